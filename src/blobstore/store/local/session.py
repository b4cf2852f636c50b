"""Session: everything that one import writes, invisible until it is complete.

Blobs are written to a folder of the session under ``.blobstore/tmp/``; `publish` makes them
durable, moves them to ``blobs/``, and links the manifest last. A failed session leaves the store as
it was. A killed one leaves its folder, whose finished blobs later imports use (kept.py). Ollama
does not see temporary blobs, however long an import takes: a starting Ollama deletes unreferenced
files over an hour old from ``blobs/`` (server/images.go `PruneLayers`, ollama/ollama@fb307609).
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from blobstore import hashing
from blobstore.errors import StorageError
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.hashing import Bytes
from blobstore.hashing.stage import HashStage
from blobstore.io.copying import clone, link, remove_tree
from blobstore.io.durable import (
    PAGE,
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
from blobstore.store.local.backups import ManifestCopies
from blobstore.store.local.blobs import (
    BlobFolder,
    FinishedBlob,
    Stamp,
    kept_young,
    old_ns,
    renewed,
)
from blobstore.store.local.journal import Journal, MadeBlob
from blobstore.store.local.kept import KeptBlobs, make_owned_folder
from blobstore.store.local.locks import StoreLock
from blobstore.store.local.manifests import ManifestFolder
from blobstore.store.local.writer import BlobWriter, write_whole
from blobstore.store.ports import (
    Expected,
    Finished,
    How,
    Session,
    check_expected,
    check_reader_size,
    other_spelling,
    wrong_bytes,
)

_log = logging.getLogger("blobstore.store.local.store")
_CHUNK = 2**20


class NewBlobs:
    """The blobs in a session's folder: ``made`` has the finished ones. Safe to share.

    ``syncs``: each is made durable by itself, because the folder's file system can't be.
    """

    def __init__(self, folder: Path, stage: HashStage, *, syncs: bool) -> None:
        self.made: dict[Digest, FinishedBlob] = {}
        self._folder = folder
        self._stage = stage
        self._syncs = syncs
        self._numbers = itertools.count()

    def add(self, blob: FinishedBlob) -> None:
        """Note a blob that is in the folder."""
        self.made.setdefault(blob.digest, blob)

    def discard(self, blob: FinishedBlob) -> None:
        """Remove a blob, unless another one has its bytes. Raises: StorageError."""
        if self.made.get(blob.digest) is blob:
            del self.made[blob.digest]
            with os_errors("remove", blob.path):
                remove_if_there(blob.path)

    def move(self, blobs: Iterable[Finished | Descriptor], folder: Path) -> dict[Digest, Stamp]:
        """Move those of ``blobs`` that are new to ``folder``; return changed stamps.

        Raises: StorageError if a folder is in the way; OSError.
        """
        stamps: dict[Digest, Stamp] = {}
        ours, theirs = self._folder, os.fspath(folder)
        young_from_ns = old_ns()
        for wanted in blobs:
            blob = self.made.pop(wanted.digest, None)
            if blob is None:
                continue
            name = blob.digest.file_name
            path, place = f"{blob.folder}/{name}", f"{theirs}/{name}"
            try:
                if blob.stamp.mtime_ns <= young_from_ns:
                    stamps[blob.digest] = renewed(path)
                os.rename(path, place)  # noqa: PTH104  # a hundred thousand of them
            except IsADirectoryError:
                message = f"{place} is in the way: it is a folder"
                raise StorageError(message, path=place, blob=str(blob.digest)) from None
            except FileNotFoundError:
                if blob.folder == ours:  # else another session has published a kept one
                    raise
        return stamps

    def writer(
        self, size: int, finished: Callable[[Any], None], stage: HashStage | None = None
    ) -> BlobWriter:
        """Return a writer. See `Session.writer`."""

        def both(blob: FinishedBlob) -> None:
            self.add(blob)
            finished(blob)

        return BlobWriter(self._folder, self._number(), size, both, stage, syncs=self._syncs)

    def put_all(self, blobs: Sequence[Bytes]) -> list[FinishedBlob]:
        """Write small blobs. See `Session.put_all`."""
        return [
            self._put(Digest(digest.hex()), memoryview(data))
            for digest, data in zip(hashing.digests(blobs), blobs, strict=True)
        ]

    def take(self, descriptor: Descriptor, reader: OpenReader) -> tuple[How, FinishedBlob]:
        """Return the blob of a reader's bytes, and how it came; its digest is not compared."""
        place = self._folder / self._number()
        for how, share in ((How.CLONED, clone), (How.LINKED, link)):
            if reader.fileno() is not None and share(reader, place):
                return how, self._shared(place, descriptor)
        return How.COPIED, self.copy(reader)

    def copy(self, reader: OpenReader) -> FinishedBlob:
        """Return the blob of a reader's bytes, copied in pieces of 1 MiB."""
        if reader.size <= _CHUNK:
            return self.put_all([reader.read(0, reader.size)])[0]
        made: list[FinishedBlob] = []
        hashed = threading.Event()
        done = 0
        with closing(self.writer(reader.size, made.append, self._stage)) as writer:
            for piece in reader.pieces(memoryview(mmap.mmap(-1, _CHUNK))):
                hashed.clear()
                writer.put(done, piece, aligned=done % PAGE == 0, hashed=hashed.set)
                self._stage.work_until(hashed)
                done += len(piece)
            writer.check()
        return made[0]

    def _number(self) -> str:
        return str(next(self._numbers))

    def _put(self, digest: Digest, data: memoryview) -> FinishedBlob:
        blob = write_whole(self._folder, digest, data, self._number(), syncs=self._syncs)
        self.add(blob)
        return blob

    def _shared(self, place: Path, descriptor: Descriptor) -> FinishedBlob:
        """Return the blob of a file that shares another's blocks, named for its digest."""
        with FileReader(place, follow=False) as reader:
            reader.read_ahead()
            digest = reader.digest(self._stage)
            with os_errors("write", place):
                if self._syncs:
                    sync(reader.fileno())
                stamp = Stamp.of(reader.status())
                blob = FinishedBlob(digest, descriptor.size, self._folder, stamp)
                place.rename(blob.path)
        self.add(blob)
        return blob


