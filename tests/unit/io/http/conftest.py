"""Servers on loopback, and a `Remote` that does not wait long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.remotes import Remote
from support.retry_policies import patient_clients, patient_policy
from support.servers import Server, server as run_server

RETRY_POLICY = patient_policy(backoff_s=0.001, longest_wait_s=0.05)


@pytest.fixture(scope="session", autouse=True)
def _patient() -> Iterator[None]:
    with patient_clients():
        yield


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server; every test gives it a script of its own."""
    with run_server() as running:
        yield running


@pytest.fixture(scope="session")
def other_server() -> Iterator[Server]:
    """Another origin: the same host, another port."""
    with run_server() as running:
        yield running


@pytest.fixture(scope="session")
def remote() -> Iterator[Remote]:
    """A client with a token for whatever it is asked for first."""
    with Remote("secret", retry_policy=RETRY_POLICY) as made:
        yield made
