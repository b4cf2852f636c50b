"""Which repositories of a registry have which blobs, as far as it is known.

A registry keeps the blobs of each repository apart. A blob that another repository of the same
registry has can be mounted from there, without its bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from blobstore.formats.documents import Descriptor
from blobstore.names import Digest, ModelName


def repository_of(name: ModelName) -> str:
    """Return the repository of a model: ``NAMESPACE/MODEL``. Its tag is the model's."""
    return f"{name.namespace}/{name.model}"


class Places:
    """Safe to share between threads.

    ``others`` gives the repositories that may have a blob besides those that are noted.
    """

    def __init__(self, others: Callable[[Digest], Iterable[str]] = lambda _: ()) -> None:
        self._others = others
        self._found: dict[Digest, dict[str, int]] = {}
        self._mutex = threading.Lock()

    def note(self, repository: str, blobs: Iterable[Descriptor]) -> None:
        """Note that the repository has these blobs."""
        with self._mutex:
            for blob in blobs:
                self._found.setdefault(blob.digest, {})[repository] = blob.size

    def size(self, repository: str, digest: Digest) -> int | None:
        """Return the size of a blob that the repository is known to have, or None."""
        with self._mutex:
            return self._found.get(digest, {}).get(repository)

    def known(self, digest: Digest) -> dict[str, int]:
        """Return the repositories that are known to have a blob, and its size there."""
        with self._mutex:
            return dict(self._found.get(digest, {}))

    def candidates(self, digest: Digest, repository: str) -> list[str]:
        """Return the other repositories that the blob may be mounted from."""
        found = [*self.known(digest), *self._others(digest)]
        return [one for one in dict.fromkeys(found) if one != repository]
