"""Replan: the plan of an import that has been, from the source and from what the model keeps of its options."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from blobstore.digest import Digest
from blobstore.documents import TENSOR_MEDIA_TYPE, Manifest, ModelConfig
from blobstore.errors import BlobStoreError, UsageError
from blobstore.importer.modelfile.modelfile import Modelfile
from blobstore.importer.options import ImportOptions
from blobstore.importer.planning.outputs import ImportPlan
from blobstore.importer.planning.plan import make_plan
from blobstore.importer.policies.importance import Importance
from blobstore.importer.recorded import possible_options, recorded_import
from blobstore.provenance import OWN_DOCUMENT
from blobstore.quant import QuantType
from blobstore.source.inventory import Inventory, read_inventory
from blobstore.store import Store


@dataclass(frozen=True, slots=True)
class Files:
    """What the import read and its document does not hold, where it is given again."""

    importance: str | os.PathLike[str] | Mapping[str, Any] | None = None
    draft: str | os.PathLike[str] | None = None
    modelfile: str | os.PathLike[str] | None = None


def replan(store: Store, manifest: Manifest, source: str | os.PathLike[str], files: Files) -> ImportPlan:
    """Return the plan of the import that made a model, from its source.

    Raises: as `plan_import`; UsageError when a file is missing that the import had, or its options can't be found out.
    """
    given = ImportOptions.parse(modelfile=files.modelfile)
    path = Path(files.draft) if files.draft is not None else given.draft
    inventory = read_inventory(source, without=path)
    draft = read_inventory(path) if path is not None else None
    importance = Importance.parse(files.importance) if files.importance is not None else None
    planner = _Planner(store, manifest, inventory, draft, importance, given.modelfile)
    return planner.plan()


@dataclass(frozen=True, slots=True)
class _Planner:
    """What is known of an import: its model, its source, what was given beside it."""

    store: Store
    manifest: Manifest
    inventory: Inventory
    draft: Inventory | None
    importance: Importance | None
    modelfile: Modelfile

    def plan(self) -> ImportPlan:
        layer = self.manifest.document(OWN_DOCUMENT)
        if layer is None:
            return self._fitting()
        try:
            raw = self.store.blobs.read(layer)
        except BlobStoreError:
            return self._giving(layer.digest)
        recorded = recorded_import(raw)
        if recorded.importance is not None and (self.importance is None or self.importance.digest != recorded.importance):
            what = "with other" if self.importance is not None else "with"
            raise UsageError(f"the model was imported {what} importance", hint="Give the same file: --importance FILE.")
        return make_plan(self.inventory, self._completed(recorded.options), self.draft)

    def _completed(self, options: ImportOptions) -> ImportOptions:
        """Return options with what was given: importance weighs a search only."""
        importance = self.importance if options.method == "search" else None
        return replace(options, importance=importance, modelfile=self.modelfile)

    def _giving(self, digest: Digest) -> ImportPlan:
        """Return the first plan of usual options whose own document, which is damaged in the store, has that digest."""
        for plan in self._plans(own_document=True):
            if Digest.of(plan.documents[OWN_DOCUMENT]) == digest:
                return plan
        raise self._unknown(f"its {OWN_DOCUMENT} is damaged, and nothing usual gives it")

    def _fitting(self) -> ImportPlan:
        """Return the first plan of usual options that gives the model's blobs their names and sizes."""
        wanted = {(layer.name, layer.size) for layer in self.manifest.layers if layer.media_type == TENSOR_MEDIA_TYPE}
        for plan in self._plans(own_document=False):
            if {(blob.name, blob.size) for blob in plan.blobs} == wanted:
                return plan
        raise self._unknown("it keeps none, and nothing usual gives its blobs")

    def _plans(self, *, own_document: bool) -> Iterator[ImportPlan]:
        """Yield the plans of usual options, of profiles that write a document of ours or of those that do not."""
        for options in self._possible():
            if options.profile.own_document is own_document:
                with suppress(BlobStoreError):  # such options can't have been asked for
                    yield make_plan(self.inventory, options, self.draft)

    def _possible(self) -> Iterator[ImportOptions]:
        draft_types = (None, *QuantType) if self.draft is not None else (None,)
        for options, draft_type in product(possible_options(self._file_type()), draft_types):
            yield replace(self._completed(options), draft_type=draft_type)

    def _file_type(self) -> str | None:
        if self.manifest.config is None:
            return ""
        try:
            return ModelConfig.parse(self.store.blobs.read(self.manifest.config)).file_type or ""
        except BlobStoreError:
            return None

    def _unknown(self, why: str) -> UsageError:
        message = f"the options of the import are not known: {why} from {self.inventory.path}"
        return UsageError(message, hint="If this is the source, import it again with the options of that time.")
