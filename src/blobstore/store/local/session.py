"""Session: everything that one import writes, invisible until it is complete.

Blobs are written to a folder of the session under ``.blobstore/tmp/``; `publish` makes them
durable, moves them to ``blobs/``, and links the manifest last. A failed session leaves the store as
it was. A killed one leaves its folder, whose finished blobs later imports use (locks.py). Ollama
does not see temporary blobs, however long an import takes: a starting Ollama deletes unreferenced
files over an hour old from ``blobs/`` (server/images.go `PruneLayers`, ollama/ollama@fb307609).

Two things keep memory and the page cache small. Bytes that can't be hashed yet wait in the caller's
buffer, which is released when they are hashed. Bytes that are too early for that (the scales of a
tensor whose weight is still being written) are written, and read back when it is their turn. Large
aligned pieces are written with O_DIRECT where the system has it: a model that is twice the memory
would otherwise push everything else out of the page cache, and on a virtual machine filling that
cache costs more than the disk does (docs/decisions/README.md).
"""

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from blobstore import hashing
from blobstore.errors import CorruptDataError, StorageError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.hashing import Bytes
from blobstore.hashing.stage import BlobHash, HashStage, Piece
from blobstore.io.copying import clone, link, remove_tree
from blobstore.io.durable import (
    DIRECT_FROM,
    PAGE,
    check_one_mount,
    create_file,
    make_folder,
    open_direct,
    os_errors,
    remove_if_there,
    sync,
    sync_file_system,
    sync_folder,
    syncs_whole,
    write_aligned,
    write_all_at,
)
from blobstore.io.ranges import FileReader, OpenReader, close_quietly, fill
from blobstore.names import Digest, ModelName
from blobstore.store.local.blobs import (
    NAMED,
    FinishedBlob,
    Stamp,
    kept_young,
    old_ns,
    renew,
)
from blobstore.store.local.locks import make_owned_folder
from blobstore.store.local.store_folder import StoreFolder
from blobstore.store.ports import (
    Expected,
    Finished,
    How,
    Session,
    check_expected,
    check_reader_size,
    check_spelling,
    wrong_bytes,
)

# Bytes of a gap that are read back at a time.
_READ_BACK = 2**19


def write_whole(
    folder: Path, digest: Digest, data: memoryview, name: str, *, syncs: bool
) -> FinishedBlob:
    """Write a blob in one piece to ``folder``; return it.

    ``name``: of its file meanwhile, if another file of the digest is there. Raises: StorageError.
    """
    path = f"{os.fspath(folder)}/{digest.file_name}"
    with os_errors("write", path):
        try:
            fd, written = create_file(path), path
        except FileExistsError:  # two tensors of the model are equal
            written = f"{os.fspath(folder)}/{name}"
            fd = create_file(written)
        try:
            write_all_at(fd, 0, data)
            if syncs:
                sync(fd)
            stamp = Stamp.of(os.fstat(fd))
        finally:
            close_quietly(fd)
        if written != path:
            os.rename(written, path)  # noqa: PTH104  # a hundred thousand of them
    return FinishedBlob(digest, len(data), folder, stamp)


