"""Names of tensors as places: a module, a layer's number, a projection.

``model.layers.3.mlp.experts.7.up_proj.weight`` is in module ``model.layers.3``; its layer is 3, its
projection ``model.layers.*.mlp.experts.*.up_proj``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_LAYER = re.compile(r"(.*?(?:^|\.))([0-9]{1,9})(\..*|$)", re.ASCII | re.DOTALL)
_FIRST_NUMBER = re.compile(r"(?:^|(?<=\.))[0-9]{1,9}(?=\.|\Z)", re.ASCII)
_NUMBER = re.compile(r"(?<=\.)[0-9]{1,9}(?=\.|$)", re.ASCII)
_DIGITS = re.compile(r"([0-9]{1,18})", re.ASCII)
_WEIGHT = ".weight"
_LONGEST = 120


def module_and_part(name: str) -> tuple[str, str]:
    """Return the module that a tensor is drawn in, and its name in there.

    The module ends at the first number, else before the tensor's own word.
    """
    name = name.removesuffix(_WEIGHT)
    match = _FIRST_NUMBER.search(name)
    if match:
        return name[: match.end()], name[match.end() + 1 :]
    module, _, last = name.rpartition(".")
    return (module, last) if module else (name, "")


def layer_and_projection(name: str) -> tuple[int | None, str]:
    """Return a tensor's layer, None without one, and its name with a star for each number."""
    name = name.removesuffix(_WEIGHT)
    match = _LAYER.fullmatch(name)
    if match is None:
        return None, name
    return int(match[2]), f"{match[1]}*{starred(match[3])}"


def natural(place: Sequence[object]) -> list[list[tuple[int, str]]]:
    """Return the key that sorts names as people do: layer 2 before layer 10."""
    return [
        [(int(word) if _DIGITS.fullmatch(word) else -1, word) for word in _DIGITS.split(str(part))]
        for part in place
    ]


def starred(name: str) -> str:
    """Return a name with a star for each part that is a number."""
    return _NUMBER.sub("*", name)


def shortened_names(names: list[str]) -> dict[str, str]:
    """Return short labels by name: without the leading words that all have in common.

    A label keeps at least one word, and at most 120 characters.
    """
    parts = [name.split(".") for name in names]
    common = 0
    while all(len(words) > common + 1 for words in parts) and len({w[common] for w in parts}) == 1:
        common += 1
    if len(names) < 2:  # noqa: PLR2004  # one name shares nothing
        common = 0
    return {
        name: ".".join(words[common:])[:_LONGEST] for name, words in zip(names, parts, strict=True)
    }
