"""All rows of the table: what each is called, how its checkpoint is made and compared.

recipes.json has the recipes, by who makes the checkpoint and by the row's name. ``of``: its model
type, if the row is not named by it. ``overrides``: what differs from `made_by_transformers.TINY`.
The names under "" need nothing else.

transformers saves the checkpoint. ``also``: a JSON merge patch of config.json, for what published
checkpoints have and those of transformers 5 have not.

mlx-lm's network is made, and ``undo`` takes back what its ``sanitize`` did, by functions of
made_by_mlx_lm.py and their arguments.
"""

import json
import multiprocessing
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from architectures import made_by_mlx_lm, made_by_transformers
from architectures.compare import TYPES, Outcome, Verdict, compare, source_network
from architectures.converted import CONVERSIONS, compare_conversion
from architectures.variants import CHANGED, Change

_RECIPES = Path(__file__).parent / "recipes.json"
Row = dict[str, Any]
LOADED = "loads"


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


# Each is made in a process of its own: a crash of it is a row, too.


def made_apart(name: str, *, converted: bool) -> Row:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["blobstore", "mlx_lm.utils", "torch", "transformers"])
    with ProcessPoolExecutor(1, context) as process:
        try:
            return process.submit(make_row, name, converted=converted).result()
        except BrokenProcessPool:
            return _row(name, "not run", dict.fromkeys(TYPES, Outcome(verdict=Verdict.CRASHED)))


def make_row(name: str, *, converted: bool = False) -> Row:
    """Return the outcomes of an architecture by type; if mlx-lm converts it, by conversion."""
    warnings.simplefilter("ignore")
    if reason := architectures()[name].unsound:
        outcome = Outcome(verdict=Verdict.NOT_COMPARED, reason=reason)
        return _row(name, f"not run: {reason}", dict.fromkeys(TYPES, outcome))
    with tempfile.TemporaryDirectory(prefix="blobstore-architecture-") as scratch:
        source = Path(scratch, "source")
        architectures()[name].make(source)
        if converted:
            return _row(name, LOADED, {one: compare_conversion(source, one) for one in CONVERSIONS})
        network = source_network(source)
        outcomes = {quant: compare(source, quant, network) for quant in TYPES}
    return _row(name, network if isinstance(network, str) else LOADED, outcomes)


def _row(name: str, mlx_lm: str, outcomes: dict[Any, Outcome]) -> Row:
    types = {str(key): asdict(outcome) for key, outcome in outcomes.items()}
    head = {"architecture": name, "maker": architectures()[name].maker}
    return {**head, "mlx_lm": mlx_lm, "types": types}
