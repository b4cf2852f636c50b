"""Stored model: what a manifest, its documents and the headers of its blobs mean.

This is the one place that reads them. The loader, exports, inspections and lists are made from it.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self

from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    UnsupportedSourceError,
)
from blobstore.formats.checkpoint import CONFIG_NAME, parse_config, settings_of
from blobstore.formats.documents import OWN_DOCUMENT, Descriptor, Manifest, ModelConfig, Provenance
from blobstore.formats.safetensors.header import Header, ScannedFiles, TensorEntry, header_of
from blobstore.io.budget import Budget
from blobstore.io.ranges import FileReader, Identity, OpenReader, digests_of
from blobstore.io.workers import each, threads
from blobstore.names import Digest, ModelName
from blobstore.store.ports import HEAD, Readable, checked_bytes, mismatch_error
from blobstore.store.stored import Settings, StoredTensor, stored_tensors

# Blobs that a thread hashes at once: as many as the widest processors do.
_HASHED_TOGETHER = 16
# Blobs whose headers are read together, and kept in memory.
_AT_ONCE = 4096
KnownForms = dict[bytes, StoredTensor | None]
"""Forms of tensors by their keys, of any model; None: they have to be read one by one."""
_MOST_KNOWN = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class BlobFile:
    """The file of a blob, as it was when it was opened; ``identity`` is None in memory."""

    digest: Digest
    path: str
    identity: Identity | None

    def require_file(self) -> Identity:
        """Return the file's identity. Raises: UnsupportedSourceError for a blob in memory."""
        if self.identity is None:
            raise UnsupportedSourceError(
                f"blob {self.digest} is not in a file",
                blob=str(self.digest),
                hint="Transfer the model to a folder.",
            )
        return self.identity

    def open(self) -> FileReader:
        """Return a reader over the file.

        Raises: NotFoundError, StorageError; CorruptDataError when the file was replaced or written
        to since; as `require_file`.
        """
        reader = FileReader(self.path, follow=False)
        try:
            reader.check_is(self.require_file())
        except BaseException:
            reader.close()
            raise
        return reader

    def read(self) -> bytes:
        with self.open() as reader:
            return checked_bytes(reader.read(0, reader.size), self.digest)


@dataclass(frozen=True, slots=True, eq=False)
class TensorBlob(BlobFile):
    """A blob of tensors, which begin at ``data_start``."""

    data_start: int

    @classmethod
    def of(cls, digest: Digest, reader: OpenReader, header: Header) -> Self:
        return cls(digest, reader.name, reader.identity, header.data_start)

    def offset(self, entry: TensorEntry) -> int:
        """Return where in the file a stored array begins."""
        return self.data_start + entry.begin


