"""Ports for servers that have to be told one."""

import random
import socket
from contextlib import suppress

_SERVERS = range(15_000, 32_000)
"""Below the ports that Linux gives to connections, and to servers that ask for any
(ip_local_port_range): those of other tests can't take one before the server does."""
_chance = random.SystemRandom()


def free_port() -> int:
    while True:
        port = _chance.choice(_SERVERS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
