"""A plan in a file: the options, the source's files, and a digest of what was decided.

Written by ``plan -o plan.json``, carried out by ``import --plan``, ``work`` and ``commit``, on this
machine or on another one that sees the source. To read it is to plan again, from the headers and
documents of the source, and to compare. So it gives the bytes of an import from the source, and
needs neither its options nor, for a target, the weights to be measured again.

Rule P2: a strict JSON object of version 2, at most 512 MiB. Each file of the source has the size
and the time of its last write (far away: its version and declared digest) that it had, and each
JSON document its bytes. Files that the plan does not name are ignored. What is decided, for every
blob its header, its sources and how it is made, has the digest in the plan.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from blobstore._version import __version__
from blobstore.errors import CorruptDataError, DocumentError, NotFoundError, UsageError
from blobstore.formats import strictjson
from blobstore.formats.checkpoint import CONFIG_NAME
from blobstore.formats.documents import Omission
from blobstore.formats.dtypes import QuantType
from blobstore.formats.modelfile import Modelfile
from blobstore.formats.strictjson import Document, parse_document
from blobstore.importer.options import ImportOptions
from blobstore.importer.outputs import ImportPlan, PlannedBlob, PlannedFile
from blobstore.importer.plan import make_plan
from blobstore.importer.rules import Importance
from blobstore.importer.writing import entries_of
from blobstore.io.durable import FILE_MODE, check_regular, os_errors, read_own, replace_file
from blobstore.io.ranges import FileIdentity
from blobstore.names import Digest
from blobstore.source.addresses import OpenSource, Source, open_folder, without_secrets
from blobstore.source.files import KeptFile
from blobstore.source.folders import Folder, SourceFile
from blobstore.source.inventory import Inventory, read_adapter, read_model

VERSION: Final = 2
RULE = "P2"
MAX_PLAN = 512 * 2**20

_AGAIN = "Make the plan again."


@dataclass(frozen=True, slots=True)
class PlanSource(Document):
    """A source: its address, the state of each file by name, and what was left out of it.

    ``config``: the address of the folder with its documents, if that is another one.
    """

    address: str
    files: Mapping[str, str]
    left_out: tuple[Omission, ...]
    config: str | None = None

    def inventory(
        self, source: Source | None, open_source: OpenSource, without: Folder | None = None
    ) -> Inventory:
        place = self.address if source is None else source
        opened = open_source(place) if isinstance(place, str) else place
        config = open_source(self.config) if self.config is not None else None
        return self.checked(read_model(opened, without=without, config=config))

    def checked(self, current: Inventory) -> Inventory:
        """Return what the plan names of a source, if that is unchanged."""
        documents = {name: data for name, data in current.documents.items() if name in self.files}
        kept = tuple(file for file in current.kept if file.name in self.files)
        inventory = replace(
            current,
            documents=documents,
            config=current.config if CONFIG_NAME in documents else None,
            kept=kept,
            left_out=self.left_out,
        )
        states = _states(inventory)
        for name in sorted(self.files.keys() | states.keys()):
            if states.get(name) != self.files.get(name):
                changed = "has changed" if name in self.files else "has been added"
                place = inventory.folder.place(name)
                raise CorruptDataError(
                    f"{place} {changed if name in states else 'has been removed'} since"
                    " the plan was made",
                    path=place,
                    hint=_AGAIN,
                )
        return inventory


@dataclass(frozen=True, slots=True)
class PlanDocument(Document):
    """The document.

    ``options``: as ``blobstore.json`` has them. ``importance``: float32 vectors in base64,
    little-endian, by the name of a source's weight.
    """

    version: Literal[2]
    blobstore: str
    source: PlanSource
    draft: PlanSource | None
    options: dict[str, Any]
    draft_quant: str | None
    modelfile: Modelfile
    importance: dict[str, str]
    relative_errors: dict[str, float]
    notes: tuple[str, ...]
    decisions: str
    adapter: PlanSource | None = None

    @property
    def import_options(self) -> ImportOptions:
        texts = self.modelfile
        texts.layers()
        Modelfile().with_options(texts.template, texts.system, texts.licenses, {})  # for limits
        vectors = {
            name: np.frombuffer(base64.b64decode(text, validate=True), "<f4")
            for name, text in self.importance.items()
        }
        return replace(
            ImportOptions.from_record(self.options),
            importance=Importance.parse(vectors) if vectors else None,
            modelfile=texts,
            draft_type=None if self.draft_quant is None else QuantType.parse(self.draft_quant),
        )


def write_plan(plan: ImportPlan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a file, replacing an existing one.

    Only its owner can read the file if it has a secret: the query of a signed address. Raises:
    StorageError.
    """
    data = encode_plan(plan)
    addresses = {folder.address for one in plan.inventories for folder in one.folders}
    is_secret = addresses != {*map(without_secrets, addresses)}
    check_regular(path)
    with os_errors("write", path):
        replace_file(Path(path), data, mode=0o600 if is_secret else FILE_MODE)


