"""The invariant of headers, and the program that looks for a file which breaks it.

Whatever the bytes: scanner and parser agree, only our typed errors come out, what we accept the
safetensors package reads equally, and what we refuse it refuses too, but for the classes of
`DIFFERENCES`, in which it is laxer than its README or than our limits.

`python tests/fuzz/headers.py --executions 50000000 --jobs 2` is the long form. Files that break the
sentence are saved, and `--replay FILE…` looks at them again. With `--atheris` they are chosen by
the coverage of the parser. The short form is test_header_fuzz.py.
"""

from __future__ import annotations

import argparse
import base64
import faulthandler
import hashlib
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from types import FunctionType
from typing import Any

import safetensors
from header_inputs import Inputs

from blobstore.errors import BlobStoreError, HeaderError, LimitExceededError
from blobstore.formats import strictjson
from blobstore.formats.safetensors import header as rules
from blobstore.formats.safetensors.header import (
    Header,
    encode_header,
    header_of as read_header,
)
from blobstore.io.ranges import BytesReader

CORPUS = Path(__file__).resolve().parents[2] / "fixtures" / "corpus" / "header.jsonl"
BATCH = 8_000
HANG_S = 60
_FILE_EVERY = 64
_SMALL = 1000


class DisagreementError(AssertionError):
    """An input breaks the sentence at the top of this file."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A class of files that we refuse by our ``rule`` and safetensors 0.8.0 accepts.

    ``words`` are the README's. ``holds`` looks at the header's text with other means than ours.
    """

    name: str
    error: type[BlobStoreError]
    rule: str
    words: str
    holds: Callable[[bytes], bool]


def _document(text: bytes) -> Any:
    return json.loads(text)


def _entries(text: bytes) -> list[Any]:
    return [value for name, value in _document(text).items() if name != "__metadata__"]


def _has_duplicates(text: bytes) -> bool:
    found = []

    def count(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found.append(len(pairs) - len({key for key, _ in pairs}))
        return dict(pairs)

    json.loads(text, object_pairs_hook=count)
    return any(found)


def _depth(value: Any) -> int:
    children = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    )
    return 1 + max(map(_depth, children), default=0)


def _largest(value: Any) -> float:
    children = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    )
    return max(map(_largest, children), default=abs(value) if isinstance(value, int | float) else 0)


_IS_OBJECT = (
    'a dict like {"TENSOR_NAME": {"dtype": "F16", "shape": [1, 16, 256], "data_offsets": [BEGIN, '
    "END]}, …}"
)
DIFFERENCES = (
    Difference(
        "space before the header", HeaderError, "F5",
        "The header data MUST begin with a { character (0x7B).",
        lambda text: text[:1] in (b" ", b"\t", b"\r", b"\n"),
    ),
    Difference(
        "padding that is no space", HeaderError, "F6",
        "The header data MAY be trailing padded with whitespace (0x20).",
        lambda text: text.rstrip(b" \t\r\n") != text.rstrip(b" "),
    ),
    Difference(
        "duplicate keys", HeaderError, "F8",
        "Duplicate keys are disallowed. Not all parsers may respect this.",
        _has_duplicates,
    ),
    Difference(
        "an entry as a list", HeaderError, "F10", _IS_OBJECT,
        lambda text: any(isinstance(one, list) for one in _entries(text)),
    ),
    Difference(
        "a dtype as an object", HeaderError, "F11", _IS_OBJECT,
        lambda text: any(isinstance(one["dtype"], dict) for one in _entries(text)),
    ),
    Difference(
        "a number beyond our limit", LimitExceededError, "F10",
        "our own limit: 1e308; serde's is 1.79e308, about",
        lambda text: _largest(_document(text)) > 1e308,
    ),
    Difference(
        "deeper than our limit", LimitExceededError, "F10",
        "our own limit: 64 levels; serde's is 128",
        lambda text: _depth(_document(text)) > 64,
    ),
)  # fmt: skip


def check(raw: bytes, scratch: Path | None = None) -> str:
    """Return in a few words what became of a file.

    With ``scratch``, a path to write to, metadata are compared too, and what is written has to
    read back equal.

    Raises: DisagreementError; whatever else comes out is one as well.
    """
    reference = _by_reference(raw)
    try:
        header = read_header(BytesReader(raw))
    except (HeaderError, LimitExceededError) as error:
        return _refused(raw, error, reference)
    _check_twins(raw, header)
    if isinstance(reference, str):
        raise DisagreementError(f"we accept what safetensors refuses: {reference}")
    _check_equal(raw, header, reference)
    if scratch is not None:
        _check_metadata(raw, header, scratch)
        _check_written(header)
    return "accepted by the scanner" if header.within_limits else "accepted by the parser"


