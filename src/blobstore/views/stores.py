"""Views of a store: its models, what was done to them, and its care."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AliasChoices, AliasPath, BeforeValidator, Field

from blobstore.views.view import (
    ONLY_SHOWN,
    Bytes,
    Count,
    CoverageView,
    DigestText,
    Figure,
    Moment,
    Nbytes,
    OptionalText,
    Size,
    TensorView,
    Text,
    Total,
    VerdictView,
    View,
)

if TYPE_CHECKING:
    from blobstore.formats.provenance import Coverage
    from blobstore.inspection.listing import BrokenModel, ListedModel, ModelDetails, ModelSummary
    from blobstore.names import ModelName
    from blobstore.store.care.prune import PruneResult, UndoResult, UnneededBlob
    from blobstore.store.care.usage import ModelUsage, Usage
    from blobstore.store.ports import Removal
    from blobstore.store.transfer import Transferred

MOST_NAMES = 100
"""Names of models, or tensors, that are listed of one damaged blob: it may belong to thousands."""


class ListItemView(View):
    """A model of a store; of one that can't be read only the name and why."""

    name: Text
    id: OptionalText = Field(description="the manifest's digest")
    size: int | None = Field(description="bytes of its blobs")
    modified: Moment = Field(description="RFC 3339")
    quant_type: str | None
    parameters: int | None
    error: str = Field(default="", description="why it can't be read")
    store: str = Field(default="", description="where it lies, when there are lower stores")
    packed: bool = Field(default=False, description="if it is: true")

    @classmethod
    def of(cls, model: ListedModel | BrokenModel, place: str | None) -> ListItemView:
        """Return the view of a model, which lies in the store ``place`` where there are several."""
        where: dict[str, Any] = {} if place is None else {"store": place}
        error = getattr(model, "error", None)
        if error is None:
            if getattr(model, "is_packed", False):
                where["packed"] = True
            return cls.model_validate(model).model_copy(update=where)
        unknown = dict.fromkeys(("id", "size", "modified", "quant_type", "parameters"))
        return cls.model_validate({"name": model.name, **unknown, "error": error.message, **where})


class StoredTensorView(TensorView):
    """A tensor of a stored model; ``shape`` is before packing."""

    size: Size


class ModelView(View):
    """A stored model."""

    name: Text
    id: Text
    architecture: str | None
    parameters: int
    quant_type: str | None
    context_length: int | None
    embedding_length: int | None
    capabilities: list[str]
    size: Bytes
    layers: int
    runs_in: list[VerdictView]
    tensors: list[StoredTensorView]
    coverage: CoverageView | None = Field(default=None, description="with --coverage")
    packed: bool = Field(default=False, description="if it is: true")

    @classmethod
    def of(
        cls, summary: ModelSummary, details: ModelDetails, coverage: Coverage | None
    ) -> ModelView:
        """Return the view of a model; ``coverage`` where it is asked for."""
        covered: dict[str, Any] = {} if coverage is None else {"coverage": coverage}
        if summary.is_packed:
            covered["packed"] = True
        fields = {
            name: getattr(source, name)
            for source in (details, summary)
            for name in cls.model_fields
            if hasattr(source, name)
        }
        return cls.model_validate(fields | covered)


class RemovalView(View):
    """A removed model: how many blobs went with it, and why others had to stay."""

    name: Text
    removed: Count
    bytes: Total
    kept: Count
    kept_bytes: Annotated[Total, ONLY_SHOWN] = 0
    reason: str | None

    @classmethod
    def of(cls, name: ModelName, removal: Removal) -> RemovalView:
        """Return the view of a removal."""
        gone, kept = removal.removed, removal.kept
        return cls(
            name=name,
            removed=gone,
            bytes=gone,
            kept=kept,
            kept_bytes=kept,
            reason=removal.reason,
        )


class NewNameView(View):
    """A model and the name that it got."""

    source: Text
    name: Text


class WayView(View):
    """How much came in one way."""

    blobs: int
    bytes: Bytes


def _way(description: str) -> Any:
    return Field(
        default=WayView(blobs=0, bytes=0), description=f"with --to: blobs that {description}"
    )


class CopyView(NewNameView):
    """A model that was copied; to another store, what came in which way."""

    store: str = Field(default="", description="with --to: the other store")
    there: WayView = _way("the store had")
    cloned: WayView = _way("share their blocks")
    linked: WayView = _way("are the same file")
    copied: WayView = _way("were copied")

    @classmethod
    def of(cls, done: Transferred, store: str) -> CopyView:
        """Return the view of a model that was copied to another store."""
        ways = {
            how.value: WayView(blobs=done.blobs[how], bytes=done.nbytes[how]) for how in done.blobs
        }
        return cls(source=done.source, name=done.name, store=store, **ways)

    @property
    def ways(self) -> dict[str, WayView]:
        """What came, by the way in which it came."""
        names = [
            how for how in ("there", "linked", "cloned", "copied") if how in self.model_fields_set
        ]
        return {how: getattr(self, how) for how in names}


