"""The stand-in for the Hub is faithful: the real client downloads from it. Marked `lab`."""

import filecmp
import os
import subprocess
import sys
from pathlib import Path

import pytest
from integration.far_rigs import far_rig
from support import PYCODE
from support.hub_stand_in import REPOSITORY, Rules


@pytest.mark.lab
def test_the_client_downloads_all_files(tmp_path: Path) -> None:
    """It sends the token to the Hub only."""
    with far_rig("hub", PYCODE, Rules(token="hf_right")) as rig:  # noqa: S106
        environment = {key: value for key, value in os.environ.items() if key[:3] != "HF_"}
        environment |= {"HF_ENDPOINT": rig.endpoint, "HF_HOME": str(tmp_path / "home")}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        environment |= {f"HF_HUB_{kind}_TIMEOUT": "600" for kind in ("DOWNLOAD", "ETAG")}
        line = [sys.executable, "-m", "huggingface_hub.cli.hf", "download", REPOSITORY]
        line += ["--local-dir", str(tmp_path / "here"), "--token", "hf_right"]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        _, objects = (script.asked for script in rig.scripts)
    assert objects
    assert not any("authorization" in asked.fields for asked in objects)
    names = [path.name for path in PYCODE.iterdir()]
    assert filecmp.cmpfiles(PYCODE, tmp_path / "here", names, shallow=False)[0] == names
