"""The view that each command prints with ``--json``, its JSON Schema, and the page of them all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pydantic import TypeAdapter

from blobstore.errors import UsageError
from blobstore.views.archived import ArchivedModelView, LoadedModelView, SaveView
from blobstore.views.checkpoints import (
    DiffView,
    ExportView,
    ImportView,
    InspectionView,
    PlanView,
    QualityView,
)
from blobstore.views.packs import PackView, UnpackView
from blobstore.views.shared import SharedView
from blobstore.views.signed import SignatureCheckView, SignedView
from blobstore.views.stores import (
    CopyView,
    ListItemView,
    ModelView,
    NewNameView,
    PruneView,
    RemovalView,
    RepairView,
    ReportView,
    RunView,
    UndoView,
    UsageView,
    VerifyView,
)
from blobstore.views.worked import BatchView, WorkView

VIEWS: Final[dict[str, Any]] = {
    "import": ImportView,
    "plan": PlanView,
    "work": WorkView,
    "work --batch": BatchView,
    "commit": ImportView,
    "list": list[ListItemView],
    "show": ModelView,
    "inspect": InspectionView,
    "rm": list[RemovalView],
    "cp": CopyView,
    "mv": NewNameView,
    "push": SharedView,
    "pull": SharedView,
    "save": SaveView,
    "load": list[LoadedModelView],
    "load --list": list[ArchivedModelView],
    "verify": VerifyView,
    "verify --key": list[SignatureCheckView],
    "sign": list[SignedView],
    "repair": RepairView,
    "prune": PruneView,
    "prune --undo": UndoView,
    "du": UsageView,
    "diff": DiffView,
    "export": ExportView,
    "quality": QualityView,
    "report": ReportView,
    "metadata get": dict[str, str],
    "metadata set": dict[str, str],
    "metadata rm": dict[str, str],
    "run": RunView,
    "pack": PackView,
    "unpack": UnpackView,
}


def schema(command: str) -> dict[str, Any]:
    """Return the JSON Schema of what a command prints with ``--json``.

    Raises: UsageError for another command.
    """
    if command not in VIEWS:
        raise UsageError(
            f"no command {command!r} prints JSON", hint=f"Use one of: {', '.join(VIEWS)}."
        )
    return TypeAdapter(VIEWS[command]).json_schema(mode="serialization")


def page() -> str:
    """Return docs/json.md: every command's keys, with their types."""
    head = (
        "# What `--json` prints\n\n"
        "One JSON document for each command, in ASCII. `blobstore schema COMMAND` prints its JSON "
        "Schema. Keys that are\nmarked *optional* are left out where they say nothing. This page "
        "is made by `blobstore schema --page`.\n"
    )
    return head + "".join(f"\n## `{command}`\n\n{_section(command)}" for command in VIEWS)


def _section(command: str) -> str:
    found = schema(command)
    what = found.get("description", "").partition("\n\n")[0]
    if found.get("type") == "array":
        found = found | found["$defs"][found["items"]["$ref"].rpartition("/")[2]]
        what = f"A list. {found.get('description', '')}"
    if "properties" not in found:
        return "A map of texts to texts.\n"
    rows = "".join(
        f"| `{key}` | {kind} | {says} |\n"
        for key, kind, says in _rows(found, found.get("$defs", {}), "")
    )
    return f"{what}\n\n| key | type | what |\n|---|---|---|\n{rows}"


def _rows(
    node: dict[str, Any], kinds: dict[str, Any], prefix: str
) -> Iterator[tuple[str, str, str]]:
    required = set(node.get("required", ()))
    for key, value in node["properties"].items():
        kind, inner, suffix = _kind(value, kinds)
        says = value.get("description", "")
        optional = "" if key in required else "*optional* " if says else "*optional*"
        yield f"{prefix}{key}", kind, f"{optional}{says}"
        if inner is not None:
            yield from _rows(inner, kinds, f"{prefix}{key}{suffix}.")


def _kind(value: dict[str, Any], kinds: dict[str, Any]) -> tuple[str, dict[str, Any] | None, str]:
    """Return the name of a type, the object in it, if any, and the text between it and its keys."""
    if "$ref" in value:
        return "object", kinds[value["$ref"].rpartition("/")[2]], ""
    if "anyOf" in value:
        parts = [_kind(part, kinds) for part in value["anyOf"]]
        inner = next((part for part in parts if part[1] is not None), ("", None, ""))
        return " or ".join(part[0] for part in parts), inner[1], inner[2]
    if value.get("type") == "array":
        kind, inner_node, _ = _kind(value["items"], kinds)
        return f"list of {kind}s", inner_node, "[]"
    if value.get("type") == "object":
        of = value.get("additionalProperties")
        return (
            (f"map to {_kind(of, kinds)[0]}" if isinstance(of, dict) and of else "object"),
            None,
            "",
        )
    return str(value.get("type", "any")), None, ""
