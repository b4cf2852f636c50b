"""Adapters: merged in float32 as their libraries do (``fixtures/adapters/make.py``), or refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import FIXTURES
from support.arrays import bits
from support.streaming import SMALL, TINY, streamed

from blobstore import Store, import_model, open_model, plan_import, read_plan, repair_model
from blobstore.errors import BlobStoreError, UnsupportedSourceError, UsageError
from blobstore.importer.planfile import write_plan
from blobstore.source.inventory import read_adapter, read_inventory
from blobstore.source.weights import SourceReaders
from blobstore.store.memory import MemoryStore

ADAPTERS = FIXTURES / "adapters"
CASES = sorted(path.parent.name for path in ADAPTERS.glob("*/merged.safetensors"))
Q = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]
Settings = dict[str, Any]


def base_of(case: str) -> Path:
    return ADAPTERS / f"base-{(ADAPTERS / case / 'base.txt').read_text().strip()}"


def merged(case: str) -> Tensors:
    """Return the weights that change, in the base's dtype."""
    values = load_file(ADAPTERS / case / "merged.safetensors")
    return {name: value.bfloat16() for name, value in values.items()}


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_library(case: str) -> None:
    """To the bit, also in pieces that begin and end within rows."""
    base = read_inventory(base_of(case))
    adapted = replace(base, adapter=read_adapter(ADAPTERS / case))
    expected = load_file(base_of(case) / "model.safetensors") | merged(case)
    assert {weight.name for weight in adapted.weights} == expected.keys()
    readers = SourceReaders()
    for weight in adapted.weights:
        starts = range(0, weight.elements, 37)
        pieces = [readers.values(weight, at, min(37, weight.elements - at)).copy() for at in starts]
        assert bits(np.concatenate(pieces)) == bits(expected[weight.name]), weight.name
    readers.close()


def test_the_import_says_what_it_merged(store: Store) -> None:
    result = import_model(base_of("peft-saved"), "m", store=store, adapter=ADAPTERS / "peft-saved")
    with open_model("m", store=store) as model:
        for name, value in merged("peft-saved").items():
            assert bits(model[name].numpy()) == bits(value)
        record = json.loads(model.document("blobstore.json"))["adapter"]
    assert [file["name"] for file in record["sources"]] == ["adapter_model.safetensors"]
    tensors = result.coverage.tensors
    assert sum(tensors.derived.values()) == 2
    assert tensors.source == tensors.covered + sum(one.count for one in tensors.left_out)
    assert {one.reason for one in tensors.left_out} == {"the adapter has other values for it"}


def write(folder: Path, base: Any, config: Settings, adapter: Any, rank: int, scale: float) -> Any:
    """Write a base and an adapter of mlx-lm, and return their folders."""
    said = {"lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0}, "num_layers": 1}
    for name, arrays, settings in (("model", base, config), ("adapters", adapter, said)):
        (folder / name).mkdir()
        mx.save_safetensors(str(folder / name / f"{name}.safetensors"), arrays)
        document = "config.json" if name == "model" else "adapter_config.json"
        (folder / name / document).write_text(json.dumps(settings))
    return folder / "model", folder / "adapters"


def test_quantized_weights_get_their_type_again(store: Store, tmp_path: Path) -> None:
    mx.random.seed(0)
    how: Settings = {"group_size": 64, "bits": 4}
    weight = mx.random.normal((96, 128)).astype(mx.bfloat16) * 0.05
    codes, scales, biases = mx.quantize(weight, **how)
    one, other = mx.random.normal((128, 3)) * 0.1, mx.random.normal((3, 96)) * 0.1
    parts = {f"{Q}.weight": codes, f"{Q}.scales": scales, f"{Q}.biases": biases}
    config = {"quantization": how, "architectures": ["LlamaForCausalLM"]}
    base, adapter = write(tmp_path, parts, config, {f"{Q}.lora_a": one, f"{Q}.lora_b": other}, 3, 2)
    import_model(base, "m", store=store, adapter=adapter)
    values = mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), **how)
    again, *_ = mx.quantize((values + 2 * (other.T @ one.T)).astype(mx.bfloat16), **how)
    with open_model("m", store=store) as model:
        assert model[f"{Q}.weight"].type_text == "int4/64"
        assert bytes(model[f"{Q}.weight"].raw()) == bits(np.array(again))


