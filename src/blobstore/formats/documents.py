"""JSON documents of a store that others own: manifests and config blobs.

Rule M1: a manifest is a JSON object with ``schemaVersion`` 2 and ``layers``, each a descriptor of
media type, digest and size. Unknown keys are ignored, keys are compared exactly, and the raw bytes
are kept: they are what is hashed, stored and sent. A checkpoint's documents are in checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Sequence
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

from blobstore.errors import BlobStoreError, DocumentError, LimitExceededError
from blobstore.formats import strictjson
from blobstore.formats.strictjson import parse_object
from blobstore.io.budget import MAX_TEXT
from blobstore.names import Digest

_T = TypeVar("_T", bound=BaseModel)

MANIFEST_MEDIA_TYPE: Final = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG_MEDIA_TYPE: Final = "application/vnd.docker.container.image.v1+json"
TENSOR_MEDIA_TYPE: Final = "application/vnd.ollama.image.tensor"
JSON_MEDIA_TYPE: Final = "application/vnd.ollama.image.json"
FILE_MEDIA_TYPE: Final = "application/vnd.blobstore.file"
"""A file of the checkpoint, byte for byte, named by its path in the folder.

Ours: Ollama passes over such layers.
"""
TEMPLATE_MEDIA_TYPE: Final = "application/vnd.ollama.image.template"
SYSTEM_MEDIA_TYPE: Final = "application/vnd.ollama.image.system"
LICENSE_MEDIA_TYPE: Final = "application/vnd.ollama.image.license"
PARAMS_MEDIA_TYPE: Final = "application/vnd.ollama.image.params"
MESSAGES_MEDIA_TYPE: Final = "application/vnd.ollama.image.messages"

REQUIRED_OLLAMA: Final = "0.19.0"
"""The first version of Ollama that reads models of safetensors."""

MAX_MANIFEST = 64 * 2**20
"""Bytes of a manifest in a local store (100,000 layers are about 23 MB)."""
MAX_REGISTRY_MANIFEST = 4 * 2**20
"""Bytes of a manifest that a registry may send."""
MAX_LAYERS = 110_000
"""Layers of a manifest: 100,000 tensors, and room for documents, licenses and a draft model."""
MAX_DOCUMENT = MAX_TEXT
_NO_CONFIG = {"mediaType": "", "digest": "", "size": 0}
MAX_BLOB = 2**48
"""Bytes of one blob: a size beyond it is a mistake or an attack, and nothing is allocated for it."""


def validated(model: type[_T], value: dict[str, Any], what: str, rule: str) -> _T:
    """Return the document that ``value`` is.

    Raises: DocumentError with ``rule``, naming the place in it.
    """
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
        defer_build=True,  # a validator is made when it is first needed: most commands need few
    )


class Descriptor(Document):
    """A blob that a manifest refers to: its kind, digest and size in bytes; ``name`` is the tensor or file name."""

    media_type: _MediaType = Field(alias="mediaType")
    digest: _Digest
    size: int = Field(ge=0, le=MAX_BLOB)
    source: str | None = Field(default=None, alias="from")
    name: str | None = None


class Manifest(Document):
    """A model: its config blob and its layers, in order.

    ``raw`` are the bytes that it was read from or is written as.
    """

    schema_version: Literal[2] = Field(default=2, alias="schemaVersion")
    media_type: _MediaType = Field(default=MANIFEST_MEDIA_TYPE, alias="mediaType")
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] = Field(strict=False)
    _raw: bytes = PrivateAttr(default=b"")

    @model_validator(mode="before")
    @classmethod
    def _is_one_image(cls, value: Any) -> Any:
        if isinstance(value, dict) and "manifests" in value:
            raise ValueError("an image index is not supported, only a manifest with layers")
        # Go writes a missing config as a descriptor of empty fields.
        if isinstance(value, dict) and value.get("config") == _NO_CONFIG:
            value = {key: item for key, item in value.items() if key != "config"}
        # True == 1.0 == 1 in Python, and pydantic's Literal compares: the version has to be the
        # integer.
        if isinstance(value, dict) and not isinstance(value.get("schemaVersion"), int | None):
            raise ValueError("schemaVersion is not 2")  # noqa: TRY004  # pydantic reports ValueErrors
        return value

    @classmethod
    def parse(cls, raw: bytes, what: str = "manifest", *, limit: int = MAX_MANIFEST) -> Manifest:
        """Return the manifest in ``raw``, and keep the bytes.

        Raises: DocumentError (rule M1) naming the place, also for a blob of over 256 TiB;
        LimitExceededError over ``limit`` bytes or 110,000 layers.
        """
        value = parse_object(raw, what, rule="M1", limit=limit)
        if "schemaVersion" not in value:
            raise DocumentError(f"{what}: schemaVersion is missing (rule M1)", rule="M1")
        if isinstance(layers := value.get("layers"), list):
            _check_layers(layers, what)
        manifest = validated(cls, value, what, "M1")
        manifest._raw = raw  # noqa: SLF001  # its own class
        return manifest

    def check_limits(self) -> None:
        """Raise LimitExceededError when the manifest could not be read back: too many layers, or bytes."""
        _check_layers(self.layers, "the manifest")
        if len(self.raw) > MAX_MANIFEST:
            message = f"limit exceeded: the manifest has {len(self.raw):,} bytes, at most {MAX_MANIFEST:,}"
            raise LimitExceededError(message, rule="M1")

    @property
    def raw(self) -> bytes:
        """The exact bytes: as parsed, or else one line of compact JSON in Ollama's key order and a newline."""
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
        """The layers that hold other files of the checkpoint, in order; ``name`` is the path in its folder."""
        return tuple(layer for layer in self.layers if layer.media_type == FILE_MEDIA_TYPE)

    def document(self, name: str) -> Descriptor | None:
        """Return the JSON layer of that file name, or None."""
        return next((layer for layer in self.json_layers if layer.name == name), None)

    def file(self, name: str) -> Descriptor | None:
        """Return the layer of that file of the checkpoint, a JSON document or another one, or None."""
        return next(
            (layer for layer in (*self.json_layers, *self.file_layers) if layer.name == name), None
        )

    def _encode(self) -> bytes:
        # manifest.Manifest and manifest.Layer in ollama/ollama@fb307609: `from` and `name` are left
        # out when empty. Layer by layer: the dictionaries of a hundred thousand layers at once
        # would take three times their text.
        shell = strictjson.encode(
            self.model_dump(by_alias=True, exclude_none=True, exclude={"layers"})
        )
        layers = b",".join(
            strictjson.encode(layer.model_dump(by_alias=True, exclude_none=True))
            for layer in self.layers
        )
        return b'%b,"layers":[%b]}\n' % (shell[:-1], layers)


