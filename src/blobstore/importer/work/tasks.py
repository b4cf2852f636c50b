"""Tasks: a plan's blobs in portions that any machine can make, and shards of them. Pure.

Tasks depend on the plan only, not on the number of workers, so that workers that divide it
differently agree on them. A blob belongs to the file that most of its bytes come from. Tasks have
blobs of one file, in the order of their bytes in it. So a worker reads a file from its beginning to
its end, and each byte of the source is read by one worker.

A task that needs a file whose server declares a digest reads all of it, because its digest is that
of the whole file. So the blobs that need most of such a file are one task, and files of which one
group of experts needs most belong to one task. Tasks that share much are united. A blob may also
need bytes of a file of another task: then both read it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Final

from blobstore.errors import CorruptDataError, UsageError
from blobstore.importer.planning.outputs import ImportPlan, PlannedBlob
from blobstore.importer.policies.rules import Importance
from blobstore.names import Digest
from blobstore.source.files import OtherFiles
from blobstore.source.inventory import Inventory
from blobstore.source.weights import SourceTensor

TASK_BLOBS: Final = 256
_LEAST_BYTES: Final = 2**20
_MOST_BYTES: Final = 256 * 2**20
_TASKS: Final = 64
"""Tasks get so many bytes that a plan has at least as many of them, within these bounds."""


_SHARED: Final = 0.05
_UNITS: Final = 32
_LEAST_UNIT: Final = 2**30
"""Tasks that share files with a declared digest are united until a twentieth of the source is read
twice; but a plan keeps about as many tasks, or they would have more than so many bytes."""


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


@dataclass(frozen=True, slots=True)
class PlanPortion:
    """Some tasks as a plan of their own, and the declared digests of its files by their numbers."""

    plan: ImportPlan
    declared: tuple[Digest | None, ...]

    @property
    def task(self) -> Task:
        """All of them as one task."""
        return Task(0, 0, self.plan.blobs)

    def check(self) -> None:
        """Raise CorruptDataError unless the server declares these digests here, too.

        Otherwise this machine would not hash a file that the others take for hashed.
        """
        for file, expected in zip(DividedPlan(self.plan).files, self.declared, strict=True):
            if file.declared != expected:
                raise CorruptDataError(
                    f"{file.path}: its server declares the digest {file.declared}, and declared"
                    f" {expected} when its import began",
                    path=file.path,
                )


class DividedPlan:
    """A plan and its tasks, by number."""

    def __init__(self, plan: ImportPlan) -> None:
        self.plan = plan
        self.files = [file for inventory in plan.inventories for file in inventory.files]
        self._numbers = {file.path: number for number, file in enumerate(self.files)}
        self._inventories = {
            file.path: number
            for number, inventory in enumerate(plan.inventories)
            for file in inventory.files
        }

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks."""
        places = [self._place(blob) for blob in self.plan.blobs]
        owners = self._owners([file for file, _ in places])
        return tuple(self._tasks(places, owners))

    def _tasks(self, places: Sequence[tuple[int, int]], owners: dict[int, int]) -> Iterator[Task]:
        placed = sorted(
            (owners.get(file, file), file, begin, number)
            for number, (file, begin) in enumerate(places)
        )
        blobs = self.plan.blobs
        most = min(max(_LEAST_BYTES, self.plan.source_bytes // _TASKS), _MOST_BYTES)
        whole = set(owners.values())
        number = 0
        for first, group in groupby(placed, key=lambda place: place[0]):
            members = (blobs[place[3]] for place in group)
            for portion in [tuple(members)] if first in whole else _portions(members, most):
                yield Task(number, first, portion)
                number += 1

    def _owners(self, places: Sequence[int]) -> dict[int, int]:
        """Return the owner of each file with a declared digest that is needed.

        An owner is the first of the files that a task owns. ``places``: of the blobs.
        """
        if all(file.declared is None for file in self.files):
            return {}
        needed: dict[int, Counter[int]] = defaultdict(Counter)
        for blob, place in zip(self.plan.blobs, places, strict=True):
            for part in _parts([blob]):
                if part.file.declared is not None:
                    needed[self._numbers[part.file.path]][place] += part.nbytes
        # A blob's place has most of its bytes, so no file leads back to itself.
        leads = {
            file: min(counts, key=lambda place: (-counts[place], place != file, place))
            for file, counts in needed.items()
        }
        owners = {file: _last(leads, file) for file in leads}
        sizes: Counter[int] = Counter()
        shared: Counter[tuple[int, int]] = Counter()
        for file, counts in needed.items():
            sizes[owners[file]] += self.files[file].size
            for place, nbytes in counts.items():
                pair = sorted((owners[file], owners.get(place, place)))
                if place in owners and pair[0] != pair[1]:
                    shared[pair[0], pair[1]] += nbytes
        units = _united(sizes, shared)
        return {file: _last(units, owner) for file, owner in owners.items()}

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

    def portion(self, tasks: Sequence[Task]) -> PlanPortion:
        """Return some tasks as a plan of their own."""
        plan = self.only([blob for task in tasks for blob in task.blobs])
        files = (file for inventory in plan.inventories for file in inventory.files)
        return PlanPortion(plan, tuple(file.declared for file in files))

    def only(self, blobs: Sequence[PlannedBlob]) -> ImportPlan:
        """Return a plan of nothing but these blobs, whose inventories have only what they need."""
        parts: list[list[SourceTensor]] = [[] for _ in self.plan.inventories]
        for part in _parts(blobs):
            parts[self._inventories[part.file.path]].append(part)
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
        check_shard(index, count)
        files = [tuple(group) for _, group in groupby(self.tasks, key=lambda task: task.file)]
        units = files if len(files) >= count else [(task,) for task in self.tasks]
        costs = [sum(task.cost for task in unit) for unit in units]
        begin, end = partition(costs, count)[index]
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


def _united(sizes: Mapping[int, int], shared: Counter[tuple[int, int]]) -> dict[int, int]:
    """Return which unit, if any, each is united with, so that little is shared by two of them.

    ``sizes``: of the units in bytes; ``shared``: what two of them both need.
    """
    units: dict[int, int] = {}
    nbytes = dict(sizes)
    total, left = sum(sizes.values()), shared.total()
    most = max(total // _UNITS, _LEAST_UNIT)
    for (one, other), both in sorted(shared.items(), key=lambda pair: (-pair[1], pair[0])):
        if left <= total * _SHARED:
            break
        first, second = sorted((_last(units, one), _last(units, other)))
        if first != second and nbytes[first] + nbytes[second] <= most:
            units[second] = first
            nbytes[first] += nbytes[second]
        if _last(units, one) == _last(units, other):
            left -= both
    return units


def _last(leads: Mapping[int, int], file: int) -> int:
    while leads.get(file, file) != file:
        file = leads[file]
    return file


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
