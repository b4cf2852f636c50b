"""Makes seeded mistakes one by one, and says which no test sees: ``python tests/mutants [GLOB…]``.

A GLOB matches the name of a mutant or its symbol. ``--sample 20`` takes so many of those in Python,
others for each commit, and does not check that the tests pass without them. ``--find TEST…`` runs
other tests than those that a mutant names, and prints which of them fails first. Exit code 0: all
were seen.
"""

import argparse
import random
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutants.copies import Copy
from mutants.mutant import ROOT, FaultError, Mutant, mutants

_PASSED, _FAILED = 0, 1
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def main() -> int:
    """Make each mistake in a copy of the checkout; return 1 if one is not seen or can't be made."""
    options = _options()
    chosen = mutants(*options.globs)
    if options.sample:
        python = [mutant for mutant in chosen if not mutant.is_native]
        print(f"--sample {options.sample} --seed {options.seed}", flush=True)
        chosen = random.Random(options.seed).sample(python, min(options.sample, len(python)))
    if not chosen:
        sys.exit("no mutant has such a name")
    # What is in C++ is built in one copy: only the first build there compiles everything.
    native = [mutant for mutant in chosen if mutant.is_native]
    groups = [native] * bool(native) + [[one] for one in chosen if not one.is_native]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(options.jobs):
            copies.put(Copy(Path(folder) / str(number)))
        with ThreadPoolExecutor(options.jobs) as pool:
            is_short = options.find or options.sample
            tests = () if is_short else sorted({test for one in chosen for test in one.tests})
            plain = pool.submit(_fail_without, copies, tuple(tests))
            seen = sum(pool.map(lambda group: _seen(group, copies, options.find), groups))
    print(f"{len(chosen)} mutants: {seen} killed, {len(chosen) - seen} not")
    if plain.result():
        sys.exit(f"these fail without any mistake:\n{plain.result()}")
    return 0 if seen == len(chosen) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python tests/mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("globs", nargs="*", metavar="GLOB", help="only these")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="only N of them")
    parser.add_argument("--seed", default=_commit(), help="of the sample (the commit)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument("--find", nargs="+", default=(), metavar="TEST", help="run these tests")
    return parser.parse_args()


def _commit() -> str:
    """Return the commit's name; the day where there is no repository."""
    line = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return done.stdout.strip() or str(datetime.now(tz=UTC).date())


def _fail_without(copies: SimpleQueue[Copy], tests: tuple[str, ...]) -> str:
    """Return what the tests print if they fail on the code as it is, "" if they pass."""
    copy = copies.get()
    try:
        code, printed = copy.test(tests, timeout_s=None) if tests else (_PASSED, "")
    finally:
        copies.put(copy)
    return "" if code == _PASSED else printed


def _seen(group: list[Mutant], copies: SimpleQueue[Copy], instead: tuple[str, ...]) -> int:
    copy = copies.get()
    try:
        return sum(_is_seen(mutant, copy, tuple(instead)) for mutant in group)
    finally:
        copies.put(copy)


def _is_seen(mutant: Mutant, copy: Copy, instead: tuple[str, ...]) -> bool:
    try:
        with copy.changed(mutant.edit()):
            code, printed = copy.test(instead or mutant.tests)
    except FaultError as error:
        print(f"STALE    {mutant.name}: {error}", flush=True)
        return False
    verdict = {_PASSED: "SURVIVED", _FAILED: "killed  "}.get(code, "BROKEN  ")
    failure = _FAILURE.search(printed)
    first = failure[1] if failure else printed[-300:] if code != _PASSED else ""
    hung = " (hung)" if "Timeout" in printed else ""
    print(f"{verdict} {mutant.name}  {first}{hung}", flush=True)
    return code == _FAILED


if __name__ == "__main__":
    sys.exit(main())