class Draft(Document):
    """A draft model that lies in the same manifest: what its tensors' names and its config.json's layer begin with.

    Keys in Ollama's order, each left out when it is None. Source: ollama/ollama@0abf7fac
    types/model/config.go `Draft`.
    """

    model_format: str | None = None
    architecture: str | None = None
    tensor_prefix: str | None = None
    config: str | None = None

    @classmethod
    def of(cls, architecture: str) -> Draft:
        """Return what Ollama writes for a draft of that architecture: the first of config.json's, else its model type.

        Source: ollama/ollama@1d7605bf x/create/manifest.go `safetensorsDraftMetadata`, which
        refuses a draft without one.
        """
        return cls(
            model_format="safetensors",
            architecture=architecture,
            tensor_prefix="draft.",
            config="draft/config.json",
        )


def _check_layers(layers: Sequence[object], what: str) -> None:
    if len(layers) > MAX_LAYERS:
        raise LimitExceededError(
            f"limit exceeded: {what} has {len(layers):,} layers, at most {MAX_LAYERS:,}", rule="M1"
        )


class ModelConfig(Document):
    """Ollama's config blob.

    Written by `encode` in Ollama's key order; read leniently, since GGUF models have one too.
    """

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
        """Return the config in ``raw``. Raises: DocumentError (rule M1) when it is not one."""
        return validated(cls, parse_object(raw, what, rule="M1"), what, "M1")

    def encode(self) -> bytes:
        """Return one line of compact JSON without a newline.

        Renderer, parser, requires and draft are left out when None.
        """
        document = self.model_dump()
        if self.draft is not None:
            document["draft"] = self.draft.model_dump(exclude_none=True)
        optional = {"renderer", "parser", "requires", "draft"}
        return strictjson.encode(
            {
                key: value
                for key, value in document.items()
                if value is not None or key not in optional
            }
        )
