"""What ``--json`` prints fits its JSON Schema, and the page that lists all keys."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
import typer
from support import PYCODE
from support.checkpoints import write_checkpoint
from support.commands import Cli, key_pair
from support.servers import server
from support.small_registry import SmallRegistry

import blobstore
from blobstore.cli.main import app, run
from blobstore.views.commands import DOCUMENTS, page, schema

ONLY_WITH_MLX = {"run"}


def commands_with_json(group: Any, prefix: str = "") -> set[str]:
    """Return the commands that have ``--json``."""
    found = set()
    for name in group.commands:
        command = group.get_command(None, name)
        if hasattr(command, "commands"):
            found |= commands_with_json(command, f"{name} ")
        elif any("--json" in getattr(parameter, "opts", ()) for parameter in command.params):
            found.add(f"{prefix}{name}")
    return found


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    with server() as running:
        running.play(SmallRegistry())
        yield f"{running.host}:{running.port}"


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory, registry: str) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("schema")
    source, store = str(write_checkpoint(folder / "tiny")), ["--store", str(folder / "store")]
    file = str(folder / "tiny" / "model.safetensors")
    private, public = key_pair(folder / "a")
    plan, batch = str(folder / "plan.json"), folder / "models.toml"
    batch.write_text(f'[[model]]\nsource = "{source}"\nname = "batched"\n')
    blobstore.write_plan(blobstore.plan_import(source, quant="int8"), plan)
    return {
        "import": ["import", source, "m", "--quant", "int8", *store],
        "plan": ["plan", source, "--quant", "int8", "--target-bpw", "12"],
        "work": ["work", plan, *store],
        "work --batch": ["work", "--batch", str(batch), *store],
        "commit": ["commit", plan, "m", *store],
        "list": ["list", *store],
        "show": ["show", "m", "--coverage", *store],
        "inspect": ["inspect", str(PYCODE)],
        "cp": ["cp", "m", "n", *store],
        "cp --to": ["cp", "m", "--to", str(folder / "other"), *store],
        "mv": ["mv", "n", "o", *store],
        "diff": ["diff", "m", "o", "--error", *store],
        "quality": ["quality", "m", "--against", source, *store],
        "report": ["report", "m", "-o", str(folder / "m.html"), *store],
        "export": ["export", "m", str(folder / "out"), *store],
        "sign": ["sign", "m", "--key", private, *store],
        "verify": ["verify", *store],
        "verify --key": ["verify", "m", "--key", public, *store],
        "repair": ["repair", "m", *store],
        "du": ["du", *store],
        "push": ["push", "m", f"{registry}/a/m", *store],
        "pull": ["pull", f"{registry}/a/m", *store],
        "save": ["save", "m", "-o", str(folder / "m.tar"), *store],
        "load": ["load", str(folder / "m.tar"), *store],
        "load --list": ["load", "--list", str(folder / "m.tar")],
        "pack": ["pack", "m", *store],
        "unpack": ["unpack", "m", *store],
        "rm": ["rm", "m", "o", *store],
        "prune": ["prune", *store, "--grace", "0s", "--sole-owner"],
        "metadata set": ["metadata", "set", file, "key", "value"],
        "metadata get": ["metadata", "get", file],
        "metadata rm": ["metadata", "rm", file, "key"],
    }


def test_printed_fits(lines: dict[str, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    for command, line in lines.items():
        assert run([*line, "--json"]) == 0, capsys.readouterr().err
        printed = json.loads(capsys.readouterr().out)
        fitting = schema(command if command in DOCUMENTS else command.partition(" --")[0])
        jsonschema_rs.validate(fitting, printed)
    documents = {name for name in DOCUMENTS if "--" not in name}
    assert {command.partition(" --")[0] for command in lines} == documents - ONLY_WITH_MLX
    assert commands_with_json(typer.main.get_command(app)) - {"ls"} == documents


def test_the_command_prints_a_schema(cli: Cli) -> None:
    assert json.loads(cli.text("schema", "metadata", "get")) == schema("metadata get")
    assert {schema(command)["type"] for command in DOCUMENTS} == {"object", "array"}
    assert cli.text("schema", "--page") == page()
