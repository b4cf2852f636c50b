"""Requests that commands send to a bucket: ``python tests/bench/bucket_requests.py``.

Counts the lines in the log of moto's S3, for fixtures/pycode-5m as int4, and prints a table.
"""

import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from tables import show, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from integration.cloud_services import moto_s3
from support import PYCODE

IMPORT = f"import {PYCODE} m --quant int4"
COMMANDS = {
    "`import`, new · the same again": f"{IMPORT} · {IMPORT}",
    "`show` · `list`": "show m · list",
    "`export`, first · again": "export m {0}/out · export m {0}/out-2",
    "`show` · `list`, after them": "show m · list",
    "`import` as another type": f"import {PYCODE} n --quant int8",
    "`verify` · `du` · `prune`, of two models": "verify · du · prune",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, moto_s3(Path(folder) / "s3") as bucket:
        log = Path(folder) / "s3" / "moto.log"
        given = os.environ | bucket.environment | {"BLOBSTORE_CACHE": f"{folder}/cache"}
        table("command", "requests")
        for name, commands in COMMANDS.items():
            counts = [log.read_bytes().count(b"HTTP/1.1")]
            for words in commands.format(folder).split(" · "):
                line = [sys.executable, "-m", "blobstore", *words.split()]
                line += ["--store", f"{bucket.address}/store"]
                subprocess.run(line, env=given, check=True, capture_output=True)
                counts.append(log.read_bytes().count(b"HTTP/1.1"))
            show((name, " · ".join(str(b - a) for a, b in pairwise(counts))))


if __name__ == "__main__":
    main()
