"""Session: everything that one import writes, invisible until it is all there.

Blobs are written to a folder of the session's own under ``.blobstore/tmp/``; `publish` makes them
durable, moves them to ``blobs/``, and links the manifest last. A failed session leaves the store as
it was. A killed one leaves its folder, whose finished blobs the next import of the same source
takes over (leftovers.py). Temporary blobs are out of Ollama's sight, however long an import takes:
a starting Ollama deletes unreferenced files over an hour old from ``blobs/`` (server/images.go
`PruneLayers`, ollama/ollama@fb307609).
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from blobstore.errors import (
    BlobStoreError,
    ConflictError,
    CorruptDataError,
    DigestMismatchError,
    NotFoundError,
    StorageError,
    UsageError,
)
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.io.copying import clone, link, remove_tree
from blobstore.io.durable import (
    check_one_mount,
    make_folder,
    os_errors,
    remove_if_there,
    sync,
    sync_file_system,
    sync_folder,
    syncs_whole,
    write_back,
)
from blobstore.io.ranges import FileReader, OpenReader, close_quietly
from blobstore.names import Digest, ModelName
from blobstore.store.local.blobs import BlobFolder
from blobstore.store.local.copies import ManifestCopies
from blobstore.store.local.journal import Entry, Journal
from blobstore.store.local.leftovers import Leftovers, make_owned_folder
from blobstore.store.local.locks import StoreLock
from blobstore.store.local.manifests import ManifestFolder
from blobstore.store.local.writer import BlobWriter, FinishedBlob, Stamp
from blobstore.store.ports import Expected, Finished, How

_log = logging.getLogger("blobstore.store.local.store")

_CHUNK = 2**20
_NOTE_EVERY_S = 0.05
_NOTED_AT_ONCE = 2**20
_OLD_S = 30 * 60
"""Age from which a blob that is used again is made young: Ollama spares unreferenced ones for an hour."""


class LocalSession:
    """One import's private folder.

    Use it by `Store.session`: what was not published is gone at the end.

    See `Session` in ports.py. It is its own `Earlier`: the journal knows what earlier sessions made
    for a key.
    """

    def __init__(
        self,
        blobs: BlobFolder,
        manifests: ManifestFolder,
        copies: ManifestCopies,
        temporary_folder: Path,
        journal: Journal,
        names: StoreLock,
    ) -> None:
        self._blobs = blobs
        self._manifests = manifests
        self._copies = copies
        self._journal = journal
        self._names = names
        self._leftovers = Leftovers(temporary_folder)
        self._leftovers.clean()
        with os_errors("write to the store", temporary_folder):
            # Opened before the first write, so that syncfs on it reports every write error since.
            self._folder, self._folder_fd = make_owned_folder(temporary_folder)
            try:
                for place in (blobs.path, manifests.path):
                    check_one_mount(self._folder, place)
                self._syncs_whole = syncs_whole(self._folder_fd)
            except BaseException:
                close_quietly(self._folder_fd)
                self._folder.rmdir()
                raise
        self._numbers = itertools.count()
        self._made: dict[Digest, FinishedBlob] = {}
        self._keyed: dict[str, FinishedBlob] = {}
        self._unnoted: list[Entry] = []
        self._is_kept = False
        self._noted_at = time.monotonic()
        self._mutex = threading.Lock()

    def writer(self, size: int) -> BlobWriter:
        """Return a writer for one blob of ``size`` bytes. May be called from several threads."""
        return BlobWriter(
            self._folder,
            str(next(self._numbers)),
            size,
            self._finished,
            syncs=not self._syncs_whole,
        )

    def _finished(self, blob: FinishedBlob) -> None:
        self._made.setdefault(blob.digest, blob)

    def put(self, data: bytes) -> FinishedBlob:
        """Write bytes in memory as one blob. Raises: StorageError."""
        writer = self.writer(len(data))
        try:
            blob = writer.put(0, data)
        finally:
            writer.close()
        if blob is None:
            raise AssertionError("a blob of one piece is finished by it")
        return blob

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        """See `Session`: shared with a file's file system where it can be, else copied.

        Hashed in any case.
        """
        key = descriptor.digest.hex
        if (
            descriptor.digest in self._made
            or self.find(key, descriptor.size, verify=False) is not None
        ):
            return How.THERE
        how, blob = self._taken(descriptor, reader)
        if blob.digest != descriptor.digest:
            if (
                self._made.get(blob.digest) is blob
            ):  # else another blob of the session has these bytes
                del self._made[blob.digest]
                with os_errors("remove", blob.path):
                    remove_if_there(blob.path)
            message = f"{reader.name}: its bytes are not those of {descriptor.digest}"
            raise DigestMismatchError(message, blob=str(descriptor.digest), path=reader.name)
        self.note(key, blob)
        return how

    def _taken(self, descriptor: Descriptor, reader: OpenReader) -> tuple[How, FinishedBlob]:
        if reader.size != descriptor.size:
            message = f"{reader.name} has {reader.size:,} bytes, and {descriptor.digest} {descriptor.size:,}"
            raise CorruptDataError(message, blob=str(descriptor.digest), path=reader.name)
        place = self._folder / str(next(self._numbers))
        for how, share in ((How.CLONED, clone), (How.LINKED, link)):
            if reader.fileno() is not None and share(reader, place):
                return how, self._shared(place, descriptor)
        return How.COPIED, self.copy(reader)

    def _shared(self, place: Path, descriptor: Descriptor) -> FinishedBlob:
        """Return the blob of a file that shares another's blocks, named for the digest of its bytes."""
        with FileReader(place, follow=False) as reader:
            reader.read_ahead()
            digest = reader.digest()
            with os_errors("write", place):
                if not self._syncs_whole:
                    sync(reader.fileno())
                blob = FinishedBlob(
                    digest, descriptor.size, self._folder, Stamp.of(reader.status())
                )
                place.rename(blob.path)
        self._finished(blob)
        return blob

    def copy(self, reader: OpenReader) -> FinishedBlob:
        """See `Session`: in pieces of 1 MiB."""
        if reader.size <= _CHUNK:
            return self.put(reader.read(0, reader.size))
        writer = self.writer(reader.size)
        blob, done = None, 0
        try:
            for piece in reader.pieces(memoryview(bytearray(_CHUNK))):
                blob = writer.put(done, piece)
                done += len(piece)
        finally:
            writer.close()
        if blob is None:
            raise AssertionError("the last piece finishes a blob")
        return blob

    @property
    def earlier(self) -> Self:
        """What earlier sessions made (`Earlier`)."""
        return self

    def note(self, key: str, blob: FinishedBlob) -> None:
        """Note that the plan's entry of ``key`` became ``blob``, for the case that this import is killed."""
        with self._mutex:
            self._keyed[key] = blob
            self._unnoted.append(
                Entry(key, blob.digest, blob.size, blob.stamp, is_durable=not self._syncs_whole)
            )
            if blob.size >= _NOTED_AT_ONCE or time.monotonic() - self._noted_at > _NOTE_EVERY_S:
                self._note()

    def _note(self) -> None:
        self._remember(self._unnoted, logging.INFO)  # whether it matters is known at the end
        self._unnoted = []
        self._noted_at = time.monotonic()

    def keep(self) -> None:
        """See `Earlier`."""
        self._is_kept = True

    def takes_time(self) -> bool:
        """Return True when killed imports left finished blobs: to find one takes as long as to read it."""
        return any(True for _ in self._leftovers.finished())

    def find(self, key: str, size: int, *, verify: bool) -> FinishedBlob | None:
        """Return the blob that an earlier import made for ``key``, or None when it is not there any more.

        It is one of the store's, or one that a killed import left. Its bytes are hashed when its
        file was written to since, when it was not durable when it was noted, or with ``verify``.
        What a killed import left is written back before, and hashed from the disk (`write_back`):
        an error of its writing may have been reported to others only, and never to us. May be
        called from several threads. Raises: StorageError.
        """
        with self._mutex:
            entry = self._journal.find(key)
        if entry is None or entry.size != size:
            return None
        stored = _intact(self._blobs.path / entry.digest.file_name, entry, verify=verify)
        blob = _kept_young(stored) if stored is not None else None
        if blob is None and (blob := self._take_over(entry, verify=verify)) is not None:
            self._finished(blob)
        if blob is not None:
            with self._mutex:
                self._keyed[key] = blob
        return blob

    def _take_over(self, entry: Entry, *, verify: bool) -> FinishedBlob | None:
        with self._mutex:  # another thread of ours has the lock of the same folder otherwise
            left = self._leftovers.find(entry.digest)
            if left is None or not self._leftovers.take(left, self._folder):
                return None
        path = self._folder / left.name
        blob = _intact(path, entry, verify=verify, settle=write_back)
        if blob is None:
            # Removed at once: the kernel reports a lost write only once, so the next import might
            # not see it.
            with os_errors("remove", path):
                remove_if_there(path)
        return blob

    def _sync(self) -> None:
        with os_errors("write to the store", self._folder):
            if self._syncs_whole:
                sync_file_system(self._folder_fd)

    def publish(
        self,
        name: ModelName,
        manifest: Manifest,
        *,
        expected: Expected = None,
        below: Collection[Digest] = (),
    ) -> set[Digest]:
        """Make the manifest's blobs and then the model ``name`` visible.

        Return the digests that were not there before.

        Order: manifest and bytes durable, blobs renamed, their names durable, every blob of the
        manifest checked for presence and size, manifest renamed, its name durable. All space is
        taken before anything is visible. A blob or manifest that was there is replaced: what has
        just been computed heals what lies there. Then the journal is told. What the name has is
        looked at while no other of ours can change it. ``expected`` and ``below``: see `Session`.

        Raises: StorageError; NotFoundError or CorruptDataError when the manifest names a blob that
        is not in the store with its size; LimitExceededError for a manifest that could not be read
        back; ConflictError; UsageError when the store has the name in another case (`Store.target`
        gives the one to use). The old manifest stays then.
        """
        manifest.check_limits()
        named = [blob for blob in manifest.descriptors if blob.digest not in below]
        created = {blob.digest for blob in self._blobs.missing(named)}
        prepared = self._folder / "manifest"
        self._manifests.prepare(name, manifest, prepared)
        is_new = self._copies.write(name, manifest.raw)
        try:
            stamps = self.replace(named)
            for descriptor in named:
                self._blobs.check(descriptor)
            with self._names.exclusive():
                self._refuse_conflict(name, expected)
                self._refuse_other_spelling(name)
                self._copies.write(
                    name, manifest.raw
                )  # another import of the name may have just removed it
                self._manifests.link(name, prepared)
                self._copies.settle(name, manifest.raw)
        except BaseException:
            if is_new:
                self._copies.forget(name, manifest.raw)
            raise
        self._remember(
            Entry(key, blob.digest, blob.size, stamps.get(blob.digest, blob.stamp))
            for key, blob in self._keyed.items()
        )
        return created

    def _refuse_conflict(self, name: ModelName, expected: Expected) -> None:
        if expected is not None and self._manifests.raw(name) not in expected:
            message = f"{name} was changed by another meanwhile"
            raise ConflictError(message, model=str(name), hint="Look at it, and try again.")

    def _refuse_other_spelling(self, name: ModelName) -> None:
        """Raise UsageError when the store has the name in another case, as another process may have just written it.

        A file system that ignores case may spell the folders of a name in its own way and still find them under the name:
        then both spellings are the same model.
        """
        spelled = self._manifests.spelled(name)
        if spelled != name and self._manifests.has(spelled) and not self._manifests.has(name):
            message = f"there is a model {spelled}, and {name} differs from it only in case"
            raise UsageError(message, model=str(spelled), hint=f"Try again: it will be {spelled}.")

    def replace(self, blobs: Iterable[Finished | Descriptor]) -> dict[Digest, Stamp]:
        """Make ``blobs`` of this session visible, durably, in the place of what has their names.

        Return their stamps there.

        Raises: StorageError.
        """
        made = [
            self._made[digest]
            for digest in {blob.digest: None for blob in blobs}
            if digest in self._made
        ]
        with os_errors("write blobs to", self._blobs.path):
            self._sync()
            make_folder(self._blobs.path)
            stamps = self._publish(made)
            sync_folder(self._blobs.path)
        for digest in stamps:
            self._made.pop(digest, None)
        return stamps

    def _remember(self, entries: Iterable[Entry], level: int = logging.WARNING) -> None:
        try:
            self._journal.append(entries)
        except StorageError as error:
            # Only the next import has more to do.
            _log.log(level, "what was made is not in the journal: %s", error)

    def _publish(self, blobs: Iterable[FinishedBlob]) -> dict[Digest, Stamp]:
        """Move the blobs of our folder to ``blobs/``; return their stamps there."""
        stamps: dict[Digest, Stamp] = {}
        ours, theirs = os.fspath(self._folder), os.fspath(self._blobs.path)
        for blob in blobs:
            if blob.digest not in stamps and blob.folder == self._folder:
                path = f"{ours}/{blob.digest.file_name}"
                status = os.stat(path)  # noqa: PTH116  # a hundred thousand of them
                if (
                    status.st_nlink == 1
                ):  # else it is another store's file too, whose times are not ours to change
                    os.utime(
                        path
                    )  # young again: a starting Ollama spares it until its manifest is there
                    status = os.stat(path)  # noqa: PTH116
                stamps[blob.digest] = Stamp.of(status)
                try:
                    os.rename(path, f"{theirs}/{blob.digest.file_name}")  # noqa: PTH104
                except IsADirectoryError:
                    place = f"{theirs}/{blob.digest.file_name}"
                    raise StorageError(
                        f"{place} is in the way: it is a folder", path=place, blob=str(blob.digest)
                    ) from None
        return stamps

    def close(self, *, keep_finished: bool) -> None:
        """Remove what was not published; ``keep_finished``, or after `keep`: but for what the journal knows."""
        if keep_finished or self._is_kept:
            self._remember(self._unnoted, logging.INFO)  # whether it matters is known at the end
        else:
            with suppress(OSError):  # the next import removes it
                remove_tree(self._folder)
        close_quietly(self._folder_fd)
        self._leftovers.clean()


