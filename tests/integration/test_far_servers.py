"""Imports from servers that are slow, cut connections, limit requests, or sign addresses.

Marked `lab`: they need nginx.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.far_rigs import blobs_of, far_rig, write_far_checkpoint
from support.hub_stand_in import REPOSITORY, RepositoryFile, Rules, RunningHub, hub_stand_in
from support.nginx import Limits, nginx
from support.relay import relay
from support.server_faults import Alarm

from blobstore import import_model, open_store
from blobstore.errors import BlobStoreError, RemoteError
from blobstore.source.addresses import Source, open_folder
from blobstore.source.weights import FetchOptions

pytestmark = pytest.mark.lab
TOKEN = "hf_" + "a" * 34
HUB = f"hf://{REPOSITORY}"
Check = Callable[..., None]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 42 MB in two shards."""
    return write_far_checkpoint(tmp_path_factory.mktemp("far") / "m")


@pytest.fixture
def equal(checkpoint: Path, tmp_path: Path) -> Check:
    """A function that checks that an import of a source equals the local import."""

    def check(source: Source, connections: int | None = None) -> None:
        fetch = FetchOptions(connections=connections)
        made = [
            blobs_of(
                import_model(
                    one, "m", store=open_store(tmp_path / name), quant="int4", fetch=fetch
                ).manifest
            )
            for name, one in (("local", checkpoint), ("far", source))
        ]
        assert made[0] == made[1]

    return check


def test_connections_that_are_cut_again_and_again(
    checkpoint: Path, tmp_path: Path, equal: Check
) -> None:
    with (
        nginx(tmp_path / "nginx", checkpoint) as server,
        relay(server.port, cuts=3_000_001) as between,
        open_folder(f"http://{between.host}/") as folder,
    ):
        equal(folder)


def test_a_server_that_is_slow(checkpoint: Path, tmp_path: Path, equal: Check) -> None:
    limits = Limits(rate=2_000_000)
    with (
        nginx(tmp_path / "nginx", checkpoint, limits=limits) as server,
        open_folder(server.url) as folder,
    ):
        equal(folder)


def test_a_server_that_limits_requests(checkpoint: Path, tmp_path: Path, equal: Check) -> None:
    limits = Limits(requests=5)
    with (
        nginx(tmp_path / "nginx", checkpoint, limits=limits) as server,
        open_folder(server.url) as folder,
    ):
        equal(folder)
        statuses = Counter(request.status for request in server.requests())
    assert 0 < statuses[429] <= 3 * (statuses[200] + statuses[206] + statuses[404]), statuses


def test_the_hub_limits_requests(checkpoint: Path, tmp_path: Path, equal: Check) -> None:
    rules = Rules(quota=4)
    with (
        hub_stand_in(tmp_path / "hub", checkpoint, rules=rules) as hub,
        open_folder(HUB, endpoint=hub.url) as folder,
    ):
        equal(folder)
        assert 429 in hub.answers.refused


def test_signed_addresses_expire_on_the_way(checkpoint: Path, tmp_path: Path, equal: Check) -> None:
    """They are good for two seconds; the files need longer at this rate.

    One that expires before a header was read by it ends the import. A machine that stops for so
    long gets one that lasts longer, and fewer bytes a second.
    """
    for life_s in (2, 60):
        limits = Limits(rate=2_000_000 // life_s)
        with (
            hub_stand_in(tmp_path / f"{life_s}", checkpoint, limits=limits) as hub,
            open_folder(HUB, endpoint=hub.url) as folder,
        ):
            hub.answers.signer = partial(signed, hub, life_s)
            try:
                equal(folder, connections=1)  # one request after the other
            except RemoteError as error:
                if error.status != 403:
                    raise
                continue
            statuses = Counter(one.status for one in hub.store.requests())
        assert statuses[403] > 0
        return
    pytest.fail("addresses that last for a minute expire before they are used")


def signed(hub: RunningHub, life_s: int, file: RepositoryFile) -> str:
    return hub.store.signed(f"objects/{file.sha256}", life_s)


def test_signed_addresses_are_renewed(checkpoint: Path, equal: Check) -> None:
    """All that were given out are refused, again and again, each after its first use."""
    with far_rig("hub", checkpoint) as rig, rig.open() as folder:
        rig.play(Alarm(5_000_000, rig.expire, repeats=True).around)
        equal(folder)
        assert rig.refused > 0


def test_signed_addresses_are_asked_for_once_a_file(
    checkpoint: Path, tmp_path: Path, equal: Check
) -> None:
    with (
        hub_stand_in(tmp_path / "hub", checkpoint) as hub,
        open_folder(HUB, endpoint=hub.url) as folder,
    ):
        equal(folder)
        asked = Counter(one.target for one in hub.script.asked)
    weights = [count for target, count in asked.items() if target.endswith(".safetensors")]
    assert len(weights) == 2
    assert max(weights) <= 2, asked  # with the one that reads the header


@pytest.mark.parametrize("gated", [False, True])
def test_a_token_goes_to_its_origin_only(
    checkpoint: Path, tmp_path: Path, equal: Check, gated: bool
) -> None:
    with (
        far_rig("hub", checkpoint, Rules(token=TOKEN, gated=gated)) as rig,
        rig.open(TOKEN) as folder,
    ):
        equal(folder)
        api, objects = rig.asked
        assert all(one.fields.get("authorization") == f"Bearer {TOKEN}" for one in api)
        assert objects
        assert not any("authorization" in one.fields for one in objects)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("token", [None, "hf_other"])
def test_a_repository_that_is_private(
    checkpoint: Path, tmp_path: Path, gated: bool, token: str | None
) -> None:
    rules, store = Rules(token=TOKEN, gated=gated), open_store(tmp_path / "store")
    with (
        far_rig("hub", checkpoint, rules) as rig,
        rig.open(token) as folder,
        pytest.raises(BlobStoreError) as raised,
    ):
        import_model(folder, "m", store=store)
    assert isinstance(raised.value, RemoteError)
    assert REPOSITORY in str(raised.value)
    assert not store.root.exists()