class RunView(View):
    """What a model wrote, how fast, and with which seed."""

    text: str
    tokens: int
    prompt_tokens: int
    seconds: float
    tokens_per_second: Figure
    finish_reason: str | None
    seed: int | None

    @classmethod
    def of(cls, answer: Any, seed: int | None) -> RunView:
        """Return the view of a whole answer."""
        return cls(
            text=answer.text,
            tokens=answer.tokens,
            prompt_tokens=answer.prompt_tokens,
            seconds=answer.seconds,
            tokens_per_second=answer.tokens_per_second,
            finish_reason=answer.finish_reason,
            seed=seed,
        )


class ReportView(View):
    """A report that was written."""

    name: Text
    page: str | None = Field(description="its file; null without -o")
    bytes: int | None = Field(description="of the page")
    plots: list[str] = Field(description="what is drawn")
    pictures: list[str] = Field(description="the files of --png")


_NAMES = BeforeValidator(lambda names: [str(name) for name in names[:MOST_NAMES]])


class DamagedBlobView(View):
    """A damaged blob: at most 100 names of its models and tensors, and how many there are."""

    digest: Text
    reason: str
    models: Annotated[list[str], _NAMES]
    model_count: Count = Field(validation_alias=AliasChoices("model_count", "models"))
    tensors: Annotated[list[str], _NAMES]
    tensor_count: Count = Field(validation_alias=AliasChoices("tensor_count", "tensors"))


class BrokenManifestView(View):
    """A model whose manifest is damaged."""

    name: Text
    reason: str


class OddFileView(View):
    """A file that is not part of a store, which is not damage."""

    path: Text
    reason: str


class VerifyView(View):
    """What is damaged."""

    checked: int = Field(description="blobs")
    bytes: Nbytes = Field(description="bytes that were hashed")
    damaged: list[DamagedBlobView]
    broken: list[BrokenManifestView]
    odd: list[OddFileView]


class RemainingView(View):
    """A blob that could not be made again."""

    digest: Text = Field(validation_alias=AliasChoices("digest", AliasPath("blob", "digest")))
    name: str | None = Field(validation_alias=AliasChoices("name", AliasPath("blob", "name")))
    reason: str


class RepairView(View):
    """What was made again."""

    name: Text
    checked: int
    repaired: list[DigestText] = Field(description="digests")
    bytes: Total = Field(validation_alias=AliasChoices("bytes", "repaired"))
    manifest_restored: bool
    remaining: list[RemainingView]


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
            digest=blob.digest, size=blob.size, age=int(blob.age_s), reason=reason, kept=kept
        )


class LeftoverView(View):
    """A remain of an import that was killed, or signatures that no model has."""

    path: Text
    size: Size
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
        young = "it is within the grace time"
        removed = [UnneededBlobView.of(blob, blob.reason, kept=False) for blob in result.removed]
        spared = [UnneededBlobView.of(blob, young, kept=True) for blob in result.spared]
        return cls(
            dry_run=dry_run,
            removed=len(removed),
            bytes=sum(blob.size for blob in removed),
            kept=len(spared),
            kept_bytes=sum(blob.size for blob in spared),
            freed=result.freed,
            blobs=[*removed, *spared],
            leftovers=list(map(LeftoverView.model_validate, result.leftovers)),
            forgotten=result.forgotten,
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
            blobs=[digest for digest, _ in undone.restored],
            without_manifest=undone.without_manifest,
        )


class ModelUsageView(View):
    """What a model takes; null where its manifest can't be read."""

    name: Text
    bytes: int | None
    unique: int | None = Field(description="bytes that rm would free")
    shared: int | None = Field(description="bytes that other models need too")
    error: str = Field(default="", description="why its manifest can't be read")
    packed: bool = Field(default=False, description="if it is: true; bytes are those of files")

    @classmethod
    def of(cls, model: ModelUsage) -> ModelUsageView:
        """Return the view of a model's usage."""
        more: dict[str, Any] = {"packed": True} if model.is_packed else {}
        if model.error is not None:
            more["error"] = model.error.message
            return cls(name=model.name, bytes=None, unique=None, shared=None, **more)
        return cls(
            name=model.name,
            bytes=model.nbytes,
            unique=model.unique,
            shared=model.shared,
            **more,
        )


class UsageView(View):
    """What blobs take."""

    blobs: int
    bytes: Nbytes
    models: list[ModelUsageView]
    reclaimable: Bytes = Field(description="bytes that no model needs")
    trash: Bytes
    packed: Bytes = Field(default=0, description="bytes of packed files")

    @classmethod
    def of(cls, usage: Usage) -> UsageView:
        """Return the view of a usage."""
        return cls(
            blobs=usage.blobs,
            bytes=usage.nbytes,
            models=list(map(ModelUsageView.of, usage.models)),
            reclaimable=usage.reclaimable,
            trash=usage.trash,
            **({"packed": usage.packed} if usage.packed else {}),
        )
