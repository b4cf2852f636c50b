"""The stand-in for the Hub is faithful: the real client downloads from it.

Marked `lab`: it needs nginx.
"""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import PYCODE
from support.hub_stand_in import Rules, hub_stand_in

pytestmark = pytest.mark.lab
PATIENCE_S = 600  # the client's own is 10


def test_the_client_downloads_all_files(tmp_path: Path) -> None:
    """It waits as long as it is told, and sends the token to the Hub only."""
    rules = Rules(quota=3, token="hf_right")  # noqa: S106
    with hub_stand_in(tmp_path, PYCODE, rules=rules) as hub:
        environment = {key: value for key, value in os.environ.items() if key[:3] != "HF_"}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        environment |= {f"HF_HUB_{kind}_TIMEOUT": f"{PATIENCE_S}" for kind in ("DOWNLOAD", "ETAG")}
        line = [sys.executable, "-m", "huggingface_hub.cli.hf", "download", "org/name"]
        line += ["--local-dir", str(tmp_path / "here"), "--token", "hf_right"]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        names = [path.name for path in PYCODE.iterdir()]
        assert filecmp.cmpfiles(PYCODE, tmp_path / "here", names, shallow=False)[0] == names
        fetched = [one for one in hub.store.requests() if one.path.startswith("/objects/")]
        assert any(one.body > 10_000_000 for one in fetched)
        assert 429 in hub.answers.refused
