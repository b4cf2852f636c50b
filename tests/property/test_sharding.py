"""Shards: names, order, files, total size and index equal huggingface_hub's."""

import json
import random

import pytest
from huggingface_hub import split_state_dict_into_shards_factory

from blobstore.export.planned_files import shard_index, split_into_shards

PATTERN = "model{suffix}.safetensors"


def assert_equal(sizes: dict[str, int], limit: int) -> None:
    theirs = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        get_storage_id=lambda _: None,
        filename_pattern=PATTERN,
        max_shard_size=limit,
    )
    ours = split_into_shards(sizes, limit)
    assert list(ours.items()) == list(theirs.filename_to_tensors.items()), sizes
    # As save_torch_state_dict writes it, of which only the dump is not public.
    index = {"metadata": theirs.metadata, "weight_map": theirs.tensor_to_filename}
    assert shard_index(ours, sum(sizes.values())) == json.dumps(index, indent=2).encode(), sizes


@pytest.mark.parametrize(
    "count", [1_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(1200)])]
)
def test_random_state_dicts(count: int) -> None:
    chance = random.Random(20_261_121)
    for _ in range(count):
        limit = chance.choice([1, 7, 64, 1000, 5_000_000_000])
        corners = [0, 1, limit // 3, limit // 2, limit - 1, limit, limit + 1, 3 * limit]
        sizes = {
            f"layers.{chance.randrange(10_000)}.w{number}": chance.choice(
                [chance.choice(corners), chance.randrange(limit // 2 + 1)]
            )
            for number in range(chance.choice([0, 1, 2, 5, 12, 40]))
        }
        assert_equal(sizes, limit)


def test_names_that_json_escapes() -> None:
    for names in (["é\n<>&", "\u2028", "plain"], [], ["only"]):
        assert_equal(dict.fromkeys(names, 3), 4)
