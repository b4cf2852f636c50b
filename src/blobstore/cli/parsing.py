"""Commands that are built when they are asked for, and options that cost nothing if not given.

typer builds all commands from the signatures of their functions. It also reads each value with a
validator of pydantic, even the None of an option that was not given: that, and loading pydantic,
took half of the time before ``import`` began. A group here builds only the command that is used,
from a module that is loaded then. Texts, and options that are not given, need no validator.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any, ClassVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

_TEXTS = (str, list[str])


def _is_final(parameter: TyperOption | TyperArgument, value: Any) -> bool:
    """Return True for a value that typer's validator would return as it is."""
    described = parameter.type_descriptor
    is_text = described.annotation in _TEXTS and described.parameter_info.parser is None
    is_missing = parameter.required and parameter.value_is_missing(value)  # typer has the message
    return not is_missing and (value is None or is_text)


class _Option(TyperOption):
    def process_value(self, ctx: Any, value: Any) -> Any:
        if not _is_final(self, value):
            return super().process_value(ctx, value)
        return value if self.callback is None else self.callback(ctx, self, value)


class _Argument(TyperArgument):
    def process_value(self, ctx: Any, value: Any) -> Any:
        return value if _is_final(self, value) else super().process_value(ctx, value)


def _lighten(parameters: Iterable[Any]) -> None:
    for parameter in parameters:
        parameter.__class__ = _Option if isinstance(parameter, TyperOption) else _Argument


class LightCommand(TyperCommand):
    """A command whose options cost nothing if they are not given."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        _lighten(parameters)
        return parameters


class _Commands(Mapping[str, Any]):
    """Commands by name, each made when it is first asked for."""

    def __init__(self, makers: Mapping[str, Callable[[], Any]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Any:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


class LazyGroup(TyperGroup):
    """A group whose commands, ``makers``, are made when they are asked for."""

    makers: ClassVar[Mapping[str, Callable[[], Any]]]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands(self.makers)  # type: ignore[assignment]  # nothing adds commands

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  # typer passes it
        return list(self.commands)

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        _lighten(parameters)
        return parameters


def makers_of(places: Mapping[str, str], *, hidden: bool = False) -> dict[str, Callable[[], Any]]:
    """Return what makes the commands at the places of their functions, such as ``care:verify``."""
    return {name: partial(_command, name, place, hidden) for name, place in places.items()}


@cache
def _command(name: str, place: str, hidden: bool) -> Any:  # a partial's argument
    module, _, function = place.partition(":")
    found = getattr(importlib.import_module(f"blobstore.cli.{module}"), function)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name, cls=LightCommand, hidden=hidden)(found)
    return typer.main.get_command(app)
