"""Records what users see, and replays it: ``python tests/battery record|replay|show [GLOB…]``.

``replay`` prints one line a difference, and exits with 1 if facts differ that tests/battery/
allowed.toml does not list; ``--words`` shows changed texts too. ``show SCENARIO`` prints what a
scenario gives now, to compare with another checkout. ``record`` overwrites fixtures/battery: only
with the code whose behaviour is to stay (commit fd19f72e for issue 31), and only for new cases.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import resource
import shutil
import sys
import tempfile
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from battery import differences
from battery.public import helps, signatures
from battery.scenarios import Scenario, World, together, warm_up

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parents[1] / "fixtures" / "battery"
Record = dict[str, Any]


def main() -> int:
    """Record, replay or show. Return 1 if facts differ."""
    options = _options()
    document = tomllib.loads((HERE / "cases.toml").read_text())
    scenarios = [one for one in Scenario.read(document) if _is_chosen(one.name, options)]
    parts = [name for name in ("names", "helps") if _is_chosen(name, options)]
    if not scenarios and not parts:
        sys.exit("no scenario is called so")
    start: dict[str, Record] = {}
    if "names" in parts:
        start["names"] = together([signatures])[0]
    warm_up(has_lm=any(one.has_lm for one in scenarios))  # once for all processes
    chosen: list[Scenario | str] = [*parts, *scenarios]
    run = partial(_found, chosen, options.jobs, document["environment"], start)
    if options.action == "record":
        first, second = together([run, run])
        for name, record in first.items():
            _write(RECORDS / f"{name}.json", differences.masked(record, second[name]))
        return 0
    found = run()
    if options.action == "show":
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return 0
    return _replay(found, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python tests/battery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("record", "replay", "show"))
    parser.add_argument("globs", nargs="*", metavar="GLOB", help="only these scenarios")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("--words", action="store_true", help="show changed texts too")
    parser.add_argument("--most", type=int, default=12, metavar="N", help="lines a step (12)")
    parser.add_argument(
        "--allow", type=Path, default=HERE / "allowed.toml", help="differences that may be"
    )
    return parser.parse_intermixed_args()


def _is_chosen(name: str, options: argparse.Namespace) -> bool:
    return not options.globs or any(fnmatch.fnmatchcase(name, glob) for glob in options.globs)


def _found(
    chosen: list[Scenario | str], jobs: int, variables: dict[str, str], start: dict[str, Record]
) -> dict[str, Record]:
    """Return the records of scenarios and parts, which ``jobs`` processes share."""
    shares = [share for share in (chosen[number::jobs] for number in range(jobs)) if share]
    found = dict(start)
    for records in together([partial(_run, share, variables) for share in shares]):
        found |= records
    return found


def _run(chosen: list[Scenario | str], variables: dict[str, str]) -> dict[str, Record]:
    scenarios = [one for one in chosen if isinstance(one, Scenario)]
    found: dict[str, Record] = {}
    # Not TemporaryDirectory: a command that runs exit functions in its fork would remove it.
    world = World(Path(tempfile.mkdtemp(prefix="battery-")), variables)
    try:
        if "helps" in chosen:
            found["helps"] = helps(world)
        with world.servers({kind for one in scenarios for kind in one.servers}):
            for scenario in scenarios:
                found[scenario.name] = scenario.run(world)
    finally:
        shutil.rmtree(world.root, ignore_errors=True)
    return found


def _write(path: Path, record: Record) -> None:
    """Write a record, one line a step."""
    path.parent.mkdir(exist_ok=True)
    lines = [
        f"{json.dumps(step)}: {json.dumps(outcome, ensure_ascii=False, sort_keys=True)}"
        for step, outcome in record.items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _replay(found: dict[str, Record], options: argparse.Namespace) -> int:
    allowed = tomllib.loads(options.allow.read_text()).get("allow", [])
    counts = {"facts": 0, "words": 0, "allowed": 0}
    for name, record in found.items():
        path = RECORDS / f"{name}.json"
        old = json.loads(path.read_text()) if path.exists() else {}
        for step, changes in differences.between(old, record).items():
            shown = []
            for change in changes:
                kind = change.kind(name, step, allowed)
                counts[kind] += 1
                if kind == "facts" or (kind == "words" and options.words):
                    shown.append(str(change))
            if shown:
                print(f"{name}: {step}")
                print("".join(f"    {line}\n" for line in shown[: options.most]), end="")
                if len(shown) > options.most:
                    print(f"    … and {len(shown) - options.most} more")
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(one.ru_utime + one.ru_stime for one in used)
    print(
        f"{sum(map(len, found.values()))} steps, {seconds:.0f} s of processor time: "
        f"{counts['facts']} facts differ, {counts['words']} words, {counts['allowed']} allowed"
    )
    return 1 if counts["facts"] else 0


if __name__ == "__main__":
    sys.exit(main())
