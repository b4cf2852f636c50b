"""The solver of targets: choices within a budget, near the least error that is possible."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from blobstore.errors import UsageError
from blobstore.importer.allocation import NEAR, Choice, Item, allocate, least_bytes


def total(items: Sequence[Item], chosen: Sequence[int]) -> tuple[int, float]:
    choices = [item[index] for item, index in zip(items, chosen, strict=True)]
    return sum(choice.nbytes for choice in choices), math.fsum(choice.error for choice in choices)


def test_few_items_get_what_trying_everything_finds() -> None:
    """The least error of what nearly fills the budget; of all that fits, if nothing does."""
    generator = random.Random(0)
    for _ in range(60):
        items = [
            [
                Choice(generator.randint(1, 1000), generator.random())
                for _ in range(generator.randint(1, 4))
            ]
            for _ in range(generator.randint(1, 4))
        ]
        most = sum(max(choice.nbytes for choice in item) for item in items)
        budget = generator.randint(least_bytes(items), most + 50)
        nbytes, error = total(items, allocate(items, budget))
        every = (total(items, each) for each in itertools.product(*(range(len(i)) for i in items)))
        fitting = [(size, lost) for size, lost in every if size <= budget]
        near = [(size, lost) for size, lost in fitting if size >= NEAR * budget]
        assert nbytes <= budget
        assert error <= min(lost for _, lost in near or fitting) + 1e-9


def test_the_smallest_and_the_largest_budget() -> None:
    items = [[Choice(2**16 * bits, 1 / bits) for bits in (4, 8, 16)]] * 50
    assert allocate(items, least_bytes(items)) == [0] * 50
    assert allocate(items, 2**60) == [2] * 50
    with pytest.raises(UsageError, match="3 bytes"):
        allocate([[Choice(1, 1.0)], [Choice(2, 1.0), Choice(9, 0.0)]], 2)
