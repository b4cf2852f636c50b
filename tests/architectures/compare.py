"""One checkpoint as one type: blobstore's import compared with mlx-lm's network.

A model is right when it is imported, when its network gives the logits of the exported folder in
mlx-lm, and when each module holds what the same module of the source's network holds, as closely as
the bits that were stored allow.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

TYPES: tuple[str | None, ...] = (None, "int4", "int8", "nvfp4", "mxfp8")
_TOKENS = [[3, 17, 5, 101, 44, 9, 200, 63, 3, 90, 31, 7]]
_COSINES = {4: 0.99, 8: 0.999}
_LONGEST = 300
_SCRATCH = re.compile(rf"{re.escape(tempfile.gettempdir())}/[^ ]*blobstore-architectures?-\w+/")
_ROUNDING = 2**-7
"""BF16 has eight bits: two ways to one value may differ by the last of them."""
_NEAR = 2**-10
"""Logits are bit-equal, unless mlx-lm normalises a head a second time."""


class Verdict(StrEnum):
    """What came of a comparison. Only the first two are good."""

    RIGHT = "right"
    REFUSED = "refused"
    LATE = "refused late"
    WRONG = "wrong"
    CRASHED = "crashed"
    NOT_COMPARED = "not compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A verdict and its reason; of a right one the shares of parameters, and the logits' error.

    ``dequantized``: what mlx-lm computes with, or moves within a group, becomes values again.
    """

    verdict: Verdict
    reason: str = ""
    quantized: float = 0.0
    dequantized: float = 0.0
    error: float = 0.0


class Ended(Exception):  # noqa: N818  # an outcome, not an error
    """Ends a comparison with an outcome."""

    def __init__(self, verdict: Verdict, reason: str) -> None:
        super().__init__(reason)
        self.outcome = Outcome(verdict=verdict, reason=reason)


def source_network(folder: Path) -> Any:
    """Return mlx-lm's own network of a checkpoint, or the reason why it has none, as text."""
    try:
        network = load_folder(folder)
        logits_of(network)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # mlx-lm raises what it likes
        return said(error)
    return network


def compare(folder: Path, quant: str | None, source: Any) -> Outcome:
    """Return the outcome of an import; ``source``: mlx-lm's network, or the reason for none."""
    if isinstance(source, str):
        return Outcome(verdict=Verdict.NOT_COMPARED, reason=f"mlx-lm: {source}")
    try:
        with tempfile.TemporaryDirectory(prefix="blobstore-architectures-") as scratch:
            return _judged(*_imported(folder, quant, Path(scratch)), source)
    except Ended as end:
        return end.outcome


def _imported(folder: Path, quant: str | None, scratch: Path) -> tuple[Any, Any, int | None]:
    """Return the loaded network, that of the exported folder, and the fewest bits stored."""
    import blobstore

    store, out = blobstore.open_store(scratch / "store"), scratch / "exported"
    with step("plan", Verdict.REFUSED):
        blobstore.plan_import(folder, quant=quant)
    with step("import", Verdict.LATE):
        blobstore.import_model(folder, "m", store=store, quant=quant)
    with step("load", Verdict.LATE):
        network = blobstore.mlx_lm.load_network("m", store=store)
    with step("export", Verdict.LATE):
        blobstore.export_model("m", out, store=store, format="mlx")
    with step("the exported folder", Verdict.CRASHED):
        exported = load_folder(out)
    with blobstore.open_model("m", store=store) as model:
        bits = [tensor.quant_type.bits for tensor in model.values() if tensor.quant_type]
    return network, exported, min(bits, default=None)


@contextmanager
def step(what: str, refused: Verdict) -> Iterator[None]:
    """Raises: Ended, as ``refused`` with an error of ours, as a crash with any other."""
    from blobstore.errors import BlobStoreError

    try:
        yield
    except BlobStoreError as error:
        raise Ended(refused, f"{what}: {_one_line(error)}") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001  # that any may come is what is looked for
        raise Ended(Verdict.CRASHED, f"{what}: {said(error)}") from None


def load_folder(folder: Path) -> Any:
    """Return mlx-lm's network of a folder. Raises: what mlx-lm raises."""
    from mlx_lm import utils

    network, _ = utils.load_model(folder)
    return network


