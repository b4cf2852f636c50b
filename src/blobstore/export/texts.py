"""The texts of an exported folder: its Modelfile, and the files that were files of the source.

The files of an export that were files of the source, byte for byte, and where these meet what the
export makes itself.

The Modelfile of an exported folder: what a manifest has beside weights and JSON documents. Pure.

Each command is read back by the importer's own parser before it counts: a Modelfile has no way to
write some texts, and these are left out and said.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blobstore.errors import (
    BlobStoreError,
    InvalidNameError,
    UnsupportedSourceError,
    quoted,
)
from blobstore.export.outputs import INDEX_NAME, ExportPlan, PlannedCopy, PlannedDocument
from blobstore.formats import strictjson
from blobstore.formats.checkpoint import SourceConfig
from blobstore.formats.documents import (
    MESSAGES_MEDIA_TYPE,
    PARAMS_MEDIA_TYPE,
    REQUIRED_OLLAMA,
    TEXT_LAYERS,
    ModelConfig,
)
from blobstore.formats.modelfile import Modelfile
from blobstore.formats.modelfile_commands import read_script
from blobstore.formats.strictjson import parse_object
from blobstore.importer.planning.notes import family_of
from blobstore.model.parts import StoredFile
from blobstore.names import relative_path
from blobstore.source.shards import MAX_INDEX

NAME = "Modelfile"
_HEAD = "FROM .\n"


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that is neither tensors nor a JSON document: its media type and its bytes."""

    media_type: str
    data: bytes


def modelfile(
    layers: Sequence[Layer], stored: ModelConfig, config: SourceConfig | None, *, draft: bool
) -> tuple[bytes | None, list[str]]:
    """Return the Modelfile that gives the layers back on import, and what could not be written into it.

    None when there is nothing to say: no layers, and the config blob has the parser, the renderer
    and the version of Ollama that an import would choose by itself.
    """
    commands: list[str] = []
    notes: list[str] = []
    for what, command in map(_commands, layers):
        if command is None:
            notes.append(f"{what} can't be written in a Modelfile and was left out")
        else:
            commands.append(command)
    commands += _choices(stored, config)
    if not commands:
        return None, notes
    text = _HEAD + ("DRAFT draft\n" if draft else "") + "".join(commands)
    return text.encode(), notes


def _commands(layer: Layer) -> tuple[str, str | None]:
    """Return what a layer is, for a message, and the commands that give it back, or None."""
    what = TEXT_LAYERS.get(layer.media_type)
    if what is None:
        return f"a layer of type {quoted(layer.media_type)}", None
    try:
        text = "".join(_lines(layer))
        (back,) = Modelfile.parse((_HEAD + text).encode()).layers()
        is_same = back[0] == layer.media_type and (
            back[1] == layer.data or _is_same_json(back[1], layer.data)
        )
    except (
        BlobStoreError,
        strictjson.StrictJsonError,
        TypeError,
        ValueError,
        AttributeError,
        KeyError,
    ):
        is_same = False  # whatever it is, it is not what an import makes
    return f"the {what.lower()}", text if is_same else None


def _lines(layer: Layer) -> Iterator[str]:
    if layer.media_type == PARAMS_MEDIA_TYPE:
        for key, item in strictjson.parse(layer.data).items():
            for one in item if isinstance(item, list) else [item]:
                yield f"PARAMETER {key} {_value(one if isinstance(one, str) else strictjson.encode(one).decode())}\n"
    elif layer.media_type == MESSAGES_MEDIA_TYPE:
        for message in strictjson.parse(layer.data):
            yield f"MESSAGE {message['role']} {_value(message['content'])}\n"
    else:
        yield f"{TEXT_LAYERS[layer.media_type]} {_value(layer.data.decode())}\n"


def _is_same_json(one: bytes, other: bytes) -> bool:
    return one.startswith((b"{", b"[")) and strictjson.parse(one) == strictjson.parse(other)


