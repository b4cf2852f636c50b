"""Where requests go, and where redirects lead them (policy: `blobstore.io.http`).

A redirect may say which file it leads to. The Hugging Face Hub redirects from a file's address to a
signed one of another server, and says with it: ``X-Linked-ETag``, for large files the SHA-256 of
the content, and ``X-Repo-Commit``. Source: huggingface_hub@2.4.0 constants.py
`HUGGINGFACE_HEADER_X_LINKED_ETAG`, file_download.py `get_hf_file_metadata`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from blobstore.io.http.web_addresses import WebAddress
from blobstore.names import Digest

if TYPE_CHECKING:
    from blobstore.io.http.replies import Reply

MAX_REDIRECTS = 5
_LINKED_DIGEST = re.compile(r'"?([0-9a-f]{64})"?', re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Linked:
    """A file's digest and commit from the head of a redirect; None if not declared."""

    digest: Digest | None
    commit: str | None

    @classmethod
    def of(cls, reply: Reply) -> Self | None:
        """Return the declarations in a reply's head; None without any."""
        etag = _LINKED_DIGEST.fullmatch(reply.field("x-linked-etag") or "")
        commit = _COMMIT.fullmatch(reply.field("x-repo-commit") or "")
        if etag is None and commit is None:
            return None
        digest = Digest(etag[1]) if etag is not None else None
        return cls(digest, commit[0] if commit is not None else None)


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """The address of a request, its authorization, and which IP addresses are allowed.

    ``authorization`` is the whole field, or None. It is never shown. ``public_only``: only public
    addresses are allowed. ``from_server``: a server named the address; link-local ones are refused.
    ``linked``: what the redirects to it said of the file.
    """

    address: WebAddress
    authorization: str | None = field(default=None, repr=False)
    public_only: bool = False
    from_server: bool = False
    linked: Linked | None = None


def redirected(
    target: RequestTarget,
    location: str | None,
    *,
    from_public: bool,
    linked: Linked | None = None,
) -> RequestTarget:
    """Return where a redirect of the server at ``target`` leads.

    ``from_public``: the server's own address is public. ``linked``: what the redirect says.

    Raises: RemoteError (rule R2) without a usable Location, or when it leads from https to http.
    """
    here = target.address
    if location is None:
        raise here.refuse("redirects to nowhere")
    there = here.join(location)
    if here.scheme == "https" and there.scheme == "http":
        raise here.refuse(f"redirects from https to http: {there}")
    is_same = there.origin == here.origin
    return RequestTarget(
        there,
        target.authorization if is_same else None,
        public_only=target.public_only or from_public,
        from_server=target.from_server or not is_same,
        linked=linked or target.linked,
    )