def test_large_weights_are_the_same_by_any_number_of_threads(store: Store, tmp_path: Path) -> None:
    """Of several runs, with rows that end within blocks."""
    mx.random.seed(0)
    weight = mx.random.normal((1500, 992)).astype(mx.bfloat16)
    one, other = mx.random.normal((992, 4)), mx.random.normal((4, 1500))
    config, factors = {"architectures": ["LlamaForCausalLM"]}, (one, other)
    lora = {f"{Q}.lora_{end}": factor for end, factor in zip("ab", factors, strict=True)}
    base, adapter = write(tmp_path, {f"{Q}.weight": weight}, config, lora, 4, 0.75)
    results = [
        import_model(base, "m", store=home, adapter=adapter, jobs=jobs)
        for jobs, home in ((1, store), (3, MemoryStore()))
    ]
    with streamed(SMALL, declared=True):
        results.append(import_model(base, "m", store=MemoryStore(), adapter=adapter))
    assert len({result.digest for result in results}) == 1
    with open_model("m", store=store) as model:
        read = model[f"{Q}.weight"].dequantize()
    down, up = (np.array(factor, np.float64) for factor in factors)
    exact = np.array(weight.astype(mx.float32), np.float64) + 0.75 * (down @ up).T
    assert (np.abs(read - exact) <= 2**-8 * np.abs(exact) + 1e-5).all()


@pytest.mark.parametrize("declared", [False, True])
def test_streams_give_the_same(declared: bool) -> None:
    for case in ("peft-embedding", "peft-saved", "mlx-experts"):
        given: Settings = {"adapter": ADAPTERS / case, "store": MemoryStore()}
        local = import_model(base_of(case), "m", **given)
        with streamed(TINY, declared=declared):
            assert import_model(base_of(case), "n", **given).digest == local.digest


Change = Callable[[Tensors, Settings], Any]


def rewritten(case: str, folder: Path, change: Change) -> Path:
    shutil.copytree(ADAPTERS / case, folder)
    (path,) = folder.glob("adapter*s.safetensors" if "mlx" in case else "adapter_m*.safetensors")
    tensors, settings = load_file(path), json.loads((folder / "adapter_config.json").read_text())
    change(tensors, settings)
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