def _by_reference(raw: bytes) -> list[tuple[str, dict[str, Any]]] | str:
    tensors: list[tuple[str, dict[str, Any]]]
    try:
        tensors = safetensors.deserialize(raw)
    except safetensors.SafetensorError as error:
        return str(error)
    return tensors


def _refused(raw: bytes, error: BlobStoreError, reference: Sequence[object] | str) -> str:
    if isinstance(reference, str):
        return f"refused by {error.rule}"
    text = _text(raw)
    for difference in DIFFERENCES:
        if (
            type(error) is difference.error
            and error.rule == difference.rule
            and difference.holds(text)
        ):
            return f"differs: {difference.name}"
    raise DisagreementError(f"safetensors accepts what we refuse: {error}")


def _text(raw: bytes) -> bytes:
    return raw[8 : 8 + int.from_bytes(raw[:8], "little")]


def _check_twins(raw: bytes, header: Header) -> None:
    text = _text(raw)
    if header.within_limits:
        twin = rules.parse_strictly(text, len(raw) - 8 - len(text))
        same = (
            list(header.tensors.items()) == list(twin.tensors.items())
            and header.metadata == twin.metadata
        )
        if not same or header.data_start != twin.data_start:
            raise DisagreementError(
                f"the scanner reads {dict(header.tensors)!r}, the parser {twin!r}"
            )
        twin.check_limits("what is scanned")
    elif not _for_the_parser(text, header):
        raise DisagreementError("the scanner declines an ordinary header")


def _for_the_parser(text: bytes, header: Header) -> bool:
    """Whether a legal header is of those that the scanner leaves to the parser."""
    has_null = _document(text).get("__metadata__", "") is None
    return (
        has_null
        or b"\\" in text
        or any(len(entry) > 3 for entry in _entries(text))
        or _beyond_limits(header)
    )


def _beyond_limits(header: Header) -> bool:
    """Whether ranks or dimensions are odd enough for the parser."""
    try:
        header.check_limits("")
    except LimitExceededError:
        return True
    return any(
        0 in entry.shape
        and math.prod(max(dim, 1) for dim in entry.shape) * entry.dtype.bits >= 2**64
        for entry in header.tensors.values()
    )


def _check_equal(
    raw: bytes, header: Header, reference: Sequence[tuple[str, dict[str, Any]]]
) -> None:
    if len(reference) != len(header.tensors):
        raise DisagreementError(f"{len(header.tensors)} tensors, safetensors has {len(reference)}")
    for name, wanted in reference:
        entry = header.tensors[name]
        data = raw[header.data_start + entry.begin : header.data_start + entry.end]
        if (entry.dtype.value, list(entry.shape), data) != (
            wanted["dtype"],
            wanted["shape"],
            wanted["data"],
        ):
            raise DisagreementError(f"{name!r} is {entry}, safetensors has {wanted}")


def _check_metadata(raw: bytes, header: Header, scratch: Path) -> None:
    scratch.write_bytes(raw)
    with safetensors.safe_open(scratch, "np") as file:
        if (file.metadata() or {}) != header.metadata:
            raise DisagreementError(
                f"metadata {header.metadata!r}, safetensors has {file.metadata()!r}"
            )


def _check_written(header: Header) -> None:
    text = encode_header(header.tensors, header.metadata, 1)[8:]
    again = rules.parse_strictly(text, None)
    if (again.tensors, again.metadata) != (header.tensors, header.metadata):
        raise DisagreementError(f"{header!r} is written as {text!r}")


@dataclass(slots=True)
class Report:
    """Outcomes of many inputs.

    Counts by `check`'s words, violations of the invariant with reasons, and the longest time.
    """

    counts: Counter[str] = field(default_factory=Counter)
    broken: list[tuple[bytes, str]] = field(default_factory=list)
    slowest_s: float = 0.0

    def add(self, other: Report) -> None:
        """Take in another report."""
        self.counts.update(other.counts)
        self.broken.extend(other.broken)
        self.slowest_s = max(self.slowest_s, other.slowest_s)

    @property
    def executions(self) -> int:
        """Inputs that were looked at."""
        return self.counts.total() + len(self.broken)


