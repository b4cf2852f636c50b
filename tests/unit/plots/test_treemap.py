"""Treemaps: no byte is lost, however coarse; the same values, the same document."""

import json
import random
from typing import Any

from hypothesis import given, strategies as st

from blobstore.plots.specification import COLOURS
from blobstore.plots.treemap import rectangles, treemap

Tensor = tuple[str, str, int]


def tensors_named(names: list[str]) -> list[Tensor]:
    sizes = random.Random(1)
    types = ("int4/64", "BF16", "nvfp4/16")
    return [(name, types[index % 3], sizes.randrange(10**6)) for index, name in enumerate(names)]


SMALL = tensors_named(
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        *(f"model.layers.{n}.mlp.up_proj.weight" for n in range(12)),
    ]
)
ODD = ["", ".", "a", "a.", ".5", "5", "model.layers.3", "é.1.é", "a." * 40 + "weight", "a..1..b"]
names = st.lists(st.text("ab.019\x00é", max_size=12), max_size=30)


@given(names, st.integers(3, 40))
def test_rectangles_have_all_bytes_and_tensors(found: list[str], most: int) -> None:
    tensors = tensors_named([*found, *ODD])
    drawn = rectangles(tensors, most)
    assert sum(one.nbytes for one in drawn) == sum(nbytes for _, _, nbytes in tensors)
    assert sum(one.tensors for one in drawn) == len(tensors)
    assert len(drawn) <= most


def test_the_document() -> None:
    spec = treemap(SMALL)
    (tree, *_) = spec["data"]
    rows: list[dict[str, Any]] = tree["values"]
    assert all(row["parent"] < row["id"] for row in rows[1:])
    assert sum(row.get("bytes", 0) for row in rows) == sum(nbytes for _, _, nbytes in SMALL)
    layers = [row["name"] for row in rows if row.get("parent") == 0]
    assert layers == ["lm_head", "model", *(f"layers.{n}" for n in range(12))]  # 2 before 10
    assert {row["type"] for row in rows if "type" in row} <= set(COLOURS)
    assert len(spec["usermeta"]["table"]["rows"]) == len(SMALL)
    shuffled = random.Random(2).sample(SMALL, len(SMALL))
    assert json.dumps(treemap(shuffled)) == json.dumps(spec)
    assert treemap([("a", "BF16", 0)])["signals"][0]["value"] == "No bytes to show."
