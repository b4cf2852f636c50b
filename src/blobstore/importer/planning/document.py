"""A plan that travels, as a document: an `ImportPlan` in JSON, written. travel.py reads it."""

from __future__ import annotations

import base64
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from blobstore.errors import DocumentError
from blobstore.formats import strictjson
from blobstore.formats.coverage import Coverage
from blobstore.formats.documents import MAX_BLOB
from blobstore.formats.quant import Quantization
from blobstore.formats.strictdocument import InvalidError
from blobstore.importer.planning.outputs import (
    ImportPlan,
    OutputTensor,
    PlannedBlob,
    PlannedCopy,
    PlannedFile,
)
from blobstore.io.durable import FILE_MODE, check_regular, os_errors, replace_file
from blobstore.io.ranges import FileIdentity, Identity
from blobstore.source.addresses import without_secrets
from blobstore.source.files import KeptFile
from blobstore.source.weights import SourceFile, SourceWeight

VERSION: Final = 1
RULE: Final = "P2"
MAX_PLAN: Final = 512 * 2**20
_MAX_RANK = 64
_PRIVATE_MODE = 0o600
_Size = Annotated[int, Field(ge=0, le=MAX_BLOB)]
_Shape = Annotated[list[_Size], Field(max_length=_MAX_RANK)]


class PlanPart(BaseModel):
    """Base of everything in the document: strict, immutable, without unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)


class PlanFile(PlanPart):
    """A file, by its path below the source, its size in bytes and its state.

    On a disk that is the time of its last write, far away ``version``: its ETag, or its hash.
    """

    path: str
    size: _Size
    mtime_ns: int | None = None
    version: str | None = None


class PlanTensor(PlanPart):
    """A tensor of a source: the number of its file, and where its bytes begin in it."""

    name: str
    file: Annotated[int, Field(ge=0)]
    dtype: str
    shape: _Shape
    offset: _Size


class PlanQuantization(PlanPart):
    """A type and its group size."""

    type: str
    group_size: int


def _quantization(value: Quantization | None) -> dict[str, Any] | None:
    if value is None:
        return None
    return {"type": value.quant_type.value, "group_size": value.group_size}


class PlanInventory(PlanPart):
    """A source: its path, its files of weights, all of their tensors.

    Other files stand where they are copied.
    """

    source: str
    files: list[PlanFile]
    tensors: list[PlanTensor]


class PlanWeight(PlanPart):
    """A `SourceWeight`; ``parts`` are the numbers of its tensors by suffix.

    ``inventory`` 0 is the model, 1 the draft.
    """

    name: str
    inventory: Annotated[int, Field(ge=0, le=1)]
    dtype: str
    shape: _Shape
    parts: dict[str, Annotated[int, Field(ge=0)]]
    form: str
    producer: str
    quantization: PlanQuantization | None
    inverse_global_scale: bool
    transposed: bool


class PlanOutput(PlanPart):
    """An `OutputTensor`: ``weights`` are numbers."""

    name: str
    weights: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    dtype: str
    shape: _Shape
    quantization: PlanQuantization | None
    global_scale: _Shape | None
    copies_codes: bool
    kept: str | None


class PlanBlob(PlanPart):
    """A `PlannedBlob`.

    ``size``: what it will have, in bytes; ``is_weighed``: the plan's importance counts for it.
    """

    kind: Literal["blob"]
    name: str
    tensors: Annotated[list[PlanOutput], Field(min_length=1)]
    metadata: dict[str, str]
    alignment: Annotated[int, Field(ge=1, le=2**20)]
    method: str
    is_weighed: bool
    size: _Size


class PlanText(PlanPart):
    """A `PlannedFile`: ``data`` in base64."""

    kind: Literal["text"]
    name: str | None
    media_type: Annotated[str, Field(max_length=255)]
    data: str


class PlanCopy(PlanPart):
    """A `PlannedCopy`: a file of a source."""

    kind: Literal["copy"]
    name: str
    inventory: Annotated[int, Field(ge=0, le=1)]
    file: PlanFile


def _coverage(value: Any) -> Coverage:
    found = Coverage.checked(value)
    _refuse_others(value, asdict(found))
    return found


def _refuse_others(value: Any, known: Any) -> None:
    """Raise InvalidError for a key that only ``value`` has."""
    both = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in both:
        if isinstance(value, dict) and key not in known:
            raise InvalidError("Extra inputs are not permitted", key)
        if isinstance(item, dict | list):
            try:
                _refuse_others(item, known[key])
            except InvalidError as error:
                raise error.within(key) from None


_Coverage = Annotated[Coverage, BeforeValidator(_coverage)]


class PlanDocument(PlanPart):
    """The document.

    ``importance``: float32 vectors in base64, little-endian, by the name of a source's weight.
    """

    version: Literal[1]
    quant_type: str | None
    inventories: Annotated[list[PlanInventory], Field(min_length=1, max_length=2)]
    weights: list[PlanWeight]
    layers: list[Annotated[PlanBlob | PlanText | PlanCopy, Field(discriminator="kind")]]
    config: str
    coverage: _Coverage
    relative_errors: dict[str, float]
    notes: list[str]
    importance: dict[str, str] | None


def parse_plan(value: dict[str, Any], what: str) -> PlanDocument:
    """Return ``value`` as a document; raise DocumentError (rule P2) with the place in it."""
    try:
        return PlanDocument.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place, reason = first["loc"], first.get("ctx", {}).get("error", first["msg"])
        if isinstance(reason, InvalidError):
            place, reason = (*place, *reason.place), reason.reason
        shown = ".".join(map(str, place)) or "document"
        raise DocumentError(f"{what}: {shown}: {reason} (rule {RULE})", rule=RULE) from None


def write_plan(plan: ImportPlan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a file, in the place of one that is there.

    Only its owner can read the file if it has a secret: the query of a signed address. Raises:
    UsageError for a source with files that lie outside its folder; StorageError.
    """
    data = encode_plan(plan)
    addresses = [inventory.folder.address for inventory in plan.inventories]
    is_secret = any(without_secrets(address) != address for address in addresses)
    check_regular(path)
    with os_errors("write", path):
        replace_file(Path(path), data, mode=_PRIVATE_MODE if is_secret else FILE_MODE)


