"""Texts: the Modelfile of an exported folder, and the files that were files of the source. Pure.

The Modelfile holds the layers of a manifest beside weights and JSON documents. Each command is read
back by the importer's own parser before it counts: some texts can't be written in a Modelfile, and
these are left out with a note. Files of the source are exported byte for byte; a file that the
export makes itself gives way to one of the same name.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from blobstore.errors import (
    BlobStoreError,
    InvalidNameError,
    UnsupportedSourceError,
    quoted,
)
from blobstore.export.planned_files import INDEX_NAME, CopiedBlob, ExportPlan, PlannedDocument
from blobstore.formats import strictjson
from blobstore.formats.checkpoint import SourceConfig, family_of
from blobstore.formats.documents import (
    MESSAGES_MEDIA_TYPE,
    PARAMS_MEDIA_TYPE,
    REQUIRED_OLLAMA,
    TEXT_LAYERS,
    ModelConfig,
)
from blobstore.formats.modelfile import Modelfile, read_script
from blobstore.formats.strictjson import parse_object
from blobstore.names import relative_path
from blobstore.source.files import MAX_INDEX, MAX_INDEX_VALUES

NAME = "Modelfile"
_HEAD = "FROM .\n"


TextLayer = tuple[str, bytes]
"""A layer that is neither tensors nor a JSON document: its media type and its bytes."""


def modelfile(
    layers: Sequence[TextLayer], stored: ModelConfig, config: SourceConfig | None, *, draft: bool
) -> tuple[bytes | None, list[str]]:
    """Return the Modelfile that gives the layers back on import, and notes on what is left out.

    None when it would be empty: no layers, and the config blob has the parser, the renderer
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


def _commands(layer: TextLayer) -> tuple[str, str | None]:
    """Return what a layer is, for a message, and the commands that give it back, or None."""
    media_type, data = layer
    what = TEXT_LAYERS.get(media_type)
    if what is None:
        return f"a layer of type {quoted(media_type)}", None
    try:
        text = "".join(_lines(media_type, data))
        (back,) = Modelfile.parse((_HEAD + text).encode()).layers()
        is_same = back == layer or (back[0] == media_type and _is_same_json(back[1], data))
    except (BlobStoreError, TypeError, ValueError, AttributeError, KeyError):
        is_same = False  # no import makes such a layer
    return f"the {what.lower()}", text if is_same else None


def _lines(media_type: str, data: bytes) -> Iterator[str]:
    if media_type == PARAMS_MEDIA_TYPE:
        for key, item in strictjson.parse(data).items():
            for one in item if isinstance(item, list) else [item]:
                text = one if isinstance(one, str) else strictjson.encode(one).decode()
                yield f"PARAMETER {key} {_value(text)}\n"
    elif media_type == MESSAGES_MEDIA_TYPE:
        for message in strictjson.parse(data):
            yield f"MESSAGE {message['role']} {_value(message['content'])}\n"
    else:
        yield f"{TEXT_LAYERS[media_type]} {_value(data.decode())}\n"


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
            commands, dropped = read_script(f"SYSTEM {written}\n".encode(), NAME)
        except BlobStoreError:
            continue
        if not dropped and [command.text for command in commands] == [text]:
            return written
    raise ValueError(text)


def _choices(stored: ModelConfig, config: SourceConfig | None) -> Iterator[str]:
    """Yield the commands for settings of the config blob that an import would not choose."""
    family = family_of(config, None)
    for name, chosen, usual in (
        ("PARSER", stored.parser, family.parser if family else None),
        ("RENDERER", stored.renderer, family.renderer if family else None),
        ("REQUIRES", stored.requires, REQUIRED_OLLAMA),
    ):
        if chosen and chosen != usual:
            yield f"{name} {chosen}\n"


MADE_MODELFILE = "Modelfile.blobstore"
"""The export's own Modelfile, where the source had one; the next one is called ``…-2``."""


def with_files(
    plan: ExportPlan, files: Sequence[CopiedBlob], folders: Collection[str], *, same_weights: bool
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
        try:
            path = relative_path(file.path)
        except InvalidNameError as error:
            raise UnsupportedSourceError(
                f"a file of the model can't be a file: {error}", rule=error.rule
            ) from None
        if path in indexes:
            plan = _with_index(plan, file, same_weights=same_weights)
        else:
            copies.append(file)
    return _beside_modelfile(plan, files) + ExportPlan(documents=tuple(copies))


def _with_index(plan: ExportPlan, file: CopiedBlob, *, same_weights: bool) -> ExportPlan:
    made = _made(plan, file.path)
    if made is None:
        return plan + ExportPlan(notes=(f"{file.path} was left out: there is one file of weights",))
    if not same_weights or _weight_map(file.blob.read()) != _weight_map(made.data):
        return plan
    documents = tuple(file if one is made else one for one in plan.documents)
    return replace(plan, documents=documents)


def _made(plan: ExportPlan, path: str) -> PlannedDocument | None:
    """Return the document of that path that the export makes itself."""
    for one in plan.documents:
        if isinstance(one, PlannedDocument) and one.path == path:
            return one
    return None


def _weight_map(raw: bytes) -> Any:
    """Return where an index says that tensors are. Raises: DocumentError, LimitExceededError."""
    index = parse_object(raw, INDEX_NAME, rule="I1", limit=MAX_INDEX, values=MAX_INDEX_VALUES)
    return index.get("weight_map")


def _beside_modelfile(plan: ExportPlan, files: Sequence[CopiedBlob]) -> ExportPlan:
    """Return the plan with the export's Modelfile under a name that no other file of it has.

    It is left out where the source has the same one.
    """
    made = _made(plan, NAME)
    if made is None:
        return plan
    theirs = {file.path: file.blob for file in files}
    others = (f"{MADE_MODELFILE}-{number}" for number in itertools.count(2))
    path = next(
        name
        for name in itertools.chain((NAME, MADE_MODELFILE), others)
        if name not in theirs or theirs[name].read() == made.data
    )
    documents = [one for one in plan.documents if one is not made]
    if path not in theirs:
        at = plan.documents.index(made) if path == NAME else len(documents)
        documents.insert(at, replace(made, path=path))
    notes = plan.notes
    if path != NAME:
        notes += (
            f"{NAME} is the source's; what the model has beside its weights is in {quoted(path)}",
        )
    return replace(plan, documents=tuple(documents), notes=notes)
