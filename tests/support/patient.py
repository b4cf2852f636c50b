"""`blobstore serve` with hours for its clients: any process may stop for long on a busy machine."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Served:
    """A running server, at ``port`` of 127.0.0.1."""

    process: subprocess.Popen[str]
    port: int

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=600)
        return self.process.returncode, output


@contextmanager
def serving(
    *words: str,
    waits_at_end: bool = False,
    environment: Mapping[str, str] | None = None,
    errors: int | None = None,
) -> Iterator[Served]:
    """Run ``blobstore serve WORDS…`` for as long as the block lasts; ``errors``: its stderr."""
    line = patient("serve", "--port", "0", *words, waits_at_end=waits_at_end)
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            yield Served(process, int(said.rstrip("/\n").rpartition(":")[2]))
        finally:
            process.kill()
