"""JSON documents of a store that others own: manifests and config blobs.

Rule M1: a manifest is a JSON object with ``schemaVersion`` 2 and ``layers``, each a descriptor of
media type, digest and size. Unknown keys are ignored and keys are compared exactly. The raw bytes
are kept, because they are hashed, stored and sent. A checkpoint's documents are in checkpoint.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    model_validator,
)

from blobstore.errors import BlobStoreError, DocumentError
from blobstore.formats import strictjson
from blobstore.formats.strictjson import check_limit, parse_object
from blobstore.io.budget import MAX_TEXT
from blobstore.names import Digest

_T = TypeVar("_T", bound=BaseModel)

MANIFEST_MEDIA_TYPE: Final = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG_MEDIA_TYPE: Final = "application/vnd.docker.container.image.v1+json"
TENSOR_MEDIA_TYPE: Final = "application/vnd.ollama.image.tensor"
JSON_MEDIA_TYPE: Final = "application/vnd.ollama.image.json"
FILE_MEDIA_TYPE: Final = "application/vnd.blobstore.file"
"""A file of the checkpoint, byte for byte, named by its path in the folder; Ollama ignores it."""
TEMPLATE_MEDIA_TYPE: Final = "application/vnd.ollama.image.template"
SYSTEM_MEDIA_TYPE: Final = "application/vnd.ollama.image.system"
LICENSE_MEDIA_TYPE: Final = "application/vnd.ollama.image.license"
PARAMS_MEDIA_TYPE: Final = "application/vnd.ollama.image.params"
MESSAGES_MEDIA_TYPE: Final = "application/vnd.ollama.image.messages"
TEXT_LAYERS: Final = {
    TEMPLATE_MEDIA_TYPE: "TEMPLATE",
    SYSTEM_MEDIA_TYPE: "SYSTEM",
    LICENSE_MEDIA_TYPE: "LICENSE",
    PARAMS_MEDIA_TYPE: "PARAMETERS",
    MESSAGES_MEDIA_TYPE: "MESSAGES",
}
"""The layers that a Modelfile makes, in Ollama's order, and what they are called in messages."""

REQUIRED_OLLAMA: Final = "0.19.0"
"""The first version of Ollama that reads models of safetensors."""

MAX_MANIFEST = 64 * 2**20
"""Bytes of a manifest in a local store (100,000 layers are about 23 MB)."""
MAX_LAYERS = 110_000
"""Layers of a manifest: 100,000 tensors, and room for documents, licences and a draft model."""
MAX_DOCUMENT = MAX_TEXT
_NO_CONFIG = {"mediaType": "", "digest": "", "size": 0}
MAX_BLOB = 2**48
"""Bytes of one blob: a larger size is a mistake or an attack, and allocates nothing."""


def validated(model: type[_T], value: dict[str, Any], what: str, rule: str) -> _T:
    """Return ``value`` as a document; raise DocumentError with ``rule`` and the place in it."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        reason = str(first.get("ctx", {}).get("error", first["msg"]))
        raise DocumentError(
            f"{what}: {place or 'document'}: {reason} (rule {rule})", rule=rule
        ) from None


def _digest(value: object) -> Digest:
    try:
        return value if isinstance(value, Digest) else Digest.parse(value)
    except BlobStoreError as error:
        raise ValueError(error.message) from None


_Digest = Annotated[Digest, BeforeValidator(_digest), PlainSerializer(str)]
_MediaType = Annotated[str, StringConstraints(max_length=255)]


class Document(BaseModel):
    """Base of all documents: strict, immutable, unknown keys ignored."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="ignore",
        populate_by_name=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        defer_build=True,  # most commands need few of the validators
    )


class Descriptor(Document):
    """A blob of a manifest: its media type, digest, size in bytes, and name of a tensor or file."""

    media_type: _MediaType = Field(alias="mediaType")
    digest: _Digest
    size: int = Field(ge=0, le=MAX_BLOB)
    source: str | None = Field(default=None, alias="from")
    name: str | None = None


