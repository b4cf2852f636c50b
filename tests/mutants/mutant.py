"""Mutants: seeded mistakes, and the tests that must see each.

One TOML file a room, ``[[mutant]]`` tables in it.

A mutant is one replacement in one file: ``old`` stands there exactly once. ``name`` says the
mistake, ``tests`` are the identifiers of tests that fail with it, as pytest takes them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FIELDS = {"name", "file", "old", "new", "tests"}
_NATIVE = (".cpp", ".h")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake: ``old`` becomes ``new`` in ``file``, and one of ``tests`` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def is_native(self) -> bool:
        """True when the mistake is in C++, and is only seen when that is built."""
        return self.file.endswith(_NATIVE)

    def fault(self, root: Path = ROOT) -> str | None:
        """Return why the mutant says nothing about the code under ``root``; None when it does."""
        path = root / self.file
        if not path.is_file():
            return f"there is no {self.file}"
        if self.old == self.new:
            return "it changes nothing"
        count = path.read_text().count(self.old)
        if count != 1:
            return f"its old text stands {count} times in {self.file}"
        return self._fault_of_tests(root)

    def _fault_of_tests(self, root: Path) -> str | None:
        if not self.tests:
            return "no test is named that must see it"
        for test in self.tests:
            file, *names = test.split("::")
            if not (root / file).exists():
                return f"there is no {file}"
            text = (root / file).read_text() if names else ""
            if "StoreTests" in text:  # whose tests every home inherits
                text += "".join(
                    path.read_text() for path in (root / "src/blobstore/testing").glob("*.py")
                )
            for name in names:
                plain = name.split("[")[0]
                if f"def {plain}(" not in text and f"class {plain}" not in text:
                    return f"{file} has no {plain}"
        return None

    def apply(self, root: Path) -> None:
        """Make the mistake in the copy at ``root``."""
        path = root / self.file
        path.write_text(path.read_text().replace(self.old, self.new))


def mutants(*globs: str) -> list[Mutant]:
    """Return the mutants whose name or file matches one of ``globs``; all without one."""
    return [one for one in _all() if not globs or any(_matches(one, glob) for glob in globs)]


def _matches(mutant: Mutant, glob: str) -> bool:
    return fnmatchcase(mutant.name, glob) or fnmatchcase(mutant.file, glob)


def _all() -> Iterator[Mutant]:
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        for row in tomllib.loads(path.read_text())["mutant"]:
            if row.keys() != _FIELDS:
                raise ValueError(
                    f"{path.name}: {row.get('name')}: the fields are {sorted(_FIELDS)}"
                )
            yield Mutant(row["name"], row["file"], row["old"], row["new"], tuple(row["tests"]))
