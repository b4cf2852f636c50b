"""The layering: imports from lower rooms only, heavy libraries only inside functions."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from support import PYCODE, ROOT
from support.sources import FILES, SOURCE, tree_of

import blobstore

# docs/design.md, "Rooms": a file may import from the rooms above its own, and from its own.
ROOMS = (
    {"_version", "errors"},
    {"names"},
    {"hashing"},
    {"io"},
    {"formats"},
    {"kernels"},
    {"store"},
    {"source", "model"},
    {"importer"},
    {"inspection", "export"},
    {"distributed", "mlx_lm", "testing", "views"},
    {"plots"},
    {"web"},
    {"cli"},
    {"__init__", "__main__"},
)
# Folders inside a room, lower ones first: a file imports from none above its own. The files beside
# them may lie above or below; what holds for all is that no imports lead back to where they began.
FOLDERS = {
    "formats": ("safetensors",),
    "io": ("http",),
    "store": ("packed", "signing", "local", "care", "registry", "bucket", "archive"),
}
HEAVY = {"mlx", "torch", "mlx_lm", "transformers", "rich", "truststore", "zstandard"}
HEAVY |= {"cryptography", "nacl", "obstore", "dask", "distributed"}
HEAVY |= {"starlette", "uvicorn", "anyio", "vl_convert", "playwright"}
TOP_OF = {"web": {"starlette", "uvicorn", "anyio"}}  # `cli` imports `web` inside functions
TOP_OF["mlx_lm/chat_service.py"] = {"mlx", "mlx_lm"}  # `cli` imports it inside a function
NUMPY_FREE = {"errors", "names", "hashing", "io", "formats", "store"}
ONLY_CLI_READS = {"environ", "getenv", "argv"}


def room_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0].removesuffix(".py")


def shown(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def row_of(room: str) -> int:
    return next(number for number, rooms in enumerate(ROOMS) if room in rooms)


@cache
def imports_of(path: Path) -> list[tuple[str, bool]]:
    """Return the modules that a file imports, and whether at its top.

    Top means: not in a function, and not for types only.
    """
    tree = tree_of(path)
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


def test_every_file_has_a_room() -> None:
    assert {room_of(path) for path in FILES} == set().union(*ROOMS)


def test_imports_point_down() -> None:
    wrong = [
        (shown(path), module)
        for path in FILES
        if room_of(path) != "__init__"
        for module, _ in imports_of(path)
        if (room := room_of_module(module)) not in (None, room_of(path))
        and row_of(room) >= row_of(room_of(path))
    ]
    assert wrong == []


def room_of_module(module: str) -> str | None:
    """Return a module's room in blobstore; None for other packages and the package itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == "blobstore" and parts[1:2] not in ([], ["__version__"]) else None


@cache
def modules() -> dict[str, Path]:
    """Return the files of the package by the names of their modules, without the package's."""
    found = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in FILES}
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


@cache
def modules_of(path: Path) -> set[str]:
    """Return the modules of the package that a file imports: at its top, in functions, for types.

    Importing a name from a folder imports the folder's ``__init__``; a module, that module.
    """
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{shown(path)}: imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                name = whole.removeprefix("blobstore.")
                is_native = (SOURCE / name.replace(".", "/")).with_suffix(".pyi").exists()
                found.add(whole if name in modules() or is_native else str(node.module))
    names = {name.removeprefix("blobstore.") for name in found if name.startswith("blobstore")}
    return {"__init__" if name == "blobstore" else name for name in names} & modules().keys()


def test_no_imports_lead_back_to_where_they_began() -> None:
    graph = {name: modules_of(path) - {name} for name, path in modules().items()}
    TopologicalSorter(graph).prepare()  # CycleError names the modules


def test_folders_inside_rooms_have_an_order() -> None:
    inner = {path.relative_to(SOURCE).parts[:2] for path in FILES if is_inner(path)}
    assert {
        (room, folder) for room, folder in inner if folder not in FOLDERS.get(room, ())
    } == set()
    wrong = [
        (shown(path), module)
        for path in FILES
        if is_inner(path)
        for module in modules_of(path)
        if is_inner(there := modules()[module]) and room_of(there) == room_of(path)
        if rank_of(there) > rank_of(path)
    ]
    assert wrong == []


def is_inner(path: Path) -> bool:
    return len(path.relative_to(SOURCE).parts) > 2


def rank_of(path: Path) -> int:
    return FOLDERS[room_of(path)].index(path.relative_to(SOURCE).parts[1])


def test_heavy_libraries_are_imported_in_functions() -> None:
    wrong = [
        (shown(path), module)
        for path in FILES
        for module, is_top in imports_of(path)
        if is_top
        and module.split(".")[0]
        in HEAVY - TOP_OF.get(room_of(path), set()) - TOP_OF.get(shown(path), set())
        | ({"numpy", "ml_dtypes"} if room_of(path) in NUMPY_FREE else set())
    ]
    assert wrong == []


