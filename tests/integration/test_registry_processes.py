"""The corpus's cases of whole processes: clients that are killed, and many that pull one model."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from support.hostile_registry import NAME, Scene, scene
from support.relay import relay
from support.shared_models import contents, finish, pulling
from support.small_registry import digest_of

from blobstore import open_store, verify
from blobstore.names import ModelName

CLIENTS = 8


def reference(host: str) -> str:
    return f"{host}/library/tiny:int4"


def check_whole(root: Path, made: Scene) -> None:
    store = open_store(root)
    assert store.manifests.names() == [ModelName.parse(NAME)]
    assert store.manifests.text(store.find(NAME)) == made.raw
    assert contents(store, NAME) == {digest_of(data): data for data in made.blobs}
    assert verify(store).is_sound


@pytest.mark.parametrize("points", [3, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_registry_kill_client_mid_pull(points: int, tmp_path: Path) -> None:
    """Killed at points that are spread over the bytes of one pull after the other."""
    random = Random(points)
    with scene(tmp_path, is_push=False) as made:
        made.play()
        total = sum(map(len, made.blobs))
        with relay(made.here.port, most=2**14) as between:
            root, whole = tmp_path / "pulled0", 0
            for number in range(points):
                process = pulling(root, NAME, reference(between.host))
                between.after(random.randrange(1, total), process.kill)
                process.communicate(timeout=240)
                names = open_store(root).manifests.names()
                assert names in ([], [ModelName.parse(NAME)])
                if names or number == points - 1:  # else the next one goes on
                    finish(pulling(root, NAME, reference(between.host)))
                    check_whole(root, made)
                    root, whole = tmp_path / f"pulled{number + 1}", whole + 1
    assert whole


def test_registry_concurrent_same_pull(tmp_path: Path) -> None:
    with scene(tmp_path, is_push=False) as made:
        made.play()
        host = f"{made.here.host}:{made.here.port}"
        root = tmp_path / "pulled"
        processes = [pulling(root, NAME, reference(host)) for _ in range(CLIENTS)]
        for process in processes:
            finish(process)
        check_whole(root, made)