def encode_plan(plan: ImportPlan) -> bytes:
    """Return the bytes of a plan's file. Raises: UsageError, as `write_plan`."""
    return strictjson.encode(_Writer(plan).document()) + b"\n"


class _Writer:
    """Turns a plan into a document.

    Tensors and weights are numbered in the order in which they are met.
    """

    def __init__(self, plan: ImportPlan) -> None:
        self._plan = plan
        self._files = [
            {file.path: number for number, file in enumerate(one.files)} for one in plan.inventories
        ]
        self._tensors = [
            {name: number for number, name in enumerate(one.tensors)} for one in plan.inventories
        ]
        self._weights: list[dict[str, Any]] = []

    def document(self) -> dict[str, Any]:
        plan = self._plan
        layers = [self._layer(layer) for layer in plan.layers]
        vectors = plan.options.importance and plan.options.importance.vectors
        return {
            "version": VERSION,
            "quant_type": plan.options.quant_type and plan.options.quant_type.value,
            "inventories": [self._inventory(number) for number in range(len(plan.inventories))],
            "weights": self._weights,
            "layers": layers,
            "config": plan.config.encode().decode(),
            "coverage": asdict(plan.coverage),
            "relative_errors": dict(plan.relative_errors),
            "notes": list(plan.notes),
            "importance": vectors
            and {name: _encoded(value.astype("<f4").tobytes()) for name, value in vectors.items()},
        }

    def _inventory(self, number: int) -> dict[str, Any]:
        inventory = self._plan.inventories[number]
        files = self._files[number]
        return {
            "source": inventory.folder.address,
            "files": [_file(file) for file in inventory.files],
            "tensors": [
                {
                    "name": tensor.name,
                    "file": files[tensor.file.path],
                    "dtype": tensor.dtype.value,
                    "shape": list(tensor.shape),
                    "offset": tensor.offset,
                }
                for tensor in inventory.tensors.values()
            ],
        }

    def _layer(self, layer: PlannedBlob | PlannedFile | PlannedCopy) -> dict[str, Any]:
        match layer:
            case PlannedBlob():
                return {
                    "kind": "blob",
                    "name": layer.name,
                    "tensors": [self._output(tensor) for tensor in layer.tensors],
                    "metadata": dict(layer.metadata),
                    "alignment": layer.options.header_alignment(layer.data_size),
                    "method": layer.options.method,
                    "is_weighed": layer.options.importance is not None,
                    "size": layer.size,
                }
            case PlannedFile():
                return {
                    "kind": "text",
                    "name": layer.name,
                    "media_type": layer.media_type,
                    "data": _encoded(layer.data),
                }
            case PlannedCopy():
                number = next(
                    n for n, one in enumerate(self._plan.inventories) if layer.file in one.kept
                )
                file = _file(layer.file)
                return {"kind": "copy", "name": layer.name, "inventory": number, "file": file}

    def _output(self, output: OutputTensor) -> dict[str, Any]:
        return {
            "name": output.name,
            "weights": [self._weight(source) for source in output.sources],
            "dtype": output.dtype.value,
            "shape": list(output.shape),
            "quantization": _quantization(output.quantization),
            "global_scale": None if output.global_scale is None else list(output.global_scale),
            "copies_codes": output.copies_codes,
            "kept": output.kept,
        }

    def _weight(self, weight: SourceWeight) -> int:
        number = next(n for n, files in enumerate(self._files) if weight.file.path in files)
        tensors = self._tensors[number]
        self._weights.append(
            {
                "name": weight.name,
                "inventory": number,
                "dtype": weight.dtype.value,
                "shape": list(weight.shape),
                "parts": {suffix: tensors[part.name] for suffix, part in weight.parts.items()},
                "form": weight.form.value,
                "producer": weight.producer,
                "quantization": _quantization(weight.quantization),
                "inverse_global_scale": weight.inverse_global_scale,
                "transposed": weight.transposed,
            }
        )
        return len(self._weights) - 1


def _file(file: SourceFile | KeptFile) -> dict[str, Any]:
    return {"path": file.name, "size": file.size, **state_of(file.identity)}


def state_of(identity: Identity) -> dict[str, int | str]:
    """Return what a plan says of a file's state."""
    if isinstance(identity, FileIdentity):
        return {"mtime_ns": identity.mtime_ns}
    return {"version": identity.key}


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