_log = logging.getLogger("blobstore.store.local.store")

_NOTE_EVERY_S = 0.05
_NOTED_AT_ONCE = 2**20


class LocalSession(Session):
    """One import's private folder, made by `Store.session`. See `Session`.

    The journal says what earlier sessions made for a key.
    """

    remembers = True

    def __init__(
        self,
        blobs: BlobFolder,
        manifests: ManifestFolder,
        copies: ManifestCopies,
        journal: Journal,
        names: StoreLock,
        kept: KeptBlobs,
        published: Callable[[ModelName], None] = lambda _: None,
    ) -> None:
        self._blobs = blobs
        self._manifests = manifests
        self._copies = copies
        self._journal = journal
        self._names = names
        self._kept = kept
        self._published = published  # called while the lock of names is held
        kept.clean()
        with os_errors("write to the store", kept.sessions):
            # Opened before the first write, so that syncfs on it reports every write error since.
            self._folder, self._folder_fd = make_owned_folder(kept.sessions)
            try:
                for place in (blobs.path, manifests.path):
                    check_one_mount(self._folder, place)
                self._syncs_whole = syncs_whole(self._folder_fd)
            except BaseException:
                close_quietly(self._folder_fd)
                self._folder.rmdir()
                raise
        self._stage = HashStage()
        self._new = NewBlobs(self._folder, self._stage, syncs=not self._syncs_whole)
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
        return self._new.writer(size, finished, stage)

    def put_all(self, blobs: Sequence[Bytes]) -> list[FinishedBlob]:
        return self._new.put_all(blobs)

    def copy(self, reader: OpenReader) -> FinishedBlob:
        """See `Session`: in pieces of 1 MiB."""
        return self._new.copy(reader)

    def add(self, descriptor: Descriptor, reader: OpenReader) -> How:
        """See `Session`. The blob shares a file's blocks or inode if it can, and is hashed."""
        key = descriptor.digest.hex
        if descriptor.digest in self._new.made or self.recall(key, descriptor.size, verify=False):
            return How.THERE
        check_reader_size(descriptor, reader)
        how, blob = self._new.take(descriptor, reader)
        if blob.digest != descriptor.digest:
            self._new.discard(blob)
            raise wrong_bytes(descriptor, reader)
        self.note(key, blob)
        return how

    def note(self, key: str, blob: FinishedBlob) -> None:
        with self._mutex:
            self._keyed[key] = blob
            self._unnoted.append(key)
            if blob.size >= _NOTED_AT_ONCE or time.monotonic() - self._noted_at > _NOTE_EVERY_S:
                self._write_notes()
                self._noted_at = time.monotonic()

    def _write_notes(self) -> None:
        is_durable = not self._syncs_whole
        # At level INFO: a later error may make the failure harmless.
        self._append(self._unnoted, {}, is_durable=is_durable, level=logging.INFO)
        self._unnoted = []

    def keep(self) -> None:
        self._is_kept = True

    def open(self, blob: FinishedBlob) -> FileReader:
        return FileReader(blob.path, follow=False)

    def recall(self, key: str, size: int, *, verify: bool) -> FinishedBlob | None:
        """See `Session`.

        The blob is in the store, or was kept, or a killed session left it (kept.py). It is hashed
        if its file was written to since it was noted, or was not durable then. What a killed
        session left is written back first, and hashed from the disk (`write_back`): the error of a
        failed write may have been reported to other processes only.
        """
        made = self._journal.find(key)
        blob = None
        if made is not None and made.size == size:
            place = self._blobs.path / made.digest.file_name
            stored = made.at(place, self._stage, verify=verify)
            blob = kept_young(stored) if stored is not None else None
        elif (digest := Digest.from_file_name(f"sha256-{key}")) is not None:
            made = MadeBlob(digest, size, None)
        else:
            return None
        if blob is None:
            kept = self._kept.path / made.digest.file_name
            blob = made.at(kept, self._stage, verify=verify) or self._left(made, verify=verify)
        if blob is not None:
            with self._mutex:
                self._keyed[key] = blob
            if blob.folder != self._blobs.path:
                self._new.add(blob)
        return blob

    def _left(self, made: MadeBlob, *, verify: bool) -> FinishedBlob | None:
        if (path := self._kept.take(made.digest, self._folder)) is None:
            return None
        if made.stamp is None:
            made = made._replace(is_durable=False)
        blob = made.at(path, self._stage, verify=verify, settle=write_back)
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
        created = [blob.digest for blob in self._blobs.missing(named)]
        prepared = self._folder / "manifest"
        self._manifests.prepare(name, manifest, prepared)
        is_new = self._copies.write(name, manifest.raw)
        try:
            stamps = self.replace(named)
            for descriptor in named:
                self._check(descriptor)
            with self._names.exclusive():
                check_expected(name, self._manifests.raw(name), expected)
                self._check_spelling(name)
                # Again, because another import of the name may have just removed it.
                self._copies.write(name, manifest.raw)
                self._manifests.link(name, prepared)
                self._copies.settle(name, manifest.raw)
                self._published(name)
        except BaseException:
            if is_new:
                self._copies.forget(name, manifest.raw)
            raise
        self._append(self._keyed, stamps)
        return set(created)

    def _check(self, descriptor: Descriptor) -> None:
        """Raise, as `BlobFolder.check`, unless the blob is there with its size and can be read."""
        path = f"{self._blobs.path}/{descriptor.digest.file_name}"
        with suppress(OSError):
            status = os.lstat(path)
            is_whole = stat.S_ISREG(status.st_mode) and status.st_size == descriptor.size
            if is_whole and os.access(path, os.R_OK):
                return
        self._blobs.check(descriptor)

    def _check_spelling(self, name: ModelName) -> None:
        """Raise UsageError if another process has just written the name in another case.

        A file system that ignores case may spell the folders of a name in its own way and still
        find them under the name: then both spellings are the same model.
        """
        spelled = self._manifests.spelled(name)
        if spelled != name and self._manifests.has(spelled) and not self._manifests.has(name):
            raise other_spelling(name, spelled)

    def replace(self, blobs: Iterable[Finished | Descriptor]) -> dict[Digest, Stamp]:
        """Make those of ``blobs`` that this session made visible, durably; return changed stamps.

        A file with the name of one of them is replaced. Raises: StorageError.
        """
        with os_errors("write to the store", self._folder):
            if self._syncs_whole:
                sync_file_system(self._folder_fd)
        with os_errors("write blobs to", self._blobs.path):
            make_folder(self._blobs.path)
            stamps = self._new.move(blobs, self._blobs.path)
            sync_folder(self._blobs.path)
        return stamps

    def _append(
        self,
        keys: Iterable[str],
        stamps: Mapping[Digest, Stamp],
        *,
        is_durable: bool = True,
        level: int = logging.WARNING,
    ) -> None:
        """Add the blobs of ``keys`` to the journal, with newer ``stamps`` of some.

        Without them, the next import only has more to do.
        """
        blobs = ((key, self._keyed[key]) for key in keys)
        made = (
            (key, MadeBlob(one.digest, one.size, stamps.get(one.digest, one.stamp), is_durable))
            for key, one in blobs
        )
        try:
            self._journal.append(made)
        except StorageError as error:
            _log.log(level, "the blobs of this import are not in the journal: %s", error)

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
            self._kept.clean()

    def _keep_finished(self) -> None:
        """Make the finished blobs durable, move them to the kept ones, and note them as durable."""
        made = [blob for blob in self._new.made.values() if blob.folder == self._folder]
        if made and self._syncs_whole:
            with os_errors("write to the store", self._folder):
                sync_file_system(self._folder_fd)
        self._kept.add(made)
        self._append(list(self._keyed), {})
