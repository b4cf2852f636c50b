"""One row of the table, made in a process of its own: a crash of it is a row, too."""

import multiprocessing
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

from architectures.compare import TYPES, Outcome, Verdict, compare, source_network
from architectures.converted import CONVERSIONS, compare_conversion
from architectures.rows import architectures

Row = dict[str, Any]
LOADED = "loads"


def made_apart(make: Callable[[str], Row], name: str) -> Row:
    """Return what ``make`` returns, a function of this module, called in a new process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["blobstore", "mlx_lm.utils", "torch", "transformers"])
    with ProcessPoolExecutor(1, context) as process:
        try:
            return process.submit(make, name).result()
        except BrokenProcessPool:
            return _row(name, "not run", dict.fromkeys(TYPES, Outcome(verdict=Verdict.CRASHED)))


def make_row(name: str) -> Row:
    warnings.simplefilter("ignore")
    if reason := architectures()[name].unsound:
        outcome = Outcome(verdict=Verdict.NOT_COMPARED, reason=reason)
        return _row(name, f"not run: {reason}", dict.fromkeys(TYPES, outcome))
    with tempfile.TemporaryDirectory(prefix="blobstore-architecture-") as scratch:
        source = Path(scratch, "source")
        architectures()[name].make(source)
        network = source_network(source)
        outcomes = {quant: compare(source, quant, network) for quant in TYPES}
    return _row(name, network if isinstance(network, str) else LOADED, outcomes)


def make_converted_row(name: str) -> Row:
    """Return the outcomes of an architecture that mlx-lm has converted, by conversion."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="blobstore-architecture-") as scratch:
        source = Path(scratch, "source")
        architectures()[name].make(source)
        outcomes = {one: compare_conversion(source, one) for one in CONVERSIONS}
    return _row(name, LOADED, outcomes)


def _row(name: str, mlx_lm: str, outcomes: dict[Any, Outcome]) -> Row:
    types = {str(key): asdict(outcome) for key, outcome in outcomes.items()}
    head = {"architecture": name, "maker": architectures()[name].maker}
    return {**head, "mlx_lm": mlx_lm, "types": types}
