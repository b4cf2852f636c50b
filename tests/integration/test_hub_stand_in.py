"""The stand-in for the Hub is faithful: the real client downloads from it, and reads its refusals.

Marked `lab`: it needs nginx.
"""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import PYCODE
from support.hub_stand_in import COMMIT, Rules, RunningHub, hub_stand_in

pytestmark = pytest.mark.lab
TOKEN = "hf_" + "a" * 34
PATIENCE_S = 300  # the client's own is 10


@pytest.fixture
def running(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningHub]:
    """A Hub of a real model."""
    with hub_stand_in(tmp_path, PYCODE, rules=getattr(request, "param", None)) as hub:
        yield hub


def hf(hub: RunningHub, home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``hf download`` of the whole repository into ``home``/here."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"NO_COLOR": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"}
    environment |= {f"HF_HUB_{kind}_TIMEOUT": str(PATIENCE_S) for kind in ("DOWNLOAD", "ETAG")}
    line = [sys.executable, "-m", "huggingface_hub.cli.hf", "download", "org/name"]
    line += ["--local-dir", str(home / "here"), *options]
    return subprocess.run(
        line, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )


def is_whole(home: Path) -> bool:
    """Return True if all files were downloaded."""
    names = [path.name for path in PYCODE.iterdir()]
    return not any(filecmp.cmpfiles(PYCODE, home / "here", names, shallow=False)[1:])


def test_the_client_downloads_all_files(running: RunningHub, tmp_path: Path) -> None:
    done = hf(running, tmp_path)
    assert done.returncode == 0, done.stderr
    assert is_whole(tmp_path)
    fetched = [one for one in running.store.requests() if one.path.startswith("/objects/")]
    assert {one.status for one in fetched} <= {200, 206}
    assert any(one.body > 10_000_000 for one in fetched)


@pytest.mark.parametrize("running", [Rules(quota=3)], indirect=True)
def test_the_client_waits_as_long_as_it_is_told(running: RunningHub, tmp_path: Path) -> None:
    done = hf(running, tmp_path)
    assert done.returncode == 0, done.stderr
    assert is_whole(tmp_path)
    assert 429 in running.answers.refused


@pytest.mark.parametrize(
    "running", [Rules(token=TOKEN), Rules(token=TOKEN, gated=True)], indirect=True
)
def test_the_client_needs_the_token_and_sends_it_to_the_hub_only(
    running: RunningHub, tmp_path: Path
) -> None:
    assert hf(running, tmp_path).returncode != 0
    assert not is_whole(tmp_path)
    done = hf(running, tmp_path, "--token", TOKEN)
    assert done.returncode == 0, done.stderr
    assert is_whole(tmp_path)


@pytest.mark.parametrize(
    ("running", "token", "error"),
    [
        (None, None, "RevisionNotFoundError"),
        (Rules(token=TOKEN), None, "RepositoryNotFoundError"),
        (Rules(token=TOKEN, gated=True), None, "GatedRepoError"),
        (Rules(token=TOKEN, gated=True), "hf_other", "GatedRepoError"),
    ],
    indirect=["running"],
)
def test_the_client_reads_refusals(
    running: RunningHub, tmp_path: Path, token: str | None, error: str
) -> None:
    from huggingface_hub import HfApi, errors

    api = HfApi(endpoint=running.url, token=token or False)
    revision = "other" if error.startswith("Revision") else "main"
    with pytest.raises(getattr(errors, error)) as raised:
        api.hf_hub_download(
            "org/name",
            "config.json",
            revision=revision,
            cache_dir=tmp_path,
            etag_timeout=PATIENCE_S,
        )
    assert type(raised.value).__name__ == error


def test_the_listing_and_the_heads_say_the_same(running: RunningHub) -> None:
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.hf_api import RepoFile

    api = HfApi(endpoint=running.url, token=False)
    assert api.model_info("org/name").sha == COMMIT
    listed = [one for one in api.list_repo_tree("org/name") if isinstance(one, RepoFile)]
    assert {one.path for one in listed} == {path.name for path in PYCODE.iterdir()}
    for one in listed:
        url = hf_hub_url("org/name", one.path, endpoint=running.url)
        found = get_hf_file_metadata(url, token=False, timeout=PATIENCE_S)
        assert (found.size, found.commit_hash) == (one.size, COMMIT)
        assert found.etag == (one.lfs.sha256 if one.lfs is not None else one.blob_id)