def encode_plan(plan: ImportPlan) -> bytes:
    """Return the bytes of a plan's file."""
    options = plan.options
    vectors = options.importance.vectors if options.importance is not None else {}
    adapter = plan.inventory.adapter
    own, *draft = map(_source_of, plan.inventories)
    document = PlanDocument(
        version=VERSION,
        blobstore=__version__,
        source=own,
        draft=draft[0] if draft else None,
        options=options.record,
        draft_quant=options.draft_type and options.draft_type.value,
        modelfile=replace(options.modelfile, source=None, draft=None, adapter=None, notes=()),
        importance={
            name: base64.b64encode(vector.astype("<f4").tobytes()).decode()
            for name, vector in vectors.items()
        },
        relative_errors=dict(plan.relative_errors),
        notes=plan.notes,
        decisions=_decisions(plan),
        adapter=_source_of(adapter) if adapter is not None else None,
    )
    return strictjson.encode(asdict(document)) + b"\n"


def read_plan(
    path: str | os.PathLike[str],
    *,
    source: Source | None = None,
    open_source: OpenSource = open_folder,
) -> ImportPlan:
    """Return the plan in a file, to be carried out from its source, or from a copy at ``source``.

    ``open_source`` opens an address that the plan names: with a token, perhaps.

    Raises: DocumentError (rule P2); LimitExceededError; CorruptDataError when a file of the source
    is not the one that was planned; NotFoundError when one is missing; as `plan_import`.
    """
    return decode_plan(plan_bytes(path), path, source=source, open_source=open_source)


def plan_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a plan's file.

    Raises: NotFoundError; LimitExceededError; StorageError.
    """
    try:
        return read_own(path, MAX_PLAN, follow=True)
    except NotFoundError as error:
        error.hint = "blobstore plan SOURCE -o PLAN writes a plan."
        raise


def decode_plan(
    raw: bytes,
    path: str | os.PathLike[str],
    *,
    source: Source | None = None,
    open_source: OpenSource = open_folder,
) -> ImportPlan:
    """Return the plan in the bytes of a file, as `read_plan`; ``path`` is for messages."""
    what = f"the plan {os.fspath(path)}"
    document, options = _parse(raw, what)
    try:
        drafted = document.draft
        draft = drafted.inventory(None, open_source) if drafted is not None else None
        without = draft.folder if draft is not None else None
        inventory = document.source.inventory(source, open_source, without)
        if document.adapter is not None:
            adapter = read_adapter(open_source(document.adapter.address))
            inventory = replace(inventory, adapter=document.adapter.checked(adapter))
    except NotFoundError as error:
        error.hint = error.hint or "If the source was moved, give its new location."
        raise
    plan = make_plan(inventory, options, draft)
    if _decisions(plan) == document.decisions:
        return replace(plan, relative_errors=document.relative_errors, notes=document.notes)
    if document.blobstore != __version__:
        raise DocumentError(
            f"{what} was made by blobstore {document.blobstore}, and {__version__} decides"
            f" differently (rule {RULE})",
            rule=RULE,
            hint=_AGAIN,
        )
    raise CorruptDataError(
        f"{what}: {inventory.path} has different tensors than when the plan was made",
        path=inventory.path,
        hint=_AGAIN,
    )


def _parse(raw: bytes, what: str) -> tuple[PlanDocument, ImportOptions]:
    value = strictjson.parse_object(raw, what, rule=RULE, limit=MAX_PLAN)
    if value.get("version") == 1:
        raise DocumentError(
            f"{what} is of version 1, which earlier versions of blobstore wrote (rule {RULE})",
            rule=RULE,
            hint=_AGAIN,
        )
    document = parse_document(PlanDocument, value, what, RULE)
    try:
        return document, document.import_options
    except (UsageError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DocumentError(f"{what}: {error} (rule {RULE})", rule=RULE) from None


def _source_of(inventory: Inventory) -> PlanSource:
    config = inventory.config_folder.address if inventory.config_folder is not None else None
    return PlanSource(inventory.folder.address, _states(inventory), inventory.left_out, config)


def _states(inventory: Inventory) -> dict[str, str]:
    states = {name: str(Digest.of(data)) for name, data in inventory.documents.items()}
    states |= {file.name: _state(file) for file in inventory.kept}
    return states | {
        file.name: f"{_state(file)} {file.declared or ''}".rstrip() for file in inventory.files
    }


def _state(file: SourceFile | KeptFile) -> str:
    identity = file.identity
    version = identity.mtime_ns if isinstance(identity, FileIdentity) else identity.key
    return f"{file.size} {version}"


def _decisions(plan: ImportPlan) -> str:
    """Return the digest of everything that a plan decides, whichever machine makes it."""
    hashed = hashlib.sha256(plan.config.encode())
    for key, _ in entries_of(plan.blobs, lambda file: file.name):
        hashed.update(key.encode())
    for layer in plan.layers:
        if not isinstance(layer, PlannedBlob):
            data = layer.data if isinstance(layer, PlannedFile) else layer.file.name.encode()
            hashed.update(f"\n{layer.name} {layer.media_type} {Digest.of(data)}".encode())
    return f"sha256:{hashed.hexdigest()}"
