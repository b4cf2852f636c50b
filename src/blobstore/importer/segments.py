"""Segments: parts of a source's files, in the order in which they are fetched.

A segment is fetched in one request, and is in memory while blobs are made of it. Files are fetched
one after the other, each from its beginning to its end, because its declared digest is that of all
its bytes. Files are cut between the bytes of runs, so most runs need one segment.

Segments are fetched ahead (schedule.py) into a bounded number of buffers, which are taken once and
given back. Threads read the bytes of segments, and of samples, as they read files on a disk.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from queue import Empty, LifoQueue
from typing import NamedTuple, TypeAlias

import numpy as np

from blobstore.importer.making import Copy, GlobalScale, Run, Values, runs_of
from blobstore.importer.outputs import OutputTensor, PlannedBlob
from blobstore.io.durable import PAGE, os_errors
from blobstore.io.ranges import SourceReader
from blobstore.kernels.arrays import numpy_dtype
from blobstore.source.folders import SourceFile, SourceTensor
from blobstore.source.weights import Form, SourceWeight


class Need(NamedTuple):
    """Bytes of a file, by its path: from ``begin`` to ``end``. A plan may have a million."""

    path: str
    begin: int
    end: int


def needs_of(run: Run) -> Iterator[Need]:
    """Yield the bytes that a run is made from."""
    for step in run.steps:
        match step:
            case Copy(tensor, start, nbytes):
                yield _part(tensor, start, start + nbytes)
            case Values(output, source, start, count) if output.global_scale is None:
                yield from needed_for(source, start, count)
            case GlobalScale(output) | Values(output):
                yield from _global_scale(output)


def whole(tensor: SourceTensor) -> Need:
    """Return all bytes of a tensor."""
    return _part(tensor, 0, tensor.nbytes)


def _part(tensor: SourceTensor, begin: int, end: int) -> Need:
    return Need(tensor.file.path, tensor.offset + begin, tensor.offset + end)


def _global_scale(output: OutputTensor) -> Iterator[Need]:
    for source in output.sources:
        if output.copies_codes:
            yield whole(source.companions[".global_scale"])
        else:
            yield from map(whole, source.parts.values())


def needed_for(source: SourceWeight, start: int, count: int) -> Iterator[Need]:
    """Yield the bytes that ``count`` values of a weight from index ``start`` on are read from."""
    if source.change is not None:
        start, count = source.whole_rows(start, count)
        for _, regions in source.changed_tiles(start, count):
            yield from (_part(source.parts[one.suffix], *one.needs) for one in regions)
    match source.form:
        case Form.PLAIN:
            # Of a transposed weight whole matrices, where columns are rows.
            unit = math.prod(source.shape[-2:]) if source.transposed else 1
            first, stop = start // unit, -(-(start + count) // unit)
            yield _items(source.tensor, first * unit, stop * unit)
        case Form.FP8:
            yield _part(source.tensor, start, start + count)
            scales = source.block_run(start, count).scales
            yield _items(source.companions[".scale"], scales.start, scales.stop)
        case Form.CODED if source.coding is not None:
            for suffix, begin, end in source.coding.needs(start, count):
                yield _part(source.parts[suffix], begin, end)
            yield from (whole(source.companions[one]) for one in source.stated if not start)
        case Form.CODES if source.quantization is not None:
            for part in source.quantization.parts((count,), source.companions[".scale"].dtype):
                items = math.prod(part.shape)
                first, nbytes = start * items // count, numpy_dtype(part.dtype).itemsize
                yield _part(source.parts[part.suffix], first * nbytes, (first + items) * nbytes)
            if ".global_scale" in source.companions:
                yield whole(source.companions[".global_scale"])


def _items(tensor: SourceTensor, first: int, stop: int) -> Need:
    nbytes = max(1, tensor.dtype.bits // 8)
    return _part(tensor, first * nbytes, stop * nbytes)


SEGMENT = 8 * 2**20
"""Bytes of a segment at most."""
GAP = 2**16
"""Bytes between two needed ranges that are fetched rather than asked for in two requests."""
Span = tuple[int, int]
"""Bytes of a file: begin and end."""


class Segment(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file. ``number``: its place among all segments."""

    number: int
    file: SourceFile
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class Segments:
    """``all`` segments of what ``blobs`` are made from, in the order of ``files``.

    ``hashed``: of each file that is hashed to its end, the offset from which on it is.
    """

    def __init__(
        self,
        files: Iterable[SourceFile],
        blobs: Iterable[PlannedBlob],
        hashed: Mapping[str, int],
    ) -> None:
        needed = _spans(blobs)
        self.all: list[Segment] = []
        self._firsts: dict[str, int] = {}
        self._begins: dict[str, list[int]] = {}
        for file in files:
            spans = list(_cut(needed.get(file.path, ()), hashed.get(file.path), file.size))
            self._firsts[file.path] = len(self.all)
            self._begins[file.path] = [begin for begin, _ in spans]
            for begin, end in spans:
                self.all.append(Segment(len(self.all), file, begin, end))

    def numbers(self, need: Need) -> range:
        if need.begin >= need.end:
            return range(0)
        begins, first = self._begins[need.path], self._firsts[need.path]
        begin = first + bisect_right(begins, need.begin) - 1
        return range(begin, first + bisect_right(begins, need.end - 1))


