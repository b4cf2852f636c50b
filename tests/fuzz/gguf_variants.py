"""Variants of GGUF files, and the sentence that each has to keep.

Whatever metadata, names, types, shapes and bytes say: every weight is what the gguf package reads
from the file, or the import is refused by a typed error that names a tensor or the file.

``python tests/fuzz/producers.py GGUF`` is the long form.
"""

import random
import re
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from producer_values import Values
from producers import DisagreementError, compare, imported, read
from support import FIXTURES
from support.gguf_files import TYPES, Described, GgufFile

from blobstore import open_model
from blobstore.errors import BlobStoreError
from blobstore.formats.gguf import gguf_header
from blobstore.io.ranges import BytesReader
from blobstore.kernels.arrays import numpy_dtype
from blobstore.source.inventory import read_inventory
from blobstore.source.weights import SourceReaders

MODELS = sorted((FIXTURES / "gguf-models").glob("*.gguf"))
LEFT_OUT = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
VALUES: tuple[Any, ...] = (0, 1, 2, 3, 5, 2**31, 2**32 - 1, -1.0, True, "", "8", ["a"], b"\4\0\0\0")
RENAMES = (
    *(("blk.0", "blk.1"), ("blk.1", "blk.2"), (".weight", ".bias"), ("attn_q", "attn_k")),
    *(("gate", "up"), ("ffn_down", "ffn_up"), ("blk.1.", ""), ("_exps", ""), ("token", "tok")),
)
GPT_OSS = {
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.experts.gate_up_proj.weight": "ffn_gate_exps.weight",
    "mlp.experts.gate_up_proj_bias": "ffn_gate_exps.bias",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
}
"""Names that the package's map lacks."""


@dataclass
class Variant:
    file: GgufFile
    changes: list[str] = field(default_factory=list)
    cut: int | None = None


@cache
def seed(path: Path) -> GgufFile:
    raw = path.read_bytes()
    header = gguf_header(BytesReader(raw))
    tensors = [
        Described(name, one.type.name, one.dims, raw[header.data_start + one.begin :][: one.nbytes])
        for name, one in header.tensors.items()
    ]
    return GgufFile([*header.values.items()], tensors)


def drawn_bytes(rng: random.Random, nbytes: int) -> bytes:
    """Return any bytes, or such that no scale is infinite or NaN."""
    raw = np.frombuffer(rng.randbytes(nbytes), np.uint8)
    return (raw & rng.choice((0xFF, 0xBB, 0xBB, 0xBB))).tobytes()


