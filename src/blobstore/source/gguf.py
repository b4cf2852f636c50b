"""GGUF: which weights of the model its tensors are. Pure.

Each architecture has a row: its names of tensors, and those of transformers. What the converter
changed is undone: rows of Llama's queries and keys are interleaved, Gemma's norms have 1 more,
experts of a layer lie in one tensor, and gpt-oss' rows of gate and up in two. A tensor that no row
names is refused.

Weights that are not codes, and the scales of codes, have one dtype in the whole model: MLX computes
in float32 where F16 and BF16 meet (`_dtype`).

Sources: ggml-org/llama.cpp gguf-py/gguf/tensor_mapping.py and constants.py `MODEL_TENSORS` (gguf
0.19.0); convert_hf_to_gguf.py `LlamaModel.permute`, `Gemma3Model.norm_shift`, `GptOssModel`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise

from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.formats.dtypes import DType
from blobstore.formats.gguf import BlockHeader, GgufHeader, GgufTensor
from blobstore.formats.safetensors.header import Header
from blobstore.source.folders import SourceFile, SourceTensor
from blobstore.source.gguf_blocks import FLOATS, KEPT, UNREAD, Blocks
from blobstore.source.weights import Form, SourceWeight, named_twice

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_COMMON = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERTS = {"ffn_gate_inp": "mlp.gate"} | {
    f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")
}
_SHARED_EXPERT = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"} | {
    f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")
}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_ARCHITECTURES = {
    "llama": _COMMON,
    "qwen2": _COMMON,
    "qwen3": _COMMON | _QK_NORMS,
    "qwen2moe": _COMMON | _EXPERTS | _SHARED_EXPERT,
    "qwen3moe": _COMMON | _QK_NORMS | _EXPERTS,
    "gemma2": _COMMON | _FOUR_NORMS,
    "gemma3": _COMMON | _QK_NORMS | _FOUR_NORMS,
    "phi3": _COMMON | _PHI3,
    "gpt-oss": _COMMON | _GPT_OSS,
}
_PERMUTED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
LEFT_OUT = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""What the model computes from its config.json."""
_NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,8})\.)?([a-z0-9_]+)\.(weight|bias)", re.ASCII)
_STACK, _MAX_EXPERTS = 3, 65_536
_HINT = "Import the checkpoint that it was made from."


def gguf_weights(
    tensors: Mapping[str, SourceTensor], header: GgufHeader
) -> tuple[SourceWeight, ...]:
    """Return the weights of a model by its tensors and the header of all files, sorted by name.

    Raises: UnsupportedSourceError with tensor and reason if the architecture or one of its tensors
    is unknown, if a tensor does not fit the others or the metadata, or if a type needs the gguf
    package, and it is missing.
    """
    architecture = _architecture(header)
    dtype = _dtype(architecture, header.tensors.values())
    model = _Model(architecture, header.metadata, tensors, header.tensors, dtype)
    model.check()
    weights = sorted(model.weights(), key=lambda weight: weight.name)
    for one, other in pairwise(weights):
        if one.name == other.name:
            raise named_twice(one.name, one, other)
    return tuple(weights)


def joined_header(read: Sequence[tuple[SourceFile, Header]]) -> GgufHeader | None:
    """Return the header of all files of a GGUF model, in their order; None for safetensors.

    Raises: UnsupportedSourceError if they are not the parts that their metadata say.
    """
    headers = [header.gguf for _, header in read if isinstance(header, BlockHeader)]
    if not headers:
        return None
    tensors = {name: tensor for one in headers for name, tensor in one.tensors.items()}
    path, metadata = read[0][0].path, headers[0].metadata
    for number, one in enumerate(headers):
        said = one.metadata.get("split.no", 0), one.metadata.get("split.count", 0) or 1
        if said != (number, len(read)):
            raise UnsupportedSourceError(
                f"{read[number][0].path} is not part {number + 1} of {len(read)} by its metadata"
                f" (split.no, split.count: {said[0]}, {said[1]})",
                path=read[number][0].path,
                hint="Import a file whose name ends in -00001-of-0000N.gguf, with all others.",
            )
    if (count := metadata.get("split.tensors.count", len(tensors))) != len(tensors):
        raise UnsupportedSourceError(
            f"{path} and its other parts have {len(tensors)} tensors, and not {count}", path=path
        )
    return GgufHeader(metadata, tensors, headers[0].data_start)


