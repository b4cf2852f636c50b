"""Shards: which files of a folder hold a checkpoint's tensors, and whether they and their index agree.

Rule I1: a shard index maps tensor names to plain ``*.safetensors`` file names; every file that it names is there, holds the
tensors that it is said to hold, and no others. Nothing is opened before the index is checked. Unknown keys are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from blobstore.errors import BlobStoreError, CorruptDataError, DocumentError, LimitExceededError, NotFoundError, quoted
from blobstore.names import file_name
from blobstore.source.folders import Folder
from blobstore.strictjson import parse_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_INDEX = 256 * 2**20
MAX_SHARDS = 10_000
"""Files of an index: the largest checkpoints have some hundreds, and behind a server each is a request."""

_SHARDS = "model-*.safetensors"
_SHARD_NAME = re.compile(r"model-(?P<number>[0-9]{1,6})-of-(?P<total>[0-9]{1,6})\.safetensors", re.ASCII)


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """``model.safetensors.index.json``: tensor name → shard file name; ``document`` is the JSON object as it lies there."""

    weight_map: Mapping[str, str]
    document: Mapping[str, Any]

    @classmethod
    def parse(cls, raw: bytes, what: str = "shard index") -> ShardIndex:
        """Return the index in ``raw``.

        Raises: DocumentError (rule I1) when weight_map is missing or empty, or names something else than a plain
        ``*.safetensors`` file; LimitExceededError for more than 256 MiB or 10,000 files.
        """
        document = parse_object(raw, what, rule="I1", limit=MAX_INDEX)
        weight_map = document.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise DocumentError(f"{what}: weight_map does not map tensors to files (rule I1)", rule="I1")
        checked: set[str] = set()
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or name not in checked:
                checked.add(_shard_name(name, f"{what}: weight_map of {quoted(tensor)}"))
        if len(checked) > MAX_SHARDS:
            raise LimitExceededError(
                f"limit exceeded: {what} names {len(checked):,} files, at most {MAX_SHARDS:,}", rule="I1"
            )
        return cls(weight_map, document)

    @property
    def files(self) -> list[str]:
        """The shards, sorted."""
        return sorted(set(self.weight_map.values()))


def _shard_name(value: object, place: str) -> str:
    try:
        name = file_name(value)
    except BlobStoreError as error:
        raise DocumentError(f"{place}: {error.message} (rule I1)", rule="I1") from None
    if not name.endswith(SUFFIX):
        raise DocumentError(f"{place}: {name!r} is no .safetensors file (rule I1)", rule="I1")
    return name


def read_index(folder: Folder, name: str = INDEX_NAME) -> ShardIndex:
    """Return a folder's shard index; its shards are there, if the folder lists what it has.

    Raises: NotFoundError (no index, a shard that is missing), DocumentError, LimitExceededError, StorageError.
    """
    index = ShardIndex.parse(folder.read(name, MAX_INDEX), folder.place(name))
    present = folder.names()
    if present is not None and (missing := sorted(set(index.files).difference(present))):
        raise missing_shard(folder, name, missing[0])
    return index


def missing_shard(folder: Folder, index: str, shard: str) -> NotFoundError:
    """Return the error for a shard that an index names, and that is not there."""
    return NotFoundError(
        f"{folder.place(index)} names the shard {shard}, which is missing", path=folder.place(shard), rule="I1"
    )


def check_index(index: ShardIndex, shards: Sequence[tuple[str, str, Collection[str]]]) -> None:
    """Raise unless each tensor is in exactly the shard that the index names, and the shards hold nothing else.

    ``shards``: each one's path or address, its file name, and the names of its tensors. Raises: CorruptDataError (rule I1).
    """
    held = 0
    for place, file, tensors in shards:
        held += len(tensors)
        for name in tensors:
            if index.weight_map.get(name) != file:
                where = index.weight_map.get(name)
                says = f"says it is in {where}" if where else "does not name it"
                message = f"{place} holds the tensor {quoted(name)}, but the index {says}"
                raise CorruptDataError(message, tensor=name, rule="I1", path=place)
    if held != len(index.weight_map):
        present = {name for _, _, tensors in shards for name in tensors}
        missing = min(index.weight_map.keys() - present)
        raise CorruptDataError(
            f"the index says that {index.weight_map[missing]} holds the tensor {quoted(missing)}, but it does not",
            tensor=missing,
            rule="I1",
        )


def shards_without_index(folder: Folder, names: Iterable[str]) -> list[str]:
    """Return those of a folder's files that are shards by their names, ``model-00001-of-00003.safetensors``, sorted.

    Raises: NotFoundError when their own names say that one is missing.
    """
    shards = sorted(name for name in names if fnmatchcase(name, _SHARDS))
    present = set(shards)
    claims = {match["total"]: match for name in shards if (match := _SHARD_NAME.fullmatch(name))}
    for total, match in claims.items():
        width = len(match["number"])
        wanted = (f"model-{number:0{width}}-of-{total}.safetensors" for number in range(1, int(total) + 1))
        if missing := next((name for name in wanted if name not in present), None):
            path = folder.place(missing)
            raise NotFoundError(f"{folder.name} has {match[0]}, but {missing} is missing", path=path)
    return shards
