"""The invariant of headers, and the program that looks for a file which breaks it.

Whatever the bytes: scanner and parser agree, only our typed errors come out, what we accept the
safetensors package reads equally, and what we refuse it refuses too, but for the classes of
`DIFFERENCES`, in which it is laxer than its README or than our limits.

`python tests/fuzz/headers.py --executions 50000000 --jobs 2` is the long form. Files that break the
sentence are saved, and `--replay FILE…` checks them again. The short form is test_header_fuzz.py.
"""

import argparse
import base64
import hashlib
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import safetensors
from header_inputs import Inputs

from blobstore.errors import BlobStoreError, HeaderError, LimitExceededError
from blobstore.formats.safetensors.header import Header, encode_header, header_of, parse_strictly
from blobstore.io.ranges import BytesReader

CORPUS = Path(__file__).resolve().parents[2] / "fixtures" / "corpus" / "header.jsonl"
BATCH = 4_000
FILE_EVERY = 64


class DisagreementError(AssertionError):
    """An input breaks the sentence at the top of this file."""


def entries_of(text: bytes) -> list[Any]:
    return [value for name, value in json.loads(text).items() if name != "__metadata__"]


def has_duplicates(text: bytes) -> bool:
    found: list[list[str]] = []
    json.loads(text, object_pairs_hook=lambda pairs: found.append([key for key, _ in pairs]))
    return any(len(keys) > len(set(keys)) for keys in found)


