"""Records: results of `quality` and `verify` that a store keeps, and the views of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from blobstore.errors import DocumentError, NotFoundError
from blobstore.names import Digest, ModelName
from blobstore.store.care.verify_record import file_number
from blobstore.views.checkpoints import QualityView
from blobstore.views.stores import VerifyView
from blobstore.views.view import Moment, OptionalText, Text, View

if TYPE_CHECKING:
    from blobstore.inspection.quality import ModelQuality
    from blobstore.source.folders import Folder
    from blobstore.store.ports import Readable, Results

_Record = TypeVar("_Record", bound=View)


class QualityRecord(View):
    """What a store keeps of a `quality`."""

    version: Literal[1]
    measured: Moment
    against: OptionalText
    result: QualityView


class VerifyRecord(View):
    """What a store keeps of a `verify`; `store.care.verify_record` makes it."""

    version: Literal[1]
    verified: Moment
    quick: bool
    sample: str | None
    damaged: int
    broken: int
    odd: int
    files: dict[str, int | None] = Field(default_factory=dict)
    result: VerifyView


class KeptQualityView(View):
    """The last result of `quality` for a model; null if it is missing."""

    model: Text
    id: Text = Field(description="the manifest's digest")
    measured: Moment = Field(description="RFC 3339")
    against: OptionalText = Field(description="the checkpoint that it was compared with")
    result: QualityView | None


class KeptVerifyView(View):
    """The last result of `verify` for the whole store; null if it is missing.

    Faults that it lists are left out once their blobs or manifests were written anew or removed,
    and odd files once they are gone.
    """

    verified: Moment = Field(description="RFC 3339")
    quick: bool = Field(description="tensor blobs were not hashed")
    sample: str | None = Field(description="the part of the blobs that was checked, such as 1/7")
    blobs: int = Field(description="blobs in the store now")
    damaged: int = Field(description="damaged blobs; the result lists at most 1,000")
    broken: int = Field(description="broken manifests; the result lists at most 1,000")
    odd: int = Field(description="odd files; the result lists at most 1,000")
    result: VerifyView | None


def keep_quality(home: Readable, found: ModelQuality, source: str | Folder) -> None:
    """Keep the result of a model's `quality` in its store, if that keeps results.

    It is kept for the manifest that was measured: the name may be another model's by now. A lower
    store is only read. Of ``source`` the address or the folder's name is kept.
    """
    results, is_lower = kept_results_of(home, found.name)
    if results is None or is_lower:
        return
    record = QualityRecord(
        version=1,
        measured=datetime.now(UTC),
        against=_shown(source),
        result=QualityView.of(found),
    )
    results.keep("quality", found.manifest, record.model_dump_json(exclude_unset=True).encode())


def kept_quality(home: Readable, name: ModelName, digest: Digest) -> KeptQualityView:
    """Return what `quality` kept of a model whose manifest has this digest.

    Raises: DocumentError for a record that is damaged; StorageError.
    """
    results, _ = kept_results_of(home, name)
    found = None if results is None else results.read("quality", digest)
    if found is None:
        return KeptQualityView(model=name, id=digest, measured=None, against=None, result=None)
    record = _parsed(QualityRecord, *found, "Run quality again: it is replaced.")
    return KeptQualityView(
        model=name,
        id=digest,
        measured=record.measured,
        against=record.against,
        result=record.result,
    )


def kept_verify(home: Readable) -> KeptVerifyView:
    """Return what is still true of the last `verify` of a store. Raises: as `kept_quality`."""
    store: Any = home.upper
    results = home.upper.results
    found = None if results is None else results.read_verify()
    if found is None:
        return KeptVerifyView(
            verified=None,
            quick=False,
            sample=None,
            blobs=0,
            damaged=0,
            broken=0,
            odd=0,
            result=None,
        )
    record = _parsed(VerifyRecord, *found, "Run verify again: it is replaced.")
    said, names = record.result, {str(name) for name in store.manifests.names()}

    def stands(name: str, models: Iterable[str]) -> bool:
        number = file_number(store, name)
        is_needed = number is not None or not names.isdisjoint(models)
        return is_needed and record.files.get(name, number) == number

    damaged = [blob for blob in said.damaged if stands(blob.digest, blob.models)]
    broken = [model for model in said.broken if stands(model.name, [model.name])]
    odd = [file for file in said.odd if os.path.lexists(file.path)]
    return KeptVerifyView(
        verified=record.verified,
        quick=record.quick,
        sample=record.sample,
        blobs=len(store.blobs.listing().named) + len(store.packed.blobs.digests()),
        damaged=record.damaged - len(said.damaged) + len(damaged),
        broken=record.broken - len(said.broken) + len(broken),
        odd=record.odd - len(said.odd) + len(odd),
        result=said.model_copy(update={"damaged": damaged, "broken": broken, "odd": odd}),
    )


def kept_results_of(home: Readable, name: ModelName) -> tuple[Results | None, bool]:
    """Return the results of the store that a model is in, and whether that is a lower one."""
    if not home.lower:
        return home.results, False
    try:
        owner = home.home_of(name)
    except NotFoundError:  # it is packed
        owner = home.upper
    return owner.results, owner in home.lower


def _shown(source: str | Folder) -> str:
    return Path(source).resolve().name if isinstance(source, str) else source.name


def _parsed(kind: type[_Record], path: str, text: bytes, hint: str) -> _Record:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        message = f"{path} is damaged: {place}: {first['msg']}"
        raise DocumentError(message, path=path, hint=hint) from error
