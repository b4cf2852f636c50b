"""The corpus of inputs to accept and to refuse (fixtures/corpus), large ones by recipe."""

import base64
import json
import pickle
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import BlobStoreError
from support import FIXTURES

CORPUS = FIXTURES / "corpus"
TIB = 2**40


@dataclass(frozen=True, slots=True)
class Case:
    """One input. ``rule`` is the number alone (``F8``); ``size`` is the file's, if it is said."""

    id: str
    accepted: bool
    rule: str
    size: int | None
    reference_accepts: bool
    _document: dict[str, Any] = field(repr=False, compare=False)

    @property
    def by_recipe(self) -> bool:
        """Whether the corpus only describes the input: it is large, or several replies."""
        return not self._document.keys() & {"bytes_base64", "bytes_zlib_base64"}

    @property
    def data(self) -> bytes:
        """The input's bytes; of a sparse file, those before the hole."""
        if "bytes_base64" in self._document:
            return base64.b64decode(self._document["bytes_base64"])
        if "bytes_zlib_base64" in self._document:
            return zlib.decompress(base64.b64decode(self._document["bytes_zlib_base64"]))
        return _RECIPES[self.id]()

    @property
    def sparse_size(self) -> int | None:
        """Bytes of a file that ends in a hole, which `data` leaves out; None for every other."""
        return TIB if self.id == "st-sparse-1TiB-empty-object" else None

    def write(self, path: Path) -> Path:
        """Write the input to ``path`` and return it."""
        with path.open("wb") as file:
            file.write(self.data)
            file.truncate(self.sparse_size)
        return path


@cache
def load(kind: str) -> tuple[Case, ...]:
    lines = (CORPUS / f"{kind}.jsonl").read_text("utf-8").splitlines()
    return tuple(
        Case(
            id=document["id"],
            accepted={"accept": True, "reject": False}[document["expected"]],
            rule=document["rule"].split()[0],
            size=document.get("size"),
            reference_accepts=document["safetensors_verdict"].startswith("accept"),
            _document=document,
        )
        for document in map(json.loads, lines)
    )


def find(kind: str, name: str) -> Case:
    (found,) = (case for case in load(kind) if case.id == name)
    return found


def accepted(kind: str) -> list[Case]:
    return [case for case in load(kind) if case.accepted]


def rejected(kind: str) -> list[Case]:
    return [case for case in load(kind) if not case.accepted]


def case_id(value: Any) -> str | None:
    """Name a test after its case: the ``ids`` of a parametrization."""
    return value.id if isinstance(value, Case) else None


def refusal(call: Callable[[], object]) -> BlobStoreError:
    """Return the error that ``call`` raises: one of ours, which survives pickling."""
    with pytest.raises(BlobStoreError) as caught:
        call()
    error = caught.value
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert (again.args, str(again)) == (error.args, str(error))
    return error


def _file(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def _many_empty() -> bytes:
    entries = (
        b'"t%06d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % number
        for number in range(10**6)
    )
    return _file(b"{" + b",".join(entries) + b"}")


def _long_name() -> bytes:
    return _file(
        b'{"' + b"n" * 99_000_000 + b'":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)
    )


def layers(count: int) -> bytes:
    """Return the corpus's ``manifest-ok`` with ``count`` tensor layers of different digests."""
    raw = find("manifest", "manifest-ok").data
    start = raw.index(b'"layers":[') + len(b'"layers":[')
    layer = raw[start : -len(b"]}")]
    before, after = re.split(rb"(?<=sha256:)[0-9a-f]{64}", layer)
    many = b",".join(b"%b%064x%b" % (before, number, after) for number in range(count))
    return raw[:start] + many + b"]}"


_RECIPES: dict[str, Callable[[], bytes]] = {
    "st-many-1e6-empty": _many_empty,
    "st-hdr-100000001-spaces": lambda: _file(b"{}".ljust(100_000_001)),
    "st-hdr-99MB-name": _long_name,
    "st-hdr-90MB-open-brackets": lambda: _file(b'{"a":' + b"[" * 90_000_000),
    "st-sparse-1TiB-empty-object": lambda: _file(b"{}"),
    "manifest-layers-100k": lambda: layers(100_000),
    "manifest-layers-1M": lambda: layers(1_000_000),
    "manifest-size-5MiB": lambda: find("manifest", "manifest-ok").data.ljust(5 * 2**20),
}
