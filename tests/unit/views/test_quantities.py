"""Quantities as people read them."""

import pytest

from blobstore.views.quantities import count, size


@pytest.mark.parametrize(
    ("number", "text"),
    [(999, "999"), (1000, "1K"), (999_499, "999K"), (999_500, "1M"), (5_245_696, "5.25M")],
)
def test_numbers_have_three_digits_and_a_unit(number: int, text: str) -> None:
    assert count(number) == text
    assert size(number) == text.replace("K", " KB").replace("M", " MB") + " B" * (number < 1000)
