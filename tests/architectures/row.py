"""One row of the table, made in a process of its own: a crash of it is a row, too."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from architectures import Architecture, architectures
from compare import TYPES, Outcome, Verdict, compare, source_network

_LIMIT_S = 600
_LOADED = "loads"


def make_row(name: str) -> dict[str, Any]:
    """Return what comes of an architecture as each type, as JSON's values; made here."""
    warnings.simplefilter("ignore")
    row = architectures()[name]
    with tempfile.TemporaryDirectory(prefix="blobstore-architecture-") as scratch:
        source = Path(scratch, "source")
        row.make(source)
        network = source_network(source)
        outcomes = {str(quant): asdict(_outcome(source, quant, network)) for quant in TYPES}
    return {**_head(row), "mlx_lm": network if isinstance(network, str) else _LOADED, "types": outcomes}


def _outcome(source: Path, quant: str | None, network: Any) -> Outcome:
    return compare(source, quant, network)


def _head(row: Architecture) -> dict[str, str]:
    return {"architecture": row.name, "maker": row.maker}


def make_row_apart(row: Architecture) -> dict[str, Any]:
    """Return the same, made by another process: one that dies is a crash of every type."""
    command = [sys.executable, str(Path(__file__).parent), "--row", row.name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        if done.returncode == 0:
            result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return result
        reason = " ".join(done.stderr.splitlines()[-1:]) or f"exit status {done.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"not done after {_LIMIT_S} s"
    outcome = asdict(Outcome(verdict=Verdict.CRASHED, reason=reason))
    return {**_head(row), "mlx_lm": f"not made: {reason}", "types": {str(quant): outcome for quant in TYPES}}


def forget(folder: Path) -> None:
    """Remove the rows that an earlier run has noted."""
    shutil.rmtree(folder, ignore_errors=True)