class Manifest(Document):
    """A model: its config blob and its layers, in order; ``raw`` are its exact bytes."""

    schema_version: Literal[2] = Field(default=2, alias="schemaVersion")
    media_type: _MediaType = Field(default=MANIFEST_MEDIA_TYPE, alias="mediaType")
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] = Field(strict=False)
    _raw: bytes = PrivateAttr(default=b"")

    @model_validator(mode="before")
    @classmethod
    def _is_one_image(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "manifests" in value:
            raise ValueError("an image index is not supported, only a manifest with layers")
        # pydantic's Literal compares, and 2.0 == 2: the version has to be the integer.
        if not isinstance(value.get("schemaVersion"), int | None):
            raise ValueError("schemaVersion is not 2")  # noqa: TRY004  # pydantic reports ValueErrors
        # Go writes a missing config as a descriptor of empty fields.
        return {**value, "config": None} if value.get("config") == _NO_CONFIG else value

    @classmethod
    def parse(cls, raw: bytes, what: str = "manifest") -> Manifest:
        """Return the manifest in ``raw``, and keep the bytes.

        Raises: DocumentError (rule M1) naming the place, also for a blob of over 256 TiB;
        LimitExceededError over 64 MiB or 110,000 layers.
        """
        value = parse_object(raw, what, rule="M1", limit=MAX_MANIFEST)
        if "schemaVersion" not in value:
            raise DocumentError(f"{what}: schemaVersion is missing (rule M1)", rule="M1")
        if isinstance(layers := value.get("layers"), list):
            check_limit(what, len(layers), "layers", MAX_LAYERS, "M1")
        manifest = validated(cls, value, what, "M1")
        manifest._raw = raw  # noqa: SLF001  # its own class
        return manifest

    def check_limits(self) -> None:
        """Raise LimitExceededError if the manifest has too many layers or bytes to be read back."""
        check_limit("the manifest", len(self.layers), "layers", MAX_LAYERS, "M1")
        check_limit("the manifest", len(self.raw), "bytes", MAX_MANIFEST, "M1")

    @property
    def raw(self) -> bytes:
        """The exact bytes: as parsed, else a line of compact JSON in Ollama's key order."""
        return self._raw or self._encode()

    @property
    def digest(self) -> Digest:
        """The model's ID: the sha256 of `raw`."""
        return Digest.of(self.raw)

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """Every blob that the model needs: the layers in order, then the config."""
        return (*self.layers, self.config) if self.config is not None else self.layers

    @property
    def size(self) -> int:
        """Bytes of all blobs that the model needs, each counted once."""
        return sum({blob.digest: blob.size for blob in self.descriptors}.values())

    @property
    def tensor_layers(self) -> tuple[Descriptor, ...]:
        """The layers that hold tensors, in order."""
        return tuple(layer for layer in self.layers if layer.media_type == TENSOR_MEDIA_TYPE)

    @property
    def json_layers(self) -> tuple[Descriptor, ...]:
        """The layers that hold JSON documents, in order; ``name`` is the file name."""
        return tuple(layer for layer in self.layers if layer.media_type == JSON_MEDIA_TYPE)

    @property
    def file_layers(self) -> tuple[Descriptor, ...]:
        """The layers that hold other files of the checkpoint, in order; ``name`` is the path."""
        return tuple(layer for layer in self.layers if layer.media_type == FILE_MEDIA_TYPE)

    def document(self, name: str) -> Descriptor | None:
        """Return the JSON layer of that file name, or None."""
        return next((layer for layer in self.json_layers if layer.name == name), None)

    def file(self, name: str) -> Descriptor | None:
        """Return the layer of that file of the checkpoint, JSON document or not, or None."""
        files = (*self.json_layers, *self.file_layers)
        return next((layer for layer in files if layer.name == name), None)

    def _encode(self) -> bytes:
        # manifest.Manifest and manifest.Layer in ollama/ollama@fb307609 leave out an empty `from`
        # and `name`. The dictionaries of 100,000 layers at once would take three times their text.
        shell = strictjson.encode(
            self.model_dump(by_alias=True, exclude_none=True, exclude={"layers"})
        )
        layers = b",".join(
            strictjson.encode(layer.model_dump(by_alias=True, exclude_none=True))
            for layer in self.layers
        )
        return b'%b,"layers":[%b]}\n' % (shell[:-1], layers)


class Draft(Document):
    """A draft model in the same manifest: the prefix of its tensors' names, and its config's name.

    Keys are in Ollama's order, and left out if None. Source: ollama/ollama@0abf7fac
    types/model/config.go `Draft`.
    """

    model_format: str | None = None
    architecture: str | None = None
    tensor_prefix: str | None = None
    config: str | None = None

    @classmethod
    def of(cls, architecture: str) -> Draft:
        """Return Ollama's entry for a draft of that architecture, or else of that model type.

        Source: ollama/ollama@1d7605bf x/create/manifest.go `safetensorsDraftMetadata`, which
        refuses a draft without either.
        """
        return cls(
            model_format="safetensors",
            architecture=architecture,
            tensor_prefix="draft.",
            config="draft/config.json",
        )


class ModelConfig(Document):
    """Ollama's config blob, in Ollama's key order; read leniently: GGUF models have one too."""

    model_format: str = ""
    model_family: str | None = ""
    model_families: list[str] | None = None
    model_type: str | None = ""
    file_type: str | None = ""
    renderer: str | None = None
    parser: str | None = None
    requires: str | None = None
    capabilities: list[str] | None = None
    draft: Draft | None = None
    architecture: str | None = ""
    os: str | None = ""

    @classmethod
    def parse(cls, raw: bytes, what: str = "config") -> ModelConfig:
        """Return the config in ``raw``. Raises: DocumentError (rule M1) if it is not one."""
        return validated(cls, parse_object(raw, what, rule="M1"), what, "M1")

    def encode(self) -> bytes:
        """Return one line of compact JSON without a newline.

        Renderer, parser, requires and draft are left out if None.
        """
        optional = ("renderer", "parser", "requires", "draft")
        document = self.model_dump(exclude={key for key in optional if getattr(self, key) is None})
        if self.draft is not None:
            document["draft"] = self.draft.model_dump(exclude_none=True)
        return strictjson.encode(document)
