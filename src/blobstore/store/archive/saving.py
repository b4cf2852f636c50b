"""Saving models to an archive: a tar that is written forward, to a file or a pipe.

The order is that of reading from a pipe: ``oci-layout``, ``index.json``, the manifests, then the
blobs of each model in the order of its manifest, each blob once. So the models of an archive are
known before its first byte is written, and cannot change afterwards.

A file is written next to its place, as ``.NAME.saving``, and locked meanwhile. When it is complete
and durable, it gets its name. A file that a killed process left is written anew by the next one.

A file of the tar is read in batches of some megabytes. One thread hashes a batch while others
compress its frames, or write it. So memory is bounded by a batch, and the bytes do not depend on
the number of threads. A frame begins with every file of the tar, and a larger file has one for
every 2 MiB. So each blob is decompressed without its neighbours, and large ones by several threads;
the format allows no frame of 4 GiB anyway. A frame that compression makes less than 2 % smaller is
stored.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from operator import call
from pathlib import Path
from typing import Any, BinaryIO

from blobstore import hashing
from blobstore.errors import BusyError, UsageError
from blobstore.formats.archives import END, encode_table, in_blocks, member_header, stored_frame
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.formats.oci import (
    INDEX_PATH,
    LAYOUT,
    LAYOUT_PATH,
    blob_path,
    encode_index,
)
from blobstore.hashing import Bytes
from blobstore.io.durable import FILE_MODE, check_place, os_errors, sync, sync_folder
from blobstore.io.ranges import BytesReader, OpenReader, close_quietly
from blobstore.io.workers import Progress, results_of, threads
from blobstore.names import Digest, ModelName
from blobstore.store.places import StorePlace, opened_store
from blobstore.store.ports import (
    How,
    Intake,
    Readable,
    check_blob_size,
    check_expected,
    check_reader_size,
    unique,
    wrong_bytes,
)
from blobstore.store.transfer import TransferResult, transfer

FRAME = 2**21
"""Bytes of the tar in a frame, at most."""
LEVEL = 1
"""zstandard's level. Higher ones save under 0.1 % (docs/decisions/README.md)."""

_BATCH = 8 * FRAME
_PROBE = 2**16
_SAVES = 0.98
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

Write = Callable[[Bytes], object]


@contextmanager
def opened_output(
    target: str | os.PathLike[str] | BinaryIO, *, replace: bool
) -> Iterator[Callable[[Bytes], None]]:
    """Yield what writes the bytes of an archive in order: to an open pipe, or to a new file.

    The file is visible and durable when the block ends without an error, else it is removed.

    Raises: UsageError if the file exists, before and after the block, unless ``replace``;
    BusyError; StorageError, as what is yielded does.
    """
    if not isinstance(target, str | os.PathLike):
        yield partial(_write, target.fileno(), f"the pipe {target.name}")
        return
    path = Path(target)
    check_place(path, replace=replace)
    temporary = path.with_name(f".{path.name}.saving")
    fd = _lock_temporary(temporary, path)
    try:
        yield partial(_write, fd, os.fspath(target))
        with os_errors("write", temporary):
            sync(fd)
        check_place(path, replace=replace)
        with os_errors("write", path):
            temporary.rename(path)
            sync_folder(path.parent)
    finally:
        with suppress(OSError):
            if _is_named(fd, temporary):
                temporary.unlink()
        close_quietly(fd)


def _write(fd: int, name: str, data: Bytes) -> None:
    view = memoryview(data)
    with os_errors("write", name):
        while view:
            view = view[os.write(fd, view) :]


def _lock_temporary(temporary: Path, path: Path) -> int:
    """Return the temporary file, empty and locked.

    Raises: BusyError if another process has it, or has just renamed it.
    """
    with ExitStack() as unless_locked, os_errors("write", temporary):
        fd = os.open(temporary, _FLAGS, FILE_MODE)
        unless_locked.callback(close_quietly, fd)
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(fd, temporary):
                os.ftruncate(fd, 0)
                unless_locked.pop_all()
                return fd
    raise BusyError(f"another process is writing {path}", path=str(path))


def _is_named(fd: int, temporary: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), temporary.lstat())
    return False


def compressed(data: memoryview) -> Sequence[Bytes]:
    """Return the parts of a frame of zstandard with these bytes.

    A sample from the middle tells whether compressing all of it is worth the time.
    """
    import zstandard

    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False)
    middle = (len(data) - _PROBE) // 2
    sample = data[middle : middle + _PROBE]
    if middle <= 0 or len(compressor.compress(sample)) < _SAVES * len(sample):
        frame = compressor.compress(data)
        if len(frame) < _SAVES * len(data):
            return [frame]
    return list(stored_frame(data))


