"""`blobstore serve` with hours for its clients: any process may stop for long on a busy machine.

For tests that are not about the server's limits of time (`blobstore.web.application`).
"""

from __future__ import annotations

import sys

_HOUR_S = 3600
_DEFAULT_END_S = 8
_PATIENT = """
import sys
from blobstore.web import application as server

server.IDLE_S, server.END_S = int(sys.argv.pop(1)), int(sys.argv.pop(1))
from blobstore.cli.main import main
main()
"""


def patient(*words: str, waits_at_end: bool = False) -> list[str]:
    """Return the command ``blobstore WORDS…`` whose server gives a client an hour for everything.

    When it is told to end, requests in flight still have the 8 seconds that they have by default,
    and an hour only if it ``waits_at_end``.
    """
    end_s = _HOUR_S if waits_at_end else _DEFAULT_END_S
    return [sys.executable, "-c", _PATIENT, str(_HOUR_S), str(end_s), *words]
