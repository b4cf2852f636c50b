"""Checkpoints in the ollama profile equal the imports of Ollama (fixtures/ollama-records).

Equal are the kind of the source, the config, the layers of the manifest, what `show` says; every
byte of what is copied; every array of int4, int8 and mxfp8, and of nvfp4 and mxfp4 all but the E2M1
codes, whose rounding is MLX's there (test_quantize_mlx.py).

Where Ollama gets the metadata of a quantized source wrong (docs/formats.md section 8), everything
else is equal and ours are right. Block FP8 becomes mxfp8.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import FIXTURES, QUANT_TYPES
from support.ollama_sources import write_source
from support.stores import manifest_path

import blobstore
from blobstore.errors import UnsupportedSourceError
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor
from blobstore.formats.safetensors.header import header_of
from blobstore.importer.outputs import ImportPlan
from blobstore.importer.run import ImportResult, plan_import, run_plan
from blobstore.inspection.comparison import diff_models
from blobstore.inspection.listing import summarize
from blobstore.kernels.arrays import dtype_of
from blobstore.names import Digest, ModelName
from blobstore.source.inventory import kind_of
from blobstore.store.care.verify import verify
from blobstore.store.local.store import Store, open_store

Json = dict[str, Any]

TYPES = ("none", *QUANT_TYPES)
E2M1_TYPES = ("nvfp4", "mxfp4")
# Each architecture, each layout, each dtype and each type of quantization at least once.
FLOAT_CASES = {
    "a_dense_bf16": TYPES,
    "a_dense_bias_tied": ("int4",),
    "b_qwen3_moe": ("nvfp4",),
    "b_switch_mlp_stacked": ("nvfp4",),
    "c_sharded": ("mxfp8",),
    "g_f16": ("int4",),
    "g_f32": ("mxfp4",),
    "h_cohere2_moe": ("int4",),
    "h_gemma4": ("mxfp4",),
    "h_gemma4_moe8": ("nvfp4",),
    "h_nemotron_h": ("nvfp4",),
    "h_qwen3_5_moe": ("int4",),
    "z_draft": ("none",),
}
# Ollama forgets the type of an MLX config without `mode`, and gives every tensor the general one.
MISLABELLED = {
    "d_mlx_int4": {"quant_type": "int4", "group_size": "64"},
    "d_mlx_int4_g32": {"quant_type": "int4", "group_size": "32"},
    "d_mlx_mixed_4_8": {"quant_type": "int4", "group_size": "64"},
}
OWN_TYPE = {("d_mlx_mixed_4_8", "lm_head.weight"): {"quant_type": "int8", "group_size": "64"}}
COPIED = ("d_mlx_int8", "d_mlx_mxfp4", "d_mlx_nvfp4", "f_ct_nvfp4", "f_modelopt_nvfp4")
FP8 = ("e_fp8_block", "e_fp8_block_bf16scale", "e_fp8_moe")
QUANTIZED = (*COPIED, *MISLABELLED, *FP8)


@dataclass(frozen=True)
class Case:
    """One source imported as one type, and what Ollama recorded for it."""

    source: str
    folder: Path
    record: Json
    plan: ImportPlan
    result: ImportResult
    store: Store

    def header_text(self, layer: Descriptor) -> str:
        data = self.store.blobs.read(layer)
        return data[8 : 8 + int.from_bytes(data[:8], "little")].decode()

    @property
    def recorded_layers(self) -> list[Descriptor]:
        return [*map(Descriptor.from_json, json.loads(self.record["manifest"])["layers"])]

    def described_arrays(self) -> dict[str, list[Any]]:
        """Return the model's arrays as the records describe them: dtype, shape, sha256."""
        with blobstore.open_model(self.result.name, store=self.store) as model:
            arrays = model.arrays("numpy", names="ollama")
            hashes = {name: hashlib.sha256(one.tobytes()) for name, one in arrays.items()}
            return {
                name: [dtype_of(one).value, list(one.shape), hashes[name].hexdigest()]
                for name, one in arrays.items()
            }

    def is_made(self, name: str | None) -> bool:
        """Return True for a blob that is not a copy, or whose metadata Ollama gets wrong."""
        return any(
            (blob.metadata and self.source in MISLABELLED)
            or not all(tensor.copies for tensor in blob.tensors)
            for blob in self.plan.blobs
            if blob.name == name
        )