P, HEAD, DOWN = f"base_model.model.{Q}", "base_model.model.lm_head.weight", torch.ones(4, 16)
CONTRADICTIONS: list[tuple[str, str, Change]] = [
    ("peft-linear", "lora_B", lambda t, _: t.pop(f"{P}.lora_A.weight")),
    ("peft-linear", "rank 5", lambda _, s: s.update(r=5)),
    ("peft-linear", "rank 2", lambda _, s: s.update(rank_pattern={"q_proj": 2})),
    ("peft-linear", "q_projz", lambda t, _: t.update({f"{P}z.lora_A.weight": DOWN})),
    ("peft-linear", "alpha", lambda t, _: t.update({f"{P}.alpha": torch.ones(1)})),
    ("peft-linear", "need", lambda t, _: t.update({f"{P}.lora_A.weight": torch.ones(4, 15)})),
    ("peft-linear", "floats", lambda t, _: t.update({f"{P}.lora_A.weight": DOWN.int()})),
    ("peft-linear", "need", lambda _, s: s.update(use_dora=True)),
    ("peft-dora", "unknown", lambda _, s: s.update(use_dora=False)),
    ("peft-linear", "not finite", lambda t, _: t[f"{P}.lora_A.weight"].fill_(float("nan"))),
    ("peft-linear", "IA3", lambda _, s: s.update(peft_type="IA3")),
    ("peft-linear", "LOKR", lambda _, s: s.update(peft_type="LOKR")),
    ("peft-linear", "pissa", lambda _, s: s.update(init_lora_weights="pissa")),
    ("peft-linear", "lora_bias", lambda _, s: s.update(lora_bias=True)),
    ("peft-linear", "target_parameters", lambda _, s: s.update(target_parameters=["experts"])),
    ("peft-linear", "new_setting", lambda _, s: s.update(new_setting=1)),
    ("peft-linear", "pattern", lambda _, s: s.update(alpha_pattern={"(a|a)*": 1})),
    ("peft-linear", "pattern", lambda _, s: s.update(rank_pattern={"[z-a]": 1})),
    ("peft-linear", "lora_alpha", lambda _, s: s.update(lora_alpha=10**400)),
    ("peft-linear", "not finite", lambda _, s: s.update(lora_alpha=1e300)),
    ("peft-linear", "r: ", lambda _, s: s.update(r="4")),
    ("peft-conv1d", "need", lambda _, s: s.update(fan_in_fan_out=False)),
    ("peft-saved", "unknown", lambda _, s: s.update(modules_to_save=None)),
    ("peft-saved", "lm_head", lambda t, _: t.update({HEAD: torch.ones(21, 16)})),
    ("mlx-linear", "rank 4", lambda _, s: s["lora_parameters"].update(rank=4)),
    ("mlx-linear", "scale", lambda _, s: s["lora_parameters"].pop("scale")),
    ("mlx-linear", "alpha", lambda _, s: s["lora_parameters"].update(alpha=16)),
    ("mlx-linear", "dora_plus", lambda _, s: s.update(fine_tune_type="dora_plus")),
    ("mlx-linear", "lora_b", lambda t, _: t.pop(f"{Q}.lora_a")),
    ("mlx-dora", "unknown", lambda _, s: s.update(fine_tune_type="lora")),
    ("mlx-full", "no weight", lambda t, _: t.update({"model.x.weight": torch.ones(3)})),
    ("mlx-experts", "switch_mlp", lambda t, _: t.update(
        {name: value[:2] for name, value in t.items() if ".switch_mlp." in name}
    )),
]  # fmt: skip


@pytest.mark.parametrize(("case", "named", "change"), CONTRADICTIONS)
def test_what_does_not_fit(
    case: str, named: str, change: Change, store: Store, tmp_path: Path
) -> None:
    adapter = rewritten(case, tmp_path / "adapter", change)
    with pytest.raises(BlobStoreError, match=named):
        import_model(base_of(case), "m", store=store, adapter=adapter)
    assert not list(store.manifests.names())


def test_a_tied_head_must_not_change_with_the_embedding(tmp_path: Path, store: Store) -> None:
    base = shutil.copytree(base_of("peft-embedding"), tmp_path / "base")
    config = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedSourceError, match="same weights"):
        import_model(base, "m", store=store, adapter=ADAPTERS / "peft-embedding")
    import_model(base, "m", store=store, adapter=ADAPTERS / "mlx-embedding")


def test_plans_and_repairs_need_the_adapter(store: Store, tmp_path: Path) -> None:
    adapter = shutil.copytree(ADAPTERS / "mlx-linear", tmp_path / "adapter")
    base = base_of("mlx-linear")
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text(f"FROM {base}\nADAPTER ./adapter\n")
    made = import_model(None, "m", store=store, modelfile=modelfile)
    write_plan(plan_import(base, adapter=adapter), tmp_path / "plan.json")
    planned = read_plan(tmp_path / "plan.json")
    assert [b.name for b in planned.blobs] == [one.name for one in made.manifest.tensor_layers]
    damaged = max(made.manifest.tensor_layers, key=lambda layer: layer.size)
    path = store.blobs.path / damaged.digest.file_name
    path.chmod(0o600)
    path.write_bytes(b"\0" * damaged.size)
    with pytest.raises(UsageError, match="adapter"):
        repair_model("m", base, store=store)
    assert repair_model("m", base, store=store, adapter=adapter).repaired
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(BlobStoreError, match=r"adapter_config\.json"):
        read_plan(tmp_path / "plan.json")
