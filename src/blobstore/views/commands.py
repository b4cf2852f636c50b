"""The class that each command prints with ``--json``, its JSON Schema, and the page of them all."""

from collections.abc import Iterator
from typing import Any, Final

from blobstore.errors import UsageError
from blobstore.export.folder import ExportResult
from blobstore.importer.batch import Batch
from blobstore.importer.outputs import ImportPlan
from blobstore.importer.repair import RepairResult
from blobstore.importer.run import ImportResult
from blobstore.importer.worker import WorkResult
from blobstore.inspection.comparison import ModelDiff
from blobstore.inspection.inspection import Inspection
from blobstore.inspection.listing import BrokenModel, ListedModel
from blobstore.inspection.quality import ModelQuality
from blobstore.store.care.prune import PruneResult, UndoResult
from blobstore.store.care.usage import Usage
from blobstore.store.care.verify import VerifyResult
from blobstore.store.local.store import PackedModel, UnpackedModel
from blobstore.store.signing.signed_models import CheckedModel, SignedModel
from blobstore.store.transfer import TransferResult
from blobstore.views.documents import schema_of
from blobstore.views.results import (
    ArchivedModel,
    CopiedModel,
    LoadedModel,
    RemovedModel,
    RenamedModel,
    RunAnswer,
    SavedArchive,
    ShownModel,
    WrittenReport,
)

DOCUMENTS: Final[dict[str, Any]] = {
    "import": ImportResult,
    "plan": ImportPlan,
    "work": WorkResult,
    "work --batch": Batch,
    "commit": ImportResult,
    "list": list[ListedModel | BrokenModel],
    "show": ShownModel,
    "inspect": Inspection,
    "rm": list[RemovedModel],
    "cp": CopiedModel,
    "mv": RenamedModel,
    "push": TransferResult,
    "pull": TransferResult,
    "save": SavedArchive,
    "load": list[LoadedModel],
    "load --list": list[ArchivedModel],
    "verify": VerifyResult,
    "verify --key": list[CheckedModel],
    "sign": list[SignedModel],
    "repair": RepairResult,
    "prune": PruneResult,
    "prune --undo": UndoResult,
    "du": Usage,
    "diff": ModelDiff,
    "export": ExportResult,
    "quality": ModelQuality,
    "report": WrittenReport,
    "metadata get": dict[str, str],
    "metadata set": dict[str, str],
    "metadata rm": dict[str, str],
    "run": RunAnswer,
    "pack": PackedModel,
    "unpack": UnpackedModel,
}


def schema(command: str) -> dict[str, Any]:
    """Return the JSON Schema of what a command prints with ``--json``.

    Raises: UsageError for another command.
    """
    if command not in DOCUMENTS:
        raise UsageError(
            f"no command {command!r} prints JSON", hint=f"Use one of: {', '.join(DOCUMENTS)}."
        )
    definitions: dict[str, Any] = {}
    found = schema_of(DOCUMENTS[command], definitions)
    if "$ref" in found:
        found = definitions.pop(_name(found))
    return found | {"$defs": definitions} if definitions else found


def _name(reference: dict[str, Any]) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def page() -> str:
    """Return docs/reference/json.md: every command's keys, with their types."""
    head = (
        "# What `--json` prints\n\n"
        "One JSON document for each command, in ASCII. `blobstore schema COMMAND` prints its JSON "
        "Schema. Keys that are\nmarked *optional* are left out where they say nothing. This page "
        "is made by `blobstore schema --page`.\n"
    )
    return head + "".join(f"\n## `{command}`\n\n{_section(command)}" for command in DOCUMENTS)


def _section(command: str) -> str:
    found = schema(command)
    kinds = found.get("$defs", {})
    start = ""
    if "items" in found:
        start = "A list. "
        items = found["items"].get("anyOf", [found["items"]])
        first, *others = [kinds[_name(item)] for item in items]
        found = dict(first)
        for other in others:  # has the keys of the first, and more
            found["properties"] = other["properties"] | first["properties"]
            found["required"] = [key for key in other["required"] if key in first["required"]]
    if "properties" not in found:
        return "A map of strings to strings.\n"
    what = found["description"].partition("\n\n")[0].replace("\n", " ")
    rows = "".join(_rows(found, kinds, ""))
    return f"{start}{what}\n\n| key | type | what |\n|---|---|---|\n{rows}"


def _rows(node: dict[str, Any], kinds: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in node["properties"].items():
        kind, inner = _kind(value, kinds)
        says = "" if key in node["required"] else "*optional* "
        yield f"| `{prefix}{key}` | {kind} | {(says + value.get('description', '')).strip()} |\n"
        if inner is not None:
            yield from _rows(
                inner, kinds, f"{prefix}{key}{'[]' if kind.startswith('list') else ''}."
            )


def _kind(value: dict[str, Any], kinds: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """Return the name of a type, and the object in it, if any."""
    if "$ref" in value:
        return "object", kinds[_name(value)]
    if "anyOf" in value:
        names, inner = zip(*(_kind(part, kinds) for part in value["anyOf"]), strict=True)
        return " or ".join(names), next(filter(None, inner), None)
    if value.get("type") == "array":
        kind, item = _kind(value["items"], kinds)
        return f"list of {kind}s", item
    if of := value.get("additionalProperties"):
        return f"map to {_kind(of, kinds)[0]}", None
    return value.get("type", "any"), None
