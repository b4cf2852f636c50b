"""What ``--json`` prints fits its JSON Schema, and the page that lists all keys."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import typer
from support.checkpoints import write_checkpoint
from support.commands import Cli, key_pair
from support.servers import Server
from support.small_registry import SmallRegistry

import blobstore
from blobstore.cli.main import app
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


LINES = """
import {at}/tiny m --quant int8
plan {at}/tiny --quant int8 --target-bpw 12
work {at}/plan.json
work --batch {at}/models.toml
commit {at}/plan.json m
list
show m --coverage
inspect {at}/tiny
cp m n
cp --to {at}/other m
mv n o
diff m o --error
quality m --against {at}/tiny
report m -o {at}/m.html
export m {at}/out
sign m --key {at}/a.key
verify
verify --key {at}/a.pub m
repair m
du
push m {registry}/a/m
pull {registry}/a/m
save m -o {at}/m.tar
load {at}/m.tar
load --list {at}/m.tar
pack m
unpack m
rm m o
prune --grace 0s --sole-owner
metadata set {at}/tiny/model.safetensors key value
metadata get {at}/tiny/model.safetensors
metadata rm {at}/tiny/model.safetensors key
"""


def test_printed_fits(cli: Cli, tmp_path: Path, server: Server) -> None:
    server.play(SmallRegistry())
    source, plan = write_checkpoint(tmp_path / "tiny"), tmp_path / "plan.json"
    (tmp_path / "models.toml").write_text(f'[[model]]\nsource = "{source}"\nname = "batched"\n')
    blobstore.write_plan(blobstore.plan_import(source, quant="int8"), plan)
    key_pair(tmp_path / "a")
    documents = {name for name in DOCUMENTS if "--" not in name}
    assert commands_with_json(typer.main.get_command(app)) - {"ls"} == documents
    for line in LINES.strip().splitlines():
        words = line.format(at=tmp_path, registry=f"{server.host}:{server.port}").split()
        names = (" ".join(words[:2]), words[0])  # "work --batch" and "metadata get" come first
        command = next(name for name in names if name in DOCUMENTS)
        documents.discard(command)
        jsonschema_rs.validate(schema(command), cli.json(*words))
    assert documents == ONLY_WITH_MLX


def test_the_command_prints_a_schema(cli: Cli) -> None:
    assert json.loads(cli.text("schema", "metadata", "get")) == schema("metadata get")
    assert {schema(command)["type"] for command in DOCUMENTS} == {"object", "array"}
    assert cli.text("schema", "--page") == page()