def merge_spans(spans: Iterable[Span], gap: int = 0, most: int = sys.maxsize) -> list[Span]:
    """Return spans in order: those that touch, overlap or are ``gap`` apart as one of ``most``."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1] + gap and end - joined[-1][0] <= most:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _spans(blobs: Iterable[PlannedBlob]) -> dict[str, set[Span]]:
    """Return by file what should not be cut: the bytes of a run, together if a segment holds them.

    Global scales are left out, which are found in all bytes of a tensor: a run waits for these.
    """
    by_file: dict[str, set[Span]] = {}
    for blob in blobs:
        for run in runs_of(blob):
            spans: dict[str, list[Span]] = {}
            for path, begin, end in needs_of(run):
                if begin < end:
                    spans.setdefault(path, []).append((begin, end))
            for path, several in spans.items():
                hull = (min(begin for begin, _ in several), max(end for _, end in several))
                is_one = hull[1] - hull[0] <= SEGMENT
                by_file.setdefault(path, set()).update([hull] if is_one else several)
    return by_file


def _cut(spans: Collection[Span], hashed: int | None, size: int) -> Iterator[Span]:
    """Yield the segments of a file of ``size`` bytes that has ``spans``.

    If it is ``hashed`` from an offset on, they are all bytes after it.
    """
    at = end = hashed or 0
    ends = [] if hashed is None else [(size, size)]
    for begin, stop in chain(sorted(spans), ends):
        needed = (max(begin, end), stop)
        # Between the spans of a file that is hashed lie bytes that only the hash needs.
        for first, last in [needed] if hashed is None else [(end, begin), needed]:
            if last <= end:
                continue
            if at == end:
                at = first
            elif last - at > SEGMENT or first - end > GAP:
                yield at, end
                at = first
            while last - at > SEGMENT:
                yield at, at + SEGMENT
                at += SEGMENT
            end = last
    if at < end:
        yield at, end


WAIT_S = 0.02
"""How long a thread waits for a buffer or a segment before it checks whether the import ends."""


class Buffer:
    """Memory for one run or segment, aligned for I/O that bypasses the page cache.

    It is free when each user has released it, in whatever thread.
    """

    def __init__(self, free: LifoQueue[Buffer], nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._free = free
        self._users = 0
        self._mutex = threading.Lock()

    def at(self, offset: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` of it; the address and ``offset`` are equal modulo the page size."""
        start = offset % PAGE
        return memoryview(self.memory)[start : start + nbytes]

    def use(self) -> None:
        with self._mutex:
            self._users += 1

    def release(self) -> None:
        with self._mutex:
            self._users -= 1
            if not self._users:
                self._free.put(self)


class BufferPool:
    """``count`` buffers of ``nbytes`` each. Safe to share between threads."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.free: LifoQueue[Buffer] = LifoQueue()
        with os_errors("take", f"{count * nbytes:,} bytes of memory"):
            for _ in range(count):
                self.free.put(Buffer(self.free, nbytes))

    def take(self, wait_s: float) -> Buffer | None:
        """Return a buffer with one user, or None if none is free within that many seconds."""
        try:
            buffer = self.free.get(block=wait_s > 0, timeout=wait_s)
        except Empty:
            return None
        buffer.use()
        return buffer


Parts: TypeAlias = Mapping[str, Sequence[tuple[int, memoryview]]]
"""Bytes by the path of their file: where they begin there, in order."""


class LoadedBytes:
    """The bytes of files that each thread can read now. ``other`` reads what is not loaded."""

    def __init__(self, other: Callable[[SourceFile, int, memoryview], None]) -> None:
        self.other = other
        self._here = threading.local()

    @contextmanager
    def using(self, *parts: Parts) -> Iterator[None]:
        """Let this thread read parts of files within the block: those of the first that has one."""
        self._here.parts = parts
        try:
            yield
        finally:
            self._here.parts = ()

    def find(self, path: str, offset: int) -> memoryview | None:
        for parts in getattr(self._here, "parts", ()):
            several = parts.get(path, ())
            number = bisect_right(several, offset, key=itemgetter(0)) - 1
            if number >= 0:
                begin, data = several[number]
                if offset - begin < len(data):
                    return data[offset - begin :]  # type: ignore[no-any-return]
        return None


class LoadedFile(SourceReader):
    """A file of which the thread's loaded bytes are read. It was checked when they arrived."""

    def __init__(self, file: SourceFile, loaded: LoadedBytes) -> None:
        self.name = file.path
        self.size = file.size
        self.identity = file.identity
        self._file = file
        self._loaded = loaded

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        data = self._loaded.find(self.name, offset)
        return data[:nbytes] if data is not None and len(data) >= nbytes else None

    def readinto(self, offset: int, buffer: memoryview) -> None:
        while buffer:
            data = self._loaded.find(self.name, offset)
            if data is None:
                self._loaded.other(self._file, offset, buffer)
                return
            count = min(len(data), len(buffer))
            # NumPy copies without the interpreter's lock.
            np.frombuffer(buffer, np.uint8)[:count] = np.frombuffer(data, np.uint8)[:count]
            buffer, offset = buffer[count:], offset + count


class LoadedSegment(NamedTuple):
    """A segment in memory, and the buffer that has it as long as it has users."""

    segment: Segment
    data: memoryview
    buffer: Buffer
