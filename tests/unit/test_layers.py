"""The house's rules: a module imports from lower layers only, heavy libraries inside functions only."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

SOURCE = ROOT / "src" / "blobstore"

# docs/design.md, "Layers": a module may import from the rows above its own, and a package's files from one another.
LAYERS = (
    {"errors"},
    {"budget", "coverage", "digest", "names", "dtypes", "strictjson", "tiles"},
    {"quant"},
    {"documents", "arrays", "ranges", "transport", "runtimes"},
    {"kernels", "store", "safetensors", "checkpoint", "mapped", "provenance"},
    {"stored", "remote"},
    {"mlx_settings", "source"},
    {"tensors"},
    {"importer", "loader", "inspection", "comparison", "metadata", "network"},
    {"mlx_lm", "quality", "care", "listing", "export"},
    {"cli"},
    {"__init__", "__main__"},
)
HEAVY = {"mlx", "torch", "mlx_lm", "transformers", "rich", "httpx2", "httpcore2"}
NUMPY_FREE = {
    "budget",
    "coverage",
    "errors",
    "digest",
    "names",
    "dtypes",
    "quant",
    "strictjson",
    "tiles",
    "documents",
    "provenance",
    "ranges",
    "runtimes",
    "mapped",
    "store",
    "safetensors",
    "mlx_settings",
    "stored",
    "transport",
    "remote",
    "inspection",
}
ONLY_CLI_READS = {"environ", "getenv", "argv"}

FILES = sorted(SOURCE.rglob("*.py"))


def unit_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0].removesuffix(".py")


def layer_of(unit: str) -> int:
    return next(number for number, units in enumerate(LAYERS) if unit in units)


def imports_of(path: Path) -> list[tuple[str, bool]]:
    """Return the modules that a file imports, and whether that is at its top (not in a function, not for types only)."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "blobstore":
            found += [(f"blobstore.{alias.name}", id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, id(node) in top))
    return found


def test_every_module_has_a_layer() -> None:
    assert {unit_of(path) for path in FILES} == set().union(*LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    if unit_of(path) == "__init__":
        return
    wrong = []
    for module, _ in imports_of(path):
        parts = module.split(".")
        if parts[0] != "blobstore" or parts[1:2] in ([], ["__version__"], [unit_of(path)]):
            continue
        if layer_of(parts[1]) >= layer_of(unit_of(path)):
            wrong.append(module)
    assert wrong == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_heavy_libraries_are_imported_in_functions(path: Path) -> None:
    at_top = {module.split(".")[0] for module, top in imports_of(path) if top}
    assert not at_top & HEAVY
    if unit_of(path) in NUMPY_FREE:
        assert not at_top & {"numpy", "ml_dtypes"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_the_command_line_reads_the_environment_and_prints(path: Path) -> None:
    names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    calls = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
    if unit_of(path) != "cli":
        assert not names & ONLY_CLI_READS
        assert "print" not in calls


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_have_one_job_and_fit_in_a_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, json, blobstore; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    loaded = set(json.loads(subprocess.check_output([sys.executable, "-c", code])))
    assert not loaded & (HEAVY | {"numpy", "pydantic", "typer"})


def test_the_top_level_stays_small() -> None:
    listed = subprocess.check_output(["git", "-C", str(ROOT), "ls-files"], text=True).split()
    top = {name.split("/")[0] for name in listed}
    assert top <= {".ci", ".gitignore", "LICENSE", "README.md", "docs", "fixtures", "pyproject.toml", "src", "tests"}
