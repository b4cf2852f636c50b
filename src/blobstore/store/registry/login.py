"""Logins: a user's name and a secret that is never shown."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

HIDDEN = "***"


class Secret:
    """A text that is not shown: ``repr``, ``str`` and f-strings give ``***``.

    It can't be pickled or copied, and JSON refuses it. `reveal` returns the text.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text, to be sent or kept."""
        return self._text

    def __repr__(self) -> str:
        return HIDDEN

    def __format__(self, specification: str) -> str:
        return format(HIDDEN, specification)

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a secret can't be pickled or copied")


@dataclass(frozen=True, slots=True)
class Login:
    """A user of a registry, and the secret that proves it.

    ``user``: None if the secret is an identity token. A token server gives access tokens for an
    identity token (docker/cli@28f75608 cli/config/types/authconfig.go). ``place`` is the file or
    program that keeps it, for messages.
    """

    user: str | None
    secret: Secret
    place: str = field(default="", compare=False)

    @property
    def basic(self) -> str | None:
        """The Authorization field of Basic (RFC 7617); None for an identity token."""
        if self.user is None:
            return None
        pair = f"{self.user}:{self.secret.reveal()}".encode()
        return f"Basic {base64.b64encode(pair).decode()}"

    def __str__(self) -> str:
        name = "an identity token" if self.user is None else f"user {self.user!r}"
        return f"{name} (from {self.place})" if self.place else name


AnyLogin = Login | Callable[[], Login | None] | None
"""A login, or a function that finds it, or None. The function is called when a login is needed."""
