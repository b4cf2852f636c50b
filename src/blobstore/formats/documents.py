"""JSON documents of a store: manifests and config blobs, which others own, and ``blobstore.json``.

Rule M1: a manifest is a JSON object with ``schemaVersion`` 2 and ``layers``, each a descriptor of
media type, digest and size. Unknown keys are ignored and keys are compared exactly. The raw bytes
are kept, because they are hashed, stored and sent. A checkpoint's documents are in checkpoint.py.

Rule B1: ``blobstore.json``, what a model keeps of its import, is a JSON object with ``version`` 1
and ``sources``. It has the options, the source's files with their metadata, and how much of the
source is stored; no times of ours and no paths. Of a source on a server it has the commit, or each
file's version. So an import can be repeated, and an export gives the source's files back. The
options stay words here: `record` and `recorded` of ``ImportOptions`` are their two directions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from blobstore.errors import DocumentError, LimitExceededError
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

MAX_BLOB = 2**48
"""Bytes of one blob: a larger size is a mistake or an attack, and allocates nothing."""


_Kind = Annotated[str, Key("mediaType"), Between(0, 255)]


@dataclass(frozen=True, slots=True)
class Descriptor(Document):
    """A blob of a manifest: its media type, digest, size in bytes, and name of a tensor or file."""

    media_type: _Kind
    digest: Digest
    size: Annotated[int, Between(0, MAX_BLOB)]
    source: Annotated[str | None, Key("from")] = None
    name: str | None = None

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
        if value.get("config") == {"mediaType": "", "digest": "", "size": 0}:
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
        return tuple(layer for layer in self.layers if layer.media_type == JSON_MEDIA_TYPE)

    @property
    def file_layers(self) -> tuple[Descriptor, ...]:
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


OWN_DOCUMENT = "blobstore.json"
OWN_RULE = "B1"

MTP_HEADS = "multi-token prediction heads"
DRAFT_MODEL = "draft model"


@dataclass(frozen=True, slots=True)
class Omission(Document):
    """A file, a folder (its path ends with ``/``) or tensors that are not stored, and the reason.

    A pattern such as ``*.input_scale`` names ``count`` tensors together.
    """

    name: str
    reason: str
    count: Annotated[int, Between(1)] = 1


@dataclass(frozen=True, slots=True)
class Tally(Document):
    """How many tensors, or files, a source has (None if unknown), and what became of them.

    ``stored``: unchanged or quantized. ``derived``, by the way: tensors whose values went into a
    stored tensor of another name, and files that an export makes again. With those left out they
    add up to ``source``; a folder that is left out counts as one file.
    """

    source: Annotated[int | None, Between(0), "null when it was not recorded"]
    stored: Annotated[int, Between(0)]
    derived: Annotated[Mapping[str, int], "counts, by how they were made"] = field(
        default_factory=dict
    )
    left_out: tuple[Omission, ...] = ()

    @property
    def covered(self) -> int:
        return self.stored + sum(self.derived.values())

    def __add__(self, other: Tally) -> Tally:
        derived = Counter(self.derived)
        derived.update(other.derived)
        is_known = self.source is not None and other.source is not None
        source = (self.source or 0) + (other.source or 0) if is_known else None
        return Tally(
            source, self.stored + other.stored, dict(derived), self.left_out + other.left_out
        )


@dataclass(frozen=True, slots=True)
class Coverage(Document):
    """The coverage of a source's tensors and of its files."""

    tensors: Tally
    files: Tally
    heads: Annotated[Mapping[str, int], "tensors of other heads and models"] = field(
        default_factory=dict
    )
    kept_whole: Annotated[tuple[str, ...], "files of weights that are kept as files"] = ()

    @property
    def left_out(self) -> tuple[Omission, ...]:
        return self.tensors.left_out + self.files.left_out


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFile(Document):
    """A .safetensors file of a source: name, bytes, metadata, names of its tensors in order.

    ``version``: which version of the file a server had: its ETag, its time of change, or on the Hub
    the hash of its content. None for files on a disk.
    """

    name: str
    size: int = 0
    version: str | None = None
    metadata: Mapping[str, str]
    tensors: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedDraft(Document):
    """A draft model: its type, if one was asked for, and the files of its source."""

    quant: str | None = None
    sources: list[RecordedFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAdapter(Document):
    """An adapter that was merged: the digest of its document, and its files."""

    revision: str | None = None
    config: Digest
    sources: list[RecordedFile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance(Document):
    """The document.

    ``options`` are as they were written; ``coverage`` is missing in what early versions wrote.
    ``revision``: the commit of the repository that the sources were read from.
    """

    version: Literal[1]
    revision: str | None = None
    options: Mapping[str, Any] | None = None
    sources: list[RecordedFile]
    coverage: Coverage | None = None
    draft: RecordedDraft | None = None
    adapter: RecordedAdapter | None = None

    @classmethod
    def parse(cls, raw: bytes) -> Provenance:
        """Return the document in ``raw``.

        Raises: DocumentError (rule B1) for another version too; LimitExceededError.
        """
        value = parse_object(raw, OWN_DOCUMENT, rule=OWN_RULE, limit=MAX_DOCUMENT)
        return parse_document(cls, value, OWN_DOCUMENT, OWN_RULE)

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(name for file in self.sources for name in file.tensors)

    @property
    def is_cast(self) -> bool:
        """True when the import converted floats: its files have other sizes than the source's."""
        return (self.options or {}).get("dtype") is not None

    def encode(self, source: str) -> bytes:
        """Return the document of an import from ``source``: a line of compact JSON and a newline.

        Raises: LimitExceededError when it would be larger than a stored model's documents may be.
        """
        draft = self.draft and {"quant": self.draft.quant, "sources": _files(self.draft.sources)}
        merged = self.adapter and {
            "revision": self.adapter.revision,
            "config": str(self.adapter.config),
            "sources": _files(self.adapter.sources),
        }
        document = {
            "version": self.version,
            "revision": self.revision,
            "options": self.options,
            "sources": _files(self.sources),
            "coverage": self.coverage and asdict(self.coverage),
            "draft": draft,
            "adapter": merged and without_none(merged),
        }
        raw = encode(without_none(document)) + b"\n"
        if len(raw) > MAX_DOCUMENT:
            raise LimitExceededError(
                f"limit exceeded: {source} would have a {OWN_DOCUMENT} of {len(raw):,} bytes, "
                f"at most {MAX_DOCUMENT:,}",
                path=source,
                hint='It keeps the metadata of all files. profile="ollama" has no such document.',
            )
        return raw


def _files(files: Sequence[RecordedFile]) -> list[dict[str, Any]]:
    return [
        without_none(asdict(file) | {"metadata": dict(sorted(file.metadata.items()))})
        for file in files
    ]
