"""Messages: method, fields and body of a request, without its address."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Fields = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a request: ``size`` bytes, which ``pieces`` returns again for each attempt.

    ``has_credentials``: it is treated as an Authorization field is. It is not sent over the public
    internet without TLS, and a redirect to another origin is refused.
    """

    size: int
    pieces: Callable[[], Iterable[bytes]]
    has_credentials: bool = False

    @classmethod
    def of(cls, data: bytes, *, has_credentials: bool = False) -> Body:
        """Return a body of bytes in memory."""
        return cls(len(data), lambda: (data,), has_credentials)


@dataclass(frozen=True, slots=True)
class Message:
    """Method, fields and body of a request.

    ``direct``: the body of its reply is read into the caller's memory (`blobstore.io.http.direct`).
    """

    method: str
    fields: Fields = ()
    body: Body | None = None
    direct: bool = False

    @property
    def has_credentials(self) -> bool:
        """Whether the body contains credentials."""
        return self.body is not None and self.body.has_credentials
