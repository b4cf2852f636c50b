"""Quantities and names as people read them, in tables, plots and pages."""

import re
from collections.abc import Mapping, Sequence

_DIGITS = re.compile(r"([0-9]{1,18})")
UNITS = ("B", "KB", "MB", "GB", "TB")
"""Of sizes, each a thousand of the one before."""


def size(nbytes: int) -> str:
    """Return a size as people write it: ``5.9 MB`` (powers of 1000, as Ollama)."""
    # 999.5 would be shown as 1000 of its unit.
    power = sum(nbytes >= 999.5 * 1000**step for step in range(len(UNITS) - 1))
    return f"{nbytes / 1000**power:{'.3g' if power else '.0f'}} {UNITS[power]}"


def shape(dims: Sequence[int]) -> str:
    """Return a shape as people write it: ``768x256``."""
    return "x".join(str(dim) for dim in dims) or "scalar"


def count(number: int) -> str:
    """Return a number of parameters as people write it: ``5.25M``."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= 0.9995 * limit:  # less would be shown as 1000 of the smaller unit
            return f"{number / limit:.3g}{suffix}"
    return str(number)


def bits(number: float | None) -> str:
    """Return bits per weight as people write them: ``8.60``; nothing for None."""
    return "" if number is None else f"{number:.2f}"


def natural(name: str) -> list[tuple[int, str]]:
    """Return the key that sorts names as people do: layer 2 before layer 10."""
    return [
        (int(word) if index % 2 else -1, word) for index, word in enumerate(_DIGITS.split(name))
    ]


def _largest_first(numbers: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(numbers.items(), key=lambda item: (-item[1], item[0]))


def counts(numbers: Mapping[str, int]) -> str:
    """Return numbers of parameters by kind, the largest first: ``int4 5.25M, BF16 1.2K``."""
    return ", ".join(
        f"{kind} {count(number)}" for kind, number in _largest_first(numbers) if number
    )


def shares(numbers: Mapping[str, int]) -> str:
    """Return the shares of numbers by kind, from half a percent on: ``int8 43%, BF16 15%``."""
    total = sum(numbers.values())
    ordered = [item for item in _largest_first(numbers) if item[1] >= total / 200]
    return ", ".join(f"{kind} {number / max(1, total):.0%}" for kind, number in ordered)


def counted(number: int, noun: str) -> str:
    """Return a number of things as people write it: ``1 blob``, ``1,000 blobs``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


LONGEST_SHOWN = 600
"""Characters of a name on a page: names may have 64 KiB."""


def cut_text(text: str, most: int = LONGEST_SHOWN) -> str:
    """Return a text of at most ``most`` characters: of a longer one its beginning and its end."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 1]}…{text[-tail:]}"


def printable(text: str, keep: str = "") -> str:
    """Return a text with the characters that a terminal would act on as Python escapes.

    These are control characters, bidirectional marks and unpaired surrogates, except for those in
    ``keep``.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else repr(character)[1:-1]
        for character in text
    )
