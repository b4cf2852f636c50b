"""A copy of the checkout for mutants, and an interpreter that imports it first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

from mutants.mutant import ROOT, Mutant

_COPIED = ("src", "tests", "docs", ".ci")
_NOT_COPIED = shutil.ignore_patterns("__pycache__", "build")
_LINKED = ("fixtures", "README.md", "LICENSE", "pyproject.toml")
_NEEDED_TO_BUILD = ("scikit_build_core", "nanobind")
TIMEOUT_S = 600
"""For the tests of one mutant."""


class Copy:
    """A private copy of the checkout in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        for name in _COPIED:
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=_NOT_COPIED)
        for name in _LINKED:
            (folder / name).symlink_to(ROOT / name)
        venv.create(folder / ".venv", with_pip=False, symlinks=True)
        self._python = folder / ".venv/bin/python"
        # A folder in a .pth file is only added: what an editable install of blobstore hooks in
        # there is not run.
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / ".venv")}))
        (packages / "mutants.pth").write_text(
            "\n".join([str(folder / "src"), *_site_packages()]) + "\n"
        )
        self._copy_built()

    def _copy_built(self) -> None:
        for room in ("hashing", "kernels", "formats.safetensors"):
            spec = find_spec(f"blobstore.{room}._native")
            if spec is None or spec.origin is None:
                raise RuntimeError(f"blobstore.{room} is not built: install blobstore first")
            shutil.copy(spec.origin, self.root / "src/blobstore" / room.replace(".", "/"))

    def test(self, tests: tuple[str, ...], timeout_s: float | None = TIMEOUT_S) -> tuple[int, str]:
        """Run tests until the first fails; return pytest's exit code and what it printed.

        A hang is a failure.
        """
        options = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-o",
            "addopts=--import-mode=importlib",
        ]
        line = [str(self._python), "-m", "pytest", *options, "--timeout=120", *tests]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment["PYTHONDONTWRITEBYTECODE"] = (
            "1"  # a change within the same second would not be seen
        )
        try:
            done = subprocess.run(
                line,
                cwd=self.root,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return 1, "hung"
        return done.returncode, done.stdout + done.stderr

    def make(self, mutant: Mutant) -> None:
        """Make a mistake, in C++ as well."""
        mutant.apply(self.root)
        if mutant.is_native:
            self._build()

    def unmake(self, mutant: Mutant) -> None:
        """Undo it."""
        shutil.copy(ROOT / mutant.file, self.root / mutant.file)
        if mutant.is_native:
            self._copy_built()

    def _build(self) -> None:
        """Build the C++ of the copy into it; what has not changed is not compiled again."""
        missing = [name for name in _NEEDED_TO_BUILD if find_spec(name) is None]
        if missing:
            raise RuntimeError(
                "mutants of C++ need what docs/development.md installs first: " + ", ".join(missing)
            )
        wheels = self.root / "wheels"
        line = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(wheels),
        ]
        subprocess.run(
            [*line, "-C", f"build-dir={self.root / 'build'}", str(self.root)], check=True
        )
        for wheel in wheels.iterdir():
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if name.endswith(".so"):
                        archive.extract(name, self.root / "src")
            wheel.unlink()


def _site_packages() -> list[str]:
    return [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