def retyped(rng: random.Random, one: Described) -> None:
    kind = TYPES[rng.choice([*TYPES])]
    rows, cols = int(np.prod(one.shape[:-1])), one.shape[-1] if one.shape else 1
    if cols % kind.block:
        one.shape = (*one.shape[:-1], cols := -(-cols // kind.block) * kind.block)
    one.kind, one.data = kind.name, drawn_bytes(rng, rows * cols // kind.block * kind.block_nbytes)


def reshaped(rng: random.Random, one: Described) -> None:
    shape = list(one.shape) or [1]
    match rng.randrange(5):
        case 0:
            shape.reverse()
        case 1:
            shape.insert(rng.randrange(len(shape) + 1), rng.choice((0, 1, 2)))
        case 2:
            shape.pop()
        case 3:
            shape.append(shape.pop(0) * 2)
        case _:
            shape[0] = rng.choice((0, 1, shape[0] * 2, shape[0] // 2, 2**40))
    one.shape = shape


def refilled(rng: random.Random, one: Described) -> None:
    one.data = drawn_bytes(rng, len(one.data))


def renamed(rng: random.Random, one: Described) -> None:
    old, new = rng.choice(RENAMES)
    one.name = str(one.name).replace(old, new)


def change(rng: random.Random, variant: Variant) -> None:
    """Change a tensor, a value, or the file."""
    file, number = variant.file, rng.randrange(len(variant.file.tensors))
    one = file.tensors[number]
    match rng.choice(["tensor"] * 6 + ["value", "value", "drop", "twice", "order", "arch", "cut"]):
        case "tensor":
            done = rng.choice((retyped, retyped, retyped, refilled, reshaped, renamed))
            done(rng, one)
            variant.changes.append(f"{done.__name__} {one.name!r} {one.kind} {list(one.shape)}")
        case "value":
            at, value = rng.randrange(len(file.metadata)), rng.choice(VALUES)
            file.metadata[at] = (file.metadata[at][0], value)
            variant.changes.append(f"{file.metadata[at]}")
        case "drop":
            variant.changes.append(f"without {file.tensors.pop(number).name!r}")
        case "twice":
            file.tensors.append(replace(one, name=str(one.name)[rng.randrange(2) :]))
            variant.changes.append(f"{one.name!r} twice")
        case "order":
            rng.shuffle(file.tensors)
            variant.changes.append("another order")
        case "arch":
            old, new = str(file.metadata[0][1]), rng.choice(MODELS).stem.partition("-q")[0]
            file.metadata[0] = ("general.architecture", new)
            file.metadata[1:] = [(str(k).replace(old, new), v) for k, v in file.metadata[1:]]
            variant.changes.append(f"{old} becomes {new}")
        case _:
            variant.cut = rng.randrange(len(file.raw))
            variant.changes.append(f"cut at {variant.cut}")


def variant(_: str, number: int) -> Variant:
    """Return a variant, the same for the same number; every ninth is unchanged."""
    rng = random.Random(number)
    whole = seed(MODELS[number % len(MODELS)])
    made = Variant(GgufFile([*whole.metadata], [*map(replace, whole.tensors)]))
    for _times in range(rng.choice((1, 1, 1, 2, 4)) if rng.randrange(9) else 0):
        if made.file.tensors:
            change(rng, made)
    return made


class Library:
    def __init__(self, path: Path) -> None:
        file = gguf.GGUFReader(path)
        self.fields = {name: one.contents() for name, one in file.fields.items()}
        self.tensors = {one.name: one for one in file.tensors}
        self.arch = str(self.fields["general.architecture"])
        (number,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.arch)
        self.map = gguf.get_tensor_name_map(number, self.fields[f"{self.arch}.block_count"])
        self.used: set[str] = set()

    def name(self, weight: str) -> str:
        if weight == "lm_head.weight":  # which the map of gemma2 lacks
            return "output.weight"
        layer, _, part = weight.removeprefix("model.layers.").partition(".")
        if self.arch == "gpt-oss" and part in GPT_OSS:
            return f"blk.{layer}.{GPT_OSS[part]}"
        whole = re.sub(r"experts\.\d+\.", "experts.", weight)
        return str(self.map.get_name(whole, try_suffixes=(".weight", ".bias")))

    def array(self, name: str) -> Any:
        one = self.tensors[name]
        self.used.add(name)
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(one.data, one.tensor_type)
        return values.reshape([int(dim) for dim in reversed(one.shape)])

    def values(self, weight: str, dtype: np.dtype[Any]) -> Values:
        name = self.name(weight)
        values = self.array(name)
        if (expert := re.search(r"experts\.(\d+)\.", weight)) is not None:
            values = values[int(expert[1])]
        if self.arch == "llama" and ("attn_q." in name or "attn_k." in name):
            heads = self.fields["llama.attention.head_count"]
            if "attn_k." in name:
                heads = self.fields.get("llama.attention.head_count_kv") or heads
            half = len(values) // heads // 2
            values = values.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(values.shape)
        if self.arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values - np.float32(1)
        if "gate_up_proj" in weight and self.arch == "gpt-oss":
            up = self.array(name.replace("gate", "up"))
            values = np.stack((values, up), axis=2).reshape(len(up), -1, *up.shape[2:])
        if "shared_expert_gate" in weight:
            values = values.reshape(1, -1)
        with np.errstate(invalid="ignore"):
            exact = values.astype(np.float64)
        return Values(exact, dtype, np.zeros(exact.shape))


def check(one: Variant, folder: Path, *, imports: bool = False) -> str:
    """Return "equal" or "refused". Raises: DisagreementError; any other error is one as well."""
    (path := folder / "model.gguf").write_bytes(one.file.raw[: one.cut])
    (folder / "config.json").write_text("{}")
    readers = SourceReaders()
    try:
        weights = read_inventory(path).weights
        found = {weight.name: read(weight, readers) for weight in weights}
    except BlobStoreError as error:
        if not one.changes:
            raise DisagreementError(f"a good file is refused: {error}") from error
        if not (getattr(error, "tensor", None) or "model.gguf" in str(error)):
            raise DisagreementError(f"names no tensor, and no file: {error}") from error
        return "refused"
    finally:
        readers.close()
    library = Library(path)
    with np.errstate(all="ignore"):
        wanted = {one.name: library.values(one.name, numpy_dtype(one.dtype)) for one in weights}
    if unused := library.tensors.keys() - library.used - {*LEFT_OUT}:
        raise DisagreementError(f"{sorted(unused)} are not read")
    for name, values in wanted.items():
        compare(name, found[name], values, 1, 0)
    if imports and (store := imported(folder, {})) is not None:
        with open_model("m", store=store) as model:
            for one_weight in weights:
                values = wanted[one_weight.name]
                stored = numpy_dtype(one_weight.stored_dtype or one_weight.dtype)
                got = model[one_weight.name].dequantize().astype(np.float64)
                largest = np.nanmax(np.abs(values.exact), initial=0) + 0 * got
                values = values._replace(dtype=stored, terms=np.nan_to_num(largest))
                compare(one_weight.name, got, values, 2, 2.0**-6)
    return "equal"
