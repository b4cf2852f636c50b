"""Numbers and texts on the pages are those of the command line (views/quantities.py)."""

from __future__ import annotations

import random

import pytest
from support.browser import Watched

from blobstore.cli.output import printable, shape
from blobstore.views.quantities import count, size

pytestmark = pytest.mark.lab

_RANDOM = random.Random(0)
NUMBERS = [
    *range(2050),
    *(999_499, 999_500, 1_000_000, 2_125, 2_135, 21_250, 999_949, 999_950, 10**12, 10**12 + 1),
    *(_RANDOM.randrange(10 ** _RANDOM.randrange(1, 15)) for _ in range(5000)),
    *(step * 125 for step in range(8_000)),  # ties of three digits
]


def test_sizes_counts_and_shapes(site: Watched) -> None:
    page = site.open("/")
    found = page.evaluate(
        """async (numbers) => {
          const units = await import("/static/js/units.js");
          return numbers.map((one) => [units.size(one), units.count(one)]);
        }""",
        NUMBERS,
    )
    wrong = [
        (number, shown)
        for number, shown in zip(NUMBERS, found, strict=True)
        if shown != [size(number), count(number)]
    ]
    assert wrong == []
    shapes = [[], [1], [768, 256], [8, 4, 2]]
    assert page.evaluate(
        "async (shapes) => shapes.map((await import('/static/js/units.js')).shape)", shapes
    ) == list(map(shape, shapes))


def test_invisible_characters_are_escapes(site: Watched) -> None:
    texts = ["a\u202eb", "\n\x07", "\U000e0001", "\U0001f600"]
    page = site.open("/")
    assert page.evaluate(
        "async (texts) => texts.map((await import('/static/js/dom.js')).visible)", texts
    ) == list(map(printable, texts))
