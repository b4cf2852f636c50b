"""What servers declare of weights, and fetchers of web folders and of the Hub's repositories."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint
from support.hub import COMMIT, hub
from support.servers import Answer, Asked, Server, files, part, redirect, server as run_server

import blobstore
from blobstore.errors import CorruptDataError, UsageError
from blobstore.importer.planfile import read_plan, write_plan
from blobstore.names import Digest
from blobstore.source.folders import Folder
from blobstore.source.inventory import read_inventory
from blobstore.source.weights import FetchOptions, fetching
from blobstore.store.local.store import Store

NAME = "model.safetensors"
ETAG = 'ETag: "v1"'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server; every test gives it a script of its own."""
    with run_server() as running:
        yield running


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "name")
    assert (folder / NAME).stat().st_size >= 10_000  # for the Hub's stand-in: a large file
    return folder


def on_the_hub(server: Server) -> Folder:
    return blobstore.open_folder("hf://org/name", endpoint=server.at("").rstrip("/"))


def linking(folder: Path, server: Server) -> Answer:
    """Answer as the Hub, which redirects large files to signed addresses of another server."""
    api = hub(folder)

    def answer(asked: Asked) -> list[bytes]:
        if asked.target == "/signed?key=secret":
            return part(asked, (folder / NAME).read_bytes(), 'ETag: "content"')
        if asked.target.endswith(f"/{NAME}"):
            return redirect(f"{server.at('signed')}?key=secret")
        return list(api(asked))

    return answer


def fetched(folder: Folder) -> bytes:
    file = read_inventory(folder).files[0]
    buffer = bytearray(file.size)
    with fetching([file], FetchOptions(connections=2)) as fetcher:
        fetcher.fill(file, 0, memoryview(buffer))
    return bytes(buffer)


def test_the_hub_declares_the_digests_of_weights(
    server: Server, checkpoint: Path, tmp_path: Path
) -> None:
    server.play(hub(checkpoint))
    digest = Digest.of((checkpoint / NAME).read_bytes())
    with on_the_hub(server) as folder:
        assert [file.declared for file in read_inventory(folder).files] == [digest]
        plan = blobstore.plan_import(folder)
    write_plan(plan, tmp_path / "plan.json")
    with on_the_hub(server) as again:
        read = read_plan(tmp_path / "plan.json", source=again)
        assert [file.declared for file in read.inventory.files] == [digest]
    assert [file.declared for file in read_inventory(checkpoint).files] == [None]


def test_the_commit_is_recorded(server: Server, checkpoint: Path, tmp_path: Path) -> None:
    server.play(hub(checkpoint))
    store = Store(tmp_path / "store")
    with on_the_hub(server) as folder:
        blobstore.import_model(folder, "m", store=store)
    with blobstore.open_model("m", store=store) as model:
        document = json.loads(model.document("blobstore.json"))
    assert document["revision"] == COMMIT
    digest = Digest.of((checkpoint / NAME).read_bytes())
    assert [file["version"] for file in document["sources"]] == [digest.hex]


def test_a_repository_is_fetched_through_signed_addresses(server: Server, checkpoint: Path) -> None:
    data = (checkpoint / NAME).read_bytes()
    script = server.play(linking(checkpoint, server))
    with on_the_hub(server) as folder:
        assert fetched(folder) == data
    targets = [asked.target for asked in script.asked]
    # The header needs the signed address, and the weights use it.
    assert len([target for target in targets if target.endswith(f"/{NAME}")]) == 1
    assert targets.count("/signed?key=secret") == 2


def test_documents_are_asked_for_at_once(server: Server, checkpoint: Path) -> None:
    """Each waits until all are asked for, once."""
    documents = {"config.json", "generation_config.json", "tokenizer.json"}
    for name in documents:
        (checkpoint / name).write_text("{}" + " " * 2**17)
    api = hub(checkpoint)
    missing, all_asked = set(documents), threading.Event()

    def answer(asked: Asked) -> list[bytes]:
        missing.discard(asked.target.rpartition("/")[2])
        if not missing:
            all_asked.set()
        if asked.target.rpartition("/")[2] in documents:
            all_asked.wait()
        return list(api(asked))

    script = server.play(answer)
    assert read_inventory(on_the_hub(server)).documents.keys() >= documents
    asked = [one.target.rpartition("/")[2] for one in script.asked]
    assert sorted(documents & {*asked}) == sorted(one for one in asked if one in documents)


def test_a_plan_with_a_signed_address_is_private(
    server: Server, checkpoint: Path, tmp_path: Path
) -> None:
    server.play(files({f"name/{NAME}?key=secret": (checkpoint / NAME).read_bytes()}, ETAG))
    place = tmp_path / "plan.json"
    for address, mode in ((server.at(f"name/{NAME}?key=secret"), 0o600), (checkpoint, 0o644)):
        write_plan(blobstore.plan_import(address), place)
        assert stat.S_IMODE(place.stat().st_mode) == mode


def test_another_version_is_not_fetched(server: Server, checkpoint: Path) -> None:
    data = (checkpoint / NAME).read_bytes()
    server.play(files({f"name/{NAME}": data}, ETAG))
    with blobstore.open_folder(server.at(f"name/{NAME}")) as folder:
        file = read_inventory(folder).files[0]
        script = server.play(files({f"name/{NAME}": data}, 'ETag: "v2"'))
        with (
            pytest.raises(CorruptDataError, match="changed"),
            fetching([file], FetchOptions()) as one,
        ):
            one.fill(file, 0, memoryview(bytearray(10)))
    assert script.asked[0].fields["if-range"] == '"v1"'


def test_fetching_at_0_is_refused() -> None:
    with pytest.raises(UsageError, match="connections is at least 1, not 0"):
        FetchOptions(connections=0)