def _value(text: str) -> str:
    """Return the first way to write a value that is read back as it was.

    Raises: ValueError when no way does.
    """
    is_line = text and "\n" not in text and "\r" not in text
    for quotes in ("", '"', '"""') if is_line else ('"""', '"'):
        written = f"{quotes}{text}{quotes}"
        try:
            script = read_script(f"SYSTEM {written}\n".encode(), NAME)
        except BlobStoreError:
            continue
        if not script.dropped and [command.text for command in script.commands] == [text]:
            return written
    raise ValueError(text)


def _choices(stored: ModelConfig, config: SourceConfig | None) -> Iterator[str]:
    """Yield the commands for what the config blob has and an import of the folder would not choose."""
    family = family_of(config, None)
    for name, chosen, usual in (
        ("PARSER", stored.parser, family.parser if family else None),
        ("RENDERER", stored.renderer, family.renderer if family else None),
        ("REQUIRES", stored.requires, REQUIRED_OLLAMA),
    ):
        if chosen and chosen != usual:
            yield f"{name} {chosen}\n"


MADE_MODELFILE = "Modelfile.blobstore"
"""The name of the Modelfile that an export makes, where the source had one of its own.

Of the next one with ``-2``.
"""


def with_files(
    plan: ExportPlan, files: Sequence[StoredFile], folders: Collection[str], *, same_weights: bool
) -> ExportPlan:
    """Return the plan with the model's files in it.

    ``folders``: where checkpoints lie in the export, "" and perhaps "draft/": their shard indexes
    come back as they were while they are right, which can only be with ``same_weights``, those of
    the source. A Modelfile of the source keeps its name. Raises: UnsupportedSourceError for a name
    that can't be a path; as `BlobFile.read`.
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
        raise UnsupportedSourceError(
            f"a file of the model can't be a file: {error}", rule=error.rule
        ) from None


def _with_index(plan: ExportPlan, file: StoredFile, *, same_weights: bool) -> ExportPlan:
    made = next((one for one in plan.documents if one.path == file.name), None)
    if not isinstance(made, PlannedDocument):
        return plan + ExportPlan(
            (), (), (f"{file.name} was left out: there is one file of weights",)
        )
    if not same_weights or _weight_map(file.blob.read()) != _weight_map(made.data):
        return plan
    return replace(
        plan, documents=tuple(_copy(file) if one is made else one for one in plan.documents)
    )


def _copy(file: StoredFile) -> PlannedCopy:
    return PlannedCopy(file.name, file.blob, file.size)


def _weight_map(raw: bytes) -> Any:
    """Return where an index says that tensors are. Raises: DocumentError, LimitExceededError."""
    return parse_object(raw, INDEX_NAME, rule="I1", limit=MAX_INDEX).get("weight_map")


def _beside_modelfile(plan: ExportPlan, files: Sequence[StoredFile]) -> ExportPlan:
    """Return the plan with room for the source's Modelfile: one that says something else gets another name."""
    made = next((one for one in plan.documents if one.path == NAME), None)
    if not isinstance(made, PlannedDocument):
        return plan
    theirs = {file.name: file.blob for file in files}
    path = next(
        name
        for name in _modelfile_names()
        if name not in theirs or theirs[name].read() == made.data
    )
    others = tuple(one for one in plan.documents if one is not made)
    if path in theirs:
        plan = replace(plan, documents=others)
    elif path != NAME:
        plan = replace(plan, documents=(*others, replace(made, path=path)))
    if path == NAME:
        return plan
    note = f"{NAME} is the source's; what the model has beside its weights is in {quoted(path)}"
    return replace(plan, notes=(*plan.notes, note))


def _modelfile_names() -> Iterator[str]:
    """Yield the names that the Modelfile of an export may have, the best first."""
    yield NAME
    yield MADE_MODELFILE
    yield from (f"{MADE_MODELFILE}-{number}" for number in itertools.count(2))
