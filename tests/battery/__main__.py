"""Records what users see, and replays it: ``python tests/battery record|replay [GLOB…]``.

``replay`` prints one line a difference, and exits with 1 if facts differ that tests/battery/
allowed.toml does not list; ``--words`` shows changed texts too. ``record`` overwrites
fixtures/battery: only with the code whose behaviour is to stay (commit fd19f72e for issue 31), and
only for new cases.
"""

import argparse
import fnmatch
import json
import multiprocessing
import sys
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from battery import differences
from battery.scenarios import Scenario, sources, warm_up

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parents[1] / "fixtures" / "battery"
CASES = tomllib.loads((HERE / "cases.toml").read_text())
SCENARIOS = {scenario.name: scenario for scenario in Scenario.read(CASES)}
Record = dict[str, Any]


def main() -> int:
    """Record or replay. Return 1 if facts differ."""
    parser = argparse.ArgumentParser(prog="python tests/battery", description=__doc__)
    parser.add_argument("action", choices=("record", "replay"))
    parser.add_argument("globs", nargs="*", metavar="GLOB", help="only these scenarios")
    parser.add_argument("--words", action="store_true", help="show changed texts too")
    options = parser.parse_intermixed_args()
    globs = options.globs or ["*"]
    chosen = [name for name in SCENARIOS if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]
    if not chosen:
        sys.exit("no scenario is called so")
    found = _records(chosen)
    if options.action == "replay":
        return _replay(found, are_words_shown=options.words)
    second = _records(chosen)
    for name, record in found.items():
        _write(RECORDS / f"{name}.json", differences.masked(record, second[name]))
    return 0


def _records(chosen: list[str]) -> dict[str, Record]:
    warm_up(has_lm=any(name.startswith("run") for name in chosen))  # once for all processes
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as processes:
        return dict(zip(chosen, processes.map(_record, chosen), strict=True))


def _record(name: str) -> Record:
    with sources() as root:
        return SCENARIOS[name].run(root, CASES["environment"])


def _write(path: Path, record: Record) -> None:
    """Write a record, one line a step."""
    lines = [
        f"{json.dumps(step)}: {json.dumps(outcome, ensure_ascii=False, sort_keys=True)}"
        for step, outcome in record.items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _replay(found: dict[str, Record], *, are_words_shown: bool) -> int:
    allowed = tomllib.loads((HERE / "allowed.toml").read_text()).get("allow", [])
    counts = {"facts": 0, "words": 0, "allowed": 0}
    for name, record in found.items():
        path = RECORDS / f"{name}.json"
        old = json.loads(path.read_text()) if path.exists() else {}
        for step, changes in differences.between(old, record).items():
            for change in changes:
                kind = change.kind(name, step, allowed)
                counts[kind] += 1
                if kind == "facts" or (kind == "words" and are_words_shown):
                    print(f"{name}: {step}\n    {change}")
    steps = sum(map(len, found.values()))
    print(f"{steps} steps:", ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 1 if counts["facts"] else 0


if __name__ == "__main__":
    sys.exit(main())
