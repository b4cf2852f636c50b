"""The options of an import, which several commands take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.models import ArgumentInfo

from blobstore.cli.output import parse_size

if TYPE_CHECKING:
    from blobstore.importer.policies.options import ImportArguments


_OPTIONS: dict[str, tuple[Any, Any]] = {
    "quant": (
        Annotated[
            str | None,
            typer.Option(
                "--quant",
                metavar="TYPE",
                help="int4, int8, nvfp4, mxfp4 or mxfp8 [default: keep the weights as they are].",
            ),
        ],
        None,
    ),
    "group_size": (
        Annotated[
            int | None,
            typer.Option(
                "--group-size",
                metavar="N",
                help="How many weights share a scale: 32, 64 or 128, for int4 and int8.",
            ),
        ],
        None,
    ),
    "method": (
        Annotated[
            str | None,
            typer.Option(
                "--method",
                metavar="minmax|search",
                help="How scales are chosen: minmax is fast, search loses less [default: minmax].",
            ),
        ],
        None,
    ),
    "importance": (
        Annotated[
            str | None,
            typer.Option(
                "--importance",
                metavar="FILE",
                help="For search: a .safetensors file that says how much each input column of each tensor counts.",
            ),
        ],
        None,
    ),
    "global_scale": (
        Annotated[
            bool,
            typer.Option(
                "--global-scale",
                help="Give each nvfp4 tensor a second scale, for the whole tensor.",
            ),
        ],
        False,
    ),
    "rules": (
        Annotated[
            list[str] | None,
            typer.Option(
                "--rule",
                metavar="GLOB=TYPE",
                help="The type of tensors whose names match, such as '*.down_proj.*=int8'; the last match wins. Repeatable.",
            ),
        ],
        None,
    ),
    "policy": (
        Annotated[
            str | None,
            typer.Option(
                "--policy",
                metavar="FILE",
                help="A TOML or JSON file with rules, group sizes and a method.",
            ),
        ],
        None,
    ),
    "target_size": (
        Annotated[
            int | None,
            typer.Option(
                "--target-size",
                metavar="SIZE",
                parser=parse_size,
                help="Choose each tensor's type by its error so that the model takes at most this much, such as 3.5GB.",
            ),
        ],
        None,
    ),
    "target_bpw": (
        Annotated[
            float | None,
            typer.Option(
                "--target-bpw", metavar="BITS", help="The same with bits per weight, such as 4.25."
            ),
        ],
        None,
    ),
    "requantize": (
        Annotated[
            bool,
            typer.Option(
                "--requantize",
                help="Dequantize weights that are quantized in the source, and quantize them again.",
            ),
        ],
        False,
    ),
    "dtype": (
        Annotated[
            str | None,
            typer.Option(
                "--dtype",
                metavar="bfloat16|float16|float32",
                help="Convert float weights first.",
            ),
        ],
        None,
    ),
    "profile": (
        Annotated[
            str,
            typer.Option(
                "--profile",
                metavar="default|ollama",
                help="Preset; ollama writes what `ollama create` would write.",
            ),
        ],
        "default",
    ),
    "experts": (
        Annotated[
            str | None,
            typer.Option(
                "--experts",
                metavar="packed|stacked",
                help="Mixture-of-experts weights: packed (one blob per group) or stacked (one tensor per projection).",
            ),
        ],
        None,
    ),
    "alignment": (
        Annotated[
            int | None,
            typer.Option(
                "--align",
                metavar="BYTES",
                help="Align the data in each blob to this many bytes, a power of two.",
            ),
        ],
        None,
    ),
    "draft": (
        Annotated[
            str | None,
            typer.Option(
                "--draft",
                metavar="DIR",
                help="A checkpoint to store with the model as its draft model.",
            ),
        ],
        None,
    ),
    "draft_quant": (
        Annotated[
            str | None,
            typer.Option(
                "--draft-quant",
                metavar="TYPE",
                help="Type of the draft model [default: keep its weights as they are].",
            ),
        ],
        None,
    ),
    "modelfile": (
        Annotated[
            str | None,
            typer.Option(
                "--modelfile",
                "-f",
                metavar="FILE",
                help="A Modelfile; its FROM is the source if SOURCE is left out.",
            ),
        ],
        None,
    ),
    "template": (
        Annotated[str | None, typer.Option("--template", metavar="TEXT", help="Prompt template.")],
        None,
    ),
    "system": (
        Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System prompt.")],
        None,
    ),
    "licenses": (
        Annotated[
            list[str] | None,
            typer.Option("--license", metavar="TEXT", help="Text of a license. Repeatable."),
        ],
        None,
    ),
    "parameters": (
        Annotated[
            list[str] | None,
            typer.Option(
                "--param",
                metavar="KEY=VALUE",
                help="An Ollama parameter, such as temperature=0.7. Repeatable.",
            ),
        ],
        None,
    ),
}
_REPEATABLE = ("rules", "licenses", "parameters")


def takes_import_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the options of an import besides its own.

    It gets them as ``options``, one mapping.
    """
    own = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        options: ImportArguments = {name: values.pop(name) for name in _OPTIONS}  # type: ignore[assignment]  # by its table
        options.update(
            {name: values or () for name, values in options.items() if name in _REPEATABLE}  # type: ignore[typeddict-item]  # by its table
        )
        command(**values, options=options)

    parameters = [parameter for parameter in own.parameters.values() if parameter.name != "options"]
    arguments = [
        parameter
        for parameter in parameters
        if isinstance(parameter.annotation.__metadata__[0], ArgumentInfo)
    ]
    others = [parameter for parameter in parameters if parameter not in arguments]
    shared = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )
        for name, (annotation, default) in _OPTIONS.items()
    ]
    ordered = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in (*arguments, *shared, *others)
    ]
    wrapper.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]  # typer reads it
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
    return wrapper