PROGRAMS = {"mlx_lm/template_process.py"}
"""Modules that also run as a process of their own, which answers on its standard output."""


def test_only_the_command_line_reads_the_environment_and_prints() -> None:
    wrong = []
    for path in FILES:
        nodes = list(ast.walk(tree_of(path)))
        attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        is_program = room_of(path) == "cli" or shown(path) in PROGRAMS
        if not is_program and (attributes & ONLY_CLI_READS or "print" in names):
            wrong.append(shown(path))
    assert wrong == []


# How often objects are asked whether they have an attribute. Our own types declare what they can
# do: the first table may only shrink.
PROBES = Counter(
    {
        "bucket": 6,
        "digest": 1,
        "error": 1,
        "group_size": 1,
        "home_of": 2,
        "is_missing": 1,
        "is_packed": 3,
        "lower": 4,
        "memory": 1,
        "modified": 1,
        "newer": 2,
        "packed": 7,
        "parts": 1,
        "prefetch": 4,
        "quant_type": 1,
        "results": 3,
        "root": 2,
        "size": 1,
        "temporary": 2,
        "upper": 4,
    }
)
PROBES_OF_OTHERS = Counter(
    {
        "*": 2,  # what the C library has (io); an attribute of a result (views)
        "KEYS": 1,  # of a result (views)
        "begin": 1,  # a progress bar of a caller
        "bits": 2,  # a module of MLX that is quantized
        "commands": 1,  # click's groups
        "ctx": 1,  # click's errors
        "headers": 1,  # starlette's errors
        "merge": 1,  # mlx-lm's caches
        "params": 1,  # click's commands
        "public_key": 1,  # cryptography's keys
        "sanitize": 1,  # a network of mlx-lm
        "to_quantized": 1,  # a module of MLX
    }
)


def probes(path: Path) -> Iterator[str]:
    """Yield the attributes for which ``hasattr`` or ``getattr`` asks an object, "*" for a variable.

    A module is asked for what its platform has, which is not counted.
    """
    nodes = list(ast.walk(tree_of(path)))
    imports = [node for node in nodes if isinstance(node, ast.Import)]
    named = {alias.asname or alias.name for node in imports for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr"}:
            asked, attribute = node.args[:2]
            if ast.unparse(asked) in named:
                continue
            if isinstance(attribute, ast.Constant):
                yield str(attribute.value)
            elif ast.unparse(node.func) == "hasattr":
                yield "*"


def test_no_object_is_asked_for_what_its_type_does_not_declare() -> None:
    asked = Counter(attribute for path in FILES for attribute in probes(path))
    assert asked - PROBES - PROBES_OF_OTHERS == Counter()


def test_files_have_one_job_and_fit_in_a_head() -> None:
    assert [shown(path) for path in FILES if len(path.read_text().splitlines()) > 600] == []


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, json, blobstore; print(json.dumps(sorted({name.split('.')[0] for name in "
        "sys.modules})))"
    )
    loaded = set(json.loads(subprocess.check_output([sys.executable, "-c", code])))
    assert not loaded & (HEAVY | {"numpy", "pydantic", "typer"})


SLOW = {"pydantic", "email", "socket", "ssl", "asyncio", "secrets", "tomllib", "unittest"} | HEAVY
"""What most commands do without. Each would take a tenth of their time, or more, to load."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers") / "store"
    blobstore.import_model(PYCODE, "tiny", store=blobstore.open_store(folder), quant="int4")
    return folder


@pytest.mark.parametrize(
    ("words", "without"),
    [
        ("--help", {"numpy", "ml_dtypes"}),
        ("list --store STORE", {"numpy", "ml_dtypes"}),
        ("show tiny --store STORE", {"numpy", "ml_dtypes"}),
        ("verify --store STORE", {"numpy", "ml_dtypes"}),
        ("inspect SOURCE", {"numpy", "ml_dtypes"}),
        ("plan SOURCE --quant int4", {"blobstore.importer.targets"}),
        ("import SOURCE new --quant int4 --store STORE", {"blobstore.views.documents"}),
        ("import SOURCE tiny --quant int4 --store STORE", {"blobstore.inspection.inspect"}),
    ],
)
def test_a_command_loads_only_what_it_needs(store: Path, words: str, without: set[str]) -> None:
    line = words.replace("STORE", str(store)).replace("SOURCE", str(PYCODE)).split()
    code = (
        f"import sys, json; from blobstore.cli.main import run; assert run({line!r}) == 0;"
        "print(); print(json.dumps(list(sys.modules)))"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    loaded = set(json.loads(printed.splitlines()[-1]))
    assert loaded & (SLOW | without) == set()


def test_the_top_level_stays_small() -> None:
    listed = subprocess.check_output(["git", "-C", str(ROOT), "ls-files"], text=True).split()
    top = {name.split("/")[0] for name in listed}
    assert top <= {
        ".ci",
        ".github",
        ".gitignore",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "README.md",
        "SECURITY.md",
        "docs",
        "fixtures",
        "pyproject.toml",
        "src",
        "tests",
    }