Cases = Callable[[str, str], Case]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """A function that imports a source as a type, once."""
    root = tmp_path_factory.mktemp("ollama-records")
    store = open_store(root / "store")
    written = functools.cache(functools.partial(write_source, root / "sources"))

    @functools.cache
    def case(source: str, quant: str) -> Case:
        record = json.loads((FIXTURES / "ollama-records" / f"{source}.json").read_text())[quant]
        plan = plan_import(written(source), quant=quant, profile="ollama")
        result = run_plan(plan, ModelName(model=source, tag=quant), store)
        return Case(source, written(source), record, plan, result, store)

    return case


@pytest.mark.parametrize(
    ("source", "quant"),
    [
        *((source, quant) for source, types in FLOAT_CASES.items() for quant in types),
        *((source, "none") for source in QUANTIZED),
    ],
)
def test_an_import_is_ollamas(cases: Cases, source: str, quant: str) -> None:
    case = cases(source, quant)
    assert kind_of(case.plan.inventory.weights) == case.record["kind"]
    assert_same_config(case)
    assert_same_layers(case)
    assert_same_arrays(case)
    assert_same_show(case, quant)
    if not any(case.is_made(blob.name) for blob in case.plan.blobs):
        assert case.result.manifest.raw.decode() == case.record["manifest"]


def assert_same_config(case: Case) -> None:
    config, theirs = json.loads(case.plan.config.encode()), json.loads(case.record["config"])
    if case.source in MISLABELLED:
        config["file_type"] = theirs["file_type"] or config["file_type"]
        theirs["file_type"] = "int4"
    assert config == theirs


def contents(text: str) -> Json:
    """Return what a header says, with sizes for places; MLX writes null for no metadata."""
    header: Json = json.loads(text)
    if header.get("__metadata__", {}) is None:
        del header["__metadata__"]
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry.pop("data_offsets")
            entry["nbytes"] = end - begin
    return header


def assert_same_layers(case: Case) -> None:
    """The layers of the manifest: copied ones byte for byte, of others what the header says."""
    layers, recorded_layers = case.result.manifest.layers, case.recorded_layers
    named = [[(one.media_type, one.name) for one in each] for each in (layers, recorded_layers)]
    assert named[0] == named[1]
    for layer, theirs in zip(layers, recorded_layers, strict=True):
        is_made = case.is_made(layer.name)
        assert is_made or layer == theirs
        if layer.media_type == TENSOR_MEDIA_TYPE:
            ours, recorded = case.header_text(layer), case.record["headers"][str(theirs.digest)]
            # MLX writes the arrays of a blob in the order of a hash table, without padding.
            one, other = (contents(ours), contents(recorded)) if is_made else (ours, recorded)
            if case.source in MISLABELLED and isinstance(one, dict):
                metadata, _ = one.pop("__metadata__", None), other.pop("__metadata__", None)
                usual = MISLABELLED[case.source] if f"{layer.name}.scale" in one else None
                assert metadata == OWN_TYPE.get((case.source, str(layer.name)), usual)
            assert one == other


def assert_same_arrays(case: Case) -> None:
    """Compare all but the E2M1 codes that are made; of those dtypes and shapes."""
    codes = {
        tensor.name
        for tensor in case.plan.tensors
        if tensor.quantization is not None
        and not tensor.copies_codes
        and tensor.quantization.quant_type.value in E2M1_TYPES
    }
    ours, theirs = (
        {name: one[: 2 if name in codes else 3] for name, one in arrays.items()}
        for arrays in (case.described_arrays(), case.record["arrays"])
    )
    assert ours == theirs


