"""Clients that wait: a machine may stop a server of these tests, or a client, for half a minute."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

from blobstore.io.budget import RetryPolicy
from blobstore.io.http import client, connections

_LONG_S = 600
patient_policy = partial(RetryPolicy, connect_s=_LONG_S, silence_s=_LONG_S, deadline_s=4 * _LONG_S)
"""A policy without impatience; its arguments are those of `RetryPolicy`."""


@contextmanager
def patient_clients() -> Iterator[None]:
    """Let clients be patient and keep connections: tests count requests."""
    with (
        mock.patch.object(client, "RetryPolicy", patient_policy),
        mock.patch.object(connections, "KEEP_ALIVE_S", 4 * _LONG_S),
    ):
        yield