def children_of(value: Any) -> list[Any]:
    return (
        [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    )


def depth(value: Any) -> int:
    return 1 + max(map(depth, children_of(value)), default=0)


def largest(value: Any) -> float:
    own = abs(value) if isinstance(value, int | float) else 0
    return max(map(largest, children_of(value)), default=own)


def has_an_entry(text: bytes, is_it: Callable[[Any], bool]) -> bool:
    return any(map(is_it, entries_of(text)))


DIFFERENCES: dict[str, tuple[type[BlobStoreError], str, Callable[[bytes], bool]]] = {
    "space before the header": (HeaderError, "F5", lambda text: text != text.lstrip(b" \t\r\n")),
    "padding that is no space": (
        HeaderError,
        "F6",
        lambda text: text.rstrip(b" \t\r\n") != text.rstrip(b" "),
    ),
    "duplicate keys": (HeaderError, "F8", has_duplicates),
    "an entry as a list": (
        HeaderError,
        "F10",
        lambda text: has_an_entry(text, lambda one: isinstance(one, list)),
    ),
    "a dtype as an object": (
        HeaderError,
        "F11",
        lambda text: has_an_entry(text, lambda one: isinstance(one["dtype"], dict)),
    ),
    "a number beyond our limit": (
        LimitExceededError,
        "F10",
        lambda text: largest(json.loads(text)) > 1e308,
    ),
    "deeper than our limit": (LimitExceededError, "F10", lambda text: depth(json.loads(text)) > 64),
}
"""What we refuse and safetensors 0.8.0 accepts: our error and rule, and a check by other means.

Its README forbids most. Our limits are 64 levels and 1e308; serde's are 128 and about 1.79e308.
"""


def check(raw: bytes, scratch: Path | None = None) -> str:
    """Return in a few words what became of a file.

    With ``scratch``, a path to write to, metadata are compared too, and what is written has to
    read back equal.

    Raises: DisagreementError; whatever else comes out is one as well.
    """
    reference: list[tuple[str, dict[str, Any]]] | str
    try:
        reference = safetensors.deserialize(raw)
    except safetensors.SafetensorError as error:
        reference = str(error)
    text = raw[8 : 8 + int.from_bytes(raw[:8], "little")]
    try:
        header = header_of(BytesReader(raw))
    except (HeaderError, LimitExceededError) as error:
        if isinstance(reference, str):
            return f"refused by {error.rule}"
        return refused(text, error)
    check_twins(raw, text, header)
    if isinstance(reference, str):
        raise DisagreementError(f"we accept what safetensors refuses: {reference}")
    ours = {
        name: (entry.dtype.value, [*entry.shape], raw[header.data_start :][entry.begin : entry.end])
        for name, entry in header.tensors.items()
    }
    theirs = {name: (one["dtype"], one["shape"], one["data"]) for name, one in reference}
    if ours != theirs or len(ours) != len(reference):
        raise DisagreementError(f"{ours} are {reference} for safetensors")
    if scratch is not None:
        scratch.write_bytes(raw)
        with safetensors.safe_open(scratch, "np") as file:
            if (file.metadata() or {}) != header.metadata:
                raise DisagreementError(f"{header.metadata!r} are {file.metadata()!r}")
        written = parse_strictly(encode_header(header.tensors, header.metadata, 1)[8:], None)
        if (written.tensors, written.metadata) != (header.tensors, header.metadata):
            raise DisagreementError(f"{header!r} is written as {written!r}")
    return "accepted by the scanner" if header.within_limits else "accepted by the parser"


def refused(text: bytes, error: HeaderError | LimitExceededError) -> str:
    for name, (kind, rule, holds) in DIFFERENCES.items():
        if (type(error), error.rule) == (kind, rule) and holds(text):
            return f"differs: {name}"
    raise DisagreementError(f"safetensors accepts what we refuse: {error}") from error


def check_twins(raw: bytes, text: bytes, header: Header) -> None:
    """Check that the parser reads what the scanner read, or that the scanner may decline it."""
    if not header.within_limits:
        if not is_for_the_parser(text, header):
            raise DisagreementError("the scanner declines an ordinary header")
        return
    twin = parse_strictly(text, len(raw) - 8 - len(text))
    found, wanted = (
        (list(one.tensors.items()), one.metadata, one.data_start) for one in (header, twin)
    )
    if found != wanted:
        raise DisagreementError(f"the scanner reads {found!r}, the parser {wanted!r}")
    twin.check_limits("what is scanned")


def is_for_the_parser(text: bytes, header: Header) -> bool:
    """Return True if a legal header is odd enough: escapes, more fields, ranks, dimensions."""
    if b"\\" in text or json.loads(text).get("__metadata__", "") is None:
        return True
    try:
        header.check_limits("")
    except LimitExceededError:
        return True
    return any(len(entry) > 3 for entry in entries_of(text)) or any(
        0 in entry.shape
        and math.prod(max(dim, 1) for dim in entry.shape) * entry.dtype.bits >= 2**64
        for entry in header.tensors.values()
    )


@dataclass(slots=True)
class Report:
    """What became of many inputs: a count of each of `check`'s words, and violations."""

    counts: Counter[str] = field(default_factory=Counter)
    broken: list[tuple[bytes, str]] = field(default_factory=list)


def run_batch(seed: str) -> Report:
    """Check `BATCH` inputs that follow from ``seed``."""
    report, inputs = Report(), Inputs(seed, corpus_files())
    with tempfile.NamedTemporaryFile() as file:
        for number in range(BATCH):
            raw = inputs.next()
            try:
                said = check(raw, None if number % FILE_EVERY else Path(file.name))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 a panic of Rust is no Exception
                report.broken.append((raw, f"{type(error).__name__}: {error}"))
                continue
            report.counts[said] += 1
            if number % 8 == 0:
                inputs.renew()
            elif number % 32 == 1 and said.startswith("accepted"):
                inputs.keep()
    return report


@cache
def corpus_files() -> tuple[bytes, ...]:
    cases = (json.loads(line) for line in CORPUS.read_text("utf-8").splitlines())
    files = (base64.b64decode(case["bytes_base64"]) for case in cases if "bytes_base64" in case)
    return tuple(raw for raw in files if len(raw) < 1000)


def run(seed: str, executions: int, jobs: int, folder: Path) -> Report:
    """Check inputs in several processes, and save violations; a dead process ends the program."""
    whole = Report()
    seeds = [f"{seed}.{number}" for number in range(-(-executions // BATCH))]
    with ProcessPoolExecutor(jobs) as pool:
        for batch, report in zip(seeds, pool.map(run_batch, seeds), strict=True):
            print(f"{batch}: {len(report.broken)} broken", flush=True)
            whole.counts.update(report.counts)
            whole.broken.extend(report.broken)
            for raw, why in report.broken:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{hashlib.sha256(raw).hexdigest()[:16]}.safetensors"
                path.write_bytes(raw)
                print(f"BROKEN {path}: {why[:500]}", flush=True)
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", default=f"{time.time_ns()}", help="gives the same inputs again")
    parser.add_argument("--save", type=Path, default=Path("broken-headers"), help="a folder")
    parser.add_argument("--replay", type=Path, nargs="+", help="check saved inputs")
    given = parser.parse_args()
    if given.replay:
        for path in given.replay:
            print(f"{path}: {check(path.read_bytes())}")
    else:
        report = run(given.seed, given.executions, given.jobs, given.save)
        for said, count in sorted(report.counts.items()):
            print(f"{count:>12,} {said}")
        print(f"{report.counts.total():,} executions, {len(report.broken)} broken")
        sys.exit(1 if report.broken else 0)


if __name__ == "__main__":
    main()
