"""A copy of the checkout for mutants, and an interpreter that imports it first."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from mutants.mutant import ROOT, Edit

_COPIED = ("src", "tests", "docs", ".ci")
_NOT_COPIED = shutil.ignore_patterns("__pycache__", "build")
_LINKED = ("fixtures", "README.md", "LICENSE", "pyproject.toml")
_NATIVE = {".cpp", ".h"}
_PYTEST = "-x -q -p no:cacheprovider -p no:xdist -o addopts=--import-mode=importlib --timeout=600"
TIMEOUT_S = 1200
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
        site = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
        (packages / "mutants.pth").write_text("\n".join([str(folder / "src"), *site]) + "\n")
        self._copy_built()

    def _copy_built(self) -> None:
        for stub in self.root.glob("src/blobstore/**/_native.pyi"):
            name = ".".join(stub.relative_to(self.root / "src").with_suffix("").parts)
            spec = find_spec(name)
            if spec is None or spec.origin is None:
                raise RuntimeError(f"{name} is not built: install blobstore first")
            shutil.copy(spec.origin, stub.parent)

    def test(self, tests: tuple[str, ...], timeout_s: float | None = TIMEOUT_S) -> tuple[int, str]:
        """Return pytest's exit code and output, until the first failure; a hang is a failure."""
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        # A change within the same second would not be seen.
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        try:
            done = subprocess.run(
                [str(self._python), "-m", "pytest", *_PYTEST.split(), *tests],
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

    @contextmanager
    def changed(self, edit: Edit) -> Iterator[None]:
        """Have a mistake in the copy, in C++ as well, inside the block."""
        is_native = edit.file.suffix in _NATIVE
        try:
            (self.root / edit.file).write_text(edit.text)
            if is_native:
                self._build()
            yield
        finally:
            shutil.copy(ROOT / edit.file, self.root / edit.file)
            if is_native:
                self._copy_built()

    def _build(self) -> None:
        """Build the C++ of the copy into it; what has not changed is not compiled again."""
        if find_spec("scikit_build_core") is None or find_spec("nanobind") is None:
            raise RuntimeError("mutants of C++ need what docs/development.md installs first")
        wheels = self.root / "wheels"
        options = ["-q", "--no-deps", "--no-build-isolation", "-w", str(wheels)]
        options += ["-C", f"build-dir={self.root / 'build'}", str(self.root)]
        subprocess.run([sys.executable, "-m", "pip", "wheel", *options], check=True)
        for wheel in wheels.iterdir():
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if name.endswith(".so"):
                        archive.extract(name, self.root / "src")
            wheel.unlink()
