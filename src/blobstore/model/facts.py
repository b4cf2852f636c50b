"""Facts: what a runtime has to know of a model, and its verdict: values. Pure.

The facts are the same for a plan and for a stored model.
"""

from __future__ import annotations

import enum
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, NamedTuple, Self

from blobstore.formats.checkpoint import DRAFT_PREFIX, TOKENIZER, TokenizerFacts
from blobstore.formats.dtypes import DType, Quantization, QuantType, fits_mlx
from blobstore.store.stored import StoredTensor

Config = Mapping[str, Any]
"""The object in config.json."""
_EXPERT = re.compile(
    r"(?P<group>(?:.*\.)?(?:layers|h)\.[0-9]+\.(?P<place>(?:[a-z_]+\.)*?(?:experts|switch_mlp|moe|moe\.mlp)))"
    r"\.(?:(?P<number>[0-9]+)\.)?(?P<projection>[a-z_]*_proj|w[0-9]|fc[0-9])(?:\.weight)?",
    re.ASCII,
)


class Layout(enum.Enum):
    """How the routed experts of a layer are stored; the value says it in words."""

    NUMBERED = "one by one"
    STACKED = "stacked"
    FUSED = "stacked with gate and up in one tensor"


class TensorFacts(NamedTuple):
    """One tensor of a model: its name, the dtype of its values, the shape before packing.

    A tuple, because a model may have 100,000 of them, and a dataclass takes longer to make.

    ``quantization``: that of its codes, or None. ``double_scaled``: it is nvfp4 with a global
    scale. ``transposed``: its last two dimensions are swapped against the source's.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    quantization: Quantization | None = None
    double_scaled: bool = False
    transposed: bool = False

    @classmethod
    def of(cls, name: str, stored: StoredTensor, float_dtype: DType) -> Self:
        """Return a stored tensor's facts; ``float_dtype`` is for codes that do not say theirs."""
        return cls(
            name,
            stored.value_dtype or float_dtype,
            stored.shape,
            stored.quantization,
            stored.has_global_scale,
            stored.transposed,
        )

    @property
    def mode(self) -> str | None:
        return None if self.quantization is None else self.quantization.quant_type.mode

    @property
    def fits_mlx(self) -> bool:
        return self.quantization is not None or fits_mlx(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The routed experts of one layer.

    ``name`` is the prefix of their tensors, ``place`` the part of it below the layer.
    ``projections``: their tensors by the projection's name; numbered experts are several tensors of
    a projection.
    """

    name: str
    place: str
    layout: Layout
    projections: Mapping[str, Sequence[TensorFacts]]

    @property
    def tensors(self) -> tuple[TensorFacts, ...]:
        return tuple(tensor for tensors in self.projections.values() for tensor in tensors)

    @property
    def mixed_projection(self) -> str | None:
        """A projection whose experts differ in type, so that they can't be stacked, or None."""
        kinds = {
            name: {(tensor.quantization, tensor.dtype, tensor.double_scaled) for tensor in tensors}
            for name, tensors in self.projections.items()
        }
        return next((name for name, found in kinds.items() if len(found) > 1), None)


@dataclass(frozen=True)
class ModelFacts:
    """A model: config.json, names of documents and files, tensors, its draft's architecture.

    ``read``: returns the bytes of a document by its name, None if they can't be read.
    ``is_described``: blobs have metadata with the types of their tensors. The tensors of a draft
    are left out: each runtime has its own rule for drafts.
    """

    config: Config | None
    documents: frozenset[str]
    tensors: tuple[TensorFacts, ...]
    draft: str | None = None
    read: Callable[[str], bytes | None] = field(default=lambda _: None, compare=False)
    is_described: bool = True

    def __post_init__(self) -> None:
        own = [tensor for tensor in self.tensors if not tensor.name.startswith(DRAFT_PREFIX)]
        object.__setattr__(self, "tensors", tuple(own))

    @cached_property
    def experts(self) -> tuple[ExpertGroup, ...]:
        groups: dict[tuple[str, str], dict[str, list[TensorFacts]]] = defaultdict(
            lambda: defaultdict(list)
        )
        layouts: dict[str, Layout] = {}
        for tensor in self.tensors:
            if match := _EXPERT.fullmatch(tensor.name):
                name, place, number, projection = match.groups()
                groups[name, place][projection].append(tensor)
                if number:
                    layouts[name] = Layout.NUMBERED
                elif projection == "gate_up_proj":
                    layouts.setdefault(name, Layout.FUSED)
        return tuple(
            ExpertGroup(
                name,
                place,
                layouts.get(name, Layout.STACKED),
                projections,
            )
            for (name, place), projections in groups.items()
        )

    @cached_property
    def tokenizer(self) -> TokenizerFacts | None:
        raw = self.read(TOKENIZER) if TOKENIZER in self.documents else None
        return None if raw is None else TokenizerFacts.read(raw)

    @property
    def architecture(self) -> str | None:
        named = (self.config or {}).get("architectures")
        return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None

    @property
    def has_other_senses(self) -> bool:
        config = self.config or {}
        return config.get("has_vision") is True or any(
            config.get(key) for key in ("vision_config", "audio_config", "sound_config")
        )

    @property
    def types(self) -> str:
        used = {
            tensor.quantization.quant_type
            for tensor in self.tensors
            if tensor.quantization is not None
        }
        return ", ".join(one.value for one in QuantType if one in used) or "unquantized"


class Runs(enum.Enum):
    """Whether a model runs; UNKNOWN if it may not load, or may answer wrongly."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a model runs in a runtime of that version."""

    runtime: str
    version: str
    runs: Annotated[Runs, "yes, no or unknown"]
    reason: Annotated[str, "for yes, what it runs as; otherwise the obstacle"]

    @property
    def sentence(self) -> str:
        """The verdict as a sentence without its full stop."""
        runtime = f"{self.runtime} {self.version}"
        if self.runs is Runs.YES:
            return f"Runs in {runtime} ({self.reason})"
        said = "Does not run" if self.runs is Runs.NO else "Uncertain"
        return f"{said} in {runtime}: {self.reason}"
