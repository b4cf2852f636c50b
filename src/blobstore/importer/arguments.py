"""The table of an import's options: names, types, and what each does.

The API takes them by these names; the command line makes its flags of this table. It imports
nothing that is slow to load. `ImportOptions` (options.py) checks them, and says which of them
``blobstore.json`` keeps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from blobstore.errors import UsageError
from blobstore.formats.dtypes import QuantType

PolicyFunction = Callable[[str, tuple[int, ...], str], str | None]
"""Decides of an output tensor by its name, shape and dtype."""

StrPath = str | os.PathLike[str]
*_FIRST, _LAST = (kind.value for kind in QuantType)


@dataclass(frozen=True, slots=True)
class Option:
    """What an option does, for people; ``metavar`` stands for its value where it is not a flag."""

    help: str
    metavar: str | None = None


class ImportArguments(TypedDict, total=False):
    """What `plan_import` and `import_model` take, all optional.

    Each text below is what ``blobstore import --help`` says. None stands for an option's default.
    ``quant``: "none" keeps the weights too. ``importance`` may be a mapping, with one vector a
    tensor, by the source's names. ``policy`` may be a function, which is asked for each matrix, by
    name, shape and dtype (``"BF16"``), and returns a type, or None to leave it to the rest.
    ``target_size`` and ``target_bpw`` are explained in docs/quantization.md, "Targets". ``experts``
    None is what the architecture needs, else the profile's. ``template``, ``system`` and
    ``parameters`` win over what the Modelfile says, licenses add up.
    """

    quant: Annotated[
        str | None,
        Option(f"{', '.join(_FIRST)} or {_LAST} [default: keep the weights as they are].", "TYPE"),
    ]
    group_size: Annotated[
        int | None,
        Option("How many weights share a scale: 32, 64 or 128, for int4 and int8.", "N"),
    ]
    method: Annotated[
        str | None,
        Option(
            "How scales are chosen: minmax is fast, search loses less [default: minmax].",
            "minmax|search",
        ),
    ]
    importance: Annotated[
        StrPath | Mapping[str, Any] | None,
        Option(
            "For search: a .safetensors file that says how much each input column of each tensor "
            "counts.",
            "FILE",
        ),
    ]
    global_scale: Annotated[
        bool, Option("Give each nvfp4 tensor a second scale, for the whole tensor.")
    ]
    rules: Annotated[
        Sequence[str],
        Option(
            "The type of tensors whose names match, such as '*.down_proj.*=int8'; the last match "
            "wins. Repeatable.",
            "GLOB=TYPE",
        ),
    ]
    policy: Annotated[
        StrPath | PolicyFunction | None,
        Option("A TOML or JSON file with rules, group sizes and a method.", "FILE"),
    ]
    target_size: Annotated[
        int | None,
        Option(
            "Choose each tensor's type by its error so that the model takes at most this much, "
            "such as 3.5GB.",
            "SIZE",
        ),
    ]
    target_bpw: Annotated[
        float | None, Option("The same limit as bits per weight, such as 4.25.", "BITS")
    ]
    pure: Annotated[
        bool,
        Option(
            "Give every matrix that can be quantized the asked type, token embeddings and the head "
            "too, instead of Ollama's mix."
        ),
    ]
    requantize: Annotated[
        bool,
        Option("Dequantize weights that are quantized in the source, and quantize them again."),
    ]
    dtype: Annotated[str | None, Option("Convert float weights first.", "bfloat16|float16|float32")]
    profile: Annotated[
        str,
        Option(
            "Preset; ollama writes what `ollama create` would write [default: default].",
            "default|ollama",
        ),
    ]
    experts: Annotated[
        str | None,
        Option(
            "Mixture-of-experts weights: packed (one blob per group) or stacked (one tensor per "
            "projection).",
            "packed|stacked",
        ),
    ]
    alignment: Annotated[
        int | None,
        Option("Align the data in each blob to this many bytes, a power of two.", "BYTES"),
    ]
    adapter: Annotated[
        StrPath | None,
        Option("A LoRA adapter of PEFT or mlx-lm to merge into the weights.", "DIR"),
    ]
    draft: Annotated[
        StrPath | None, Option("A checkpoint to store with the model as its draft model.", "DIR")
    ]
    draft_quant: Annotated[
        str | None,
        Option("Type of the draft model [default: keep its weights as they are].", "TYPE"),
    ]
    config: Annotated[
        StrPath | None,
        Option(
            "A folder whose config.json, tokenizer and other files are stored instead of the "
            "source's, or of those that are made for a .gguf file.",
            "DIR",
        ),
    ]
    modelfile: Annotated[
        StrPath | None,
        Option("A Modelfile; its FROM is the source if SOURCE is left out.", "FILE"),
    ]
    template: Annotated[str | None, Option("Prompt template.", "TEXT")]
    system: Annotated[str | None, Option("System prompt.", "TEXT")]
    licenses: Annotated[Sequence[str], Option("Text of a license. Repeatable.", "TEXT")]
    parameters: Annotated[
        Sequence[str],
        Option("An Ollama parameter, such as temperature=0.7. Repeatable.", "KEY=VALUE"),
    ]


@dataclass(frozen=True, slots=True)
class SizeTarget:
    """The most that a model may take: ``nbytes`` stored, or ``bits`` of tensor data a parameter."""

    nbytes: int | None
    bits: float | None

    @classmethod
    def parse(cls, nbytes: int | None, bits: float | None) -> SizeTarget | None:
        """Return the target that is given, if one is.

        Raises: UsageError for both, or for none above 0.
        """
        if nbytes is None and bits is None:
            return None
        if nbytes is not None and bits is not None:
            raise UsageError(
                "give one target: a size or bits per weight", hint="Leave out one of the two."
            )
        value, kinds = (bits, (int, float)) if nbytes is None else (nbytes, (int,))
        if type(value) not in kinds or not 0 < (value or 0) < math.inf:
            raise UsageError(
                f"invalid target: {value!r}",
                hint="A size in whole bytes, or bits per weight such as 4.25.",
            )
        return cls(nbytes, bits)

    def budget(self, parameters: int) -> int:
        return self.nbytes if self.nbytes is not None else int((self.bits or 0) * parameters / 8)