def _kept_young(blob: FinishedBlob) -> FinishedBlob | None:
    """Return a blob of the store, young enough to be spared by a starting Ollama; None when it can't be made so."""
    if blob.stamp.mtime_ns > (time.time() - _OLD_S) * 1e9:
        return blob
    with suppress(OSError):
        if (
            blob.path.lstat().st_nlink > 1
        ):  # another store's file too, whose times are not ours to change
            return blob
    try:
        os.utime(blob.path)
        return replace(blob, stamp=Stamp.of(blob.path.lstat()))
    except OSError:  # it is another user's, or has just been removed: it is made again
        return None


def _intact(
    path: Path, entry: Entry, *, verify: bool, settle: Callable[[int], None] = lambda _fd: None
) -> FinishedBlob | None:
    """Return the blob at ``path`` when it has the entry's bytes: by its stamp, else, or with ``verify``, by hashing it.

    ``settle`` is called with its open descriptor before it is hashed.
    """
    try:
        with FileReader(path, follow=False) as reader:
            stamp = Stamp.of(reader.status())
            if reader.size != entry.size:
                return None
            if verify or not entry.is_durable or stamp != entry.stamp or not stamp.is_sure:
                with os_errors("write back", path):
                    settle(reader.fileno())
                reader.read_ahead()
                if reader.digest() != entry.digest:
                    return None
            return FinishedBlob(entry.digest, entry.size, path.parent, stamp)
    except BlobStoreError as error:
        if not isinstance(error, NotFoundError):
            _log.info("a finished blob is not used: %s", error)
        return None
