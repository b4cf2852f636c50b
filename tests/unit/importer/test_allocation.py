"""The solver of targets: choices within a budget, near the least error that is possible."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from blobstore.errors import UsageError
from blobstore.importer.allocation import NEAR, Choice, Item, allocate, least_bytes

BITS = ((4.25, 0.0120), (4.5, 0.0110), (5.0, 0.0080), (8.25, 0.00004), (8.5, 0.00003), (16.0, 0.0))


def total(items: Sequence[Item], chosen: Sequence[int]) -> tuple[int, float]:
    choices = [item[index] for item, index in zip(items, chosen, strict=True)]
    return sum(choice.nbytes for choice in choices), math.fsum(choice.error for choice in choices)


def tensors(count: int) -> list[list[Choice]]:
    """Return items as a model has them: few sizes, errors that differ by a tenth."""
    generator = random.Random(count)
    sizes = [generator.choice([2**16, 3 * 2**18, 2**20]) for _ in range(count)]
    return [
        [
            Choice(int(size * bits / 8), size * error * generator.uniform(0.95, 1.05))
            for bits, error in BITS
        ]
        for size in sizes
    ]


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


def test_many_items_nearly_fill_the_budget_and_more_bytes_save_errors() -> None:
    items = tensors(40)
    errors = []
    for part in (1.3, 1.6, 2.5):
        budget = int(least_bytes(items) * part)
        nbytes, error = total(items, allocate(items, budget))
        assert NEAR * budget <= nbytes <= budget
        errors.append(error)
    assert errors == sorted(errors, reverse=True)


def test_ties_go_to_the_earlier_item_and_choice() -> None:
    twice = [[Choice(1, 2.0), Choice(2, 1.0), Choice(2, 1.0)]] * 4
    assert allocate(twice, 6) == [1, 1, 0, 0]
    assert allocate([[Choice(4, 0.0)] * 3, [Choice(4, 0.0), Choice(8, 0.0)]], 100) == [0, 0]


def test_the_smallest_and_the_largest_budget() -> None:
    items = tensors(50)
    assert allocate(items, least_bytes(items)) == [0] * 50
    assert allocate(items, 2**60) == [len(BITS) - 1] * 50
    with pytest.raises(UsageError, match="3 bytes"):
        allocate([[Choice(1, 1.0)], [Choice(2, 1.0), Choice(9, 0.0)]], 2)
