"""Shards: names, order, files, total size and index equal huggingface_hub's."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

import pytest
from huggingface_hub import split_state_dict_into_shards_factory
from huggingface_hub.serialization._base import parse_size_to_int

from blobstore.cli.output import parse_size
from blobstore.export.planned_files import shard_index, split_into_shards

PATTERN = "model{suffix}.safetensors"


@dataclass(frozen=True)
class Fake:
    """A tensor of so many bytes, in a storage of its own: what is stored here shares none."""

    size: int


def state_dict(numbers: random.Random) -> tuple[dict[str, Fake], int]:
    """Return up to forty tensors and a limit: sizes that meet it, pass it, or are empty."""
    limit = numbers.choice([1, 7, 64, 1000, 5_000_000_000])
    sizes = [0, 1, limit // 3, limit // 2, limit - 1, limit, limit + 1, 3 * limit]
    tensors = {}
    for number in range(numbers.choice([0, 1, 2, 5, 12, 40])):
        size = (
            numbers.choice(sizes) if numbers.random() < 0.5 else numbers.randrange(limit // 2 + 1)
        )
        tensors[f"layers.{numbers.randrange(10_000)}.w{number}"] = Fake(size)
    return tensors, limit


def assert_equal(tensors: dict[str, Fake], limit: int) -> None:
    theirs = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.size,
        get_storage_id=lambda _: None,
        filename_pattern=PATTERN,
        max_shard_size=limit,
    )
    sizes = {name: tensor.size for name, tensor in tensors.items()}
    ours = split_into_shards(sizes, limit)
    assert list(ours.items()) == list(theirs.filename_to_tensors.items()), tensors
    # As save_torch_state_dict writes it, of which only the dump is not public.
    index = {"metadata": theirs.metadata, "weight_map": theirs.tensor_to_filename}
    assert shard_index(ours, sum(sizes.values())) == json.dumps(index, indent=2).encode(), tensors


@pytest.mark.parametrize(
    "count", [1_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(1200)])]
)
def test_random_state_dicts(count: int) -> None:
    numbers = random.Random(20_261_121)
    seen = set()
    for _ in range(count):
        tensors, limit = state_dict(numbers)
        assert_equal(tensors, limit)
        seen.add((len(tensors) > 2, any(tensor.size > limit for tensor in tensors.values())))
    assert len(seen) == 4  # many and few, too large and not


@pytest.mark.parametrize("names", [["é\n<>&", "\u2028", "plain"], [], ["only"]])
def test_names_that_json_escapes(names: list[str]) -> None:
    assert_equal({name: Fake(3) for name in names}, 4)


@pytest.mark.parametrize(
    "text", ["5GB", "5 GB", "1.5gb", "300MB", "0.3KB", "2TB", " 7MB ", "1.1MB"]
)
def test_sizes_are_read_as_huggingface_hub_reads_them(text: str) -> None:
    assert parse_size(text) == parse_size_to_int(text)
