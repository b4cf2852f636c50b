"""Texts of a stored model: its Modelfile, and the parts of it that people ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from blobstore.errors import BlobStoreError, MissingFileError, quoted
from blobstore.formats import strictjson
from blobstore.formats.checkpoint import (
    CHAT_TEMPLATE,
    CONFIG_NAME,
    SourceConfig,
    family_of,
    parse_config,
    templates_in,
)
from blobstore.formats.documents import (
    FILE_MEDIA_TYPE,
    JSON_MEDIA_TYPE,
    LICENSE_MEDIA_TYPE,
    MESSAGES_MEDIA_TYPE,
    PARAMS_MEDIA_TYPE,
    REQUIRED_OLLAMA,
    SYSTEM_MEDIA_TYPE,
    TEMPLATE_MEDIA_TYPE,
    TENSOR_MEDIA_TYPE,
    TEXT_LAYERS,
    Manifest,
    ModelConfig,
)
from blobstore.formats.modelfile import Modelfile, read_script
from blobstore.store.stored_model import StoredModel

NAME = "Modelfile"
MADE_MODELFILE = "Modelfile.blobstore"
"""The export's own Modelfile, where the source had one; the next one is called ``…-2``."""
_HEAD = "FROM .\n"
PARTS: Mapping[str, tuple[str, Sequence[str]]] = {
    "template": (TEMPLATE_MEDIA_TYPE, (CHAT_TEMPLATE,)),
    "system": (SYSTEM_MEDIA_TYPE, ()),
    "license": (LICENSE_MEDIA_TYPE, ("LICEN[CS]E*", "COPYING*")),
    "params": (PARAMS_MEDIA_TYPE, ("generation_config.json",)),
    "modelfile": ("", ()),
}
"""The layers that a part is, and patterns of the files that have it without such layers."""


def text_of(model: StoredModel, part: str) -> bytes:
    """Return a part of a model: one of `PARTS`, the Modelfile as ``ollama show`` prints it.

    Raises: MissingFileError that names what the model has; as `StoredModel.read`.
    """
    if part == "modelfile":
        text, _ = modelfile(
            text_layers(model), model.config, model.document(CONFIG_NAME), draft=False
        )
        return (text or _HEAD.encode()).replace(b"FROM .", f"FROM {model.name}".encode(), 1)
    media_type, patterns = PARTS[part]
    layers = [layer for layer in model.manifest.layers if layer.media_type == media_type]
    if not layers:
        files = (*model.manifest.json_layers, *model.manifest.file_layers)
        layers = [
            layer
            for layer in files
            if any(fnmatchcase(layer.name or "", pattern) for pattern in patterns)
        ]
    texts = [model.read(layer) for layer in layers]
    if part == "template" and not texts:
        texts = [text.encode() for text in templates_in(model.document)][:1]
    if part == "params" and layers and layers[0].media_type == media_type:
        lines = "".join(lines_of(media_type, texts[0])).splitlines(keepends=True)
        return "".join(line.removeprefix("PARAMETER ") for line in lines).encode()
    if not texts:
        raise MissingFileError(
            f"model {model.name} has no {'system prompt' if part == 'system' else part}",
            model=str(model.name),
            hint=_has(model.manifest),
        )
    return b"\n".join(texts)


def file_of(model: StoredModel, name: str) -> bytes:
    """Return a file of the checkpoint that a model keeps. Raises: as `text_of`."""
    layer = model.manifest.file(name)
    if layer is None:
        raise MissingFileError(
            f"model {model.name} has no file {quoted(name)}",
            model=str(model.name),
            hint=_has(model.manifest),
        )
    return model.read(layer)


def _has(manifest: Manifest) -> str:
    kinds = {layer.media_type for layer in manifest.layers}
    parts = [part for part, (kind, _) in PARTS.items() if kind in kinds]
    files = [layer.name or "" for layer in (*manifest.json_layers, *manifest.file_layers)]
    return f"It has: {', '.join([*parts, *files]) or 'nothing to print'}."


def text_layers(model: StoredModel) -> Iterator[TextLayer]:
    """Yield the layers that are not tensors, documents or files; unknown types without bytes."""
    for layer in model.manifest.layers:
        is_file = layer.media_type in (JSON_MEDIA_TYPE, FILE_MEDIA_TYPE) and layer.name is not None
        if layer.media_type != TENSOR_MEDIA_TYPE and not is_file:
            yield layer.media_type, model.read(layer) if layer.media_type in TEXT_LAYERS else b""


TextLayer = tuple[str, bytes]
"""A layer that is neither tensors nor a JSON document: its media type and its bytes."""


def modelfile(
    layers: Iterable[TextLayer], stored: ModelConfig, config: bytes | None, *, draft: bool
) -> tuple[bytes | None, list[str]]:
    """Return the Modelfile that gives the layers back on import, and notes on what is left out.

    None when it would be empty: no layers, and the config blob has the parser, the renderer
    and the version of Ollama that an import would choose by itself. ``config``: config.json.
    Raises: DocumentError for an invalid one.
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
    return "".join([_HEAD, "DRAFT draft\n" if draft else "", *commands]).encode(), notes


def _commands(layer: TextLayer) -> tuple[str, str | None]:
    """Return what a layer is, for a message, and the commands that give it back, or None."""
    media_type, data = layer
    what = TEXT_LAYERS.get(media_type)
    if what is None:
        return f"a layer of type {quoted(media_type)}", None
    try:
        text = "".join(lines_of(media_type, data))
        (back,) = Modelfile.parse((_HEAD + text).encode()).layers()
        is_same = back == layer or (
            back[0] == media_type
            and back[1].startswith((b"{", b"["))
            and strictjson.parse(back[1]) == strictjson.parse(data)
        )
    except (BlobStoreError, TypeError, ValueError, AttributeError, KeyError):
        is_same = False  # no import makes such a layer
    return f"the {what.lower()}", text if is_same else None


def lines_of(media_type: str, data: bytes) -> Iterator[str]:
    """Yield the commands of a Modelfile that give a layer back. Raises: ValueError and others."""
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


def _choices(stored: ModelConfig, config: bytes | None) -> Iterator[str]:
    document = parse_config(config) if config is not None else {}
    named = {key: document[key] for key in ("architectures", "model_type") if key in document}
    family = family_of(strictjson.parse_document(SourceConfig, named, CONFIG_NAME, "Q1"), None)
    for name, chosen, usual in (
        ("PARSER", stored.parser, family.parser if family else None),
        ("RENDERER", stored.renderer, family.renderer if family else None),
        ("REQUIRES", stored.requires, REQUIRED_OLLAMA),
    ):
        if chosen and chosen != usual:
            yield f"{name} {chosen}\n"
