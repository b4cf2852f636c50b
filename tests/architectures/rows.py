"""All rows of the table: what each is called, and how its checkpoint is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from architectures import (
    from_mlx_lm,
    from_mlx_lm_mixtures,
    from_transformers,
    made_by_mlx_lm,
    made_by_transformers,
)
from architectures.variants import CHANGED, Change


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row: its name, its maker, and the function that writes it into a new folder.

    ``unsound``: why mlx-lm's network must not be run; "" where it may.
    """

    name: str
    maker: str
    make: Callable[[Path], None]
    unsound: str = ""


def architectures() -> dict[str, Architecture]:
    """Return all rows by name, in the order of their names."""
    made = {row.name: row for row in (*_by_transformers(), *_by_mlx_lm())}
    changed = [
        Architecture(name, made[of].maker, partial(_changed, made[of], change))
        for name, (of, change) in CHANGED.items()
    ]
    rows = [*made.values(), *changed]
    return {row.name: row for row in sorted(rows, key=lambda row: row.name.lower())}


def _by_transformers() -> list[Architecture]:
    recipes: dict[str, tuple[str, made_by_transformers.Json, made_by_transformers.Json]]
    recipes = {name: (name, {}, {}) for name in from_transformers.PLAIN}
    recipes |= {name: (name, *recipe) for name, recipe in from_transformers.SPECIAL.items()}
    recipes |= from_transformers.VARIANTS
    return [
        Architecture(name, "transformers", partial(_transformers, model_type, overrides, also))
        for name, (model_type, overrides, also) in recipes.items()
    ]


def _transformers(
    model_type: str,
    overrides: made_by_transformers.Json,
    also: made_by_transformers.Json,
    folder: Path,
) -> None:
    made_by_transformers.make(folder, model_type, overrides, also)


def _by_mlx_lm() -> list[Architecture]:
    return [
        Architecture(
            name, "mlx-lm", partial(_mlx_lm, recipe, changes), from_mlx_lm.UNSOUND.get(name, "")
        )
        for table in (from_mlx_lm, from_mlx_lm_mixtures)
        for recipes, changes in ((table.RECIPES, False), (table.CHANGING, True))
        for name, recipe in recipes.items()
    ]


def _mlx_lm(recipe: from_mlx_lm.Recipe, changes: bool, folder: Path) -> None:
    made_by_mlx_lm.make(folder, *recipe, changes_values=changes)


def _changed(row: Architecture, change: Change, folder: Path) -> None:
    row.make(folder)
    change(folder)
