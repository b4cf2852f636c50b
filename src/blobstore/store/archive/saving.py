"""Saving models to an archive: the half of an archive's port that receives.

The order is that of reading from a pipe: ``oci-layout``, ``index.json``, the manifests, then the
blobs of each model in the order of its manifest, each blob once. So the models of an archive are
known before its first byte is written, and cannot change afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import BinaryIO

from blobstore.errors import UsageError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.formats.imagelayout import (
    INDEX_PATH,
    LAYOUT,
    LAYOUT_PATH,
    blob_path,
    encode_index,
)
from blobstore.io.ranges import OpenReader
from blobstore.io.workers import Progress, threads
from blobstore.names import Digest, ModelName
from blobstore.store.archive.archive_output import FileOutput, Output, PipeOutput
from blobstore.store.archive.frames import TarWriter
from blobstore.store.ports import (
    How,
    Readable,
    blob_not_found,
    check_blob_size,
    check_expected,
    check_reader_size,
    unique,
)
from blobstore.store.transfer import Transferred, transfer


class _Intake:
    """Adds models to an archive. See `Intake`."""

    earlier = None
    in_sequence = True

    def __init__(self, tar: TarWriter, models: Mapping[ModelName, bytes]) -> None:
        self._tar = tar
        self._models = models
        self._sizes: dict[Digest, int] = {}
        self.published: set[ModelName] = set()
        tar.add_bytes(LAYOUT_PATH, LAYOUT)
        tar.add_bytes(INDEX_PATH, encode_index(models.items()))
        for digest, raw in {Digest.of(raw): raw for raw in models.values()}.items():
            tar.add_bytes(blob_path(digest), raw)
            self._sizes[digest] = len(raw)

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        return [blob for blob in unique(descriptors) if blob.digest not in self._sizes]

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        if descriptor.digest in self._sizes:
            return How.THERE
        check_reader_size(descriptor, reader)
        self._tar.add_blob(blob_path(descriptor.digest), descriptor, reader)
        self._sizes[descriptor.digest] = descriptor.size
        return How.COPIED

    def publish(self, name: ModelName, manifest: Manifest) -> set[Digest]:
        """See `Intake`. Raises: ConflictError if the archive's index has another manifest."""
        check_expected(name, manifest.raw, (self._models[name],))
        self._tar.flush()
        for blob in manifest.descriptors:
            if blob.digest not in self._sizes:
                raise blob_not_found(blob.digest)
            check_blob_size(blob, self._sizes[blob.digest])
        self.published.add(name)
        return {blob.digest for blob in manifest.descriptors}


class NewArchive:
    """An archive that is being written. See `Receiver`.

    ``models``: what it will contain, the bytes of manifests by name. They are visible together,
    after `finish`.
    """

    signatures = None

    def __init__(self, tar: TarWriter, models: Mapping[ModelName, bytes]) -> None:
        self._tar = tar
        self._models = models
        self._intake = _Intake(tar, models)

    def target(self, name: str | ModelName) -> ModelName:
        """See `Receiver`. Raises: UsageError for a model that the archive was not begun with."""
        found = ModelName.of(name)
        if found not in self._models:
            raise UsageError(f"the archive was begun without {found}", model=str(found))
        return found

    @contextmanager
    def session(self, source: str = "", name: ModelName | None = None) -> Iterator[_Intake]:  # noqa: ARG002  # one after the other
        """See `Receiver`."""
        yield self._intake

    def finish(self) -> None:
        """Write the end of the archive. Raises: UsageError if a model is missing; StorageError."""
        if missing := self._models.keys() - self._intake.published:
            raise UsageError(f"{min(missing)} was not added to the archive")
        self._tar.finish()


@contextmanager
def new_archive(
    models: Mapping[ModelName, bytes], output: Output, *, compresses: bool, jobs: int
) -> Iterator[NewArchive]:
    """Yield an archive to transfer ``models`` to; it is complete at the end, or discarded.

    Raises: StorageError; UsageError.
    """
    try:
        archive = NewArchive(TarWriter(output.write, compresses=compresses, jobs=jobs), models)
        yield archive
        archive.finish()
        output.commit()
    finally:
        output.close()


def save_models(
    names: str | ModelName | Iterable[str | ModelName],
    target: str | os.PathLike[str] | BinaryIO,
    *,
    store: Readable,
    compress: bool | None = None,
    replace: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Transferred]:
    """Write models of a store to an archive: an OCI image layout in a tar; return them.

    ``target``: a path, or a pipe that is open for writing. A file appears when it is complete and
    durable. ``compress``: with zstandard, in its seekable format; None if the path ends in
    ``.zst``. ``replace``: a file that exists is replaced. ``jobs``: threads (None: one a core). The
    same models in the same order give the same bytes.

    Raises: InvalidNameError, NotFoundError, AmbiguousNameError, DocumentError, UsageError (no
    names; a file that exists; a path that ends in another program's compression) before anything is
    written; NotFoundError, CorruptDataError or DigestMismatchError for a blob that is missing or
    damaged in the store; ConflictError if a model is replaced meanwhile; BusyError; StorageError.
    """
    if isinstance(names, str | ModelName):
        names = [names]
    models = {name: store.manifests.text(name) for name in map(store.find, names)}
    if not models:
        raise UsageError("an archive needs a model", hint="Name one or several.")
    compresses = _compresses(target) if compress is None else compress
    output = _output(target, replace=replace)
    with new_archive(models, output, compresses=compresses, jobs=threads(jobs)) as archive:
        return transfer(list(models), store, archive, progress=progress)


def _output(target: str | os.PathLike[str] | BinaryIO, *, replace: bool) -> Output:
    if isinstance(target, str | os.PathLike):
        return FileOutput(target, replace=replace)
    return PipeOutput(target)


def _compresses(target: str | os.PathLike[str] | BinaryIO) -> bool:
    """Return whether a target's name asks for compression; False for a pipe."""
    if not isinstance(target, str | os.PathLike):
        return False
    suffix = os.path.splitext(target)[1].lower()  # noqa: PTH122  # of a path as it is given
    if suffix in (".gz", ".tgz", ".bz2", ".xz"):
        hint = "Use .tar, or .tar.zst for zstandard."
        raise UsageError(f"archives can't be written as {suffix}", path=str(target), hint=hint)
    return suffix in (".zst", ".tzst")
