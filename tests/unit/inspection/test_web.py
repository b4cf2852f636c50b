"""Remote targets from a loopback server: as local files, few requests, scoped tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import LLAMA_CONFIG, safetensors_bytes, small_tensors, write_checkpoint
from support.layouts import files_of
from support.servers import Answer, Server, files, redirect, reply, server as run_server
from support.sparse import write_sparse_folder

import blobstore
from blobstore.cli.main import run
from blobstore.errors import BlobStoreError, HeaderError, NotFoundError, RemoteError
from blobstore.inspection.inspect import inspect
from blobstore.inspection.inspection import Inspection, TargetKind

INDEX = "model.safetensors.index.json"


def served(folder: Path, base: str = "") -> dict[str, bytes]:
    return {base + name: data for name, data in files_of(folder).items()}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tensors = {f"layers.{number}.weight": ("BF16", (8, number + 1)) for number in range(10)}
    return write_sparse_folder(tmp_path / "sharded", tensors, LLAMA_CONFIG, shards=3)


def here(found: Inspection, folder: Path) -> Inspection:
    places = [replace(file, place=str(folder / Path(file.place).name)) for file in found.files]
    return replace(found, name=str(folder), files=tuple(places))


def test_a_folder_an_index_and_a_file(server: Server, sharded: Path) -> None:
    base, shard = "a/b%20c/", "model-00002-of-00003.safetensors"
    script = server.play(files(served(sharded, base)))
    found = inspect(server.at(base))
    assert len(script.asked) == 4  # the index and three shards; config.json has nothing to say
    assert here(found, sharded) == replace(inspect(sharded), name=str(sharded))
    index = inspect(server.at(f"{base}{INDEX}?download=true"))
    assert replace(index, kind=TargetKind.FOLDER, name=found.name) == found
    script = server.play(files(served(sharded, base)))
    assert inspect(server.at(base + shard)).headers == inspect(sharded / shard).headers
    assert len(script.asked) == 1
    assert blobstore.read_header(server.at(base + shard)) == blobstore.read_header(sharded / shard)


def test_a_file_of_any_address(server: Server, tmp_path: Path) -> None:
    """Signed addresses have a query and end in anything; one with nothing below may be a file."""
    data = safetensors_bytes(small_tensors())
    script = server.play(files({"download?id=7&sig=secret%2Fx": data, "blobs/sha256-00": data}))
    found = inspect(server.at("download?id=7&sig=secret%2Fx"))
    assert (found.kind, found.parameters) == (TargetKind.FILE, 32_832)
    assert "secret" not in repr(found)
    assert inspect(server.at("blobs/sha256-00")).parameters == 32_832
    assert len(script.asked) == 4


WRONG: list[tuple[Answer, type[BlobStoreError]]] = [
    (lambda _: reply(200, body=b"<html>" * 100), BlobStoreError),
    (lambda _: reply(403), RemoteError),
    (files({"model.safetensors": b"\xff" * 100}), HeaderError),
    (files({INDEX: b'{"weight_map": {"a": "../x.safetensors"}}'}), BlobStoreError),
    (files({INDEX: b'{"weight_map": {"a": "x.safetensors"}}'}), NotFoundError),
    (files({}), NotFoundError),
]


def test_wrong_answers(server: Server) -> None:
    for answer, kind in WRONG:
        script = server.play(answer)
        with pytest.raises(kind):
            inspect(server.at(""))
        assert all(".." not in asked.target for asked in script.asked)


def hub(folder: Path, repository: str = "org/name", revision: str = "main") -> Answer:
    return files(served(folder, f"{repository}/resolve/{revision}/"))


def test_a_repository_of_the_hub(server: Server, sharded: Path, tmp_path: Path) -> None:
    endpoint = server.at("").rstrip("/")
    server.play(hub(sharded))
    expected = inspect(sharded)
    for target in ("hf://org/name", f"{endpoint}/org/name/tree/main", f"hf://org/name/{INDEX}"):
        assert inspect(target, endpoint=endpoint).tensors == expected.tensors
    server.play(hub(write_checkpoint(tmp_path / "r" / "unet").parent, revision="refs%2Fpr%2F3"))
    assert inspect("hf://org/name@refs/pr/3/unet", endpoint=endpoint).parameters == 32_832
    with pytest.raises(NotFoundError):
        inspect("hf://org/name@refs/pr/3", endpoint=endpoint)


def test_a_token_goes_to_the_hub_and_nowhere_else(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_checkpoint(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret\n")
    with run_server() as other:
        monkeypatch.setenv("HF_ENDPOINT", server.at("").rstrip("/"))
        script, elsewhere = server.play(hub(folder)), other.play(files(served(folder)))
        for target in ("hf://org/name", server.at("org/name/resolve/main/model.safetensors")):
            assert run(["inspect", target]) == 0
        assert {one.fields.get("authorization") for one in script.asked} == {"Bearer hf_secret"}
        assert run(["inspect", other.at("")]) == 0
        server.play(lambda asked: redirect(other.at(asked.target.rpartition("/")[2])))
        assert run(["inspect", "hf://org/name"]) == 0
        assert {one.fields.get("authorization") for one in elsewhere.asked} == {None}
    assert "hf_secret" not in "".join(capsys.readouterr())
