"""JSON documents of a store that others own: manifests and config blobs.

Rule M1: a manifest is a JSON object with ``schemaVersion`` 2 and ``layers``, each a descriptor of
media type, digest and size. Unknown keys are ignored and keys are compared exactly. The raw bytes
are kept, because they are hashed, stored and sent. A checkpoint's documents are in checkpoint.py.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from blobstore.errors import DocumentError, InvalidDigestError
from blobstore.formats.strictjson import (
    Between,
    Document,
    InvalidError,
    Key,
    check_limit,
    encode,
    parse_document,
    parse_object,
    without_none,
)
from blobstore.io.budget import MAX_TEXT
from blobstore.names import Digest

MANIFEST_MEDIA_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG_MEDIA_TYPE = "application/vnd.docker.container.image.v1+json"
TENSOR_MEDIA_TYPE = "application/vnd.ollama.image.tensor"
GGUF_MEDIA_TYPE = "application/vnd.ollama.image.model"
"""A GGUF file: the weights of most of Ollama's models. We read its header only."""
JSON_MEDIA_TYPE = "application/vnd.ollama.image.json"
FILE_MEDIA_TYPE = "application/vnd.blobstore.file"
"""A file of the checkpoint, byte for byte, named by its path in the folder; Ollama ignores it."""
TEMPLATE_MEDIA_TYPE = "application/vnd.ollama.image.template"
SYSTEM_MEDIA_TYPE = "application/vnd.ollama.image.system"
LICENSE_MEDIA_TYPE = "application/vnd.ollama.image.license"
PARAMS_MEDIA_TYPE = "application/vnd.ollama.image.params"
MESSAGES_MEDIA_TYPE = "application/vnd.ollama.image.messages"
TEXT_LAYERS = {
    TEMPLATE_MEDIA_TYPE: "TEMPLATE",
    SYSTEM_MEDIA_TYPE: "SYSTEM",
    LICENSE_MEDIA_TYPE: "LICENSE",
    PARAMS_MEDIA_TYPE: "PARAMETERS",
    MESSAGES_MEDIA_TYPE: "MESSAGES",
}
"""The layers that a Modelfile makes, in Ollama's order, and what they are called in messages."""

REQUIRED_OLLAMA = "0.19.0"
"""The first version of Ollama that reads models of safetensors."""

MAX_MANIFEST = 64 * 2**20
"""Bytes of a manifest in a local store (100,000 layers are about 23 MB)."""
MAX_LAYERS = 110_000
"""Layers of a manifest: 100,000 tensors, and room for documents, licences and a draft model."""
MAX_DOCUMENT = MAX_TEXT
_NO_CONFIG = {"mediaType": "", "digest": "", "size": 0}
MAX_BLOB = 2**48
"""Bytes of one blob: a larger size is a mistake or an attack, and allocates nothing."""


_MAX_KIND = 255
_Kind = Annotated[str, Key("mediaType"), Between(0, _MAX_KIND)]
_USUAL_KEYS = 4


@dataclass(frozen=True, slots=True)
class Descriptor(Document):
    """A blob of a manifest: its media type, digest, size in bytes, and name of a tensor or file."""

    media_type: _Kind
    digest: Digest
    size: Annotated[int, Between(0, MAX_BLOB)]
    source: Annotated[str | None, Key("from")] = None
    name: str | None = None

    @classmethod
    def from_json(cls, value: Any) -> Descriptor:
        """Return the descriptor in a JSON value. Raises: InvalidError.

        Most are valid, and are not checked key by key: that takes four times as long.
        """
        is_usual = cls is Descriptor and type(value) is dict and len(value) == _USUAL_KEYS
        if is_usual and "name" in value:
            kind, digest, size, name = map(value.get, ("mediaType", "digest", "size", "name"))
            is_sound = type(kind) is str and len(kind) <= _MAX_KIND and type(name) is str
            if is_sound and type(size) is int and 0 <= size <= MAX_BLOB:
                with suppress(InvalidDigestError):
                    return Descriptor(str(kind), Digest.parse(digest), size, None, name)
        return super(Descriptor, cls).from_json(value)

    @property
    def document(self) -> dict[str, Any]:
        entry = {"mediaType": self.media_type, "digest": str(self.digest), "size": self.size}
        return entry | without_none({"from": self.source, "name": self.name})


