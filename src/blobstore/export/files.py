"""The files of an export that were files of the source, byte for byte, and where these meet what the export makes itself."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from blobstore.errors import InvalidNameError, UnsupportedSourceError, quoted
from blobstore.export import texts
from blobstore.export.outputs import ExportPlan, PlannedCopy, PlannedDocument
from blobstore.export.sharding import INDEX_NAME
from blobstore.export.stored_model import StoredFile
from blobstore.names import relative_path
from blobstore.source.shards import MAX_INDEX
from blobstore.strictjson import parse_object

MADE_MODELFILE = "Modelfile.blobstore"
"""The name of the Modelfile that an export makes, where the source had one of its own; of the next one with ``-2``."""


def with_files(plan: ExportPlan, files: Sequence[StoredFile], folders: Collection[str], *, same_weights: bool) -> ExportPlan:
    """Return the plan with the model's files in it.

    ``folders``: where checkpoints lie in the export, "" and perhaps "draft/": their shard indexes come back as they were
    while they are right, which can only be with ``same_weights``, those of the source. A Modelfile of the source keeps its
    name. Raises: UnsupportedSourceError for a name that can't be a path; as `BlobFile.read`.
    """
    indexes = {folder + INDEX_NAME for folder in folders}
    copies = []
    for file in files:
        path = _checked(file.name)
        if path in indexes:
            plan = _with_index(plan, file, same_weights=same_weights)
            continue
        copies.append(_copy(file))
    return _beside_modelfile(plan, files) + ExportPlan((), tuple(copies), ())


def _checked(name: str) -> str:
    try:
        return relative_path(name)
    except InvalidNameError as error:
        raise UnsupportedSourceError(f"a file of the model can't be a file: {error}", rule=error.rule) from None


def _with_index(plan: ExportPlan, file: StoredFile, *, same_weights: bool) -> ExportPlan:
    made = next((one for one in plan.documents if one.path == file.name), None)
    if not isinstance(made, PlannedDocument):
        return plan + ExportPlan((), (), (f"{file.name} was left out: there is one file of weights",))
    if not same_weights or _weight_map(file.blob.read()) != _weight_map(made.data):
        return plan
    return replace(plan, documents=tuple(_copy(file) if one is made else one for one in plan.documents))


def _copy(file: StoredFile) -> PlannedCopy:
    return PlannedCopy(file.name, file.blob, file.size)


def _weight_map(raw: bytes) -> Any:
    """Return where an index says that tensors are. Raises: DocumentError, LimitExceededError."""
    return parse_object(raw, INDEX_NAME, rule="I1", limit=MAX_INDEX).get("weight_map")


def _beside_modelfile(plan: ExportPlan, files: Sequence[StoredFile]) -> ExportPlan:
    """Return the plan with room for the source's Modelfile: one that says something else gets another name."""
    made = next((one for one in plan.documents if one.path == texts.NAME), None)
    if not isinstance(made, PlannedDocument):
        return plan
    theirs = {file.name: file.blob for file in files}
    path = next(name for name in _modelfile_names() if name not in theirs or theirs[name].read() == made.data)
    others = tuple(one for one in plan.documents if one is not made)
    if path in theirs:
        plan = replace(plan, documents=others)
    elif path != texts.NAME:
        plan = replace(plan, documents=(*others, replace(made, path=path)))
    if path == texts.NAME:
        return plan
    note = f"{texts.NAME} is the source's; what the model has beside its weights is in {quoted(path)}"
    return replace(plan, notes=(*plan.notes, note))


def _modelfile_names() -> Iterator[str]:
    """Yield the names that the Modelfile of an export may have, the best first."""
    yield texts.NAME
    yield MADE_MODELFILE
    yield from (f"{MADE_MODELFILE}-{number}" for number in itertools.count(2))
