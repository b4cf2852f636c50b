"""One row of the table, made in a process of its own: a crash of it is a row, too."""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from architectures.compare import TYPES, Outcome, Verdict, compare, source_network
from architectures.converted import CONVERSIONS, compare_conversion
from architectures.rows import Architecture, architectures

_LIMIT_S = 600
_LOADED = "loads"


def make_row(name: str) -> dict[str, Any]:
    """Return what comes of an architecture as each type, as JSON's values; made here."""
    warnings.simplefilter("ignore")
    row = architectures()[name]
    if row.unsound:
        return _uncompared(row, Verdict.NOT_COMPARED, row.unsound)
    with tempfile.TemporaryDirectory(prefix="blobstore-architecture-") as scratch:
        source = Path(scratch, "source")
        row.make(source)
        network = source_network(source)
        outcomes = {str(quant): asdict(compare(source, quant, network)) for quant in TYPES}
    return {
        **_head(row),
        "mlx_lm": network if isinstance(network, str) else _LOADED,
        "types": outcomes,
    }


def make_converted_row(name: str) -> dict[str, Any]:
    """Return the outcomes of an architecture that mlx-lm has converted, by conversion."""
    warnings.simplefilter("ignore")
    row = architectures()[name]
    with tempfile.TemporaryDirectory(prefix="blobstore-architecture-") as scratch:
        source = Path(scratch, "source")
        row.make(source)
        outcomes = {
            conversion: asdict(compare_conversion(source, conversion)) for conversion in CONVERSIONS
        }
    return {**_head(row), "mlx_lm": _LOADED, "types": outcomes}


def _head(row: Architecture) -> dict[str, str]:
    return {"architecture": row.name, "maker": row.maker}


class Apart:
    """Makes rows in processes that begin with everything imported.

    A process that dies counts as a crash of every type.
    """

    def __init__(self, make: Callable[[str], dict[str, Any]]) -> None:
        self._make = make
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["blobstore", "mlx_lm.utils", "torch", "transformers"])

    def __call__(self, row: Architecture) -> dict[str, Any]:
        """Return what ``make`` returns for the row's name; it is a function of this module."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_send_row, args=(self._make, row.name, theirs))
        process.start()
        theirs.close()
        try:
            if not ours.poll(_LIMIT_S):
                process.kill()
            result: dict[str, Any] = ours.recv()
        except EOFError:
            process.join()
            return _uncompared(row, Verdict.CRASHED, f"the process ended with {process.exitcode}")
        process.join()
        return result


def _send_row(make: Callable[[str], dict[str, Any]], name: str, to: Connection) -> None:
    to.send(make(name))


def _uncompared(row: Architecture, verdict: Verdict, reason: str) -> dict[str, Any]:
    outcome = asdict(Outcome(verdict=verdict, reason=reason))
    return {
        **_head(row),
        "mlx_lm": f"not run: {reason}",
        "types": {str(quant): outcome for quant in TYPES},
    }
