"""Tasks: a plan's blobs in portions that any machine can make, and shards of them. Pure.

Tasks depend on the plan only, not on the number of workers, so that workers that divide it
differently agree on them. A blob belongs to the file that its first bytes come from. Tasks have
blobs of one file, in the order of their bytes in it. So a worker reads a file from its beginning to
its end.

A task that needs a file whose server declares a digest reads all of it, because the digest is that
of the whole file. So the blobs of such a file are one task, and so are those of consecutive files
that share blobs, up to a limit. A file at that limit is read by both tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, TypeVar

from blobstore.errors import UsageError
from blobstore.importer.planning.outputs import ImportPlan, PlannedBlob
from blobstore.source.weights import SourceFile

_T = TypeVar("_T")
TASK_BLOBS: Final = 256
_LEAST_BYTES: Final = 2**20
_MOST_BYTES: Final = 256 * 2**20
_TASKS: Final = 64
"""Tasks get so many bytes that a plan has at least as many of them, within these bounds."""
_UNITS: Final = 32
_LEAST_UNIT: Final = 2**30
"""Files with declared digests are united up to so many bytes, or this part of the source."""


@dataclass(frozen=True, slots=True)
class Task:
    """Some blobs of a plan: its number, the number of its first file in the plan, and the blobs."""

    number: int
    file: int
    blobs: tuple[PlannedBlob, ...]

    @property
    def source_bytes(self) -> int:
        """Bytes that are read to do it."""
        return sum(blob.source_bytes for blob in self.blobs)

    @property
    def cost(self) -> int:
        """Bytes that are read and written to do it."""
        return sum(blob.source_bytes + blob.size for blob in self.blobs)


def tasks_of(plan: ImportPlan) -> tuple[Task, ...]:
    """Return all tasks of a plan."""
    files = [file for inventory in plan.inventories for file in inventory.files]
    numbers = {file.path: number for number, file in enumerate(files)}
    extents = []
    for blob in plan.blobs:
        parts = (part for source in blob.sources for part in source.parts.values())
        places = sorted((numbers[part.file.path], part.offset) for part in parts)
        extents.append((places[0], places[-1]))
    units = _units(files, [(first, last) for (first, _), (last, _) in extents])
    ordered = sorted(range(len(extents)), key=lambda number: extents[number])
    most = min(max(_LEAST_BYTES, plan.source_bytes // _TASKS), _MOST_BYTES)
    tasks: list[Task] = []
    for unit, members in groupby(ordered, key=lambda number: units[extents[number][0][0]]):
        blobs = [plan.blobs[number] for number in members]
        is_whole = files[unit].declared is not None
        costs = [max(blob.source_bytes, most // TASK_BLOBS) for blob in blobs]
        for portion in [blobs] if is_whole else grouped(blobs, costs, most):
            tasks.append(Task(len(tasks), unit, tuple(portion)))
    return tuple(tasks)


def _units(files: Sequence[SourceFile], extents: Iterable[tuple[int, int]]) -> list[int]:
    """Return the first file of the unit that each file belongs to.

    ``extents``: the first and the last file of each blob.
    """
    shared = {number for first, last in extents for number in range(first + 1, last + 1)}
    most = max(sum(file.size for file in files) // _UNITS, _LEAST_UNIT)
    units: list[int] = []
    nbytes = 0
    for number, file in enumerate(files):
        nbytes += file.size
        is_declared = file.declared is not None and files[number - 1].declared is not None
        if number in shared and is_declared and nbytes <= most:
            units.append(units[-1])
        else:
            units.append(number)
            nbytes = file.size
    return units


def grouped(items: Iterable[_T], costs: Iterable[int], most: int) -> Iterator[list[_T]]:
    """Yield consecutive items that cost ``most`` together, or one that costs more."""
    group: list[_T] = []
    total = 0
    for item, cost in zip(items, costs, strict=True):
        if group and total + cost > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += cost
    if group:
        yield group


def shard_of(tasks: Sequence[Task], index: int, count: int) -> tuple[Task, ...]:
    """Return the tasks of shard ``index`` of ``count``, counted from 0.

    Shards are consecutive tasks of about the same cost. A file's tasks are in one shard if there
    are as many files as shards. Raises: UsageError for an index that is out of range.
    """
    check_shard(index, count)
    files = [tuple(group) for _, group in groupby(tasks, key=lambda task: task.file)]
    units = files if len(files) >= count else [(task,) for task in tasks]
    begin, end = partition([sum(task.cost for task in unit) for unit in units], count)[index]
    return tuple(task for unit in units[begin:end] for task in unit)


def check_shard(index: int, count: int) -> None:
    """Raise UsageError unless ``index`` is one of ``count`` shards, counted from 0."""
    if count < 1:
        raise UsageError(f"invalid number of shards {count}", hint="There is at least one shard.")
    if not 0 <= index < count:
        valid = "only shard 0/1" if count == 1 else f"shards 0/{count} to {count - 1}/{count}"
        raise UsageError(
            f"shard {index}/{count} does not exist",
            hint=f"Shards are counted from 0: there are {valid}.",
        )


def partition(costs: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return ``count`` consecutive ranges of ``costs``, with sums as near to even as they come.

    Ranges are empty only if there are fewer costs than ranges.
    """
    ranges: list[tuple[int, int]] = []
    end, left = 0, sum(costs)
    for ranges_left in range(count, 0, -1):
        begin, total = end, 0
        share = left / ranges_left
        while end < len(costs) - (ranges_left - 1) or begin == end < len(costs):
            if begin < end and ranges_left > 1 and total + costs[end] / 2 > share:
                break
            total += costs[end]
            end += 1
        ranges.append((begin, end))
        left -= total
    return ranges
