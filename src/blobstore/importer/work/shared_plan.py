"""A plan that several machines carry out: its tasks, and a receipt for each that is done.

The plan in ``plan.json`` has its receipts in ``plan.json.receipts/``, one file for each task. They
are the only state beside the blobs themselves. Any worker may be killed at any time, and two may do
the same task.

Rule P3: a receipt is the one text that says which blobs its task became: a JSON object of version
3, with the plan's digest, the task's number, and name, digest and size of each blob in its order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from blobstore.errors import (
    BlobStoreError,
    DocumentError,
    MissingFileError,
    UsageError,
)
from blobstore.formats import strictjson
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor
from blobstore.importer.planfile import decode_plan, plan_bytes
from blobstore.importer.planning.outputs import ImportPlan
from blobstore.importer.work.tasks import Task, tasks_of
from blobstore.io.durable import make_folder, os_errors, read_own, replace_file
from blobstore.io.workers import Progress, each, silent
from blobstore.names import Digest
from blobstore.source.addresses import OpenSource, Source, open_folder
from blobstore.store.ports import Home, Session

_log = logging.getLogger("blobstore.importer.work")
RULE: Final = "P3"
_LARGEST: Final = 64 * 2**20


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """A plan, its tasks, and the path and digest of its file."""

    plan: ImportPlan
    tasks: tuple[Task, ...]
    path: str
    digest: Digest

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        source: Source | None = None,
        open_source: OpenSource = open_folder,
    ) -> SharedPlan:
        """Return the plan in a file. Raises: as `read_plan`."""
        raw = plan_bytes(path)
        plan = decode_plan(raw, path, source=source, open_source=open_source)
        return cls.of(plan, Digest.of(raw), path)

    @classmethod
    def of(cls, plan: ImportPlan, digest: Digest, path: str | os.PathLike[str]) -> SharedPlan:
        """Return a plan whose file at ``path`` has that digest; the file need not exist."""
        return cls(plan, tasks_of(plan), os.fspath(path), digest)

    @property
    def receipts(self) -> Path:
        """The folder of the receipts."""
        return Path(f"{self.path}.receipts")

    def _receipt(self, task: Task) -> Path:
        return self.receipts / f"{task.number:06}.json"

    def write_receipt(self, task: Task, blobs: Sequence[Descriptor]) -> None:
        """Write the receipt of a task whose blobs are durable. Raises: StorageError."""
        path = self._receipt(task)
        with os_errors("write", path):
            make_folder(path.parent, durable=False)
            replace_file(path, self._encoded(task, blobs))

    def _encoded(self, task: Task, blobs: Iterable[Descriptor]) -> bytes:
        listed = [{"name": one.name, "digest": str(one.digest), "size": one.size} for one in blobs]
        document = {"version": 3, "plan": str(self.digest), "task": task.number, "blobs": listed}
        return strictjson.encode(document) + b"\n"

    def read_receipt(self, task: Task) -> list[Descriptor] | None:
        """Return the blobs in the receipt of a task, or None if it is missing.

        Raises: DocumentError (rule P3) for an invalid one; UsageError for one of another plan;
        LimitExceededError; StorageError.
        """
        path = self._receipt(task)
        try:
            raw = read_own(path, _LARGEST)
        except MissingFileError:
            return None
        what = f"the receipt {path}"
        value: Any = strictjson.parse_object(raw, what, rule=RULE, limit=_LARGEST)
        try:
            plan = Digest.parse(value["plan"])
            digests = [Digest.parse(one["digest"]) for one in value["blobs"]]
            blobs = described(task, digests)
        except (KeyError, TypeError, ValueError):
            plan, blobs = self.digest, []
        if plan != self.digest:
            raise UsageError(
                f"{what} is of another plan, {plan}, and this one is {self.digest}",
                path=str(path),
                hint=f"If the plan was made anew, remove {self.receipts}.",
            )
        if raw != self._encoded(task, blobs):
            message = f"{what} is not that of task {task.number} (rule {RULE})"
            hint = "blobstore work makes it again."
            raise DocumentError(message, rule=RULE, path=str(path), hint=hint)
        return blobs

    def unfinished(
        self,
        tasks: Iterable[Task],
        session: Session,
        store: Home,
        *,
        verify: bool = False,
        jobs: int = 1,
    ) -> list[Task]:
        """Return the tasks without a sound receipt, or whose blobs the store does not have.

        Raises: UsageError for receipts of another plan; StorageError.
        """
        unfinished = []
        for task in tasks:
            try:
                blobs = self.read_receipt(task)
            except DocumentError as error:
                _log.warning("%s", error)
                blobs = None
            if blobs is None or lost_among(blobs, session, store, verify=verify, jobs=jobs):
                unfinished.append(task)
        return unfinished


def described(task: Task, digests: Iterable[Digest]) -> list[Descriptor]:
    """Return the blobs of a task, which have these digests. Raises: ValueError for other counts."""
    return [
        Descriptor(TENSOR_MEDIA_TYPE, digest, planned.size, name=planned.name)
        for planned, digest in zip(task.blobs, digests, strict=True)
    ]


def lost_among(
    blobs: Collection[Descriptor],
    session: Session,
    store: Home,
    *,
    verify: bool,
    jobs: int = 1,
    progress: Progress = silent,
    headers: Mapping[str, bytes] = MappingProxyType({}),
) -> set[Digest]:
    """Return the digests of those of ``blobs`` that are neither published nor kept by a session.

    Sizes are checked; with ``verify``, ``jobs`` threads also hash them, and a blob that does not
    begin with the one of ``headers`` for its name is lost: it is another of the same size. Raises:
    StorageError.
    """
    lost: set[Digest] = set()
    hidden = {blob.digest for blob in session.missing(blobs)}

    def is_sound(blob: Descriptor) -> bool:
        header = headers.get(blob.name or "", b"")
        if blob.digest not in hidden:
            return not verify or _is_sound(blob, store, header)
        kept = session.recall(blob.digest.hex, blob.size, verify=verify)
        if kept is None or not header:
            return kept is not None
        with session.open(kept) as reader:
            return reader.read(0, len(header)) == header

    def check(blob: Descriptor) -> None:
        if not is_sound(blob):
            lost.add(blob.digest)
        progress(blob.size, blob.name or "")

    each(blobs, check, jobs, name="check")
    return lost


def _is_sound(blob: Descriptor, store: Home, header: bytes) -> bool:
    try:
        with store.blobs.open(blob) as reader:
            return reader.read(0, len(header)) == header and reader.digest() == blob.digest
    except BlobStoreError as error:
        _log.warning("blob %s can't be used: %s", blob.digest, error)
        return False
