"""Makes seeded mistakes one by one, and says which no test sees: ``python tests/mutants [GLOB…]``.

A GLOB matches the name of a mutant or the file that it changes. Exit code 0: every mistake was
seen. ``--find TEST…`` runs other tests than those that a mutant names, and prints which of them
fails first: for writing new ones.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutants.copies import Copy
from mutants.mutant import Mutant, mutants

_PASSED, _FAILED = 0, 1
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def main() -> int:
    """Make each mistake in a copy of the checkout.

    Return 1 when one is not seen, or can't be made.
    """
    options = _options()
    chosen = mutants(*options.globs)
    if not chosen:
        sys.exit("no mutant is called so")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        jobs = min(options.jobs, len(chosen))
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            copies.put(Copy(Path(folder) / str(number)))
        if not options.find and (wrong := _fail_without(copies, chosen)):
            sys.exit(f"these fail without any mistake:\n{wrong}")
        with ThreadPoolExecutor(jobs) as pool:
            seen = list(
                pool.map(lambda mutant: _is_seen(mutant, copies, tuple(options.find)), chosen)
            )
    print(f"{len(seen)} mutants: {sum(seen)} killed, {len(seen) - sum(seen)} not")
    return 0 if all(seen) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python tests/mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("globs", nargs="*", metavar="GLOB", help="only these")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument(
        "--find",
        nargs="+",
        default=[],
        metavar="TEST",
        help="run these tests, print the first that fails",
    )
    return parser.parse_args()


def _fail_without(copies: SimpleQueue[Copy], chosen: list[Mutant]) -> str:
    """Return what the tests print when they fail on the code as it is; nothing when they pass."""
    tests = tuple(sorted({test for mutant in chosen for test in mutant.tests}))
    copy = copies.get()
    code, printed = copy.test(tests, timeout_s=None)
    copies.put(copy)
    return "" if code == _PASSED else printed


def _is_seen(mutant: Mutant, copies: SimpleQueue[Copy], instead: tuple[str, ...]) -> bool:
    fault = mutant.fault()
    if fault and not instead:
        print(f"STALE    {mutant.name}: {fault}", flush=True)
        return False
    copy = copies.get()
    try:
        copy.make(mutant)
        code, printed = copy.test(instead or mutant.tests)
    finally:
        copy.unmake(mutant)
        copies.put(copy)
    verdict = {_PASSED: "SURVIVED", _FAILED: "killed  "}.get(code, "BROKEN  ")
    failure = _FAILURE.search(printed)
    first = failure[1] if failure else printed[-300:] if code != _PASSED else ""
    print(f"{verdict} {mutant.name}  {first}", flush=True)
    return code == _FAILED


if __name__ == "__main__":
    sys.exit(main())
