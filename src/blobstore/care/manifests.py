"""The manifests of a store as verify and repair read them: which bytes they are, and whether they are what was written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from blobstore.care.blob_check import Users
from blobstore.documents import Manifest
from blobstore.errors import BlobStoreError, NotFoundError
from blobstore.mlx_settings import settings_of
from blobstore.names import ModelName
from blobstore.store import Store
from blobstore.store.references import needs_of

_FEW_BYTES = 16
"""A manifest that differs from its copy in so few bytes was not replaced by another program: digests alone have 64."""


def manifest_bytes(store: Store, name: ModelName) -> bytes:
    """Return the bytes of a manifest; none when it is gone or can't be read."""
    try:
        return store.manifests.read_bytes(name)
    except BlobStoreError:
        return b""


def read_manifest(store: Store, name: ModelName) -> tuple[Manifest | None, str | None]:
    """Return a model's manifest, where it can be read, and what is wrong with it; neither when it is missing."""
    try:
        raw = store.manifests.text(name)
        manifest = Manifest.parse(raw, f"the manifest of {name}")
    except NotFoundError:
        return None, None
    except BlobStoreError as error:
        return None, error.message
    return manifest, changed(raw, store.copies.of(name))


def changed(raw: bytes, copies: Sequence[bytes]) -> str | None:
    """Say that a manifest is not what was written, when it differs from a copy in a few bytes only."""
    if not copies or raw in copies:
        return None
    for copy in copies:
        if count := _differing(raw, copy):
            return f"it differs in {count} byte{'s' if count > 1 else ''} from what was written"
    return None  # another program has written another model there


def _differing(raw: bytes, copy: bytes) -> int | None:
    """Return in how many bytes a manifest differs from a copy; None when in so many that it is another model's."""
    if len(raw) != len(copy):
        return None
    count = sum(a != b for a, b in zip(raw, copy, strict=True))
    return count if count <= _FEW_BYTES else None


class ManifestReader:
    """Reads the manifests of many models. Bytes that many names share are parsed once, whatever they are."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._users: dict[bytes, Users] = {}
        self._wrong: dict[bytes, str] = {}
        self._suspects: list[ModelName] = []

    def read(self, names: Iterable[ModelName]) -> Iterator[tuple[Users, Manifest]]:
        """Yield each different manifest once, with the models that have it; ``Users.names`` is complete at the end."""
        for name in names:
            try:
                raw = self._store.manifests.text(name)
            except NotFoundError:
                continue  # it has been removed since the names were read
            except BlobStoreError:
                self._suspects.append(name)
                continue
            key = _key(raw)
            manifest = self._parsed(key, raw)
            if manifest is not None:
                yield self._users[key], manifest
            if key in self._users:
                self._users[key].names.append(name)
            if self._reason(name, key, raw) is not None:
                self._suspects.append(name)

    def broken(self) -> Iterator[tuple[ModelName, str]]:
        """Yield the models whose manifests were wrong and still are, and what is wrong with them."""
        for name in self._suspects:
            if (reason := self._reason_now(name)) is not None:
                yield name, reason

    def _reason_now(self, name: ModelName) -> str | None:
        try:
            raw = self._store.manifests.text(name)
        except NotFoundError:
            return None
        except BlobStoreError as error:
            return error.message
        key = _key(raw)
        self._parsed(key, raw)
        return self._reason(name, key, raw)

    def _reason(self, name: ModelName, key: bytes, raw: bytes) -> str | None:
        return self._wrong.get(key) or changed(raw, self._store.copies.of(name))

    def _parsed(self, key: bytes, raw: bytes) -> Manifest | None:
        """Return the manifest in ``raw`` when these bytes are new and valid; remember what they are."""
        if key in self._users or key in self._wrong:
            return None
        try:
            manifest = Manifest.parse(raw, "the manifest")
        except BlobStoreError as error:
            self._wrong[key] = error.message
            return None
        self._users[key] = Users(key, settings_of(self._store, manifest))
        return manifest


class CurrentNeeds:
    """Which models still need a blob: they may have been removed or replaced since their manifests were read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._needs: dict[bytes, set[str]] = {}
        self._replaced: dict[bytes, list[tuple[ModelName, bytes]]] = {}
        self._kept: dict[bytes, tuple[ModelName, ...]] = {}

    def models(self, users: Users, digest: str) -> tuple[ModelName, ...]:
        """Return those of ``users`` that need the blob of these hex digits now; the same tuple wherever all of them do."""
        if users.key not in self._kept:
            self._compare(users)
        found = [name for name, key in self._replaced[users.key] if digest in self._needs[key]]
        return tuple(sorted((*self._kept[users.key], *found))) if found else self._kept[users.key]

    def _compare(self, users: Users) -> None:
        kept: list[ModelName] = []
        replaced: list[tuple[ModelName, bytes]] = []
        for name in dict.fromkeys(users.names):  # a user may have asked for one twice
            raw = manifest_bytes(self._store, name)
            key = _key(raw)
            if key == users.key:
                kept.append(name)
                continue
            replaced.append((name, key))
            if key not in self._needs:
                self._needs[key] = _needs(raw)
        self._kept[users.key] = tuple(sorted(kept))
        self._replaced[users.key] = replaced


def _needs(raw: bytes) -> set[str]:
    """Return the hex digits of the blobs that a manifest's bytes name; none when they are not a manifest."""
    try:
        return set(needs_of(raw, "the manifest"))
    except BlobStoreError:
        return set()


def _key(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()
