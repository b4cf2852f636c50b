"""Segments: parts of a source's files, in the order in which they are fetched. Pure.

A segment is fetched in one request, and is in memory while blobs are made of it. Files are fetched
one after the other, each from its beginning to its end, because its declared digest is that of all
its bytes. Files are cut between the bytes of runs, so most runs need one segment.
"""

from __future__ import annotations

import math
import mmap
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from queue import Empty, LifoQueue
from typing import NamedTuple, TypeAlias

import numpy as np

from blobstore.formats.quant import Quantization
from blobstore.importer.making import Copy, GlobalScale, Run, Step, Values, runs_of
from blobstore.importer.outputs import OutputTensor, PlannedBlob
from blobstore.io.durable import PAGE, os_errors
from blobstore.io.ranges import SourceReader
from blobstore.io.workers import each, start_thread
from blobstore.kernels.arrays import numpy_dtype
from blobstore.kernels.scales import BlockRun
from blobstore.source.fetching import Fetcher
from blobstore.source.weights import Form, SourceFile, SourceTensor, SourceWeight

_WAIT_S = 0.02


class Buffer:
    """Memory for one run or segment, aligned for I/O that bypasses the page cache."""

    def __init__(self, pool: BufferPool, memory: mmap.mmap) -> None:
        self._pool = pool
        self.memory = memory

    def at(self, offset: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` of it; the address and ``offset`` are equal modulo the page size."""
        start = offset % PAGE
        return memoryview(self.memory)[start : start + nbytes]

    def part(self, begin: int, nbytes: int) -> memoryview:
        """Return ``nbytes`` of it from byte ``begin`` on."""
        return memoryview(self.memory)[begin : begin + nbytes]

    def release(self) -> None:
        """Give it back; a second call does nothing."""
        self._pool.take_back(self)


class BufferPool:
    """``count`` buffers of ``nbytes`` each. Safe to share between threads."""

    def __init__(self, count: int, nbytes: int) -> None:
        """Raises: StorageError when there is not so much memory."""
        self._free: LifoQueue[mmap.mmap] = LifoQueue()
        self._taken: set[Buffer] = set()
        with os_errors("take", f"{count * nbytes:,} bytes of memory"):
            for _ in range(count):
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                self._free.put(mmap.mmap(-1, nbytes + PAGE, flags))

    def take(self, stopped: threading.Event) -> Buffer | None:
        """Return a buffer when one is free; None when ``stopped`` is set before.

        After an error no buffer may become free any more.
        """
        while not stopped.is_set():
            with suppress(Empty):
                buffer = Buffer(self, self._free.get(timeout=_WAIT_S))
                self._taken.add(buffer)
                return buffer
        return None

    @property
    def is_empty(self) -> bool:
        """True if no buffer is free."""
        return self._free.empty()

    def take_back(self, buffer: Buffer) -> None:
        """Make a buffer free that was taken."""
        with suppress(KeyError):  # it was given back before
            self._taken.remove(buffer)
            self._free.put(buffer.memory)

    def close(self) -> None:
        """Free the memory when no thread uses it any more: buffers and pool refer to each other."""
        self._taken.clear()
        self._free = LifoQueue()


Parts: TypeAlias = Mapping[str, Sequence[tuple[int, memoryview]]]
"""Bytes by the path of their file: where they begin there, in order."""


def _begin(part: tuple[int, memoryview]) -> int:
    return part[0]


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
        """Return the loaded bytes of a file from ``offset`` on, or None."""
        for parts in getattr(self._here, "parts", ()):
            several = parts.get(path, ())
            number = bisect_right(several, offset, key=_begin) - 1
            if number >= 0:
                begin, data = several[number]
                if offset - begin < len(data):
                    return data[offset - begin :]  # type: ignore[no-any-return]
        return None

    def open(self, file: SourceFile) -> LoadedFile:
        """Return a reader of a file."""
        return LoadedFile(file, self)


class LoadedFile(SourceReader):
    """A file of which the thread's loaded bytes are read. It was checked when they came."""

    def __init__(self, file: SourceFile, loaded: LoadedBytes) -> None:
        self.name = file.path
        self.size = file.size
        self.identity = file.identity
        self._file = file
        self._loaded = loaded

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        """See `OpenReader`."""
        data = self._loaded.find(self.name, offset)
        return data[:nbytes] if data is not None and len(data) >= nbytes else None

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """See `OpenReader`."""
        while buffer:
            data = self._loaded.find(self.name, offset)
            if data is None:
                self._loaded.other(self._file, offset, buffer)
                return
            count = min(len(data), len(buffer))
            # NumPy copies without the interpreter's lock.
            np.frombuffer(buffer, np.uint8)[:count] = np.frombuffer(data, np.uint8)[:count]
            buffer, offset = buffer[count:], offset + count

    def read(self, offset: int, length: int) -> bytes:
        """See `OpenReader`."""
        data = bytearray(length)
        self.readinto(offset, memoryview(data))
        return bytes(data)


_WAIT_S = 0.02
"""How long a thread waits before it checks again whether it is of use elsewhere."""


class LoadedSegment:
    """A segment in memory, which is given back when its last user has released it."""

    def __init__(self, segment: Segment, buffer: Buffer) -> None:
        self.segment = segment
        self.data = buffer.at(segment.begin, segment.nbytes)
        self._buffer = buffer
        self._users = 1
        self._mutex = threading.Lock()

    def use(self) -> None:
        """Count one more user."""
        with self._mutex:
            self._users += 1

    def release(self) -> None:
        """Count one user less."""
        with self._mutex:
            self._users -= 1
            is_free = not self._users
        if is_free:
            self._buffer.release()


class Prefetch:
    """Fetches ``segments``, as many at once as have buffers."""

    def __init__(
        self, segments: Segments, fetcher: Fetcher, buffers: BufferPool, jobs: int
    ) -> None:
        self._segments = segments
        self._fetcher = fetcher
        self._buffers = buffers
        self._jobs = jobs
        self._arrived: dict[int, LoadedSegment] = {}
        self._changed = threading.Condition()
        self._ends = threading.Event()
        self._error: BaseException | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Fetch within the block; at its end requests are cancelled."""
        thread = threading.Thread(target=self._run, name="prefetch")
        start_thread(thread)
        try:
            yield
        finally:
            self._ends.set()
            self._fetcher.cancel()
            thread.join()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            each(self._begun(), self._fetch, self._jobs, name="fetch", stop=self._ends)
        except BaseException as raised:  # noqa: BLE001  # `get` raises it
            error = raised
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _begun(self) -> Iterator[LoadedSegment]:
        for segment in self._segments:
            buffer = self._buffers.take(self._ends)
            if buffer is None:
                return
            yield LoadedSegment(segment, buffer)

    def _fetch(self, loaded: LoadedSegment) -> None:
        self._fetcher.fill(loaded.segment.file, loaded.segment.begin, loaded.data)
        with self._changed:
            self._arrived[loaded.segment.number] = loaded
            self._changed.notify_all()

    def get(self, number: int, *, waits: bool) -> LoadedSegment | None:
        """Return a segment, or None if it is not there, after a moment if the call ``waits``.

        Raises: as `Fetcher.fill`, the error of the first segment that fails.
        """
        with self._changed:
            if waits and number not in self._arrived and self._error is None:
                self._changed.wait(_WAIT_S)
            if number in self._arrived:
                return self._arrived.pop(number)
            if self._error is not None:
                raise self._error
        return None


class Need(NamedTuple):
    """Bytes of a file, by its path: from ``begin`` to ``end``. A plan may have a million."""

    path: str
    begin: int
    end: int


def needed_by(step: Step) -> Iterator[Need]:
    """Yield the bytes that a step is made from; nothing for known ones."""
    match step:
        case Copy(tensor, start, nbytes):
            yield _part(tensor, start, start + nbytes)
        case GlobalScale(output):
            yield from _global_scale(output)
        case Values(output, source, start, count):
            if output.global_scale is not None:
                yield from _global_scale(output)
            else:
                yield from needed_for(source, start, count)


def whole(tensor: SourceTensor) -> Need:
    """Return all bytes of a tensor."""
    return _part(tensor, 0, tensor.nbytes)


def _part(tensor: SourceTensor, begin: int, end: int) -> Need:
    return Need(tensor.file.path, tensor.offset + begin, tensor.offset + end)


def _global_scale(output: OutputTensor) -> Iterator[Need]:
    """Yield what a global scale is found in: the source's own, else all values."""
    for source in output.sources:
        if output.copies_codes:
            yield whole(source.companions[".global_scale"])
        else:
            yield from map(whole, source.parts.values())


def needed_for(source: SourceWeight, start: int, count: int) -> Iterator[Need]:
    """Yield the bytes that ``count`` values of a weight from index ``start`` on are read from."""
    match source.form:
        case Form.PLAIN:
            yield _plain(source, start, count)
        case Form.BLOCK_FP8:
            yield _part(source.tensor, start, start + count)
            *_, rows, cols = source.shape
            scales = BlockRun(rows=rows, cols=cols, first=start, count=count).scales
            yield _items(source.companions[".scale"], scales.start, scales.stop)
        case Form.CODES:
            if source.quantization is None:
                raise AssertionError("codes are quantized")
            yield from _codes(source, source.quantization, start, count)


def _plain(source: SourceWeight, start: int, count: int) -> Need:
    """Return the values; of a transposed weight its whole matrices, where columns are rows."""
    if source.transposed:
        one = math.prod(source.shape[-2:])
        start, end = start // one * one, -(-(start + count) // one) * one
    else:
        end = start + count
    return _items(source.tensor, start, end)


def _codes(
    source: SourceWeight, quantization: Quantization, start: int, count: int
) -> Iterator[Need]:
    for part in quantization.parts((count,), source.companions[".scale"].dtype):
        items = math.prod(part.shape)
        first, nbytes = start * items // count, numpy_dtype(part.dtype).itemsize
        yield _part(source.parts[part.suffix], first * nbytes, (first + items) * nbytes)
    if ".global_scale" in source.companions:
        yield whole(source.companions[".global_scale"])


def _items(tensor: SourceTensor, first: int, stop: int) -> Need:
    """Return elements of a tensor; those narrower than a byte are counted in bytes."""
    nbytes = max(1, tensor.dtype.bits // 8)
    return _part(tensor, first * nbytes, stop * nbytes)


SEGMENT = 8 * 2**20
"""Bytes of a segment at most."""
_GAP = 2**16
"""Bytes between two needed ranges that are fetched rather than asked for in two requests."""
Span = tuple[int, int]
"""Bytes of a file: begin and end."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes ``begin`` to ``end`` of a file. ``number``: its place among all segments."""

    number: int
    file: SourceFile
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.end - self.begin


class Segments(Sequence[Segment]):
    """The segments of what ``blobs`` are made from, in the order of ``files``.

    ``hashed``: of each file that is hashed to its end, the offset from which on it is.
    """

    def __init__(
        self,
        files: Iterable[SourceFile],
        blobs: Iterable[PlannedBlob],
        hashed: Mapping[str, int],
    ) -> None:
        needed = _spans(blobs)
        self._all: list[Segment] = []
        self._firsts: dict[str, int] = {}
        self._begins: dict[str, list[int]] = {}
        for file in files:
            whole = hashed.get(file.path)
            spans = list(_cut(needed.get(file.path, ()), whole, file.size))
            self._firsts[file.path] = len(self._all)
            self._begins[file.path] = [begin for begin, _ in spans]
            for begin, end in spans:
                self._all.append(Segment(len(self._all), file, begin, end))

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> Segment:  # type: ignore[override]  # never a slice
        return self._all[number]

    def numbers(self, need: Need) -> range:
        """Return the numbers of the segments that have some of the bytes."""
        if need.begin >= need.end:
            return range(0)
        begins, first = self._begins[need.path], self._firsts[need.path]
        begin = first + bisect_right(begins, need.begin) - 1
        return range(begin, first + bisect_right(begins, need.end - 1))


def needs_of(run: Run) -> Iterator[Need]:
    """Yield the bytes that a run is made from."""
    return chain.from_iterable(map(needed_by, run.steps))


def united(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order, those that touch or overlap as one."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _spans(blobs: Iterable[PlannedBlob]) -> dict[str, set[Span]]:
    """Return by file what should not be cut: the bytes of a run, together if a segment holds them.

    Global scales are left out, which are found in all bytes of a tensor: a run waits for these.
    """
    found: dict[str, set[Span]] = {}
    for blob in blobs:
        for run in runs_of(blob):
            spans: dict[str, list[Span]] = {}
            for path, begin, end in needs_of(run):
                if begin < end:
                    spans.setdefault(path, []).append((begin, end))
            for path, several in spans.items():
                hull = (min(begin for begin, _ in several), max(end for _, end in several))
                is_one = hull[1] - hull[0] <= SEGMENT
                found.setdefault(path, set()).update([hull] if is_one else several)
    return found


def _cut(spans: Collection[Span], hashed: int | None, size: int) -> Iterator[Span]:
    """Yield the segments of a file of ``size`` bytes that has ``spans``.

    If it is ``hashed`` from an offset on, they are all bytes behind it.
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
            elif last - at > SEGMENT or first - end > _GAP:
                yield at, end
                at = first
            while last - at > SEGMENT:
                yield at, at + SEGMENT
                at += SEGMENT
            end = last
    if at < end:
        yield at, end