def run_batch(seed: str, executions: int, record: Path | None = None) -> Report:
    """Check so many inputs that follow from ``seed``.

    With ``record``, the last is in that file if the process dies.
    """
    report, inputs = Report(), Inputs(seed, corpus_files())
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as file:  # noqa: S108 memory
        for number in range(executions):
            raw = inputs.next()
            if record is not None:
                record.write_bytes(raw)
            started = time.perf_counter()
            try:
                said = check(raw, None if number % _FILE_EVERY else Path(file.name))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 a panic of Rust is no Exception
                report.broken.append((raw, f"{type(error).__name__}: {error}"))
                continue
            report.slowest_s = max(report.slowest_s, time.perf_counter() - started)
            report.counts[said] += 1
            if number % 8 == 0:
                inputs.renew()
            elif number % 32 == 1 and said.startswith("accepted"):
                inputs.keep()
    return report


def watched_batch(seed: str) -> Report:
    """Run a batch in a process of its own, which ends itself with a traceback when it hangs."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    report = run_batch(seed, BATCH)
    faulthandler.cancel_dump_traceback_later()
    return report


@cache
def corpus_files() -> tuple[bytes, ...]:
    """Return the small files of the corpus, good and bad."""
    cases = (json.loads(line) for line in CORPUS.read_text("utf-8").splitlines())
    files = (base64.b64decode(case["bytes_base64"]) for case in cases if "bytes_base64" in case)
    return tuple(raw for raw in files if len(raw) < _SMALL)


def run(seed: str, executions: int, jobs: int, folder: Path) -> Report:
    """Check inputs in several processes, save violations, and print progress every ten seconds."""
    report, started, shown = Report(), time.monotonic(), time.monotonic()
    batches = iter(range(-(-executions // BATCH)))
    with ProcessPoolExecutor(jobs) as pool:
        waiting: dict[Future[Report], str] = {}
        while True:
            for batch in islice(batches, 2 * jobs - len(waiting)):
                waiting[pool.submit(watched_batch, f"{seed}.{batch}")] = f"{seed}.{batch}"
            if not waiting:
                return report
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                try:
                    found = future.result()
                except BrokenProcessPool:
                    sys.exit(
                        "A process died or hung in one of the batches "
                        f"{', '.join(waiting.values())}: see --batch"
                    )
                del waiting[future]
                report.add(found)
                for raw, why in found.broken:
                    print(f"BROKEN {save(folder, raw)}: {why[:500]}", flush=True)
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                rate = report.executions / (shown - started)
                print(
                    f"{report.executions:,} executions, {rate:,.0f}/s, {len(report.broken)} broken",
                    flush=True,
                )


def save(folder: Path, raw: bytes) -> Path:
    """Write an input to a file named for its hash."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(raw).hexdigest()[:16]}.safetensors"
    path.write_bytes(raw)
    return path


def run_atheris(arguments: Sequence[str]) -> None:
    """Check inputs that libFuzzer chooses by the coverage of the parser, until it stops."""
    import atheris

    for module in (rules, strictjson):
        for value in vars(module).values():
            if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                atheris.instrument_func(value)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        if seed % 4 == 0:
            return bytes(atheris.Mutate(data, most))
        return Inputs(seed, (data,), fresh=0).next()[:most]

    def one(data: bytes) -> None:
        check(data)

    atheris.Setup([sys.argv[0], *arguments], one, custom_mutator=mutate)
    atheris.Fuzz()


def main() -> None:
    """Run the long form, or look at saved inputs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", default=f"{time.time_ns()}", help="gives the same inputs again")
    parser.add_argument(
        "--save",
        type=Path,
        default=Path("broken-headers"),
        help="folder for what breaks the invariant",
    )
    parser.add_argument(
        "--batch", help="one batch again, each input written to the folder before it is looked at"
    )
    parser.add_argument("--replay", type=Path, nargs="+", help="look at saved inputs")
    parser.add_argument(
        "--atheris",
        nargs=argparse.REMAINDER,
        help="choose inputs by coverage; libFuzzer's options follow",
    )
    given = parser.parse_args()
    if given.atheris is not None:
        run_atheris(given.atheris)
    for path in given.replay or ():
        print(f"{path}: {check(path.read_bytes())}")
    if given.batch is not None:
        given.save.mkdir(parents=True, exist_ok=True)
        print(run_batch(given.batch, BATCH, given.save / "last.safetensors"))
    elif given.replay is None:
        print(f"seed {given.seed}", flush=True)
        started = time.monotonic()
        report = run(given.seed, given.executions, given.jobs, given.save)
        for said, count in sorted(report.counts.items()):
            print(f"{count:>12,} {said}")
        seconds = time.monotonic() - started
        print(
            f"{report.executions:,} executions in {seconds:,.0f} s, {len(report.broken)} broken; ",
            end="",
        )
        print(f"the slowest took {report.slowest_s:.3f} s", flush=True)
        sys.exit(1 if report.broken else 0)


if __name__ == "__main__":
    main()
