"""Receipts: which blobs the tasks of a plan became, as small JSON documents beside the plan.

The plan in ``plan.json`` has its receipts in ``plan.json.receipts/``, one file for each task. They
are the only state of a plan that several machines carry out, beside the blobs themselves.

Rule P3: a strict JSON object of version 3 without unknown keys, at most 64 MiB; the plan's digest
and the task's number; each blob of the task in its order, with its name, digest and size, which is
the one that was planned.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from blobstore.errors import DocumentError, InvalidDigestError, MissingFileError, UsageError
from blobstore.formats import strictjson
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor
from blobstore.formats.strictdocument import InvalidError, check_of
from blobstore.importer.work.tasks import Task
from blobstore.io.durable import make_folder, os_errors, read_own, replace_file
from blobstore.names import Digest

RULE: Final = "P3"
_VERSION = 3
_LARGEST = 64 * 2**20
_AGAIN = "blobstore work makes it again."


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

    def write(self, task: Task, blobs: Sequence[Descriptor]) -> None:
        """Write the receipt of a task, in the place of one that is there. Raises: StorageError."""
        document = {
            "version": _VERSION,
            "plan": str(self._digest),
            "task": task.number,
            "blobs": [
                {"name": planned.name, "digest": str(blob.digest), "size": blob.size}
                for planned, blob in zip(task.blobs, blobs, strict=True)
            ],
        }
        path = self.file_of(task)
        with os_errors("write", path):
            replace_file(path, strictjson.encode(document) + b"\n")

    def read(self, task: Task) -> tuple[Descriptor, ...] | None:
        """Return the blobs in the receipt of a task, or None if it is missing.

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
            fields = _strict(value, ("version", "plan", "task", "blobs"))
            check_of(Literal[3])(fields[0])
            plan = Digest.parse(fields[1])
            self._check_plan(plan, path)
            _equal(task.number, fields[2])
            return _blobs(fields[3], task)
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
