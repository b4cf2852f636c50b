"""Import: a checkpoint becomes blobs and a manifest.

Read (source/inventory.py), decide (plan.py), write (writing.py). A tag that says another
type than the model gets is refused first.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Unpack

from blobstore.errors import InvalidNameError, NotFoundError, UsageError
from blobstore.formats.documents import CONFIG_MEDIA_TYPE, Coverage, Descriptor, Manifest
from blobstore.formats.dtypes import FLOAT_NAMES, DType, QuantType
from blobstore.importer.arguments import ImportArguments, PolicyFunction
from blobstore.importer.options import Experts, ImportOptions
from blobstore.importer.outputs import (
    ImportPlan,
    OutputTensor,
    PlannedBlob,
    PlannedCopy,
    PlannedFile,
)
from blobstore.importer.plan import make_plan, plan_blobs
from blobstore.importer.rules import Rule, escape_name
from blobstore.importer.writing import Means, WrittenBlobs, copy_file, write_blobs
from blobstore.io.workers import Progress, start_progress, threads
from blobstore.model.facts import Verdict
from blobstore.names import Digest, ModelName
from blobstore.source.addresses import OpenSource, Source, is_address, open_folder
from blobstore.source.inventory import Inventory, read_model
from blobstore.source.weights import FetchOptions
from blobstore.store.hints import Share
from blobstore.store.places import StorePlace, opened_store
from blobstore.store.ports import Finished, Home, Readable, Session, id_of, replaced_id

_SAID: dict[str, frozenset[str]] = {
    **{kind.value: frozenset({kind.value}) for kind in QuantType},
    "q4": frozenset({"int4"}),
    "q8": frozenset({"int8"}),
    # As options these two mean int4 and int8, as in Ollama; as tags people write them for the float
    # types too.
    "fp4": frozenset({"int4", "nvfp4", "mxfp4"}),
    "fp8": frozenset({"int8", "mxfp8"}),
    **{name: frozenset({dtype.value}) for name, dtype in FLOAT_NAMES.items()},
    "fp16": frozenset({DType.F16.value}),
    "fp32": frozenset({DType.F32.value}),
}


def check_tag(plan: ImportPlan, name: ModelName) -> None:
    """Raise UsageError when a tag says another type than the plan makes: ``x:int4``, but int8."""
    said, made = _SAID.get(name.tag.lower()), _types_of(plan)
    if said is None or said & made:
        return
    raise UsageError(
        f"the tag of {name} says {name.tag}, but the weights will be {', '.join(sorted(made))}",
        model=str(name),
        hint="Choose another tag, or keep this one with force=True.",
    )


def _types_of(plan: ImportPlan) -> set[str]:
    if plan.config.file_type:
        return {plan.config.file_type}
    quantized = {
        tensor.quantization.quant_type.value
        for tensor in plan.tensors
        if tensor.quantization is not None
    }
    return quantized or {tensor.dtype.value for tensor in plan.tensors}


def default_name(plan: ImportPlan) -> ModelName:
    """Return the source's stem, with the type (or ``latest``) as tag.

    The stem of ORG/NAME in the Hugging Face cache is NAME.

    Raises: InvalidNameError when the stem is not a model name.
    """
    stem, quant_type = plan.inventory.folder.stem, plan.options.quant_type
    hint = "Give the model a name: blobstore import SOURCE NAME."
    if stem.startswith("sha256-"):
        raise InvalidNameError(f"the file of a blob does not name its model: {stem}", hint=hint)
    try:
        return ModelName(model=stem, tag=quant_type.value if quant_type is not None else "latest")
    except InvalidNameError as error:
        raise error.about(hint=hint) from None


def name_for(plan: ImportPlan, name: str | ModelName | None, *, force: bool) -> ModelName:
    """Return the name of a plan's model, its default name for None.

    Raises: as `default_name`; as `check_tag`, without ``force``.
    """
    full = ModelName.of(default_name(plan) if name is None else name)
    if not force:
        check_tag(plan, full)
    return full


def imported_from(address: str, quant: str | None, store: Readable) -> ModelName | None:
    """Return a model that was imported from an address, tagged with a type (None: any), or None."""
    shares = store.shares.read() if store.shares is not None else ()
    names = (
        name
        for name, raw in store.manifests.texts()
        if isinstance(raw, bytes) and Share.of_source(address, Digest.of(raw)) in shares
    )
    return next((name for name in names if quant in (None, name.tag)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """What an import did.

    ``created`` blobs are new to the store, ``reused`` ones it had already. ``type_bytes``: bytes of
    tensors by type.
    """

    KEYS = (
        "name",
        "digest",
        "blobs",
        "created",
        "reused",
        "recalled",
        "source_bytes",
        "stored_bytes",
        "new_bytes",
        "saved_bytes",
        "bits_per_weight",
        "seconds",
        "runs_in",
        "coverage",
        "replaced",
    )

    name: ModelName
    digest: Annotated[Digest, "of the manifest"]
    manifest: Manifest = field(repr=False)
    created: int
    reused: int
    recalled: Annotated[int, "tensor blobs that an earlier import had made"]
    source_bytes: int
    stored_bytes: int
    new_bytes: int
    bits_per_weight: float
    type_bytes: Counter[str]
    options: ImportOptions
    seconds: float
    runs_in: tuple[Verdict, ...]
    coverage: Annotated[Coverage, "what is stored of the source"]
    replaced: Annotated[Digest | None, "the ID of the model that had the name before"] = None

    @property
    def blobs(self) -> int:
        """Number of different blobs of the model."""
        return self.created + self.reused

    @property
    def saved_bytes(self) -> int:
        """Bytes of the model that the store had already."""
        return self.stored_bytes - self.new_bytes


def plan_import(
    source: Source | None = None,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    open_source: OpenSource = open_folder,
    fetch: FetchOptions | None = None,
    **options: Unpack[ImportArguments],
) -> ImportPlan:
    """Return what an import of ``source`` would write.

    Only headers and JSON documents are read; nothing is written.

    ``source``: a .safetensors file or a checkpoint folder; None is what the Modelfile's FROM names.
    ``options``: `ImportArguments`, all optional. With a target (``target_size``, ``target_bpw``)
    weights are read too, by ``jobs`` threads (None: one per core), which call ``progress``;
    ``fetch``: how those on servers are fetched.
    ``open_source`` opens a source, a draft or an adapter that is given as a text: with a token,
    perhaps.

    Raises: UsageError (options), NotFoundError, HeaderError, DocumentError, CorruptDataError,
    UnsupportedSourceError, LimitExceededError, StorageError: see `read_model` and `make_plan`.
    """
    parsed = ImportOptions.parse(**options)
    chosen = parsed.source if source is None else source
    if chosen is None:
        raise UsageError(
            "the source to import is missing",
            hint="Name a checkpoint, or a Modelfile with modelfile=FILE.",
        )
    draft = read_model(open_source(parsed.draft)) if parsed.draft is not None else None
    inventory = read_model(
        open_source(chosen) if isinstance(chosen, str) else chosen,
        without=draft.folder if draft is not None else None,
        config=open_source(parsed.config) if parsed.config is not None else None,
        adapter=open_source(parsed.adapter) if parsed.adapter is not None else None,
    )
    if parsed.decide is not None:
        parsed = replace(
            parsed, rules=(*_function_rules(inventory, parsed, draft, parsed.decide), *parsed.rules)
        )
    if parsed.target is not None:
        from blobstore.importer.targets import plan_for_target

        return plan_for_target(
            inventory,
            parsed,
            parsed.target,
            draft,
            jobs=threads(jobs),
            progress=progress,
            fetch=fetch,
        )
    return make_plan(inventory, parsed, draft)


def _function_rules(
    inventory: Inventory, options: ImportOptions, draft: Inventory | None, decide: PolicyFunction
) -> Iterator[Rule]:
    """Yield a rule for each tensor that a user's function decides about.

    So the import can be repeated without the function.
    """
    for tensor in make_plan(inventory, options, draft).tensors:
        dtype = tensor.sources[0].dtype
        is_matrix = len(tensor.shape) > 1 and dtype.is_float  # nothing else can be quantized at all
        kind = decide(tensor.name, tensor.shape, dtype.value) if is_matrix else None
        if kind is None:
            continue
        if not isinstance(kind, str):
            raise UsageError(
                f"the policy returns {kind!r} for {tensor.name!r}, expected the name of a type",
                tensor=tensor.name,
            )
        yield Rule.parse(f"{escape_name(tensor.name)}={kind}")


def import_model(
    source: Source | None = None,
    name: str | ModelName | None = None,
    *,
    store: Home | StorePlace = None,
    jobs: int | None = None,
    memory: int | None = None,
    verify_reuse: bool = False,
    fetch: FetchOptions | None = None,
    progress: Progress | None = None,
    force: bool = False,
    **options: Unpack[ImportArguments],
) -> ImportResult:
    """Import a checkpoint into ``store`` under ``name``, replacing an older model of that name.

    Without a name it gets `default_name`.

    A tag that says another type than the model gets is refused (UsageError), unless ``force`` says
    that it is meant. ``options``: as in `plan_import`. ``jobs``: number of threads (None: one per
    core). ``memory``: bytes that they work in (None: 20 MiB for each and 76 MiB). ``verify_reuse``:
    hash what earlier imports have made before it is used again. ``fetch``: how a source on a server
    is fetched; it is streamed, never stored whole. ``progress`` is called every few megabytes. The
    same source and options give the same bytes and digests with any number of threads.

    An import that was killed resumes where it stopped when it is run again.

    Raises: as `plan_import`; InvalidNameError; NonFiniteWeightError with tensor and index;
    CorruptDataError when the source changes meanwhile; BusyError. After an error the store holds
    what it contained before.
    """
    plan = plan_import(source, jobs=jobs, progress=progress, fetch=fetch, **options)
    return run_plan(
        plan,
        name_for(plan, name, force=force),
        store,
        jobs=jobs,
        memory=memory,
        verify_reuse=verify_reuse,
        fetch=fetch,
        progress=progress,
    )


def outputs_of(inventory: Inventory, experts: Experts) -> dict[str, OutputTensor]:
    """Return the tensors that an import of ``inventory`` without quantization makes, by name.

    Raises: as `plan_import`.
    """
    return {
        tensor.name: tensor
        for blob in plan_blobs(inventory, ImportOptions(experts=experts))
        for tensor in blob.tensors
    }


def make_blob(
    plan: ImportPlan,
    name: str,
    store: Home,
    *,
    jobs: int = 1,
    memory: int | None = None,
    fetch: FetchOptions | None = None,
) -> Digest:
    """Make the tensor blob ``name`` of a plan, and leave it for `run_plan`, which publishes it.

    Any process that can reach the source and the store may do this, and several at once: a plan's
    blobs do not depend on each other. Nothing becomes visible. Blobs that no `run_plan` of the same
    source uses are removed by the store's next prune.

    Raises: NotFoundError when the plan has no such blob; UsageError for a store that keeps no
    record of finished blobs; as `import_model`.
    """
    chosen = tuple(blob for blob in plan.blobs if blob.name == name)
    if not chosen:
        raise NotFoundError(f"the plan has no blob {name!r}", blob=name)
    return make_blobs(plan, chosen, store, Means(jobs, memory, fetch=fetch))[0]


def make_blobs(
    plan: ImportPlan, blobs: Sequence[PlannedBlob], store: Home, means: Means
) -> list[Digest]:
    """Make tensor blobs of a plan, and leave them, durable, for a later session."""
    with store.session() as session:
        if not session.remembers:
            raise UsageError(
                f"{store.address} keeps no record of finished blobs",
                hint="Use a store in a folder or a bucket.",
            )
        made, _ = write_blobs(replace(plan, layers=tuple(blobs)), session, means)
        session.keep()
    return [blob.digest for blob in made]


def run_plan(
    plan: ImportPlan,
    name: str | ModelName,
    store: Home | StorePlace = None,
    *,
    jobs: int | None = None,
    memory: int | None = None,
    verify_reuse: bool = False,
    fetch: FetchOptions | None = None,
    progress: Progress | None = None,
) -> ImportResult:
    """Carry a plan out: write its blobs, then make them and the manifest visible.

    Raises: as `import_model`.

    The model gets ``name`` as the store spells it: names that differ only in case are one.
    """
    store = opened_store(store)
    shown = start_progress(progress, plan.source_bytes)
    means = Means(jobs, memory, shown, fetch, verify=verify_reuse)
    return publish_plan(plan, name, store, lambda session: write_blobs(plan, session, means))


def publish_plan(
    plan: ImportPlan,
    name: str | ModelName,
    store: Home,
    make: Callable[[Session], WrittenBlobs],
) -> ImportResult:
    """Publish the model of a plan, whose tensor blobs ``make`` writes or finds.

    The other layers are written here. Raises: as `import_model` and ``make``.
    """
    started = time.monotonic()
    runs_in = plan.runs_in  # made first: of 100,000 tensors it takes 10 MB for a moment
    name = store.target(name)
    before = id_of(store, name)
    with store.session() as session:
        tensors, recalled = make(session)
        manifest = _manifest(plan, tensors, session)
        # Another import may have made a model of the name meanwhile.
        name = store.manifests.stored_name(name)
        created = session.publish(name, manifest)
    if store.shares is not None and is_address(plan.inventory.folder.name):
        store.shares.add(Share.of_source(plan.inventory.folder.name, manifest.digest))
    del session, tensors  # they know as much of every blob as the manifest
    sizes = {blob.digest: blob.size for blob in manifest.descriptors}
    return ImportResult(
        name=name,
        digest=manifest.digest,
        manifest=manifest,
        created=len(created),
        reused=len(sizes) - len(created),
        recalled=recalled,
        source_bytes=plan.source_bytes,
        stored_bytes=sum(sizes.values()),
        new_bytes=sum(sizes[digest] for digest in created),
        bits_per_weight=plan.bits_per_weight,
        type_bytes=plan.type_bytes,
        options=plan.options,
        seconds=time.monotonic() - started,
        runs_in=runs_in,
        coverage=plan.coverage,
        replaced=replaced_id(before, manifest.digest),
    )


def _manifest(plan: ImportPlan, tensors: list[Finished], session: Session) -> Manifest:
    made = iter(tensors)
    layers = []
    for layer in plan.layers:
        match layer:
            case PlannedBlob():
                blob = next(made)
            case PlannedFile():
                blob = session.put(layer.data)
            case PlannedCopy():
                blob = copy_file(layer, session)
        layers.append(Descriptor(layer.media_type, blob.digest, blob.size, name=layer.name))
    config = session.put(plan.config.encode())
    return Manifest(
        config=Descriptor(CONFIG_MEDIA_TYPE, config.digest, config.size), layers=tuple(layers)
    )
