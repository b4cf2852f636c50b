"""Challenges: what a 401 asks for, in its WWW-Authenticate fields (RFC 9110 section 11.6.1).

A field is a list of challenges. A challenge is a scheme, then either a token68 or a list of
parameters. Both lists are separated by commas, so a name without ``=`` begins the next challenge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_WORD = r"[!#$%&'*+.^_`|~0-9A-Za-z-]++"
_END = r"[ \t]*+(?=,|\Z)"
_PARAMETER_TEXT = rf'({_WORD})[ \t]*+=[ \t]*+(?:({_WORD})|"((?:[^"\\]|\\.)*+)"){_END}'
_PARAMETER = re.compile(_PARAMETER_TEXT, re.ASCII | re.DOTALL)
_SCHEME = re.compile(
    rf"({_WORD})(?: ++(?:[A-Za-z0-9._~+/-]++=*+{_END}|(?={_PARAMETER_TEXT}))|{_END})",
    re.ASCII | re.DOTALL,
)
_SEPARATORS = re.compile(r"[ \t,]*+")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


class ChallengeError(ValueError):
    """A text is not a list of challenges: the reason, with the place in the text."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """One challenge. Names of schemes and parameters are in lower case.

    A token68 is dropped: neither Basic nor Bearer has one.
    """

    scheme: str
    parameters: dict[str, str] = field(default_factory=dict)


def parse_challenges(fields: Iterable[str]) -> list[Challenge]:
    """Return the challenges of a reply's fields, in their order.

    Raises: ChallengeError for anything else than the grammar allows, and for a parameter that
    comes twice in a challenge (section 11.2).
    """
    return [challenge for text in fields for challenge in _challenges_in(text)]


def _challenges_in(text: str) -> list[Challenge]:
    found: list[Challenge] = []
    position = _skipped(text, 0)
    while position < len(text):
        if found and (parameter := _PARAMETER.match(text, position)):
            _add(found[-1], parameter)
            position = _skipped(text, parameter.end())
        elif scheme := _SCHEME.match(text, position):
            found.append(Challenge(scheme[1].lower()))
            position = _skipped(text, scheme.end())
        else:
            raise ChallengeError(f"invalid at character {position}")
    return found


def _skipped(text: str, position: int) -> int:
    separators = _SEPARATORS.match(text, position)
    return position if separators is None else separators.end()


def _add(challenge: Challenge, parameter: re.Match[str]) -> None:
    name, token, text = parameter.group(1, 2, 3)
    if name.lower() in challenge.parameters:
        raise ChallengeError(f"{name[:40]} appears twice")
    challenge.parameters[name.lower()] = _ESCAPED.sub(r"\1", text) if token is None else token