class BlobWriter:
    """Writes and hashes one blob of ``size`` bytes into ``folder``. See `Session.writer`.

    When its last byte is hashed, the blob is durable with ``syncs``, and ``finished`` is called.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        size: int,
        finished: Callable[[FinishedBlob], None],
        stage: HashStage | None = None,
        *,
        syncs: bool = False,
    ) -> None:
        self._folder = folder
        self._path = folder / name
        self._size = size
        self._finished = finished
        self._stage = stage or HashStage()
        self._hashes_itself = stage is None
        self._hash = BlobHash(self._stage, size, self._finish)
        self._syncs = syncs
        self._mutex = threading.Lock()
        self._fd = self._direct = -1

    def put(
        self,
        offset: int,
        data: Any,
        *,
        extra: Sequence[tuple[int, Any]] = (),
        gap: int = 0,
        aligned: bool = False,
        waits: bool = True,
        hashed: Callable[[], None] = lambda: None,
    ) -> None:
        view = memoryview(data).cast("B")
        # Bytes that will be read back are best left in the page cache.
        self._write(offset, view, extra, aligned=aligned and waits)
        end = offset + len(view)
        if waits:
            self._hash.add(offset, Piece(len(view), lambda: view, hashed))
        else:
            hashed()
            self._add_read_back(offset, end)
        self._add_read_back(end, end + gap)
        if self._hashes_itself:
            self._stage.work_while(lambda: True)

    def _add_read_back(self, begin: int, end: int) -> None:
        for start in range(begin, end, _READ_BACK):
            length = min(_READ_BACK, end - start)
            self._hash.add(start, Piece(length, partial(self._read_back, start, length)))

    def _open(self) -> None:
        with self._mutex, os_errors("create", self._path):
            if self._fd >= 0:
                return
            is_large = self._size >= DIRECT_FROM
            self._fd = create_file(self._path, self._size if is_large else 0)
            self._direct = open_direct(self._path) if is_large else -1

    def _write(
        self, offset: int, view: memoryview, extra: Sequence[tuple[int, Any]], *, aligned: bool
    ) -> None:
        if self._fd < 0:
            self._open()
        with os_errors("write", self._path):
            write_aligned(self._fd, self._direct if aligned else -1, offset, view, extra)

    def _read_back(self, start: int, length: int) -> memoryview:
        data = memoryview(bytearray(length))
        with os_errors("read back", self._path):
            filled = fill(self._fd, start, data)
        if filled < length:
            end = f"{start + filled:,} of {self._size:,}"
            raise CorruptDataError(f"{self._path} ends at byte {end}")
        return data

    def _finish(self, raw_digest: bytes) -> None:
        digest = Digest(raw_digest.hex())
        with os_errors("write", self._path):
            if self._syncs:
                sync(self._fd)
            stamp = Stamp.of(os.fstat(self._fd))
            self._path.rename(self._folder / digest.file_name)
        self.close()
        self._finished(FinishedBlob(digest, self._size, self._folder, stamp))

    def close(self) -> None:
        """Close the file, when no thread writes to it any more; a second call does nothing.

        Errors are ignored: a finished blob is synced by then, or will be by `LocalSession.publish`,
        which reports them.
        """
        self._hash.abandon()
        open_fds = {self._fd, self._direct} - {-1}
        self._fd = self._direct = -1
        for fd in open_fds:
            close_quietly(fd)


_CHUNK = 2**20
NOTE_EVERY_S = 0.05
_NOTED_AT_ONCE = 2**20


class LocalSession(Session):
    """One import's private folder, made by `Store.session`. See `Session`.

    The journal says what earlier sessions made for a key.
    """

    remembers = True

    def __init__(self, store: StoreFolder) -> None:
        self._store = store
        self._blobs, self._manifests, self._copies = store.blobs, store.manifests, store.copies
        store.kept.clean()
        with os_errors("write to the store", store.kept.sessions):
            # Opened before the first write, so that syncfs on it reports every write error since.
            self._folder, self._folder_fd = make_owned_folder(store.kept.sessions)
            try:
                for place in (self._blobs.path, self._manifests.path):
                    check_one_mount(self._folder, place)
                # Else each blob is made durable by itself.
                self._syncs_whole = syncs_whole(self._folder_fd)
            except BaseException:
                close_quietly(self._folder_fd)
                self._folder.rmdir()
                raise
        self._stage = HashStage()
        self._made: dict[Digest, FinishedBlob] = {}
        self._numbers = map(str, itertools.count())
        self._recorded: dict[str, str] | None = None
        self._keyed: dict[str, FinishedBlob] = {}
        self._unnoted: list[str] = []
        self._is_kept = False
        self._noted_at = time.monotonic()
        self._mutex = threading.Lock()

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        return self._blobs.missing(descriptors)

    def writer(
        self, size: int, finished: Callable[[Any], None], stage: HashStage | None = None
    ) -> BlobWriter:
        def both(blob: FinishedBlob) -> None:
            self._made.setdefault(blob.digest, blob)
            finished(blob)

        syncs = not self._syncs_whole
        return BlobWriter(self._folder, next(self._numbers), size, both, stage, syncs=syncs)

    def put_all(self, blobs: Sequence[Bytes]) -> list[FinishedBlob]:
        write = partial(write_whole, self._folder, syncs=not self._syncs_whole)
        made = [
            write(Digest(raw.hex()), memoryview(data), next(self._numbers))
            for raw, data in zip(hashing.digests(blobs), blobs, strict=True)
        ]
        for blob in made:
            self._made.setdefault(blob.digest, blob)
        return made

    def copy(self, reader: OpenReader) -> FinishedBlob:
        if reader.size <= _CHUNK:
            return self.put_all([reader.read(0, reader.size)])[0]
        made: list[FinishedBlob] = []
        done = 0
        with closing(self.writer(reader.size, made.append)) as writer:
            for piece in reader.pieces(memoryview(mmap.mmap(-1, _CHUNK))):
                writer.put(done, piece, aligned=done % PAGE == 0)
                done += len(piece)
        return made[0]

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        # It shares a file's blocks or inode if it can, and is hashed.
        key = descriptor.digest.hex
        if descriptor.digest in self._made or self.recall(key, descriptor.size, verify=False):
            return How.THERE
        check_reader_size(descriptor, reader)
        how, place = How.COPIED, self._folder / next(self._numbers)
        if reader.fileno() is not None and clone(reader, place):
            how = How.CLONED
        elif reader.fileno() is not None and link(reader, place):
            how = How.LINKED
        blob = self.copy(reader) if how is How.COPIED else self._share_blocks(place, descriptor)
        if blob.digest != descriptor.digest:
            if self._made.get(blob.digest) is blob:  # else another blob has its bytes
                del self._made[blob.digest]
                with os_errors("remove", blob.path):
                    remove_if_there(blob.path)
            raise wrong_bytes(descriptor, reader)
        self.note(key, blob)
        return how

    def _share_blocks(self, place: Path, descriptor: Descriptor) -> FinishedBlob:
        with FileReader(place, follow=False) as reader:
            reader.read_ahead()
            digest = reader.digest(self._stage)
            with os_errors("write", place):
                if not self._syncs_whole:
                    sync(reader.fileno())
                stamp = Stamp.of(reader.status())
                blob = FinishedBlob(digest, descriptor.size, self._folder, stamp)
                place.rename(blob.path)
        self._made.setdefault(digest, blob)
        return blob

    def note(self, key: str, blob: FinishedBlob) -> None:
        with self._mutex:
            self._keyed[key] = blob
            self._unnoted.append(key)
            if blob.size >= _NOTED_AT_ONCE or time.monotonic() - self._noted_at > NOTE_EVERY_S:
                self._write_notes()
                self._noted_at = time.monotonic()

    def _write_notes(self) -> None:
        self._append(self._unnoted, {}, is_durable=not self._syncs_whole)
        self._unnoted = []

    def keep(self) -> None:
        self._is_kept = True

    def open(self, blob: FinishedBlob) -> FileReader:
        return FileReader(blob.path, follow=False)

    def recall(self, key: str, size: int, *, verify: bool) -> FinishedBlob | None:
        """See `Session`.

        The blob is in the store, or was kept, or a killed session left it (locks.py). It is hashed
        if its file was written to since it was noted, or was not durable then.
        """
        with self._mutex:
            if self._recorded is None:  # later lines are for later sessions
                self._recorded = self._store.made.read()
        made = FinishedBlob.parse(self._recorded.get(key, ""), self._blobs.path)
        blob, kept = None, self._store.kept.path
        if made is not None and made.size == size:
            blob = made.checked(self._stage, verify=verify)
            blob = kept_young(blob) if blob is not None else None
        elif (digest := Digest.from_file_name(f"sha256-{key}")) is not None:
            made = FinishedBlob(digest, size, kept, NAMED)
        else:
            return None
        if blob is None:
            blob = made._replace(folder=kept).checked(self._stage, verify=verify)
            blob = blob or self._take_leftover(made, verify=verify)
        if blob is not None:
            with self._mutex:
                self._keyed[key] = blob
            if blob.folder != self._blobs.path:
                self._made.setdefault(blob.digest, blob)
        return blob

    def _take_leftover(self, made: FinishedBlob, *, verify: bool) -> FinishedBlob | None:
        if (path := self._store.kept.take(made.digest, self._folder)) is None:
            return None
        is_durable = made.is_durable and made.stamp != NAMED
        made = made._replace(folder=self._folder, is_durable=is_durable)
        blob = made.checked(self._stage, verify=verify)
        if blob is None:
            # It is removed at once: the kernel reports a lost write only once, so the next import
            # might not see it.
            with os_errors("remove", path):
                remove_if_there(path)
        return blob

    def publish(
        self,
        name: ModelName,
        manifest: Manifest,
        *,
        expected: Expected = None,
        below: Collection[Digest] = (),
    ) -> set[Digest]:
        """See `Session`.

        Order: manifest and bytes durable, blobs renamed, their names durable, every blob of the
        manifest checked for presence and size, manifest renamed, its name durable. All space is
        taken before anything is visible. An older blob or manifest is replaced, which repairs a
        damaged one. Then the blobs are added to the journal. The name is checked while no other
        process of ours can change it.

        Raises: as `Session.publish`; UsageError if the store has the name in another case
        (`Store.target` returns the one to use).
        """
        manifest.check_limits()
        named = [blob for blob in manifest.descriptors if blob.digest not in below]
        created = {blob.digest for blob in self._blobs.missing(named)}
        prepared = self._folder / f"manifest-{next(self._numbers)}"  # a refused one may be there
        self._manifests.prepare(name, manifest, prepared)
        is_new = self._copies.write(name, manifest.raw)
        try:
            stamps = self.replace(named)
            for descriptor in named:
                self._blobs.check(descriptor)
            with self._store.names_lock.exclusive():
                check_expected(name, self._manifests.raw(name), expected)
                self._check_spelling(name)
                # Again, because another import of the name may have just removed it.
                self._copies.write(name, manifest.raw)
                self._manifests.link(name, prepared)
                self._copies.settle(name, manifest.raw)
                self._store.packed.remove_replaced(name)
        except BaseException:
            if is_new:
                self._copies.forget(name, manifest.raw)
            raise
        self._append(self._keyed, stamps)
        return created

    def _check_spelling(self, name: ModelName) -> None:
        """Raise UsageError if another process has just written the name in another case.

        A file system that ignores case may spell the folders of a name in its own way and still
        find them under the name: then both spellings are the same model.
        """
        existing = self._manifests.stored_name(name)
        if self._manifests.has(existing) and not self._manifests.has(name):
            check_spelling(name, existing)

    def replace(self, blobs: Iterable[Finished | Descriptor]) -> dict[Digest, Stamp]:
        """Make those of ``blobs`` that this session made visible, durably; return changed stamps.

        A file with the name of one of them is replaced. Raises: StorageError.
        """
        with os_errors("write to the store", self._folder):
            if self._syncs_whole:
                sync_file_system(self._folder_fd)
        with os_errors("write blobs to", self._blobs.path):
            make_folder(self._blobs.path)
            stamps = self._move(blobs)
            sync_folder(self._blobs.path)
        return stamps

    def _move(self, blobs: Iterable[Finished | Descriptor]) -> dict[Digest, Stamp]:
        """Move those of ``blobs`` that are new to the store's folder; return changed stamps.

        Raises: StorageError if a folder is in the way; OSError.
        """
        stamps: dict[Digest, Stamp] = {}
        young_from_ns = old_ns()
        for wanted in blobs:
            blob = self._made.pop(wanted.digest, None)
            if blob is None:
                continue
            name = blob.digest.file_name
            path, place = f"{blob.folder}/{name}", f"{self._blobs.path}/{name}"
            try:
                if blob.stamp.mtime_ns <= young_from_ns:
                    stamps[blob.digest] = renew(path)
                os.rename(path, place)  # noqa: PTH104  # a hundred thousand of them
            except IsADirectoryError:
                message = f"{place} is in the way: it is a folder"
                raise StorageError(message, path=place, blob=str(blob.digest)) from None
            except FileNotFoundError:
                if blob.folder == self._folder:  # else another session has published a kept one
                    raise
        return stamps

    def _append(
        self, keys: Iterable[str], stamps: Mapping[Digest, Stamp], *, is_durable: bool = True
    ) -> None:
        texts = []
        for key in keys:
            blob = self._keyed[key]
            stamp = stamps.get(blob.digest, blob.stamp)
            texts.append((key, blob._replace(stamp=stamp, is_durable=is_durable).encode()))
        self._store.made.add(texts)

    def close(self, *, keep_finished: bool) -> None:
        """Remove everything unpublished; with ``keep_finished``, or after `keep`, keep it all.

        After `keep` the finished blobs are durable, and lie where any session finds them. Raises:
        StorageError if that fails.
        """
        try:
            if self._is_kept:
                self._keep_finished()
            elif keep_finished:
                self._write_notes()
        finally:
            close_quietly(self._folder_fd)  # NFS and FUSE keep an open file under another name
            if not (keep_finished or self._is_kept):
                with suppress(OSError):  # the next import removes it
                    remove_tree(self._folder)
            self._store.kept.clean()

    def _keep_finished(self) -> None:
        made = [blob for blob in self._made.values() if blob.folder == self._folder]
        if made and self._syncs_whole:
            with os_errors("write to the store", self._folder):
                sync_file_system(self._folder_fd)
        self._store.kept.add(made)
        self._append(list(self._keyed), {})