def experts_apart(
    tensors: Mapping[str, SourceTensor], header: GgufHeader | None
) -> dict[str, SourceTensor]:
    """Return the tensors of a model, and of stacked ``X`` each expert: ``X[0]`` and so on.

    gpt-oss has stacked experts in transformers, too. Tensors that are not in GGUF are unchanged.
    """
    apart: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        count = header.tensors[name].shape[0] if header and len(tensor.shape) == _STACK else 0
        if not 0 < count <= _MAX_EXPERTS or (header and _architecture(header) == "gpt-oss"):
            apart[name] = tensor
            continue
        nbytes = tensor.nbytes // count
        for number in range(count):
            part = replace(tensor, name=f"{name}[{number}]", shape=tensor.shape[1:], nbytes=nbytes)
            apart[part.name] = replace(part, offset=tensor.offset + number * nbytes)
    return apart


def _architecture(header: GgufHeader) -> str:
    return str(header.metadata.get("general.architecture"))


def _dtype(architecture: str, tensors: Iterable[GgufTensor]) -> DType:
    """Return the dtype of what is not codes: the matrices', or else that of GGUF's scales, F16.

    Gemma's activations are too large for F16, so its quantized models have BF16.
    """
    kinds = {tensor.type.name for tensor in tensors if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return DType.F32
    is_large = architecture.startswith("gemma") and "F16" not in kinds
    return DType.BF16 if is_large or "BF16" in kinds else DType.F16


@dataclass(frozen=True, slots=True)
class _Model:
    architecture: str
    metadata: Mapping[str, object]
    tensors: Mapping[str, SourceTensor]
    described: Mapping[str, GgufTensor]
    dtype: DType

    def check(self) -> None:
        """Raise UnsupportedSourceError if tensors are missing, or are not those of the metadata."""
        name = "token_embd.weight" if "token_embd.weight" in self.tensors else min(self.tensors)
        if self.architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            reason = f"{quoted(self.architecture)} is not an architecture whose tensors are known"
            raise self.refused(name, f"{reason} ({known})")
        width = self.number("embedding_length")
        if name != "token_embd.weight" or self.described[name].shape[-1:] != (width,):
            raise self.refused(name, f"no token_embd.weight has rows of {width} values")
        layers = {match[1] for one in self.tensors if (match := _NAME.fullmatch(one))} - {None}
        count = self.number("block_count")
        if len(layers) != count or layers != set(map(str, range(count))):
            raise self.refused(name, f"there are {len(layers)} layers, and not 0 to {count - 1}")

    def number(self, key: str, default: int = 0) -> int:
        """Return a number of the metadata; 0 for anything else."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        return value if type(value) is int else 0

    def refused(self, name: str, reason: str, hint: str = _HINT) -> UnsupportedSourceError:
        path = self.tensors.get(name, next(iter(self.tensors.values()))).file.path
        return UnsupportedSourceError(
            f"{quoted(name)} of {path}: {reason}", tensor=name, path=path, hint=hint
        )

    def weights(self) -> Iterator[SourceWeight]:
        for name, tensor in self.tensors.items():
            whole, _, number = name.partition("[")
            if whole in LEFT_OUT or self.first_of(whole) in self.tensors:
                continue
            target, shape = self.target(whole), self.described[whole].shape
            self.check_tensor(whole, shape, is_stack="{}" in target)
            if number:
                target, shape = target.format(number[:-1]), shape[1:]
            yield self.weight(target, tensor, shape, whole)

    def first_of(self, name: str) -> str | None:
        """Return the gate that gpt-oss' rows of up lie beside; None for other tensors."""
        is_second = self.architecture == "gpt-oss" and "ffn_up_exps" in name
        return name.replace("ffn_up_exps", "ffn_gate_exps") if is_second else None

    def target(self, name: str) -> str:
        """Return the weight's name; ``{}`` is for the number of an expert."""
        if (match := _NAME.fullmatch(name)) is not None:
            layer, part, suffix = match.groups()
            known = _TOP if layer is None else _ARCHITECTURES[self.architecture]
            found = known.get(
                f"{part}.{suffix}", f"{known[part]}.{suffix}" if part in known else ""
            )
            if found:
                return found if layer is None else f"model.layers.{layer}.{found}"
        raise self.refused(name, f"no weight of {self.architecture} is known by this name")

    def check_tensor(self, name: str, shape: tuple[int, ...], *, is_stack: bool) -> None:
        kind = self.described[name].type.name
        if kind in UNREAD:
            raise self.refused(name, f"weights of the type {kind} are not read")
        if kind not in FLOATS and kind not in KEPT and find_spec("gguf") is None:
            reason = f"{kind} is dequantized by the gguf package, which is not installed"
            hint = "Install the extra: pip install 'blobstore[gguf]'."
            raise self.refused(name, reason, hint)
        rank = 1 if name.endswith(("norm.weight", "sinks.weight", ".bias")) else 2
        rank = rank + 1 if "_exps." in name else rank
        if not math.prod(shape) or len(shape) not in (rank, 1 if "inp_shexp" in name else rank):
            raise self.refused(name, f"{list(shape)} does not have {rank} dimensions")
        if is_stack and shape[0] != (count := self.number("expert_count")):
            raise self.refused(name, f"it has {shape[0]} experts, and the metadata say {count}")

    def weight(
        self, target: str, tensor: SourceTensor, shape: tuple[int, ...], name: str
    ) -> SourceWeight:
        kind, cols, companions = self.described[name].type, shape[-1], {}
        if "inp_shexp" in name:
            shape = (1, shape[-1])
        head = self.head(name, shape[0])
        less = int(self.architecture.startswith("gemma") and name.endswith("norm.weight"))
        if self.architecture == "gpt-oss" and "ffn_gate_exps" in name:
            companions = {".up": self.second(name)}
            shape = (shape[0], 2 * shape[1], *shape[2:])
        if (head or companions) and name.endswith(".bias"):
            cols = 1
        coding = Blocks(kind, cols, self.dtype, head, less, is_half=bool(companions))
        if kind.name in FLOATS and not (head or less or companions):
            return SourceWeight(target, tensor.dtype, shape, tensor, stored_dtype=self.dtype)
        quantization = coding.quantization
        dtype = self.dtype if quantization is not None else FLOATS.get(kind.name, DType.F32)
        return SourceWeight(
            target,
            dtype,
            shape,
            tensor,
            companions,
            Form.CODED,
            f"GGUF {kind.name}",
            quantization,
            coding=coding,
            stored_dtype=self.dtype,
        )

    def second(self, name: str) -> SourceTensor:
        """Return the tensor with every second row of gpt-oss' gate and up."""
        other = name.replace("ffn_gate_exps", "ffn_up_exps")
        one, two = self.described[name], self.described.get(other)
        if two is None or (two.type, two.shape) != (one.type, one.shape):
            raise self.refused(name, f"{quoted(other)} is missing, or of another shape or type")
        return self.tensors[other]

    def head(self, name: str, rows: int) -> int:
        """Return the rows of a head of Llama's queries or keys, 0 for other tensors."""
        key = _PERMUTED.get(name.split(".")[-2]) if self.architecture == "llama" else None
        if key is None:
            return 0
        heads = self.number(key, self.number(_PERMUTED["attn_q"]))
        if heads < 1 or rows % (2 * heads):
            raise self.refused(name, f"its {rows} rows are not those of {heads} heads")
        return rows // heads
