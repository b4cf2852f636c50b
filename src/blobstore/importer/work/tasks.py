"""Tasks: a plan's blobs in portions that any machine can make, and shards of them. Pure.

Tasks depend on the plan only, not on the number of workers, so that workers that divide it
differently agree on them. A blob belongs to the file that most of its bytes come from. Tasks have
blobs of one file, in the order of their bytes in it. So a worker reads a file from its beginning to
its end, and each byte of the source is read by one worker. A file whose server declares a digest is
one task: its digest is that of the whole file. A task of another file that needs bytes of it (a
group of experts in two files) reads and hashes it whole, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from blobstore.errors import UsageError
from blobstore.importer.planning.outputs import ImportPlan, PlannedBlob
from blobstore.importer.policies.rules import Importance
from blobstore.source.files import OtherFiles
from blobstore.source.inventory import Inventory
from blobstore.source.weights import SourceFile, SourceTensor

TASK_BLOBS: Final = 256
_LEAST_BYTES: Final = 2**20
_MOST_BYTES: Final = 256 * 2**20
_TASKS: Final = 64
"""Tasks get so many bytes that a plan has at least as many of them, within these bounds."""


@dataclass(frozen=True, slots=True)
class Task:
    """Some blobs of a plan: its number, the number of its file in the plan, and the blobs."""

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


class DividedPlan:
    """A plan and its tasks, by number."""

    def __init__(self, plan: ImportPlan) -> None:
        self.plan = plan
        files = [file for inventory in plan.inventories for file in inventory.files]
        self._numbers = {file.path: number for number, file in enumerate(files)}
        self._owners = {
            file.path: number
            for number, inventory in enumerate(plan.inventories)
            for file in inventory.files
        }
        self.tasks = tuple(self._tasks(files))

    def _tasks(self, files: Sequence[SourceFile]) -> Iterator[Task]:
        placed = sorted((*self._place(blob), number) for number, blob in enumerate(self.plan.blobs))
        blobs = self.plan.blobs
        most = min(max(_LEAST_BYTES, self.plan.source_bytes // _TASKS), _MOST_BYTES)
        number = 0
        for file, group in groupby(placed, key=lambda place: place[0]):
            members = (blobs[place[2]] for place in group)
            whole = files[file].declared is not None
            for portion in [tuple(members)] if whole else _portions(members, most):
                yield Task(number, file, portion)
                number += 1

    def _place(self, blob: PlannedBlob) -> tuple[int, int]:
        """Return the number of a blob's file, and where its bytes begin there."""
        nbytes: Counter[int] = Counter()
        begins: dict[int, int] = {}
        for part in _parts([blob]):
            file = self._numbers[part.file.path]
            nbytes[file] += part.nbytes
            begins[file] = min(part.offset, begins.get(file, part.offset))
        most = max(nbytes.values())
        file = min(file for file, count in nbytes.items() if count == most)
        return file, begins[file]

    def only(self, blobs: Sequence[PlannedBlob]) -> ImportPlan:
        """Return a plan of nothing but these blobs, whose inventories have only what they need.

        Files keep their declared digests, also those that the blobs need little of: what comes of
        them in this task is not what comes in their own.
        """
        parts: list[list[SourceTensor]] = [[] for _ in self.plan.inventories]
        for part in _parts(blobs):
            parts[self._owners[part.file.path]].append(part)
        inventories = tuple(
            _only(inventory, needed)
            for inventory, needed in zip(self.plan.inventories, parts, strict=True)
        )
        options = self.plan.options
        if options.importance is not None:
            names = {source.name for blob in blobs for source in blob.sources}
            vectors = options.importance.vectors
            needed = {name: vectors[name] for name in sorted(names & vectors.keys())}
            options = replace(options, importance=Importance.parse(needed) if needed else None)
        return replace(
            self.plan,
            inventories=inventories,
            options=options,
            layers=tuple(blobs),
            relative_errors={},
            notes=(),
        )

    def shard(self, index: int, count: int) -> tuple[Task, ...]:
        """Return the tasks of shard ``index`` of ``count``, counted from 0.

        Shards are consecutive tasks of about the same cost. A file's tasks are in one shard if
        there are as many files as shards. Raises: UsageError for an index that is out of range.
        """
        if not 0 <= index < count:
            raise UsageError(
                f"shard {index} of {count} does not exist",
                hint=f"Shards of {count} are numbered from 0 to {count - 1}.",
            )
        files = [tuple(group) for _, group in groupby(self.tasks, key=lambda task: task.file)]
        units = files if len(files) >= count else [(task,) for task in self.tasks]
        costs = [sum(task.cost for task in unit) for unit in units]
        begin, end = partition(costs, count)[index]
        return tuple(task for unit in units[begin:end] for task in unit)


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


def _only(inventory: Inventory, needed: Sequence[SourceTensor]) -> Inventory:
    paths = {tensor.file.path for tensor in needed}
    return replace(
        inventory,
        files=tuple(file for file in inventory.files if file.path in paths),
        tensors={tensor.name: tensor for tensor in sorted(needed, key=lambda one: one.name)},
        documents={},
        other_files=OtherFiles(),
    )


def _portions(blobs: Iterable[PlannedBlob], most: int) -> Iterator[tuple[PlannedBlob, ...]]:
    taken: list[PlannedBlob] = []
    nbytes = 0
    for blob in blobs:
        if taken and (nbytes + blob.source_bytes > most or len(taken) == TASK_BLOBS):
            yield tuple(taken)
            taken, nbytes = [], 0
        taken.append(blob)
        nbytes += blob.source_bytes
    yield tuple(taken)


def _parts(blobs: Iterable[PlannedBlob]) -> Iterator[SourceTensor]:
    return (part for blob in blobs for source in blob.sources for part in source.parts.values())
