"""Receipts: which blobs the tasks of a plan became, as small JSON documents beside the plan.

The plan in ``plan.json`` has its receipts in ``plan.json.receipts/``, one file for each task. They
are the only state of a plan that several machines carry out, beside the blobs themselves.

Rule P3: a strict JSON object of version 2 without unknown keys, at most 64 MiB; the plan's digest
and the task's number; each blob of the task in its order, with its name, digest and size, which is
the one that was planned; each span of the task in its order, with its file, begin, end and digest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from blobstore.errors import DocumentError, InvalidDigestError, MissingFileError, UsageError
from blobstore.formats import strictjson
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor
from blobstore.formats.strictdocument import InvalidError, check_of
from blobstore.importer.work.tasks import FileSpan, Task
from blobstore.io.durable import make_folder, os_errors, read_own, replace_file
from blobstore.names import Digest

RULE: Final = "P3"
_VERSION = 2
_LARGEST = 64 * 2**20
_AGAIN = "blobstore work makes it again."


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the task of that number became: its blobs, in order, and the digests of its spans."""

    task: int
    blobs: tuple[Descriptor, ...]
    sums: Mapping[FileSpan, Digest]


def disagrees(
    task: Task,
    receipt: Receipt,
    owners: Mapping[int, Task],
    read: Callable[[Task], Receipt | None],
) -> bool:
    """Return True if a task read other bytes of a file than the task that hashed all of it.

    ``owners``: these, by file. ``read`` returns the receipt of one; None: it is not done yet.
    """
    right: dict[FileSpan, Digest] = {}
    for owner in {owners[span.file].number: owners[span.file] for span in receipt.sums}.values():
        found = read(owner) if owner.number != task.number else None
        if found is not None:
            right |= {span: one for span, one in found.sums.items() if span.file in owner.owned}
    return any(right.get(span, digest) != digest for span, digest in receipt.sums.items())


class ReceiptFolder:
    """The receipts of the plan at ``plan``, whose file has that digest."""

    def __init__(self, plan: str | os.PathLike[str], digest: Digest) -> None:
        self.path = Path(f"{os.fspath(plan)}.receipts")
        self._digest = digest

    def make(self) -> None:
        """Make the folder. Raises: StorageError."""
        with os_errors("write", self.path):
            make_folder(self.path, durable=False)

    def file_of(self, task: Task) -> Path:
        """Return the path of a task's receipt."""
        return self.path / f"{task.number:06}.json"

    def write(self, task: Task, blobs: Sequence[Descriptor], sums: Sequence[Digest] = ()) -> None:
        """Write the receipt of a task, in the place of one that is there. Raises: StorageError."""
        document = {
            "version": _VERSION,
            "plan": str(self._digest),
            "task": task.number,
            "blobs": [
                {"name": planned.name, "digest": str(blob.digest), "size": blob.size}
                for planned, blob in zip(task.blobs, blobs, strict=True)
            ],
            "spans": [
                {**span._asdict(), "digest": str(digest)}
                for span, digest in zip(task.spans, sums, strict=True)
            ],
        }
        path = self.file_of(task)
        with os_errors("write", path):
            replace_file(path, strictjson.encode(document) + b"\n")

    def read(self, task: Task) -> Receipt | None:
        """Return the receipt of a task, or None if it is missing.

        Raises: DocumentError (rule P3) for an invalid one; UsageError for one of another plan;
        LimitExceededError; StorageError.
        """
        path = self.file_of(task)
        try:
            raw = read_own(path, _LARGEST)
        except MissingFileError:
            return None
        what = f"the receipt {path}"
        value = strictjson.parse_object(raw, what, rule=RULE, limit=_LARGEST)
        try:
            fields = _strict(value, ("version", "plan", "task", "blobs", "spans"))
            check_of(Literal[2])(fields[0])
            plan = Digest.parse(fields[1])
            self._check_plan(plan, path)
            _equal(task.number, fields[2])
            return Receipt(task.number, _blobs(fields[3], task), _sums(fields[4], task))
        except (InvalidError, InvalidDigestError) as error:
            message = f"{what}: {error} (rule {RULE})"
            raise DocumentError(message, rule=RULE, path=str(path), hint=_AGAIN) from None

    def _check_plan(self, found: Digest, path: Path) -> None:
        if found != self._digest:
            raise UsageError(
                f"the receipt {path} is of another plan, {found}, and this one is {self._digest}",
                path=str(path),
                hint=f"If the plan was made anew, remove {self.path}.",
            )


def _blobs(value: Any, task: Task) -> tuple[Descriptor, ...]:
    found = [_strict(one, ("name", "digest", "size")) for one in check_of(list[Any])(value)]
    if len(found) != len(task.blobs):
        raise InvalidError(f"List should have {len(task.blobs)} items, not {len(found)}", "blobs")
    made = []
    for number, ((name, digest, size), planned) in enumerate(zip(found, task.blobs, strict=True)):
        try:
            _equal(planned.name, name)
            _equal(planned.size, size)
        except InvalidError as error:
            raise error.within(number).within("blobs") from None
        made.append(Descriptor(TENSOR_MEDIA_TYPE, Digest.parse(digest), size, name=name))
    return tuple(made)


def _sums(value: Any, task: Task) -> dict[FileSpan, Digest]:
    found = [_strict(one, (*FileSpan._fields, "digest")) for one in check_of(list[Any])(value)]
    spans = [tuple(span) for *span, _ in found]
    if spans != list(task.spans):
        raise InvalidError("the spans are not those of the task", "spans")
    digests = (Digest.parse(digest) for *_, digest in found)
    return dict(zip(task.spans, digests, strict=True))


def _strict(value: Any, keys: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the values of exactly these keys. Raises: InvalidError."""
    if not isinstance(value, dict):
        raise InvalidError("Input should be a valid dictionary")
    if missing := [key for key in keys if key not in value]:
        raise InvalidError("Field required", missing[0])
    if unknown := value.keys() - set(keys):
        raise InvalidError("Extra inputs are not permitted", min(unknown))
    return tuple(value[key] for key in keys)


def _equal(wanted: str | int, value: Any) -> None:
    if type(value) is not type(wanted) or value != wanted:
        raise InvalidError(f"Input should be {wanted!r}")