class StoredModel:
    """What a manifest, its documents and the headers of its blobs mean.

    Nothing is read before it is asked for. All headers that one object reads share a budget.

    ``name`` is for errors; None where several names share the manifest, and the caller adds it.
    ``read`` replaces ``home.blobs.read``, which returns the checked bytes of a document.
    """

    def __init__(
        self,
        name: ModelName | None,
        manifest: Manifest,
        home: Readable,
        read: Callable[[Descriptor], bytes] | None = None,
    ) -> None:
        self.name = name
        self.manifest = manifest
        self.home = home
        self._read = read or home.blobs.read
        self._settings = settings_of(self._read, manifest)
        self._budget = Budget.of_stored("the model" if name is None else f"model {name}")

    @classmethod
    def find(cls, name: str | ModelName, home: Readable) -> Self:
        """Return the model of that name. Raises: InvalidNameError, NotFoundError, DocumentError."""
        full = home.find(name)
        return cls(full, home.manifests.read(full), home)

    @property
    def tensor_layers(self) -> tuple[Descriptor, ...]:
        """The layers of tensors.

        Raises: CorruptDataError for a blob that the manifest names twice. Its tensors would have
        one name, and a manifest of 1 MB could ask for thousands of times all of them.
        """
        layers, seen = self.manifest.tensor_layers, set()
        for layer in layers:
            if layer.digest in seen:
                with self.naming(layer):
                    raise CorruptDataError("the manifest names it twice, and so its tensors")
            seen.add(layer.digest)
        return layers

    @property
    def weight_layers(self) -> tuple[Descriptor, ...]:
        """As `tensor_layers`. Raises: UnsupportedSourceError when the model has none of them."""
        if not (layers := self.tensor_layers):
            what, hint = "has no tensor blobs", self.gguf_hint
            if hint is not None:
                what = f"is a GGUF file, which Ollama runs: ollama run {self.name}"
            raise UnsupportedSourceError(
                f"model {self.name} {what}", model=str(self.name), hint=hint
            )
        return layers

    @property
    def gguf_hint(self) -> str | None:
        """How to import the model's GGUF file; None without one. Raises: NotFoundError, …."""
        for layer in self.manifest.gguf_layers[:1]:
            with self.home.blobs.open(layer) as reader:
                return f"Import it under another name: blobstore import {reader.name} NAME"
        return None

    @contextmanager
    def open_layer(
        self,
        layer: Descriptor,
        known: Container[str] | None = None,
        header: Header | None = None,
    ) -> Iterator[tuple[OpenReader, Header, list[StoredTensor]]]:
        """Yield a blob of tensors: an open reader, its validated header, and its tensors.

        ``known`` is given when the tensors are to be used: the names of the tensors of other blobs,
        none of which may be here again; and names and ranks must be within the limits. ``header``:
        if it was read before.

        Raises: NotFoundError, CorruptDataError, LimitExceededError, StorageError; as
        `stored_tensors`; whatever the block raises, with the model and the blob.
        """
        with self.naming(layer), self.home.blobs.open(layer) as reader:
            header = header or header_of(reader, self._budget, first_nbytes=HEAD)
            if known is not None:
                header.check_limits(reader.name)
            tensors = list(stored_tensors(header, self._settings))
            for tensor in tensors:
                if known is not None and tensor.name in known:
                    raise CorruptDataError(
                        f"another blob holds the tensor {tensor.name!r} too", tensor=tensor.name
                    )
            yield reader, header, tensors

    def tensors_of_each(self, layers: Sequence[Descriptor]) -> Iterator[list[StoredTensor]]:
        """Yield the tensors of each blob, whose headers are read many at once. Raises: `opened`."""
        for some, headers in self.headers_of(layers):
            for layer, header in zip(some, headers, strict=True):
                yield self.tensors_in(layer, header)

    def headers_of(
        self, layers: Sequence[Descriptor]
    ) -> Iterator[tuple[Sequence[Descriptor], Sequence[Header | None]]]:
        """Yield blobs and their headers, many at once; see `Blobs.headers`."""
        for start in range(0, len(layers), _AT_ONCE):
            some = layers[start : start + _AT_ONCE]
            yield some, self.home.blobs.headers(some, self._budget)

    def tensors_in(
        self, layer: Descriptor, header: Header | None, settings: Settings | None = None
    ) -> list[StoredTensor]:
        """Return the tensors of a blob, with the header that `headers_of` gave. Raises: `opened`.

        ``settings`` replaces those of config.json.
        """
        if header is None:
            with self.open_layer(layer) as (_, _, tensors):
                return tensors
        try:
            return list(stored_tensors(header, settings or self._settings))
        except BlobStoreError:
            with self.naming(layer):
                raise

    def verify(
        self, layers: Sequence[Descriptor], opened: Callable[[Descriptor], OpenReader] | None = None
    ) -> None:
        """Hash blobs, in all threads. ``opened`` replaces ``home.blobs.open``.

        Raises: DigestMismatchError; as `opened`.
        """
        opened = opened or self.home.blobs.open
        jobs = threads(None)
        share = max(1, min(_HASHED_TOGETHER, -(-len(layers) // jobs)))
        sets = [layers[begin : begin + share] for begin in range(0, len(layers), share)]

        def check(some: Sequence[Descriptor]) -> None:
            with ExitStack() as files:
                readers = []
                for layer in some:
                    with self.naming(layer):
                        readers.append(files.enter_context(opened(layer)))
                for layer, digest in zip(some, digests_of(readers), strict=True):
                    with self.naming(layer):
                        if isinstance(digest, BlobStoreError):
                            raise digest
                        if digest != layer.digest:
                            raise mismatch_error(layer.digest)

        each(sets, check, min(jobs, len(sets)), name="verify")

    def read(self, layer: Descriptor) -> bytes:
        with self.naming(layer):
            return self._read(layer)

    def document(self, name: str) -> bytes | None:
        layer = self.manifest.document(name)
        return None if layer is None else self.read(layer)

    @property
    def config(self) -> ModelConfig:
        """The config blob, empty when the model has none. Raises: DocumentError; as `read`."""
        if self.manifest.config is None:
            return ModelConfig()
        what = "the config" if self.name is None else f"the config of {self.name}"
        return ModelConfig.parse(self.read(self.manifest.config), what)

    @property
    def source_config(self) -> dict[str, Any] | None:
        """The object in config.json; None without one. Raises: DocumentError; as `read`."""
        raw = self.document(CONFIG_NAME)
        return None if raw is None else parse_config(raw)

    @property
    def provenance(self) -> Provenance | None:
        """What blobstore.json records of the import; None without one. Raises: as `config`."""
        raw = self.document(OWN_DOCUMENT)
        return None if raw is None else Provenance.parse(raw)

    @contextmanager
    def naming(self, layer: Descriptor) -> Iterator[None]:
        """Add the model and the blob to errors of the block, in their message and fields."""
        try:
            yield
        except BlobStoreError as error:
            if self.name is None:
                raise
            place = f"model {self.name}: blob {layer.digest} ({layer.name})"
            fields = {"model": str(self.name), "blob": str(layer.digest), "tensor": layer.name}
            raise error.at(place, **fields) from error


@dataclass(slots=True, eq=False)
class ModelOutline:
    """The tensors of blobs in columns, in stored order: ``names`` and ``forms``, of one length.

    Of 50,000 tensors most have one of a few forms: what they are follows from their dtypes, shapes
    and metadata, and not from their names and places. So the rules for stored tensors are applied
    to one tensor of each form, which is given for all of them: its name and places do not count.
    That takes a tenth of the time. ``counts``: how many tensors each blob has.
    """

    names: list[str] = field(default_factory=list)
    forms: list[StoredTensor] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls, model: StoredModel, layers: Sequence[Descriptor], known: KnownForms | None = None
    ) -> Self:
        """Return the outline of blobs of a model. ``known``: forms of models that were read before.

        Raises: as `StoredModel.opened`.
        """
        outline = cls()
        known = {} if known is None else known
        for some, headers in model.headers_of(layers):
            outline._add_each(model, some, headers, known)
        return outline

    def __len__(self) -> int:
        return len(self.names)

    def _add_each(
        self,
        model: StoredModel,
        layers: Sequence[Descriptor],
        headers: Sequence[Header | None],
        known: KnownForms,
    ) -> None:
        if not isinstance(headers, ScannedFiles):
            for layer, header in zip(layers, headers, strict=True):
                self._add(model.tensors_in(layer, header))
            return
        names, places, keys, examples, counts = headers.outline()
        forms = _forms(model, layers, headers, known)
        sound = [forms(*one) for one in zip(keys, examples, strict=True)]
        start = 0
        for index, (layer, count) in enumerate(zip(layers, counts, strict=True)):
            end = start + max(count, 0)
            own = [form for place in places[start:end] if (form := sound[place]) is not None]
            if len(own) == count:
                self.names += names[start:end]
                self.forms += own
                self.counts.append(count)
            else:
                self._add(model.tensors_in(layer, headers[index]))
            start = end

    def _add(self, tensors: list[StoredTensor]) -> None:
        self.names += [tensor.name for tensor in tensors]
        self.forms += tensors
        self.counts.append(len(tensors))


def _forms(
    model: StoredModel,
    layers: Sequence[Descriptor],
    headers: Sequence[Header | None],
    known: KnownForms,
) -> Callable[[bytes, tuple[int, str]], StoredTensor | None]:
    """Return what gives the form of a key, whose example is a tensor in one of the blobs.

    It gives None if the form depends on more, or its tensors break a rule.
    """

    @lru_cache(maxsize=1)
    def tensors_in(index: int) -> dict[str, StoredTensor]:
        settings: list[None] = []  # config.json has to decide, which names tensors
        try:
            tensors = model.tensors_in(layers[index], headers[index], lambda: settings.append(None))
        except BlobStoreError:
            return {}
        return {} if settings else {tensor.name: tensor for tensor in tensors}

    def form(key: bytes, example: tuple[int, str]) -> StoredTensor | None:
        if key not in known:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            index, name = example
            known[key] = tensors_in(index).get(name)
        return known[key]

    return form
