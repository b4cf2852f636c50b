"""InspectedFile: one file of what is inspected, and its header."""

from __future__ import annotations

from dataclasses import dataclass

from blobstore.safetensors import Header


@dataclass(frozen=True, slots=True)
class InspectedFile:
    """One .safetensors file, or one blob of a stored model.

    ``name`` is its file name, a blob's that of its layer; ``place`` its path or address; ``nbytes`` the bytes of the whole
    file, None where a server does not say.
    """

    name: str
    place: str
    nbytes: int | None
    header: Header
