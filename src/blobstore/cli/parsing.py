"""Commands that are built when they are asked for, and options that cost nothing if not given.

typer builds all commands from the signatures of their functions. It also reads each value with a
validator of pydantic, even the None of an option that was not given: that, and loading pydantic,
took half of the time before ``import`` began. A group here builds only the command that is used,
from a module that is loaded then. Texts, and options that are not given, need no validator.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

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


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        _lighten(parameters)
        return parameters


def _command(name: str, place: str, *, hidden: bool) -> Any:
    """Return a command as typer builds it from a function of this room: ``care:verify``."""
    module, _, function = place.partition(":")
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    loaded = importlib.import_module(f"blobstore.cli.{module}")
    app.command(name, cls=_Command, hidden=hidden)(getattr(loaded, function))
    return typer.main.get_command(app)


class _Commands(Mapping[str, Any]):
    """Commands by name, each made when it is first asked for."""

    def __init__(self, makers: Mapping[str, Callable[[], Any]]) -> None:
        self._makers = makers
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def group(makers: Mapping[str, Callable[[], Any]]) -> type[TyperGroup]:
    """Return a class for typer's groups whose commands are made when they are asked for."""

    class Group(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.commands = _Commands(makers)  # type: ignore[assignment]  # nothing adds commands

        def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  # typer passes it
            return list(self.commands)

        def get_params(self, ctx: Any) -> list[Any]:
            parameters = super().get_params(ctx)
            _lighten(parameters)
            return parameters

    return Group


def commands(places: Mapping[str, str], *, hidden: bool = False) -> dict[str, Callable[[], Any]]:
    """Return what makes the commands of a group, for `group`, by the places of their functions."""
    return {
        name: functools.partial(_command, name, place, hidden=hidden)
        for name, place in places.items()
    }