def _judged(network: Any, exported: Any, bits: int | None, source: Any) -> Outcome:
    import mlx.core as mx

    with step("run", Verdict.CRASHED):
        mx.eval(network(mx.array(_TOKENS)))
    ours, theirs, sources = (logits_of(one) for one in (network, exported, source))
    held, meant = _values(network), _values(source)
    if odd := sorted(held.keys() ^ meant.keys()):
        raise Ended(Verdict.WRONG, f"{odd[0]} is in one of both networks, and {len(odd) - 1} more")
    found = {path: _difference(path, held[path], meant[path], bits) for path in sorted(held)}
    if wrong := [text for text in found.values() if text]:
        raise Ended(Verdict.WRONG, f"{wrong[0]}, and {len(wrong) - 1} more of {len(held)}")
    apart: Any = (mx.abs(ours - theirs).max() / mx.abs(ours).max()).item()
    if not apart <= _NEAR:  # nor if they are not finite
        raise Ended(Verdict.WRONG, f"logits are not the exported folder's: {apart:.2g} apart")
    error: Any = (mx.linalg.norm(ours - sources) / mx.linalg.norm(sources)).item()
    quantized = [path for path, value in held.items() if value.bits]
    others = [path for path in held if not held[path].bits and found[path] is not None]
    now, before = _share(held, quantized), _share(held, others)
    return Outcome(verdict=Verdict.RIGHT, quantized=now, dequantized=before, error=error)


def _share(values: dict[str, _Value], paths: list[str]) -> float:
    sizes = {path: int(value.array.size) for path, value in values.items()}
    return sum(sizes[path] for path in paths) / sum(sizes.values())


@dataclass(frozen=True, slots=True)
class _Value:
    array: Any
    bits: int | None


def _values(network: Any) -> dict[str, _Value]:
    """Return what a network holds, by path: quantized weights dequantized."""
    from mlx.utils import tree_flatten

    plain = {path: _Value(array, None) for path, array in tree_flatten(network.parameters())}
    for path, module in network.named_modules():
        if hasattr(module, "bits") and "scales" in module:
            for part in ("scales", "biases", "global_scale"):
                plain.pop(f"{path}.{part}", None)
            plain[f"{path}.weight"] = _Value(_dequantized(module), module.bits)
    return plain


def _dequantized(module: Any) -> Any:
    import mlx.core as mx

    options = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    values = mx.dequantize(module.weight, module.scales, module.get("biases"), **options)
    if "global_scale" not in module:
        return values.astype(mx.float32)
    scale = module.global_scale
    return values.astype(mx.float32) * scale.reshape(
        *scale.shape, *[1] * (values.ndim - scale.ndim)
    )


def _difference(path: str, held: _Value, meant: _Value, stored_bits: int | None) -> str | None:
    """Return what is wrong with a value: None if equal, "" if as close as its bits allow."""
    import mlx.core as mx

    if held.array.shape != meant.array.shape:
        return f"{path} has shape {held.array.shape} instead of {meant.array.shape}"
    ours, theirs = held.array.astype(mx.float32), meant.array.astype(mx.float32)
    if mx.allclose(ours, theirs, rtol=_ROUNDING, atol=0, equal_nan=True).item():
        return None
    bits = held.bits or (stored_bits if ours.ndim > 1 else None)
    if bits is None:
        return f"{path} differs by {mx.abs(ours - theirs).max().item():.2g}"
    lengths = mx.linalg.norm(ours) * mx.linalg.norm(theirs)
    cosine = ((ours * theirs).sum() / mx.maximum(lengths, 1e-30)).item()
    return "" if cosine >= _COSINES[bits] else f"{path} in {bits} bits has a cosine of {cosine:.4f}"


def logits_of(network: Any) -> Any:
    """Return a network's logits in float32: MLX on a CPU multiplies experts in no other type."""
    import mlx.core as mx

    network.set_dtype(mx.float32)
    logits = network(mx.array(_TOKENS)).astype(mx.float32)
    mx.eval(logits)
    return logits


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    text = _SCRATCH.sub("", " ".join(str(error).split()))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