@dataclass(frozen=True, kw_only=True)
class Manifest(Document):
    """A model: its config blob and its layers, in order; ``raw`` are its exact bytes."""

    schema_version: Annotated[Literal[2], Key("schemaVersion")] = 2
    media_type: _Kind = MANIFEST_MEDIA_TYPE
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] = field(repr=False)
    parsed: Annotated[bytes, Key(None)] = field(default=b"", repr=False)
    """The bytes that it was parsed from; empty for a manifest that is new."""

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
        return replace(parse_document(cls, value, what, "M1"), parsed=raw)

    @classmethod
    def fields_of(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "manifests" in value:
            raise InvalidError("an image index is not supported, only a manifest with layers")
        if not isinstance(value.get("schemaVersion"), int | None):
            raise InvalidError("schemaVersion is not 2")
        # Go writes a missing config as a descriptor of empty fields.
        if value.get("config") == _NO_CONFIG:
            value = {**value, "config": None}
        return super().fields_of(value)

    def check_limits(self) -> None:
        """Raise LimitExceededError if the manifest has too many layers or bytes to be read back."""
        check_limit("the manifest", len(self.layers), "layers", MAX_LAYERS, "M1")
        check_limit("the manifest", len(self.raw), "bytes", MAX_MANIFEST, "M1")

    @cached_property
    def raw(self) -> bytes:
        """The exact bytes: as parsed, else a line of compact JSON in Ollama's key order."""
        if self.parsed:
            return self.parsed
        # manifest.Manifest and manifest.Layer in ollama/ollama@fb307609 leave out an empty `from`
        # and `name`. The layers one by one: the dictionaries of 100,000 at once would take three
        # times their text.
        shell: dict[str, Any] = {"schemaVersion": 2, "mediaType": self.media_type}
        if self.config is not None:
            shell["config"] = self.config.document
        layers = b",".join(encode(layer.document) for layer in self.layers)
        return encode(shell)[:-1] + b',"layers":[' + layers + b"]}\n"

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
        return sum({blob.digest.hex: blob.size for blob in self.descriptors}.values())

    @property
    def tensor_layers(self) -> tuple[Descriptor, ...]:
        return tuple(layer for layer in self.layers if layer.media_type == TENSOR_MEDIA_TYPE)

    @property
    def gguf_layers(self) -> tuple[Descriptor, ...]:
        return tuple(layer for layer in self.layers if layer.media_type == GGUF_MEDIA_TYPE)

    @property
    def json_layers(self) -> tuple[Descriptor, ...]:
        """The layers that hold JSON documents, in order; ``name`` is the file name."""
        return tuple(layer for layer in self.layers if layer.media_type == JSON_MEDIA_TYPE)

    @property
    def file_layers(self) -> tuple[Descriptor, ...]:
        """The layers that hold other files of the checkpoint, in order; ``name`` is the path."""
        return tuple(layer for layer in self.layers if layer.media_type == FILE_MEDIA_TYPE)

    def document(self, name: str) -> Descriptor | None:
        return next((layer for layer in self.json_layers if layer.name == name), None)

    def file(self, name: str) -> Descriptor | None:
        """Return the layer of that file of the checkpoint, JSON document or not, or None."""
        files = (*self.json_layers, *self.file_layers)
        return next((layer for layer in files if layer.name == name), None)


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
        return parse_document(cls, parse_object(raw, what, rule="M1"), what, "M1")

    def encode(self) -> bytes:
        """Return one line of compact JSON without a newline.

        Renderer, parser, requires and draft are left out if None.
        """
        draft = self.draft and without_none(asdict(self.draft))
        document = asdict(self) | {"draft": draft}
        needed = document.keys() - {"renderer", "parser", "requires", "draft"}
        return encode({k: v for k, v in document.items() if v is not None or k in needed})
