"""Fixtures of all tests."""

import gc
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from support.retry_policies import patient_clients
from support.servers import Server, server as run_server

from blobstore.model import on_mlx_lm
from blobstore.store.local.store import Store, open_store

# The machine may be small and busy: no deadlines. The same examples every time, so that a run says
# something of a change; HYPOTHESIS_PROFILE=random looks at others, and `deep` at many, for a night.
settings.register_profile(
    "random", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("same", settings.get_profile("random"), derandomize=True)
settings.register_profile("deep", settings.get_profile("random"), max_examples=20_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
# Not the constants of our source too: reading them takes seconds in each process, and examples
# would change with every change of the source.
vars(providers)["_get_local_constants"] = lambda: vars(providers)["_local_constants"]

Snapshot = dict[str, str]
_HINTS = (".blobstore/lock", ".blobstore/names", ".blobstore/hints/")

# A shell lets jobs in the background ignore Ctrl-C, and so would the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# MLX would call a C++ compiler for each function that it fuses: seconds, and the same numbers.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

# Commands run in the tests' process, and this switch is for a process that ends with its command.
on_mlx_lm.without_package_code = lambda: None

gc.disable()  # until the tests are collected: thousands of objects are made, and all stay
gc.set_threshold(10_000)  # tests that parse the source would wait as long for the collector again


def pytest_collection_finish() -> None:
    """Freeze thousands of tests, so that the garbage collector does not walk them repeatedly."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are mapped too, as large ones are."""
    monkeypatch.setattr("blobstore.io.ranges.MAPPED_FROM", 1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


@pytest.fixture
def server() -> Iterator[Server]:
    """A server of one test, which gives it a script: others' late requests do not count."""
    with run_server() as running, patient_clients():
        yield running


@pytest.fixture
def snapshot() -> Callable[[Store], Snapshot]:
    """A function that returns the hashes of a store's files, without the lock and the journal."""

    def take(store: Store) -> Snapshot:
        paths = [path for path in sorted(store.root.rglob("*")) if path.is_file()]
        found = {path.relative_to(store.root).as_posix(): path.read_bytes() for path in paths}
        return {
            name: hashlib.sha256(data).hexdigest()
            for name, data in found.items()
            if not name.startswith(_HINTS)
        }

    return take
