"""With any files in both trees of manifests, no command removes a blob that a model needs."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import example, given, settings, strategies as st
from support.newer import linked, list_of, manifest_of, reference
from support.stores import layer_by_hand, manifest_path

from blobstore.errors import BlobStoreError
from blobstore.names import ModelName
from blobstore.store.care.prune import prune
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store, open_store

BLOBS = st.lists(st.sampled_from([b"a", b"bb", b"ccc", b"dddd", b"eeeee"]), min_size=1, max_size=4)
NAMES = st.sampled_from(["m", "M", "m:X", "m:x", "n"])
KINDS = st.sampled_from(["manifest", "references", "whole", "nested", "damaged", "dangling"])
COMMANDS = st.lists(
    st.sampled_from(["prune", "verify", "rm m", "rm M", "rm n", "cp m n", "mv n m:x"]), max_size=5
)


def blobs_of(store: Store) -> set[str]:
    return {path.name for path in (store.root / "blobs").glob("*")}


def write_newer(store: Store, number: int, kind: str, blobs: list[bytes]) -> set[str]:
    """Write a model of a newer Ollama and return the names of the blob files that it needs."""
    before = blobs_of(store)
    # A number, so that no two are one blob: a whole one would heal a damaged one.
    document: dict[str, Any] = {**manifest_of(store, *blobs), "number": number}
    if kind == "references":
        document = list_of(reference(store, document))
    elif kind == "nested":
        document = list_of(reference(store, list_of(reference(store, document))))
    elif kind == "whole":
        document = list_of(document)
    link = linked(store, document, f"ollama.com/library/new/{number}")
    needed = blobs_of(store) - before
    if kind == "damaged":
        link.resolve().write_bytes(b"{")
    elif kind == "dangling":
        needed.discard(link.resolve().name)
        link.resolve().unlink()
    return needed | {layer_by_hand(store, "", blob)["digest"].replace(":", "-") for blob in blobs}


def needed_by(store: Store) -> set[str]:
    """Return the blob files that the manifests name, without using our code."""
    found = set()
    for path in (store.root / "manifests").glob("*/*/*/*"):
        document = json.loads(path.read_bytes())
        layers = (*document["layers"], document["config"])
        found |= {layer["digest"].replace(":", "-") for layer in layers}
    return found


def act(store: Store, command: str) -> None:
    verb, *names = command.split()
    verbs: dict[str, Callable[..., object]] = {
        "prune": lambda: prune(store, grace_s=0, sole_owner=True),
        "verify": lambda: verify(store),
        "rm": store.remove,
        "cp": store.copy,
        "mv": partial(store.move, replace=True),
    }
    with suppress(BlobStoreError):
        verbs[verb](*map(ModelName.parse, names))


@settings(max_examples=15)
@example({}, [], [b"orphan"], ["prune"])
@given(
    st.dictionaries(NAMES, BLOBS), st.lists(st.tuples(KINDS, BLOBS), max_size=3), BLOBS, COMMANDS
)
def test_nothing_that_is_needed_goes(
    models: dict[str, list[bytes]],
    newer: list[tuple[str, list[bytes]]],
    orphans: list[bytes],
    commands: list[str],
) -> None:
    with TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "store")
        for blob in orphans:
            layer_by_hand(store, "", blob)
        for name, blobs in models.items():
            path = manifest_path(store, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(manifest_of(store, *blobs)))
        for_ever: set[str] = set()
        for number, (kind, blobs) in enumerate(newer):
            for_ever |= write_newer(store, number, kind, blobs)
        for_ever &= blobs_of(store)  # a dangling link may be to another's blob, too
        is_known = all(kind not in ("damaged", "dangling") for kind, _ in newer)
        for command in commands:
            before = blobs_of(store)
            act(store, command)
            there = blobs_of(store)
            assert there >= for_ever
            assert there >= needed_by(store)
            has_manifests = bool(newer or needed_by(store))
            if not is_known or (command == "prune" and not has_manifests):
                assert there == before
            elif command == "prune":
                assert there == for_ever | needed_by(store)
