"""Signatures in a store's folder: ``.blobstore/signatures/<sha256 of a manifest>/<sha256>``.

Each file has one signature (formats/signatures.py), and is named for the sha256 of its bytes. So
several processes add signatures without waiting for each other, and a signature that is added twice
is one file. A file is durable before it is renamed into place. Ollama does not see them: a name
under ``manifests/`` would be a model. Removed by `remove` with the last model of a manifest, or by
a clean-up (store/care/prune.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence, Set as AbstractSet
from pathlib import Path

from blobstore.errors import CorruptDataError, LimitExceededError
from blobstore.formats.signatures import MAX_FILE, MAX_SIGNATURES, Signature
from blobstore.io.copying import remove_tree
from blobstore.io.durable import listed, make_folder, os_errors, read_own, replace_file, sync_folder
from blobstore.names import Digest, ModelName
from blobstore.store.local.kept import is_young
from blobstore.store.local.locks import StoreLock, refuse_link
from blobstore.store.ports import Leftover

_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_UNFINISHED = re.compile(r"new-[0-9a-f]{16}", re.ASCII)


class SignatureFolder:
    """The signatures of a store, in ``folder``, which is made with the first one. See `Signatures`.

    ``lock``: the store's, shared while signatures are added.
    """

    def __init__(self, folder: Path, lock: StoreLock) -> None:
        self._folder = folder
        self._lock = lock

    def read(self, _name: ModelName, digest: Digest) -> list[Signature]:
        """See `Signatures`. Sorted by the sha256 of their files."""
        return [_read(path) for path in self._files(digest)]

    def add(self, _name: ModelName, digest: Digest, signatures: Sequence[Signature]) -> int:
        encoded = {Digest.of(raw).hex: raw for raw in (each.encode() for each in signatures)}
        with self._lock.shared():
            there = {path.name for path in self._files(digest)}
            new = {name: raw for name, raw in encoded.items() if name not in there}
            if len(there) + len(new) > MAX_SIGNATURES:
                message = f"{digest} would have over {MAX_SIGNATURES:,} signatures"
                raise LimitExceededError(f"limit exceeded: {message}", rule="S1")
            if new:
                self._write(digest, new)
        return len(new)

    def remove(self, digest: Digest) -> None:
        """Remove the signatures of a manifest, for a holder of the store's exclusive lock.

        Raises: StorageError.
        """
        place = self._folder / digest.hex
        with os_errors("remove", place):
            if place.is_dir() and self._link(digest) is None:
                remove_tree(place)

    def remove_all(self, manifests: Iterable[str]) -> None:
        """Remove the signatures of manifests, given by hex digits. As `remove`."""
        for digits in manifests:
            self.remove(Digest(digits))

    def unneeded(self, needed: AbstractSet[str], kept_s: float) -> Iterator[Leftover]:
        """Yield the signatures of manifests whose hex digits are not ``needed``.

        Unfinished files of killed processes are among them. What was changed in the last ``kept_s``
        seconds is left out, and so are files of other programs. Raises: StorageError.
        """
        with os_errors("list", self._folder):
            folders = [] if self._folder.is_symlink() else listed(self._folder)
            for folder in folders:
                if _HEX.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                    yield from _unneeded(Path(folder.path), kept_s, whole=folder.name not in needed)

    def _write(self, digest: Digest, new: dict[str, bytes]) -> None:
        place = self._folder / digest.hex
        refuse_link(self._link(digest))
        with os_errors("write", place):
            make_folder(place)
            for name, raw in new.items():
                temporary = place / f"new-{os.urandom(8).hex()}"
                replace_file(place / name, raw, temporary=temporary, syncs=True)
            sync_folder(place)

    def _files(self, digest: Digest) -> list[Path]:
        """Return the files of a manifest's signatures, sorted. Raises: LimitExceededError."""
        place = self._folder / digest.hex
        refuse_link(self._link(digest))
        with os_errors("list", place):
            names = [entry.name for entry in listed(place) if _HEX.fullmatch(entry.name)]
        if len(names) > MAX_SIGNATURES:
            message = f"{place} has {len(names):,} signatures, at most {MAX_SIGNATURES:,}"
            raise LimitExceededError(f"limit exceeded: {message}", rule="S1", path=str(place))
        return [place / name for name in names]

    def _link(self, digest: Digest) -> Path | None:
        with os_errors("access", self._folder):
            places = (self._folder, self._folder / digest.hex)
            return next((place for place in places if place.is_symlink()), None)


def _read(path: Path) -> Signature:
    raw = read_own(path, MAX_FILE)
    if Digest.of(raw).hex != path.name:
        message = f"{path} is damaged: its bytes do not match its name"
        hint = "Remove the file, and sign or pull the model again."
        raise CorruptDataError(message, path=str(path), hint=hint)
    return Signature.parse(raw, str(path))


def _unneeded(folder: Path, kept_s: float, *, whole: bool) -> Iterator[Leftover]:
    files = listed(folder)
    if whole and not is_young(folder, kept_s):
        nbytes = sum(file.stat(follow_symlinks=False).st_size for file in files)
        yield Leftover(folder, nbytes, "signatures of a manifest that no model has")
    elif not whole:
        for file in files:
            if _UNFINISHED.fullmatch(file.name) and not is_young(Path(file.path), kept_s):
                nbytes = file.stat(follow_symlinks=False).st_size
                yield Leftover(Path(file.path), nbytes, "a signature left unfinished")
