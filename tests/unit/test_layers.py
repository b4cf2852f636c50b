"""The source as text: imports from lower rooms only, heavy libraries late."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from support import ROOT
from support.checkpoints import write_checkpoint

import blobstore

SOURCE = ROOT / "src" / "blobstore"
FILES = sorted(SOURCE.rglob("*.py"))
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


def statements_of(node: ast.AST) -> Iterator[ast.AST]:
    for key in ("body", "handlers", "orelse", "finalbody", "cases"):
        for inner in getattr(node, key, ()):
            yield inner
            yield from statements_of(inner)


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def shown(path: Path) -> str:
    return str(path.relative_to(SOURCE))


ROWS = {room: number for number, rooms in enumerate(ROOMS) for room in rooms}
MODULES = {
    shown(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path
    for path in FILES
}
"""The files of the package by the names of their modules, such as ``io.ranges``."""


@cache
def imports_of(path: Path) -> list[tuple[str, bool]]:
    """Return the modules that a file imports, and whether at its top.

    Top means: not in a function, and not for types only. Importing a name from a folder imports the
    folder's ``__init__``; a module, that module.
    """
    found = []
    for node in statements_of(ast.parse(path.read_bytes())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{shown(path)}: imports are absolute"
            wholes = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if is_module(name) else str(node.module) for name in wholes]
        found += [(name, node.col_offset == 0) for name in names]  # type: ignore[attr-defined]
    return found


def is_module(name: str) -> bool:
    package, _, own = name.partition(".")
    if package != "blobstore":
        return False
    return own in MODULES or (SOURCE / own.replace(".", "/")).with_suffix(".pyi").exists()


@cache
def modules_of(path: Path) -> set[str]:
    found = (name for name, _ in imports_of(path) if name.split(".")[0] == "blobstore")
    names = {name.removeprefix("blobstore.") for name in found}
    return {"__init__" if name == "blobstore" else name for name in names} & MODULES.keys()


def test_every_file_has_a_room() -> None:
    assert {room_of(path) for path in FILES} == set().union(*ROOMS)


def test_imports_point_down() -> None:
    wrong = [
        (shown(path), module)
        for path in FILES
        for module in modules_of(path)
        if room_of(path) != "__init__" != module
        if (room := module.partition(".")[0]) != room_of(path)
        if ROWS[room] >= ROWS[room_of(path)]
    ]
    assert wrong == []


def test_no_imports_lead_back_to_where_they_began() -> None:
    graph = {name: modules_of(path) - {name} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # CycleError names the modules


def test_folders_inside_rooms_have_an_order() -> None:
    inner = [path for path in FILES if len(path.relative_to(SOURCE).parts) > 2]
    ranks = {
        path: FOLDERS[room_of(path)].index(path.relative_to(SOURCE).parts[1]) for path in inner
    }
    wrong = [
        (shown(path), module)
        for path in inner
        for module in modules_of(path)
        if (there := MODULES[module]) in ranks and room_of(there) == room_of(path)
        if ranks[there] > ranks[path]
    ]
    assert wrong == []


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


MAY_READ = {"mlx_lm/template_process.py", "store/local/store.py"}
"""A program of its own, which answers on its standard output; and `open_store` has a default."""
READS = re.compile(r"\b(environ|getenv|argv|print)\b")


def test_only_the_command_line_reads_the_environment_and_prints() -> None:
    others = [path for path in FILES if room_of(path) != "cli" and shown(path) not in MAY_READ]
    wrong = [
        (shown(path), name)
        for path in others
        if READS.search(text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if READS.fullmatch(name := getattr(node, "attr", getattr(node, "id", "")))
    ]
    assert wrong == []


def test_files_have_one_job_and_fit_in_a_head() -> None:
    assert [shown(path) for path in FILES if len(path.read_text().splitlines()) > 600] == []


SLOW = {"pydantic", "email", "socket", "ssl", "asyncio", "secrets", "tomllib", "unittest"} | HEAVY
"""What most commands do without. Each would take a tenth of their time, or more, to load."""
ARRAYS = {"numpy", "ml_dtypes"}


LOADED = """
import json, os, sys
for name, code in json.loads(sys.argv[1]).items():
    if name == "--help":
        import blobstore.cli.main  # once for all commands
    if not os.fork():
        exec(code)
        with open(name, "w") as file:
            print(*sys.modules, file=file)
        os._exit(0)
    assert os.wait()[1] == 0, code
"""
"""Runs each piece of code in a fork of a process that has loaded nothing."""
PACKAGE = (
    "import blobstore; from blobstore import errors; dir(blobstore); blobstore.open_store('x')"
)
COMMANDS = {
    "--help": ARRAYS,
    "list --store {at}/store": {*ARRAYS, "blobstore.cli.care", "blobstore.cli.inspecting"},
    "inspect {at}/source --tensors --tree": {*ARRAYS, "http.client", "blobstore.kernels"},
    "import {at}/source new --quant int4 --store {at}/store": {
        *("blobstore.views.documents", "blobstore.importer.targets")
    },
}


def test_code_and_commands_load_only_what_they_need(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    blobstore.import_model(source, "tiny", store=tmp_path / "store", quant="int4")
    pieces = {"package": (PACKAGE, HEAVY | ARRAYS | {"pydantic", "typer"})}
    for words, without in COMMANDS.items():
        line = words.format(at=tmp_path).split()
        code = f"from blobstore.cli.main import run; assert run({line!r}) == 0"
        pieces[line[0]] = code, SLOW | without
    codes = json.dumps({name: code for name, (code, _) in pieces.items()})
    subprocess.run(
        [sys.executable, "-c", LOADED, codes], check=True, cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    for name, (_, without) in pieces.items():
        modules = (tmp_path / name).read_text().split()
        loaded = {*modules, *(module.partition(".")[0] for module in modules)}
        assert loaded & without == set(), name
        assert "blobstore" in loaded
