"""What a plan says of itself: coverage, ``blobstore.json``, notes, the model's config blob. Pure.

*Coverage*: which files of a source a plan keeps, and what becomes of each tensor and file. *Notes*:
why a plan is larger than asked for, or has another form of experts. *The config blob* comes from
the architecture and the chat template; source of its tables: ollama/ollama@fb307609
x/create/client/create.go and x/create/capabilities.go, model/parsers, and the recorded configs in
fixtures/ollama-records.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.formats.checkpoint import (
    DRAFT_FOLDER,
    ParserFamily,
    SourceConfig,
    family_of,
    templates_in,
)
from blobstore.formats.documents import (
    DRAFT_MODEL,
    MTP_HEADS,
    REQUIRED_OLLAMA,
    Coverage,
    Draft,
    ModelConfig,
    Omission,
    Provenance,
    RecordedAdapter,
    RecordedDraft,
    RecordedFile,
    Tally,
)
from blobstore.formats.dtypes import DType, Quantization, QuantType
from blobstore.importer.options import Experts, ImportOptions, Profile
from blobstore.importer.outputs import OutputTensor, PlannedBlob
from blobstore.importer.roles import needs_stacked_experts, stacked_group_of
from blobstore.io.ranges import FileIdentity
from blobstore.names import Digest
from blobstore.source.adapters import CONFIG
from blobstore.source.coding import FACTORS
from blobstore.source.files import INDEX_NAME, NOT_ITS_OWN, KeptFile
from blobstore.source.inventory import Inventory, quant_type_of
from blobstore.source.producers import KV_CACHE_SCALES
from blobstore.source.weights import Form

_ACTIVATION_SCALE = re.compile(
    r".*(?P<suffix>[._](?:input|input_global|output|activation)_(?:scale(?:_ub)?|zero_point))",
    re.DOTALL,
)
_MTP = re.compile(r"(?:.*\.)?mtp\..+", re.DOTALL)
_LAYER = re.compile(
    r"(?:model\.|language_model\.model\.|model\.language_model\.)?layers\.(?P<number>[0-9]{1,9})\..+",
    re.DOTALL,
)


def storable(inventory: Inventory, profile: Profile, *, has_draft: bool) -> Inventory:
    """Return the checkpoint without the files that the profile, or a draft model, excludes."""

    def reason(file: KeptFile) -> str | None:
        if profile.is_ollama:
            return (
                "an export makes it again"
                if file.name == INDEX_NAME
                else "the ollama profile stores only the JSON documents of the folder itself"
            )
        return (
            f"the draft model's files are called {DRAFT_FOLDER}…"
            if has_draft and file.name.startswith(DRAFT_FOLDER)
            else None
        )

    reasons = {file.name: found for file in inventory.kept if (found := reason(file)) is not None}
    if not reasons:
        return inventory  # with the weights that it has assembled
    left_out = (*inventory.left_out, *(Omission(name, found) for name, found in reasons.items()))
    kept = tuple(file for file in inventory.kept if file.name not in reasons)
    return replace(inventory, kept=kept, left_out=tuple(sorted(left_out, key=lambda one: one.name)))


def own_document(
    inventory: Inventory, options: ImportOptions, draft: Inventory | None, coverage: Coverage
) -> bytes:
    """Return ``blobstore.json`` of an import; ``options`` name the form of experts.

    Raises: LimitExceededError when it would be too large.
    """
    own = [one for one in coverage.files.left_out if one.reason not in NOT_ITS_OWN]
    coverage = replace(coverage, files=replace(coverage.files, left_out=tuple(own)))
    quant, adapter = options.draft_type and options.draft_type.value, inventory.adapter
    return Provenance(
        version=1,
        revision=inventory.folder.revision,
        options=options.record,
        sources=_file_records(inventory),
        coverage=coverage,
        draft=RecordedDraft(quant=quant, sources=_file_records(draft))
        if draft is not None
        else None,
        adapter=RecordedAdapter(
            revision=adapter.folder.revision,
            config=Digest.of(adapter.documents[CONFIG]),
            sources=_file_records(adapter),
        )
        if adapter is not None
        else None,
    ).encode(inventory.path)


def _file_records(inventory: Inventory) -> list[RecordedFile]:
    return [
        RecordedFile(
            name=file.name,
            size=file.size,
            # The version in the identity of a file on a server, which ends with its size.
            version=None
            if isinstance(file.identity, FileIdentity)
            else file.identity.key.rpartition(" ")[0],
            metadata=file.metadata,
            tensors=list(file.tensor_names),
        )
        for file in inventory.files
    ]


def coverage_of(
    inventory: Inventory,
    tensors: Iterable[OutputTensor],
    draft: Inventory | None,
    drafted: Iterable[OutputTensor],
) -> Coverage:
    """Return what output tensors and kept files hold of a checkpoint, and of its draft model."""
    own, of_draft = tuple(tensors), tuple(drafted)
    covered, files = _tensors(inventory, own), _files(inventory)
    heads = {MTP_HEADS: sum(map(_is_of_mtp(inventory), _source_names(own)))}
    whole = [file.name for file in inventory.kept if file.name.endswith(".safetensors")]
    if draft is not None:
        covered += _tensors(draft, of_draft)
        files += _files(draft, DRAFT_FOLDER)
        heads[DRAFT_MODEL] = len(_source_names(of_draft))
        whole += [
            DRAFT_FOLDER + file.name for file in draft.kept if file.name.endswith(".safetensors")
        ]
    return Coverage(
        covered, files, {head: count for head, count in heads.items() if count}, tuple(whole)
    )


def _files(inventory: Inventory, folder: str = "") -> Tally:
    stored = len(inventory.files) + len(inventory.documents) + len(inventory.kept)
    counted = sum(one.count for one in inventory.left_out if one.reason not in NOT_ITS_OWN)
    left_out = tuple(replace(one, name=folder + one.name) for one in inventory.left_out)
    return Tally(stored + counted, stored, {}, left_out)


def _tensors(inventory: Inventory, outputs: Iterable[OutputTensor]) -> Tally:
    """Return what became of each tensor: every one is counted exactly once."""
    derived: Counter[str] = Counter()
    names: set[str] = set()
    for output in outputs:
        for source in output.sources:
            applied = source.form is not Form.PLAIN and not output.copies_codes
            for suffix, part in source.parts.items():
                if part.name in names:
                    continue  # a stack of an adapter's, for many experts
                names.add(part.name)
                if suffix in FACTORS:
                    derived["factors of an adapter that were merged into their weights"] += 1
                elif suffix and applied:
                    derived["scales and biases that were applied to their weights"] += 1
                elif len(output.sources) > 1:
                    derived["experts that were stacked"] += 1
    adapter = inventory.adapter
    present = inventory.tensors.keys() | (set() if adapter is None else adapter.tensors.keys())
    replaced = {source.name for output in outputs for source in output.sources}
    left_out = Counter(
        (name, "the adapter has other values for it") if name in replaced else _name_parts(name)
        for name in present - names
    )
    return Tally(
        len(present),
        len(names) - derived.total(),
        dict(sorted(derived.items())),
        tuple(Omission(name, reason, count) for (name, reason), count in sorted(left_out.items())),
    )


def _name_parts(tensor: str) -> tuple[str, str]:
    if match := _ACTIVATION_SCALE.fullmatch(tensor):
        return f"*{match['suffix']}", "activation scales, which no stored form uses"
    if tensor.endswith(".bias"):  # others are stored (source/inventory.py)
        return "*.bias", "biases of zeros, which GPTQ's programs add"
    suffix = next(filter(tensor.endswith, KV_CACHE_SCALES), None)
    return (
        (f"*{suffix}", "scales of a cache of keys and values, which no stored form uses")
        if suffix is not None
        else (tensor, "not part of any weight")
    )


def _source_names(outputs: Iterable[OutputTensor]) -> list[str]:
    return [
        part.name
        for output in outputs
        for source in output.sources
        for part in source.parts.values()
    ]


def _is_of_mtp(inventory: Inventory) -> Callable[[str], bool]:
    """Return the test for the tensors of heads that predict more than the next token.

    They are called ``mtp.…``, or are the layers beyond ``num_hidden_layers`` (DeepSeek-V3's
    README_WEIGHTS.md, GLM-4.5).
    """
    config = inventory.config
    said = (
        (
            config.others.get("num_hidden_layers"),
            (config.text_config or {}).get("num_hidden_layers"),
        )
        if config is not None
        else ()
    )
    layers = next((number for number in said if type(number) is int), None)

    def is_of_mtp(name: str) -> bool:
        if _MTP.fullmatch(name):
            return True
        match = _LAYER.fullmatch(name)
        return match is not None and layers is not None and int(match["number"]) >= layers

    return is_of_mtp


# A plan that misses more than this share of what the asked type could save is explained.
_FAR = 0.5
# Kinds of tensors that are named at most.
_NAMED = 3
# The share of all bytes that makes a kind worth naming.
_LARGE = 0.05
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)", re.ASCII)


def experts_note(
    blobs: Iterable[PlannedBlob],
    options: ImportOptions,
    config: SourceConfig | None,
    asked: Experts | None,
) -> Iterator[str]:
    """Yield a note about the form of experts that was ``asked`` for, or that Ollama needs."""
    names = (source.name for blob in blobs for source in blob.sources)
    if config is None or not needs_stacked_experts(config) or not any(map(stacked_group_of, names)):
        return
    if asked is Experts.PACKED:
        yield (
            f"Ollama does not run {config.architecture} with packed experts: "
            'it needs experts="stacked"'
        )
    elif asked is None and options.profile.experts is Experts.PACKED:
        yield (
            f"experts are stacked, because Ollama does not run {config.architecture} "
            "with packed ones"
        )


# Bytes of float32 values a second that the gguf package makes on one core.
_GGUF_BYTES_S = 60_000_000


def fp8_note(blobs: Iterable[PlannedBlob], options: ImportOptions) -> Iterator[str]:
    """Yield what weights of FP8 lose where no type is asked for.

    Errors are of weights of a normal distribution (block FP8 of 128x128), as parts of their RMS.
    """
    fp8 = [
        tensor
        for blob in blobs
        for tensor in blob.tensors
        if tensor.quantization and any(source.form is Form.FP8 for source in tensor.sources)
    ]
    if fp8 and options.quant_type is None:
        yield (
            f"weights of FP8 ({len(fp8):,}) become {fp8[0].quantization}, as in Ollama: their error"
            " grows from 0.026 of their RMS to 0.037. With --quant int8 --method search"
            " --requantize it is 0.027"
        )


def gguf_note(blobs: Iterable[PlannedBlob]) -> Iterator[str]:
    """Yield which types of GGUF the gguf package dequantizes, how long, and what they become."""
    slow = [
        tensor
        for blob in blobs
        for tensor in blob.tensors
        if tensor.sources[0].becomes is QuantType.INT8
    ]
    if slow:
        kinds = ", ".join(sorted({one.sources[0].producer for one in slow}))
        become = ", ".join(sorted({str(one.quantization or one.dtype) for one in slow}))
        seconds = sum(one.parameters for one in slow) * 4 / _GGUF_BYTES_S
        takes = f", which takes about {seconds:,.0f} s," if seconds >= 1 else ""
        yield (
            f"{len(slow):,} weights ({kinds}) are dequantized by the gguf package{takes}"
            f" and become {become}"
        )


def size_note(blobs: Sequence[PlannedBlob], options: ImportOptions) -> Iterator[str]:
    """Yield why the blobs take far more bits a weight than the asked type does.

    Nothing where they do not.
    """
    if options.quant_type is None or options.target is not None:
        return
    asked = options.quantization(options.quant_type)
    tensors = [tensor for blob in blobs for tensor in blob.tensors]
    weights, nbytes = (
        max(1, sum(tensor.parameters for tensor in tensors)),
        sum(blob.data_size for blob in blobs),
    )
    bits, wanted = 8 * nbytes / weights, _bits(asked)
    unquantized = sum(tensor.parameters * tensor.dtype.bits for tensor in tensors) / weights
    if bits - wanted <= _FAR * (unquantized - wanted):
        return
    kinds = sorted(_unquantized(tensors), key=lambda kind: (-kind[0], kind[1]))
    reasons = [reason for size, reason in kinds if size >= _LARGE * nbytes] or [
        reason for _, reason in kinds
    ]
    yield (
        f"{bits:.1f} bits per weight, and {asked} has {wanted:.1f}: {'; '.join(reasons[:_NAMED])}"
    )


def rounding_note(blobs: Iterable[PlannedBlob]) -> Iterator[str]:
    """Yield by how much values of kept codes may differ from the source's, if they may."""
    codings = [
        source.coding
        for blob in blobs
        for tensor in blob.tensors
        if tensor.copies_codes
        for source in tensor.sources
    ]
    largest = max((coding.rounding for coding in codings if coding is not None), default=0.0)
    if largest:
        yield (
            "integer codes and scales are kept, and their zero points become rounded biases:"
            f" values differ from the source's by at most {largest:.2g} of the step between codes"
        )


