"""Tasks: a plan's blobs in portions that any machine can make, and shards of them. Pure.

Tasks depend on the plan only, not on the number of workers, so that workers that divide it
differently agree on them. A blob belongs to the file that most of its bytes come from. Tasks have
blobs of one file, in the order of their bytes in it. So a worker reads a file from its beginning to
its end.

A task that needs a file whose server declares a digest reads all of it, because the digest is that
of the whole file. So the blobs of such a file are one task, and so are those of consecutive files
that share blobs, up to a limit. A file at that limit is read by both tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Final

from blobstore.errors import UsageError
from blobstore.importer.planning.outputs import ImportPlan, PlannedBlob
from blobstore.source.weights import SourceFile

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
    extents = [_extents(blob, numbers) for blob in plan.blobs]
    units = _units(files, extents)
    places = []
    for number, begins in enumerate(extents):
        file = max(begins, key=lambda one: (begins[one][0], -one))
        places.append((units[file], file, begins[file][1], number))
    most = min(max(_LEAST_BYTES, plan.source_bytes // _TASKS), _MOST_BYTES)
    tasks: list[Task] = []
    for unit, members in groupby(sorted(places), key=lambda place: place[0]):
        blobs = [plan.blobs[place[3]] for place in members]
        is_whole = files[unit].declared is not None
        for portion in [blobs] if is_whole else _portions(blobs, most):
            tasks.append(Task(len(tasks), unit, tuple(portion)))
    return tuple(tasks)


def _extents(blob: PlannedBlob, numbers: dict[str, int]) -> dict[int, tuple[int, int]]:
    """Return how many bytes of each file a blob needs, and where they begin."""
    nbytes: Counter[int] = Counter()
    begins: dict[int, int] = {}
    for source in blob.sources:
        for part in source.parts.values():
            file = numbers[part.file.path]
            nbytes[file] += part.nbytes
            begins[file] = min(part.offset, begins.get(file, part.offset))
    return {file: (nbytes[file], begin) for file, begin in begins.items()}


def _units(files: Sequence[SourceFile], extents: Iterable[dict[int, tuple[int, int]]]) -> list[int]:
    """Return the first file of the unit that each file belongs to."""
    shared = {number for one in extents for number in range(min(one) + 1, max(one) + 1)}
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


def _portions(blobs: Iterable[PlannedBlob], most: int) -> Iterator[list[PlannedBlob]]:
    taken: list[PlannedBlob] = []
    nbytes = 0
    for blob in blobs:
        if taken and (nbytes + blob.source_bytes > most or len(taken) == TASK_BLOBS):
            yield taken
            taken, nbytes = [], 0
        taken.append(blob)
        nbytes += blob.source_bytes
    yield taken


def grouped(tasks: Sequence[Task], most: int) -> Iterator[list[Task]]:
    """Yield consecutive tasks that read about ``most`` bytes together."""
    ends = accumulate(task.source_bytes for task in tasks)
    for _, members in groupby(zip(tasks, ends, strict=True), key=lambda pair: pair[1] // most):
        yield [task for task, _ in members]


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
    """Return ``count`` consecutive ranges of ``costs``, whose largest sum is as small as possible.

    Ranges at the end are empty if there are fewer costs than ranges.
    """
    low, high = max(costs, default=0), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(costs, middle, 0)) <= count:
            high = middle
        else:
            low = middle + 1
    found = _filled(costs, low, count)
    return found + [(len(costs), len(costs))] * (count - len(found))


def _filled(costs: Sequence[int], most: int, count: int) -> list[tuple[int, int]]:
    """Return consecutive ranges with sums of at most ``most``.

    They end earlier where ``count`` ranges would otherwise not get one cost each.
    """
    ranges: list[tuple[int, int]] = []
    begin = total = 0
    for number, cost in enumerate(costs):
        is_last = count - len(ranges) > len(costs) - number
        if number > begin and (total + cost > most or is_last):
            ranges.append((begin, number))
            begin, total = number, 0
        total += cost
    return [*ranges, (begin, len(costs))] if costs else []
