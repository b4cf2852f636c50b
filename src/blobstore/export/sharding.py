"""Sharding: which tensors go into which file, exactly as huggingface_hub splits a state dict. Pure.

Source of the rule: huggingface_hub 2.4.0 serialization/_base.py ``split_state_dict_into_shards_factory``, of the names and
of the index ``save_torch_state_dict`` in serialization/_torch.py. A property test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

STEM = "model"
INDEX_NAME = f"{STEM}.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Split:
    """File name → the names of its tensors in order. ``total_size`` is the bytes of all, what is shared counted once."""

    files: Mapping[str, list[str]]
    total_size: int

    @property
    def index(self) -> bytes:
        """The shard index: the bytes that huggingface_hub would write."""
        places = {name: file for file, names in self.files.items() for name in names}
        document = {"metadata": {"total_size": self.total_size}, "weight_map": places}
        return json.dumps(document, indent=2).encode()


def split_into_shards(sizes: Mapping[str, int], limit: int, storages: Mapping[str, Hashable] | None = None) -> Split:
    """Return the shards for tensors of ``sizes`` bytes, in their order, each of at most ``limit`` bytes.

    One after the other they fill a shard until the next does not fit. A tensor over the limit gets a shard of its own, which
    comes before the one that is being filled. ``storages``: what tensors share; such tensors go into the shard of the first
    of them and are counted once. A single file is ``model.safetensors``, several ``model-00001-of-00003.safetensors``.
    """
    sharing = _sharing(storages or {}, sizes)
    later = {name for group in sharing.values() for name in group}
    shards: list[list[str]] = []
    current: list[str] = []
    filled = total = 0
    for name, size in sizes.items():
        if name in later:
            continue
        total += size
        if size > limit:
            shards.append([name])
            continue
        if filled + size > limit:
            shards.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    if current:
        shards.append(current)
    # Those that share come last in their shard, by the order in which their storages were met.
    complete = [[*shard, *_followers(shard, sharing)] for shard in shards]
    return Split({_name(number, len(complete)): names for number, names in enumerate(complete, 1)}, total)


def _sharing(storages: Mapping[str, Hashable], sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """Return, by the first tensor of a storage, the others that share it, storages in the order they are met."""
    first: dict[Hashable, str] = {}
    sharing: dict[str, list[str]] = {}
    for name in sizes:
        if (storage := storages.get(name)) is not None:
            if storage in first:
                sharing[first[storage]].append(name)
            else:
                first[storage] = name
                sharing[name] = []
    return sharing


def _followers(shard: list[str], sharing: Mapping[str, list[str]]) -> list[str]:
    return [follower for name in shard for follower in sharing.get(name, ())]


def _name(number: int, count: int) -> str:
    return f"{STEM}.safetensors" if count == 1 else f"{STEM}-{number:05}-of-{count:05}.safetensors"
