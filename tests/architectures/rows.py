"""All rows of the table: what each is called, and how its checkpoint is made.

recipes.json has the recipes, by who makes the checkpoint and by the row's name. ``of``: its model
type, if the row is not named by it. ``overrides``: what differs from `made_by_transformers.TINY`.
The names under "" need nothing else.

transformers saves the checkpoint. ``also``: a JSON merge patch of config.json, for what published
checkpoints have and those of transformers 5 have not.

mlx-lm's network is made, and ``undo`` takes back what its ``sanitize`` did, by functions of
made_by_mlx_lm.py and their arguments.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from architectures import made_by_mlx_lm, made_by_transformers
from architectures.variants import CHANGED, Change

_RECIPES = Path(__file__).parent / "recipes.json"


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row: its name, its maker, what writes it; ``unsound``: why mlx-lm must not run it."""

    name: str
    maker: str
    make: Callable[[Path], None]
    unsound: str = ""


def architectures() -> dict[str, Architecture]:
    recipes = json.loads(_RECIPES.read_text())
    for recipes_of_maker in recipes.values():
        recipes_of_maker |= {name: {} for name in recipes_of_maker.pop("")}
    made = {
        name: Architecture(name, "transformers", partial(_transformers, name, recipe))
        for name, recipe in recipes["transformers"].items()
    }
    for name, recipe in recipes["mlx-lm"].items():
        make = partial(_mlx_lm, name, recipe)
        made[name] = Architecture(name, "mlx-lm", make, recipe.get("unsound", ""))
    changed = [
        Architecture(name, made[of].maker, partial(_changed, made[of], change))
        for name, (of, change) in CHANGED.items()
    ]
    rows = [*made.values(), *changed]
    return {row.name: row for row in sorted(rows, key=lambda row: row.name.lower())}


def _transformers(name: str, recipe: dict[str, Any], folder: Path) -> None:
    made_by_transformers.make(
        folder, recipe.get("of", name), recipe.get("overrides", {}), recipe.get("also", {})
    )


def _mlx_lm(name: str, recipe: dict[str, Any], folder: Path) -> None:
    made_by_mlx_lm.make(
        folder, recipe.get("of", name), recipe.get("overrides", {}), recipe.get("undo", [])
    )


def _changed(row: Architecture, change: Change, folder: Path) -> None:
    row.make(folder)
    change(folder)