class NewArchive(Intake):
    """An archive that is being written. See `Receiver`; it is also its only session.

    ``write`` is called with its bytes, by one thread at a time. ``models``: what it will contain,
    the bytes of manifests by name. ``compresses``: in frames, with a seek table.
    """

    in_sequence = True
    signatures = None

    def __init__(
        self, write: Write, models: Mapping[ModelName, bytes], *, compresses: bool, jobs: int
    ) -> None:
        self._write = write
        self._models = models
        self._compresses = compresses
        self._jobs = jobs
        self._batch = memoryview(bytearray(_BATCH))
        self._frames: list[tuple[int, int]] = []
        self._sizes: dict[Digest, int] = {}
        self._add_file(LAYOUT_PATH, BytesReader(LAYOUT))
        self._add_file(INDEX_PATH, BytesReader(encode_index(models.items())))
        for digest, raw in {Digest.of(raw): raw for raw in models.values()}.items():
            self._add_file(blob_path(digest), BytesReader(raw))
            self._sizes[digest] = len(raw)

    def target(self, name: str | ModelName) -> ModelName:
        return ModelName.of(name)

    def session(
        self,
        *,
        name: ModelName | None = None,  # noqa: ARG002  # one after the other
    ) -> AbstractContextManager[Intake]:
        return nullcontext(self)

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        return [blob for blob in unique(descriptors) if blob.digest not in self._sizes]

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        if descriptor.digest in self._sizes:
            return How.THERE
        check_reader_size(descriptor, reader)
        if self._add_file(blob_path(descriptor.digest), reader) != descriptor.digest:
            raise wrong_bytes(descriptor, reader)
        self._sizes[descriptor.digest] = descriptor.size
        return How.COPIED

    def publish(self, name: ModelName, manifest: Manifest) -> set[Digest]:
        check_expected(name, manifest.raw, (self._models[name],))
        for blob in manifest.descriptors:
            check_blob_size(blob, self._sizes.get(blob.digest))
        return {blob.digest for blob in manifest.descriptors}

    def _add_file(self, path: str, reader: OpenReader) -> Digest:
        """Write a file's header, bytes and padding; return the digest of the bytes."""
        stream = hashing.stream()
        header = member_header(path, reader.size)
        begin = len(header)
        self._batch[:begin] = header
        done = 0
        while done < reader.size or begin:
            data = self._batch[begin:][: reader.size - done]
            reader.readinto(done, data)
            done += len(data)
            end = in_blocks(begin + len(data))
            self._batch[begin + len(data) : end] = bytes(end - begin - len(data))
            self._put(self._batch[:end], partial(stream.update, data))
            begin = 0
        return Digest(stream.digest().hex())

    def _put(self, batch: memoryview, hash_it: Callable[[], object]) -> None:
        jobs: list[Callable[[], Any]] = [hash_it]
        frames = []
        if self._compresses:
            frames = [batch[at : at + FRAME] for at in range(0, len(batch), FRAME)]
            jobs += (partial(compressed, frame) for frame in frames)
        else:
            jobs.append(partial(self._write, batch))
        _, *coded = results_of(jobs, call, self._jobs, name="archive")
        for frame, parts in zip(frames, coded, strict=False):  # what is written is not coded
            self._frames.append((sum(map(len, parts)), len(frame)))
            for part in parts:
                self._write(part)

    def finish(self) -> None:
        """Write the end of the tar, and the seek table."""
        self._put(memoryview(END), lambda: None)
        if self._compresses:
            self._write(encode_table(self._frames))


def save_models(
    names: str | ModelName | Iterable[str | ModelName],
    target: str | os.PathLike[str] | BinaryIO,
    *,
    store: Readable | StorePlace = None,
    compress: bool | None = None,
    replace: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[TransferResult]:
    """Write models of a store to an archive: an OCI image layout in a tar; return them.

    ``target``: a path, or a pipe that is open for writing. A file appears when it is complete and
    durable. ``compress``: with zstandard, in its seekable format; None if the path ends in
    ``.zst``. ``replace``: a file that exists is replaced. ``jobs``: threads (None: one per core).
    The same models in the same order give the same bytes.

    Raises: InvalidNameError, NotFoundError, AmbiguousNameError, DocumentError, UsageError (no
    names; a file that exists; a path that ends in another program's compression) before anything is
    written; NotFoundError, CorruptDataError or DigestMismatchError for a blob that is missing or
    damaged in the store; ConflictError if a model is replaced meanwhile; BusyError; StorageError.
    """
    store = opened_store(store)
    if isinstance(names, str | ModelName):
        names = [names]
    models = {name: store.manifests.text(name) for name in map(store.find, names)}
    if not models:
        raise UsageError("an archive needs a model", hint="Name one or several.")
    compresses = _compresses(target) if compress is None else compress
    with opened_output(target, replace=replace) as write:
        archive = NewArchive(write, models, compresses=compresses, jobs=threads(jobs))
        done = transfer(list(models), store, archive, progress=progress)
        archive.finish()
    return done


def _compresses(target: str | os.PathLike[str] | BinaryIO) -> bool:
    if not isinstance(target, str | os.PathLike):
        return False
    suffix = os.path.splitext(target)[1].lower()  # noqa: PTH122  # of a path as it is given
    if suffix in (".gz", ".tgz", ".bz2", ".xz"):
        hint = "Use .tar, or .tar.zst for zstandard."
        raise UsageError(f"archives can't be written as {suffix}", path=str(target), hint=hint)
    return suffix in (".zst", ".tzst")