def assert_same_show(case: Case, quant: str) -> None:
    show = case.record["show"]
    summary, tensors = summarize(case.store, case.result.name, case.result.manifest)
    # Ollama's `show` leaves out blobs that hold nothing but a bias or a scale; ours does not.
    left_out = [tensor for tensor in tensors if tensor.name.endswith((".bias", ".scale"))]
    assert len(left_out) == {"a_dense_bias_tied": 6, "h_gemma4_moe8": 4}.get(case.source, 0)
    ours = {one.name: (one.type_name, list(one.shape)) for one in tensors if one not in left_out}
    theirs = {tensor["name"]: (tensor["type"], tensor["shape"]) for tensor in show["tensors"]}
    wrong = {name for name in ours if ours[name] != theirs[name]}
    # It calls the codes of the first U32, and gives the head of the other the general type.
    assert len(wrong) == {"d_mlx_int4": 16, "d_mlx_mixed_4_8": 1}.get(case.source, 0)
    if not wrong:
        biases = sum(tensor.parameters for tensor in left_out)
        assert summary.parameters == show["parameter_count"] + biases
        assert summary.quant_type == show["dtype"] or quant == "none"


@pytest.mark.parametrize("source", ["d_mlx_int8", "e_fp8_block_bf16scale", "f_ct_nvfp4"])
def test_a_type_for_a_quantized_source_is_refused_as_by_ollama(cases: Cases, source: str) -> None:
    records = json.loads((FIXTURES / "ollama-records" / f"{source}.json").read_text())
    for quant in QUANT_TYPES:
        assert records[quant]["stage"] == "classify"
        for profile in ("ollama", "default"):
            with pytest.raises(UnsupportedSourceError, match="is quantized already"):
                plan_import(cases(source, "none").folder, quant=quant, profile=profile)


def store_as_ollama(case: Case, name: str) -> None:
    """Store Ollama's model beside the case's: our data under its headers."""
    blobs = case.store.root / "blobs"
    for ours, theirs in zip(case.result.manifest.tensor_layers, case.recorded_layers, strict=False):
        header = case.record["headers"][str(theirs.digest)].encode()
        with case.store.blobs.open(ours) as reader:
            start = header_of(reader).data_start
            data = reader.read(start, reader.size - start)
        raw = len(header).to_bytes(8, "little") + header + data
        (blobs / theirs.digest.file_name).write_bytes(raw)
    config = case.record["config"].encode()
    (blobs / Digest.of(config).file_name).write_bytes(config)
    path = manifest_path(case.store, name)
    path.parent.mkdir(parents=True)
    path.write_text(case.record["manifest"])


@pytest.mark.parametrize("source", ["d_mlx_int4", "d_mlx_int4_g32"])
def test_blobs_of_ollama_without_metadata(cases: Cases, source: str, tmp_path: Path) -> None:
    """MLX's sources without a ``mode``: the settings of config.json count."""
    case, name = cases(source, "none"), f"ollamas-{source.replace('_', '-')}"
    store_as_ollama(case, name)
    store, names = case.store, (name, str(case.result.name))
    result = verify(store, [name])  # so every blob is what Ollama's digest says
    assert (result.damaged, result.broken) == ((), ())
    kinds = []
    for one in names:
        with blobstore.open_model(one, store=store) as model:
            kinds.append({key: (item.quant_type, item.group_size) for key, item in model.items()})
    assert list(kinds[0].items()) == list(kinds[1].items())
    said = {f"{quant}/{size}" for quant, size in kinds[0].values() if quant}
    assert said == {"/".join(MISLABELLED[source].values())}
    diff = diff_models(*names, store=store)
    assert (diff.added, diff.removed, diff.changed) == ((), (), ())
    assert len({blobstore.inspect(one, store=store).parameters for one in names}) == 1
    assert blobstore.export_model(name, tmp_path / "out", store=store).files
