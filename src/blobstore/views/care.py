"""Views of the care of a store: ``verify``, ``repair``, ``prune``, ``du``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from blobstore.views.view import Bytes, Text, View

if TYPE_CHECKING:
    from blobstore.importer.repair import RepairResult
    from blobstore.store.care.prune import PruneResult, UndoResult, UnneededBlob
    from blobstore.store.care.usage import Usage
    from blobstore.store.care.verify import VerifyResult

MOST_NAMES = 100
"""Names of models, or tensors, that are listed of one damaged blob: it may belong to thousands."""


class DamagedBlobView(View):
    """A damaged blob, and what that hits: at most 100 models and tensors by name, and how many there are."""

    digest: Text
    reason: str
    models: list[Text]
    model_count: int
    tensors: list[str]
    tensor_count: int


class BrokenManifestView(View):
    """A model whose manifest is damaged."""

    name: Text
    reason: str


class OddFileView(View):
    """A file that is not part of a store; that is no damage."""

    path: Text
    reason: str


class VerifyView(View):
    """What is damaged."""

    checked: int = Field(description="blobs")
    bytes: Bytes = Field(description="bytes that were hashed")
    damaged: list[DamagedBlobView]
    broken: list[BrokenManifestView]
    odd: list[OddFileView]

    @classmethod
    def of(cls, result: VerifyResult) -> VerifyView:
        """Return the view of a check."""
        damaged = [
            DamagedBlobView(
                digest=str(blob.digest),
                reason=blob.reason,
                models=[str(name) for name in blob.models[:MOST_NAMES]],
                model_count=len(blob.models),
                tensors=list(blob.tensors[:MOST_NAMES]),
                tensor_count=len(blob.tensors),
            )
            for blob in result.damaged
        ]
        broken = [BrokenManifestView.model_validate(one) for one in result.broken]
        odd = [OddFileView.model_validate(one) for one in result.odd]
        return cls(
            checked=result.checked, bytes=result.nbytes, damaged=damaged, broken=broken, odd=odd
        )


class RemainingView(View):
    """A blob that could not be made again."""

    digest: Text
    name: str | None
    reason: str


class RepairView(View):
    """What was made again."""

    name: Text
    checked: int
    repaired: list[Text] = Field(description="digests")
    bytes: Bytes
    manifest_restored: bool
    remaining: list[RemainingView]

    @classmethod
    def of(cls, result: RepairResult) -> RepairView:
        """Return the view of a repair."""
        return cls(
            name=str(result.name),
            checked=result.checked,
            repaired=[str(blob.digest) for blob in result.repaired],
            bytes=sum(blob.size for blob in result.repaired),
            manifest_restored=result.manifest_restored,
            remaining=[
                RemainingView(digest=str(left.blob.digest), name=left.blob.name, reason=left.reason)
                for left in result.remaining
            ],
        )


class UnneededBlobView(View):
    """A blob that no model needs."""

    digest: Text
    size: Bytes
    age: int = Field(description="seconds")
    reason: str
    kept: bool

    @classmethod
    def of(cls, blob: UnneededBlob, reason: str, *, kept: bool) -> UnneededBlobView:
        """Return the view of a blob."""
        return cls(
            digest=str(blob.digest), size=blob.size, age=int(blob.age_s), reason=reason, kept=kept
        )


class LeftoverView(View):
    """A remain of an import that was killed."""

    path: Text
    size: Bytes
    reason: str


class PruneView(View):
    """What a clean-up removed, or would remove."""

    dry_run: bool
    removed: int
    bytes: Bytes
    kept: int
    kept_bytes: Bytes
    freed: Bytes
    blobs: list[UnneededBlobView]
    leftovers: list[LeftoverView]
    forgotten: list[Text] = Field(description="models of which only copies of manifests were left")

    @classmethod
    def of(cls, result: PruneResult, *, dry_run: bool) -> PruneView:
        """Return the view of a clean-up."""
        removed = [UnneededBlobView.of(blob, blob.reason, kept=False) for blob in result.removed]
        spared = [
            UnneededBlobView.of(blob, "it is within the grace time", kept=True)
            for blob in result.spared
        ]
        return cls(
            dry_run=dry_run,
            removed=len(removed),
            bytes=sum(blob.size for blob in removed),
            kept=len(spared),
            kept_bytes=sum(blob.size for blob in spared),
            freed=result.freed,
            blobs=[*removed, *spared],
            leftovers=[
                LeftoverView(path=str(one.path), size=one.nbytes, reason=one.reason)
                for one in result.leftovers
            ],
            forgotten=[str(name) for name in result.forgotten],
        )


class UndoView(View):
    """What came back from the trash."""

    restored: int
    bytes: Bytes
    kept: int
    blobs: list[Text] = Field(description="digests")
    without_manifest: list[Text]

    @classmethod
    def of(cls, undone: UndoResult) -> UndoView:
        """Return the view of a clean-up that was undone."""
        return cls(
            restored=len(undone.restored),
            bytes=sum(nbytes for _, nbytes in undone.restored),
            kept=len(undone.kept),
            blobs=[str(digest) for digest, _ in undone.restored],
            without_manifest=[str(name) for name in undone.without_manifest],
        )


class ModelUsageView(View):
    """What a model takes; null where its manifest can't be read."""

    name: Text
    bytes: int | None
    unique: int | None = Field(description="bytes that rm would free")
    shared: int | None = Field(description="bytes that other models need too")
    error: str = Field(default="", description="why its manifest can't be read")


class UsageView(View):
    """What blobs take."""

    blobs: int
    bytes: Bytes
    models: list[ModelUsageView]
    reclaimable: Bytes = Field(description="bytes that no model needs")
    trash: Bytes

    @classmethod
    def of(cls, usage: Usage) -> UsageView:
        """Return the view of a usage."""
        models = []
        for model in usage.models:
            sizes = {"bytes": model.nbytes, "unique": model.unique, "shared": model.shared}
            broken = (
                {**dict.fromkeys(sizes), "error": model.error.message}
                if model.error is not None
                else {}
            )
            models.append(ModelUsageView.model_validate({"name": model.name, **sizes, **broken}))
        return cls(
            blobs=usage.blobs,
            bytes=usage.nbytes,
            models=models,
            reclaimable=usage.reclaimable,
            trash=usage.trash,
        )
