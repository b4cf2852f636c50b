"""What a function is called with while it does its work."""

from __future__ import annotations

from typing import Any

import pytest


def note_calls(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[Any]:
    """Return a list that gets the first argument of every later call of ``owner.name``."""
    real, calls = getattr(owner, name), list[Any]()

    def note(first: Any, *others: Any, **options: Any) -> Any:
        calls.append(first)
        return real(first, *others, **options)

    monkeypatch.setattr(owner, name, note)
    return calls
