"""How two records differ.

A record is a table of steps; an outcome is JSON. Below a key of `_WORDS` texts are words, which may
change; all else are facts. Long lists are recorded as their length and a digest.
"""

import fnmatch
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VARIES = "<varies>"
_WORDS = frozenset(("words", "description", "summary", "title", "message", "hint", "reason"))
_LONGEST, _LONG, _MOST = 6, 600, 80
"""More items, and more bytes, are a digest; so is a table of tables with more keys."""
_SHOWN = 90


@dataclass(frozen=True, slots=True)
class Change:
    """One difference: the place in the outcome, and how it differs."""

    place: str
    verb: str
    text: str

    def __str__(self) -> str:
        return f"{self.verb} {self.place}: {self.text}"

    def kind(self, scenario: str, step: str, allowed: Sequence[Mapping[str, str]]) -> str:
        """Return whether it is among the facts, the words, or what is allowed."""
        for row in allowed:
            places = (row.get("scenario", "*"), row.get("step", "*"), row.get("place", "*"))
            if all(map(fnmatch.fnmatchcase, (scenario, step, self.place), places)):
                return "allowed"
        is_text = self.place == "json/error" or _WORDS & set(re.split(r"[/\[]", self.place))
        return "words" if is_text else "facts"


def masked(first: Any, second: Any) -> Any:
    """Return a record without what differs between two runs, and with long parts as digests."""
    if first == second:
        return short(first)
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return {key: masked(value, second[key]) for key, value in first.items()}
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [masked(*both) for both in zip(first, second, strict=True)]
    return VARIES


def short(value: Any) -> Any:
    """Return a long text, list or table as its length and its digest."""
    if isinstance(value, str):
        return value if len(value) <= _LONG else f"<{len(value)} {_digest(value)}>"
    if not isinstance(value, (list, dict)):
        return value
    parts: Any = value.values() if isinstance(value, dict) else ()
    is_deep = len(value) <= _MOST and any(isinstance(part, (dict, list)) for part in parts)
    text = json.dumps(value, sort_keys=True)
    if len(value) > _LONGEST and len(text) > _LONG and not is_deep:
        return f"<{len(value)} {_digest(text)}>"
    if isinstance(value, dict):
        return {key: short(part) for key, part in value.items()}
    return [short(part) for part in value]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def between(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Change]]:
    found = {}
    for step in {**old, **new}:
        if step not in new:
            changes = [Change("", "missing", "the whole step")]
        elif step not in old:
            changes = [Change("", "new", "the whole step: record it with the old code")]
        else:
            changes = [*_changes("", old[step], new[step])]
        if changes:
            found[step] = changes
    return found


def _changes(place: str, old: Any, new: Any) -> Iterator[Change]:
    if old in (VARIES, new):
        return
    if isinstance(old, str) and old.startswith("<") and short(new) == old:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys(), key=str):
            where = f"{place}/{key}" if place else str(key)
            if key not in new:
                yield Change(where, "missing", _text(old[key]))
            elif key not in old:
                yield Change(where, "new", _text(new[key]))
            else:
                yield from _changes(where, old[key], new[key])
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, both in enumerate(zip(old, new, strict=True)):
            yield from _changes(f"{place}[{number}]", *both)
    else:
        are_lists = isinstance(old, list) and isinstance(new, list)
        verb = f"changed ({len(old)} → {len(new)} items)" if are_lists else "changed"
        yield Change(place, verb, f"{_text(old)} → {_text(new)}")


def _text(value: Any) -> str:
    text = json.dumps(short(value), ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