def _bits(quantization: Quantization) -> float:
    parts = quantization.parts((quantization.group_size,), DType.BF16)
    return 8 * sum(part.nbytes for part in parts) / quantization.group_size


def _unquantized(tensors: Iterable[OutputTensor]) -> Iterator[tuple[int, str]]:
    """Yield bytes and reason of the tensors that are not quantized, by kind.

    Names of one kind differ in numbers only; so do the reasons.
    """
    kinds: defaultdict[tuple[str, str], list[OutputTensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.quantization is None and tensor.kept is not None:
            kinds[_NUMBER.sub("N", tensor.name), tensor.kept].append(tensor)
    for (name, reason), members in kinds.items():
        nbytes = sum(tensor.nbytes for tensor in members)
        is_one = len(members) == 1
        count, shown = ("", members[0].name) if is_one else (f"{len(members):,} tensors, ", name)
        yield nbytes, f"{quoted(shown)} ({count}{nbytes:,} bytes) {reason}"


def describe_model(
    inventory: Inventory,
    options: ImportOptions,
    draft: Inventory | None = None,
) -> ModelConfig:
    """Return the config blob of the model that an import makes.

    A bare weights file has no capabilities.

    Raises: UnsupportedSourceError for a draft model without an architecture.
    """
    quant_type = options.quant_type
    if quant_type is None and not options.requantize:
        quant_type = quant_type_of(inventory.weights, inventory.config)
    config, family = inventory.config, family_of(inventory.config, options.modelfile.parser)
    described = ModelConfig(
        model_format="safetensors",
        file_type=quant_type.value if quant_type is not None else "",
        renderer=family.renderer if family else None,
        parser=family.parser if family else None,
        requires=REQUIRED_OLLAMA,
        capabilities=list(_capabilities(inventory, config, family)) if config is not None else [],
        draft=_draft(draft) if draft is not None else None,
    )
    return options.modelfile.configure(described)


def _draft(inventory: Inventory) -> Draft:
    architecture = inventory.config.architecture if inventory.config is not None else ""
    if not architecture:
        raise UnsupportedSourceError(
            f"the draft model {inventory.path} has no config.json that names its architecture",
            path=inventory.path,
        )
    return Draft.of(architecture)


def _capabilities(
    inventory: Inventory, config: SourceConfig, family: ParserFamily | None
) -> Iterator[str]:
    yield "completion"
    others = config.others
    if others.get("vision_config") is not None or others.get("has_vision"):
        yield "vision"
    if others.get("audio_config") is not None or others.get("sound_config") is not None:
        yield "audio"
    if family is not None and family.tools:
        yield "tools"
    tagged = any(
        tag in text
        for text in templates_in(inventory.documents.get)
        for tag in ("<think>", "</think>")
    )
    if (family is not None and family.thinking) or tagged:
        yield "thinking"
