"""The Modelfile of an exported folder: what a manifest has beside weights and JSON documents. Pure.

Each command is read back by the importer's own parser before it counts: a Modelfile has no way to write some texts, and
these are left out and said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blobstore import strictjson
from blobstore.checkpoint import SourceConfig
from blobstore.documents import (
    LICENSE_MEDIA_TYPE,
    MESSAGES_MEDIA_TYPE,
    PARAMS_MEDIA_TYPE,
    REQUIRED_OLLAMA,
    SYSTEM_MEDIA_TYPE,
    TEMPLATE_MEDIA_TYPE,
    ModelConfig,
)
from blobstore.errors import BlobStoreError, quoted
from blobstore.importer.modelfile.commands import read_script
from blobstore.importer.modelfile.modelfile import Modelfile
from blobstore.importer.planning.capabilities import family_of

NAME = "Modelfile"
_HEAD = "FROM .\n"
NAMES = {
    TEMPLATE_MEDIA_TYPE: "TEMPLATE",
    SYSTEM_MEDIA_TYPE: "SYSTEM",
    LICENSE_MEDIA_TYPE: "LICENSE",
    PARAMS_MEDIA_TYPE: "PARAMETERS",
    MESSAGES_MEDIA_TYPE: "MESSAGES",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that is neither tensors nor a JSON document: its media type and its bytes."""

    media_type: str
    data: bytes


def modelfile(
    layers: Sequence[Layer], stored: ModelConfig, config: SourceConfig | None, *, draft: bool
) -> tuple[bytes | None, list[str]]:
    """Return the Modelfile that gives the layers back on import, and what could not be written into it.

    None when there is nothing to say: no layers, and the config blob has the parser, the renderer and the version of Ollama
    that an import would choose by itself.
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
    what = NAMES.get(layer.media_type)
    if what is None:
        return f"a layer of type {quoted(layer.media_type)}", None
    try:
        text = "".join(_lines(layer))
        (back,) = Modelfile.parse((_HEAD + text).encode()).layers()
        is_same = back[0] == layer.media_type and (back[1] == layer.data or _is_same_json(back[1], layer.data))
    except (BlobStoreError, strictjson.StrictJsonError, TypeError, ValueError, AttributeError, KeyError):
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
        yield f"{NAMES[layer.media_type]} {_value(layer.data.decode())}\n"


def _is_same_json(one: bytes, other: bytes) -> bool:
    return one.startswith((b"{", b"[")) and strictjson.parse(one) == strictjson.parse(other)


def _value(text: str) -> str:
    """Return the first way to write a value that is read back as it was. Raises: ValueError when no way does."""
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
