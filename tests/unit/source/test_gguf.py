"""GGUF models of ``fixtures/gguf-models/make.py``: names, values, kept codes, contradictions."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from support import FIXTURES
from support.arrays import bits, plain
from support.gguf_files import Described, GgufFile, model

from blobstore import Store, import_model, open_model
from blobstore.errors import NotFoundError, UnsupportedSourceError
from blobstore.formats.dtypes import DType
from blobstore.formats.gguf import GGUF_TYPES
from blobstore.inspection.inspect import inspect
from blobstore.source.gguf import FLOATS, UNREAD
from blobstore.source.inventory import read_inventory
from blobstore.source.weights import SourceReaders

GGUF = FIXTURES / "gguf-models"
MODELS = sorted(path.stem for path in GGUF.glob("*.safetensors"))


@pytest.fixture
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for ``config``: the files have no tokenizer."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "config.json").write_text("{}")
    return folder


def checkpoint(name: str) -> dict[str, np.ndarray]:
    tensors = load_file(GGUF / f"{name}.safetensors")
    if name == "gpt-oss":  # whose experts, unless they are MXFP4, have their inputs first
        tensors = {
            f"{key}.weight" if tensor.ndim == 3 else key: tensor.mT if tensor.ndim == 3 else tensor
            for key, tensor in tensors.items()
        }
    return {key: tensor.float().numpy() for key, tensor in tensors.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_is_the_checkpoint(name: str, store: Store, documents: Path) -> None:
    """To the bit: every name, shape and value."""
    import_model(GGUF / f"{name}.gguf", "m", store=store, config=documents)
    wanted = checkpoint(name)
    with open_model("m", store=store) as read:
        assert sorted(read) == sorted(wanted)
        for key, values in wanted.items():
            stored = plain(read[key])
            assert (stored.dtype.name, stored.shape) == ("bfloat16", values.shape), key
            assert bits(stored.astype(np.float32)) == bits(values), key


HELD = dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), "int4/32") | {"Q8_0": "int8/32"}
HELD |= {"MXFP4": "mxfp4/32"}
"""Types whose codes are kept, and the types that hold them; others become int8."""


@pytest.mark.parametrize("path", sorted(GGUF.glob("*-quantized.gguf")), ids=lambda path: path.stem)
def test_values_are_those_of_the_library(path: Path, store: Store, documents: Path) -> None:
    """Kept codes to the bit; of Q4_K within a rounding of scales and biases."""
    variants = pytest.importorskip("gguf_variants")
    import_model(path, "m", store=store, config=documents)
    library = variants.Library(path)
    with open_model("m", store=store) as read:
        for weight in read_inventory(path).weights:
            kind = library.tensors[library.name(weight.name)].tensor_type.name
            if kind in ("F32", "BF16", "F16"):
                continue
            values = library.values(weight.name, np.dtype(np.float32)).exact
            assert read[weight.name].type_text == HELD.get(kind, "int8/32")
            unit = 0 if kind in HELD and kind != "Q4_K" else 2.0**-7
            stored = read[weight.name].dequantize()
            assert np.abs(stored - values).max() <= unit * np.abs(values).max(), weight.name


@pytest.mark.parametrize(
    "kind", [kind.name for kind in GGUF_TYPES if kind.name not in UNREAD | FLOATS.keys()]
)
def test_every_type_is_dequantized_as_by_the_library(kind: str, tmp_path: Path) -> None:
    """Blocks of any bytes, whose values are finite; pieces begin within rows."""
    gguf = pytest.importorskip("gguf")
    number = gguf.GGMLQuantizationType[kind]
    rows, cols = 7, 512
    block, nbytes = gguf.GGML_QUANT_SIZES[number]
    raw = np.random.default_rng(number).integers(0, 256, (rows, cols // block * nbytes), np.uint8)
    raw &= 0xBB  # so that no scale is infinite, or NaN
    (path := tmp_path / "m.gguf").write_bytes(model(kind, raw.tobytes(), (rows, cols)).raw)
    values = gguf.quants.dequantize(raw, number)
    (weight,) = (one for one in read_inventory(path).weights if one.name == "lm_head.weight")
    weight, readers = replace(weight, dtype=DType.F32), SourceReaders()
    pieces = [readers.values(weight, start, 256) for start in range(0, rows * cols, 256)]
    readers.close()
    assert np.array_equal(np.concatenate(pieces), values.reshape(-1))


def test_numbers_that_no_code_holds(tmp_path: Path, store: Store, documents: Path) -> None:
    for kind, raw in (("MXFP4", b"\xff" + bytes(16)), ("Q4_0", b"\xff\x7b" + bytes(16))):
        (path := tmp_path / f"{kind}.gguf").write_bytes(model(kind, raw * 64, (32, 64)).raw)
        with pytest.raises(UnsupportedSourceError, match=f"'output.weight' is GGUF {kind}"):
            import_model(path, "m", store=store, config=documents)


def test_one_file_of_several_has_to_be_named(tmp_path: Path, store: Store, documents: Path) -> None:
    for name in ("a-Q4_0.gguf", "b.gguf", "README.md"):
        (tmp_path / name).write_bytes((GGUF / "qwen2.gguf").read_bytes())
    with pytest.raises(UnsupportedSourceError, match="several sets of weights") as caught:
        import_model(tmp_path, "m", store=store, config=documents)
    assert "a-Q4_0.gguf or " in str(caught.value.hint)
    (tmp_path / "b.gguf").unlink()
    import_model(tmp_path, "m", store=store, config=documents)
    assert inspect(tmp_path).parameters == inspect(GGUF / "qwen2.gguf").parameters


def parts(folder: Path, count: int = 2, **said: int) -> Path:
    """Write a model without layers in two parts, and return the path of the second."""
    whole = model("F32", bytes(512), (2, 64))
    for number in range(2):
        split = {"split.no": number, "split.count": count, "split.tensors.count": 2} | said
        metadata = [*whole.metadata, *split.items()]
        path = folder / f"m-0000{number + 1}-of-00002.gguf"
        path.write_bytes(GgufFile(metadata, [whole.tensors[number]]).raw)
    return path


def test_parts_are_read_together(tmp_path: Path, store: Store, documents: Path) -> None:
    for source in (parts(tmp_path), tmp_path):
        import_model(source, "m", store=store, config=documents)
        with open_model("m", store=store) as read:
            assert sorted(read) == ["lm_head.weight", "model.embed_tokens.weight"]
    for said in ({"count": 3}, {"split.no": 1}, {"split.tensors.count": 3}):
        with pytest.raises(UnsupportedSourceError, match="part"):
            import_model(parts(tmp_path, **said), "other", store=store, config=documents)
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    with pytest.raises(NotFoundError, match="m-00001-of-00002"):
        import_model(tmp_path, "other", store=store, config=documents)


Change = Callable[[GgufFile], object]


def said(key: str, value: object) -> Change:
    """Return the change that the metadata say something else."""
    return lambda file: setattr(
        file, "metadata", [(k, value if str(k).endswith(key) else one) for k, one in file.metadata]
    )


def with_tensor(name: str, shape: tuple[int, ...], kind: str = "F32", nbytes: int = 0) -> Change:
    data = bytes(nbytes or 4 * int(np.prod(shape)))
    return lambda file: file.tensors.append(Described(name, kind, shape, data))


def shaped(*shape: int) -> Change:
    return lambda file: setattr(file.tensors[1], "shape", shape)


CONTRADICTIONS: dict[str, tuple[Change, str]] = {
    "an unknown architecture": (said("architecture", "mamba"), "'mamba' is not an architecture"),
    "no architecture": (lambda file: file.metadata.pop(0), "'None' is not an architecture"),
    "an unknown tensor": (with_tensor("ssm_a.weight", (2,)), "no weight of qwen2"),
    "a head of another architecture": (with_tensor("output.bias.weight", (2,)), "no weight of"),
    "a layer's name without a layer": (with_tensor("attn_q.weight", (2, 2)), "no weight of qwen2"),
    "a number of another form": (with_tensor("blk.00.attn_q.weight", (2, 2)), "no weight of qwen2"),
    "a missing layer": (said("block_count", 1), "there are 0 layers, and the metadata say 1"),
    "too many layers": (with_tensor("blk.0.attn_q.weight", (2, 64)), "there are 1 layers"),
    "no embedding": (lambda file: file.tensors.pop(0), "no token_embd.weight has rows of 64"),
    "another width": (said("embedding_length", 32), "has rows of 32 values"),
    "a width that is text": (said("embedding_length", "64"), "has rows of 64 values"),
    "a vector for a matrix": (shaped(128), r"\[128\] does not have 2 dimensions"),
    "a stack for a matrix": (shaped(2, 1, 64), r"\[2, 1, 64\] does not have 2 dimensions"),
    "an empty matrix": (with_tensor("output_norm.weight", (0,)), "does not have 1 dim"),
    "integers": (lambda file: setattr(file.tensors[1], "kind", "I32"), "type I32 can't be read"),
    "a vector of blocks": (
        with_tensor("output_norm.weight", (32,), "Q4_0", 18),
        "vectors of type Q4_0 can't be read",
    ),
    "a type without values": (
        with_tensor("output_norm.weight", (32,), "Q8_1", 40),
        "vectors of type Q8_1 can't be read",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions(case: str, tmp_path: Path, store: Store, documents: Path) -> None:
    change, reason = CONTRADICTIONS[case]
    file = model("F32", bytes(512), (2, 64))
    change(file)
    (path := tmp_path / "m.gguf").write_bytes(file.raw)
    with pytest.raises(UnsupportedSourceError, match=reason) as caught:
        import_model(path, "m", store=store, config=documents)
    assert caught.value.tensor is not None
    assert list(store.models()) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "reason"),
    [
        ("qwen3", b"qwen3", b"llama", "attn_k_norm.weight.*no weight of llama"),
        ("llama", b"head_count_kv\4\0\0\0\2", b"head_count_kv\4\0\0\0\3", "k.bias.*not those of 3"),
        ("qwen3moe", b"expert_count\4\0\0\0\3", b"expert_count\4\0\0\0\7", "it has 3 experts, and"),
    ],
)
def test_what_a_whole_model_contradicts(
    name: str, old: bytes, new: bytes, reason: str, tmp_path: Path, store: Store, documents: Path
) -> None:
    raw = (GGUF / f"{name}.gguf").read_bytes()
    assert old in raw
    (path := tmp_path / "m.gguf").write_bytes(raw.replace(old, new))
    with pytest.raises(UnsupportedSourceError, match=reason) as caught:
        import_model(path, "m", store=store, config=documents)
    assert caught.value.tensor is not None


def test_a_type_without_its_library_is_refused(
    tmp_path: Path, store: Store, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path := tmp_path / "m.gguf").write_bytes(model("Q6_K", bytes(420), (2, 256)).raw)
    monkeypatch.setattr("blobstore.source.gguf.find_spec", lambda _: None)
    with pytest.raises(UnsupportedSourceError, match="Q6_K is dequantized by the gguf") as caught:
        import_model(path, "m", store=store, config=documents)
    assert "pip install" in str(caught.value.hint)
