"""A checkpoint that lies behind a server or on the Hub is imported as one that lies here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.checkpoints import LLAMA_CONFIG, safetensors_bytes, small_tensors, write_checkpoint
from support.hub import COMMIT, hub
from support.servers import Answer, Asked, Server, files, part, reply, server as run_server
from support.sparse import write_sparse_folder

import blobstore
from blobstore.cli.main import run
from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    DigestMismatchError,
    LimitExceededError,
    NotFoundError,
    RemoteError,
    UnsupportedSourceError,
    UsageError,
)
from blobstore.importer.repair import repair_model
from blobstore.inspection.inspection import TargetKind
from blobstore.io.budget import Budget
from blobstore.source.web import HubFolder, HubTarget, parse_hub
from blobstore.store.local.store import Store

ETAG = 'ETag: "v1"'
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server; every test gives it a script of its own."""
    with run_server() as running:
        yield running


@pytest.fixture
def endpoint(server: Server) -> str:
    return server.at("").rstrip("/")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with files beside it: a large one, one in a folder, one that is left out."""
    folder = write_checkpoint(tmp_path / "name", config=LLAMA_CONFIG)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}}))
    (folder / "tokenizer.model").write_bytes(bytes(range(256)) * 300)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "optimizer.pt").write_bytes(b"\0" * 100)
    return folder


def served(folder: Path, *lines: str) -> Answer:
    """Answer as a web server does that lists nothing."""
    table = {
        f"name/{path.relative_to(folder)}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    return files(table, *(lines or (ETAG,)))


def layers(store: Store, name: str) -> dict[str | None, str]:
    return {
        layer.name: str(layer.digest)
        for layer in store.manifests.read(store.find(name)).layers
        if layer.name != "blobstore.json"
    }


def open_hub(endpoint: str, address: str = "hf://org/name") -> HubFolder:
    folder = blobstore.open_folder(address, endpoint=endpoint)
    assert isinstance(folder, HubFolder)
    return folder


@pytest.mark.parametrize("quant", [None, "int4"])
@pytest.mark.parametrize("page", [1000, 2])
def test_a_repository_is_imported_as_its_folder(
    server: Server, endpoint: str, checkpoint: Path, store: Store, quant: str | None, page: int
) -> None:
    server.play(hub(checkpoint, page=page))
    here = blobstore.import_model(checkpoint, "here", store=store, quant=quant)
    there = blobstore.import_model(open_hub(endpoint), "there", store=store, quant=quant)
    assert layers(store, "there") == layers(store, "here")
    assert there.coverage == here.coverage
    assert {"tokenizer.model", "1_Pooling/config.json"} <= layers(store, "there").keys()


def test_a_web_folder_gives_what_checkpoints_usually_have(
    server: Server, checkpoint: Path, store: Store
) -> None:
    server.play(served(checkpoint))
    blobstore.import_model(checkpoint, "here", store=store, quant="int8")
    result = blobstore.import_model(server.at("name/"), store=store, quant="int8")
    assert str(result.name) == "name:int8"
    unknown = {"1_Pooling/config.json"}
    here = layers(store, "here")
    assert layers(store, "name:int8") == {name: here[name] for name in here.keys() - unknown}


def test_shards_and_files_by_their_addresses(
    server: Server, endpoint: str, tmp_path: Path, store: Store
) -> None:
    tensors = {f"layers.{number}.weight": ("BF16", (8, number + 1)) for number in range(10)}
    folder = write_sparse_folder(tmp_path / "name", tensors, LLAMA_CONFIG, shards=3)
    blobstore.import_model(folder, "here", store=store)
    server.play(hub(folder))
    for address in ("hf://org/name", f"hf://org/name/{INDEX}", f"{endpoint}/org/name/tree/main"):
        blobstore.import_model(open_hub(endpoint, address), "there", store=store)
        assert layers(store, "there") == layers(store, "here")
    shard = "model-00001-of-00003.safetensors"
    one = blobstore.import_model(open_hub(endpoint, f"hf://org/name/{shard}"), store=store)
    assert str(one.name) == "model-00001-of-00003:latest"
    server.play(served(folder))
    for target in (f"name/{INDEX}", "name"):
        blobstore.import_model(server.at(target), "web", store=store)
        assert layers(store, "web") == layers(store, "here")


def test_an_address_without_a_suffix_may_be_a_file(
    server: Server, store: Store, tmp_path: Path
) -> None:
    data = safetensors_bytes(small_tensors())
    (tmp_path / "x.safetensors").write_bytes(data)
    server.play(files({"blobs/7": data, "x?sig=1%2F2": data}, ETAG))
    blobstore.import_model(tmp_path / "x.safetensors", "here", store=store)
    for target in ("blobs/7", "x?sig=1%2F2"):
        blobstore.import_model(server.at(target), "there", store=store)
        assert layers(store, "there") == layers(store, "here")


def test_a_plan_names_the_commit(
    server: Server, endpoint: str, checkpoint: Path, store: Store, tmp_path: Path
) -> None:
    script = server.play(hub(checkpoint, revision="v1"))
    plan = blobstore.plan_import(open_hub(endpoint, "hf://org/name@v1"), quant="int4")
    blobstore.write_plan(plan, tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["source"]["address"] == f"hf://org/name@{COMMIT}"
    server.play(hub(checkpoint, revision=COMMIT))
    read = blobstore.read_plan(
        tmp_path / "plan.json", open_source=lambda address: open_hub(endpoint, address)
    )
    blobstore.run_plan(read, "there", store)
    blobstore.import_model(checkpoint, "here", store=store, quant="int4")
    assert layers(store, "there") == layers(store, "here")
    fetched = [asked.target for asked in script.asked if "/resolve/" in asked.target]
    assert all(target.startswith(f"/org/name/resolve/{COMMIT}/") for target in fetched)


def test_a_plan_of_other_content_is_refused(
    server: Server, endpoint: str, checkpoint: Path, tmp_path: Path
) -> None:
    server.play(hub(checkpoint))
    blobstore.write_plan(blobstore.plan_import(open_hub(endpoint)), tmp_path / "plan.json")
    changed = safetensors_bytes({name: array * 2 for name, array in small_tensors().items()})
    (checkpoint / "model.safetensors").write_bytes(changed)
    server.play(hub(checkpoint, revision=COMMIT))
    with pytest.raises(CorruptDataError, match="since the plan was made"):
        blobstore.read_plan(
            tmp_path / "plan.json", open_source=lambda address: open_hub(endpoint, address)
        )


def test_quality_and_repair_read_it_too(
    server: Server, endpoint: str, checkpoint: Path, store: Store
) -> None:
    server.play(hub(checkpoint))
    blobstore.import_model(checkpoint, "m", store=store, quant="int4")
    before = layers(store, "m")
    here = blobstore.measure_quality("m", checkpoint, store=store)
    assert blobstore.measure_quality("m", open_hub(endpoint), store=store) == here
    for digest in before.values():
        (store.root / "blobs" / digest.replace(":", "-")).unlink()
    result = repair_model("m", open_hub(endpoint), store=store)
    assert (len(result.repaired), result.remaining) == (len(set(before.values())), ())


def test_the_commands_take_addresses(
    server: Server,
    endpoint: str,
    checkpoint: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    script = server.play(hub(checkpoint))
    at = ["--store", str(store.root)]
    assert run(["import", "hf://org/name", "--quant", "int4", *at]) == 0
    assert run(["plan", "hf://org/name", "--quant", "int4"]) == 0
    assert run(["quality", "name:int4", "--against", "hf://org/name", *at]) == 0
    assert run(["repair", "name:int4", "--from", "hf://org/name", *at]) == 0
    assert {asked.fields.get("authorization") for asked in script.asked} == {"Bearer hf_secret"}
    assert "hf_secret" not in "".join(capsys.readouterr())


# What servers may not do


def contents(store: Store) -> list[str]:
    return sorted(str(path) for path in store.root.rglob("*") if ".blobstore" not in path.parts)


@pytest.mark.parametrize("quant", [None, "int4"])
def test_a_file_that_changes_on_its_server(
    server: Server, checkpoint: Path, store: Store, quant: str | None
) -> None:
    tensors = {"big.weight": small_tensors()["lm_head.weight"].repeat(64, 0).repeat(64, 1)}
    (checkpoint / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    one, other = served(checkpoint), served(checkpoint, 'ETag: "v2"')
    asked_for: list[str] = []

    def answer(asked: Asked) -> Iterator[bytes]:
        asked_for.append(asked.target)
        again = asked_for.count("/name/model.safetensors") > 2
        yield from (other if again else one)(asked)

    server.play(answer)
    before = contents(store)
    with pytest.raises(CorruptDataError, match="changed while it was read"):
        blobstore.import_model(server.at("name/"), store=store, quant=quant)
    assert contents(store) == before


@pytest.mark.parametrize("lines", [("X-Other: 1",)], ids=["no validator"])
def test_a_change_that_could_not_be_seen(
    server: Server, checkpoint: Path, store: Store, lines: tuple[str, ...]
) -> None:
    server.play(served(checkpoint, *lines))
    with pytest.raises(UnsupportedSourceError, match="ETag or Last-Modified"):
        blobstore.import_model(server.at("name/"), store=store)
    assert blobstore.inspect(server.at("name/")).kind is TargetKind.FOLDER


def test_a_server_that_sends_whole_files_only(server: Server, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(safetensors_bytes(small_tensors()) + b"")
    table = {
        f"name/{path.name}": path.read_bytes() for path in checkpoint.iterdir() if path.is_file()
    }
    large = table["name/tokenizer.model"]
    assert len(large) > 2**16

    def answer(asked: Asked) -> list[bytes]:
        data = table.get(asked.target.removeprefix("/"))
        return reply(404) if data is None else reply(200, ETAG, body=data)

    server.play(answer)
    with pytest.raises(UnsupportedSourceError, match="parts of it"):
        blobstore.plan_import(server.at("name/"))


def lying(answer: Answer, change: Callable[[list[dict[str, object]]], object]) -> Answer:
    """Answer as ``answer``, with another listing."""

    def changed(asked: Asked) -> Iterator[bytes]:
        chunks = list(answer(asked))
        if "/tree/" not in asked.target:
            yield from chunks
            return
        body = json.loads(chunks[0].partition(b"\r\n\r\n")[2])
        yield from reply(200, body=json.dumps(change(body) or body).encode())

    return changed


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda rows: rows[0].update(path="../x"), RemoteError),
        (lambda rows: rows[0].update(path="/etc/passwd"), RemoteError),
        (lambda rows: rows[0].update(size=-1), RemoteError),
        (lambda rows: rows[0].update(size=True), RemoteError),
        (lambda rows: rows[0].pop("oid"), RemoteError),
        (lambda rows: rows[0].update(lfs={"oid": "xyz"}), RemoteError),
        (lambda _: {"error": "no"}, RemoteError),
        (lambda _: [1], RemoteError),
        (lambda rows: [row.update(size=row["size"] + 1) for row in rows] and rows, RemoteError),
        (lambda rows: [row for row in rows if row["path"] == "config.json"], NotFoundError),
    ],
)
def test_listings_that_are_wrong(
    server: Server,
    endpoint: str,
    checkpoint: Path,
    store: Store,
    change: Callable[[list[dict[str, object]]], object],
    kind: type[BlobStoreError],
) -> None:
    server.play(lying(hub(checkpoint), change))
    before = contents(store)
    with pytest.raises(kind):
        blobstore.import_model(open_hub(endpoint), "m", store=store)
    assert contents(store) == before


@pytest.mark.parametrize("is_large", [True, False])
def test_a_file_that_is_not_the_declared_one(
    server: Server, endpoint: str, checkpoint: Path, store: Store, *, is_large: bool
) -> None:
    """A large file has a SHA-256, and others the name that git has for their bytes."""

    def other(rows: list[dict[str, object]]) -> None:
        for row in rows:
            if row["path"] == "tokenizer.model" and is_large:
                row["lfs"] = {"oid": "0" * 64, "size": row["size"], "pointerSize": 1}
            elif row["path"] == "tokenizer.model":
                row["oid"] = "0" * 40
                row.pop("lfs", None)

    server.play(lying(hub(checkpoint), other))
    with pytest.raises(DigestMismatchError, match=r"tokenizer\.model: its bytes are not those of"):
        blobstore.import_model(open_hub(endpoint), "m", store=store)
    assert list(store.manifests.names()) == []


def test_listings_without_an_end(server: Server, endpoint: str) -> None:
    def answer(asked: Asked) -> list[bytes]:
        if "/revision/" in asked.target:
            return reply(200, body=json.dumps({"sha": COMMIT}).encode())
        link = 'Link: <http://169.254.169.254/?recursive=true&cursor=1>; rel="next"'
        return reply(200, link, body=b"[]")

    script = server.play(answer)
    with pytest.raises(LimitExceededError, match="more than 100 pages"):
        blobstore.plan_import(open_hub(endpoint))
    assert len(script.asked) == 101  # and none of them elsewhere: a server does not say where


@pytest.mark.parametrize("sha", [None, 1, "", "main", "../x", "Z" * 40])
def test_an_answer_that_names_no_commit(server: Server, endpoint: str, sha: object) -> None:
    server.play(lambda _: reply(200, body=json.dumps({"sha": sha}).encode()))
    with pytest.raises(RemoteError, match="names no commit"):
        blobstore.plan_import(open_hub(endpoint))


def test_a_mirror_without_the_api_is_a_web_folder(
    server: Server, endpoint: str, checkpoint: Path, store: Store
) -> None:
    table = {
        f"org/name/resolve/main/{path.name}": path.read_bytes()
        for path in checkpoint.iterdir()
        if path.is_file()
    }
    server.play(files(table, ETAG))
    blobstore.import_model(open_hub(endpoint), "m", store=store)
    assert "tokenizer.model" in layers(store, "m")
    server.play(files({}))
    with pytest.raises(NotFoundError, match="no weights in hf://org/name") as caught:
        blobstore.plan_import(open_hub(endpoint))
    assert caught.value.hint == "Check the address; a private repository needs a token."


def test_a_modelfile_and_a_draft_name_addresses(
    server: Server,
    endpoint: str,
    checkpoint: Path,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_checkpoint(checkpoint / "draft", config=LLAMA_CONFIG)
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    server.play(hub(checkpoint))
    (tmp_path / "Modelfile").write_text("FROM hf://org/name\nDRAFT hf://org/name/draft\n")
    at = ["-f", str(tmp_path / "Modelfile"), "--store", str(store.root)]
    assert run(["import", "there", *at]) == 0
    blobstore.import_model(checkpoint, "here", store=store, draft=checkpoint / "draft")
    assert layers(store, "there") == layers(store, "here")
    assert "draft/config.json" in layers(store, "here")


def test_files_that_a_server_does_not_list_are_not_counted(
    server: Server, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.play(served(checkpoint))
    assert run(["plan", server.at("name/")]) == 0
    shown = capsys.readouterr().out
    assert "4 of 4 files stored" in shown
    assert "files of other names: their server does not list them" in shown


@pytest.mark.parametrize("answer", [b"<html>login</html>", b"{", b""])
def test_a_document_that_is_not_the_listed_one(
    server: Server, endpoint: str, checkpoint: Path, store: Store, answer: bytes
) -> None:
    right = hub(checkpoint)
    server.play(
        lambda asked: (
            reply(200, body=answer) if asked.target.endswith("tokenizer.json") else right(asked)
        )
    )
    with pytest.raises(BlobStoreError, match=r"tokenizer\.json"):
        blobstore.import_model(open_hub(endpoint), "m", store=store)
    document = (checkpoint / "tokenizer.json").read_bytes()
    other = document.replace(b"vocab", b"Vocab")
    server.play(
        lambda asked: (
            part(asked, other) if asked.target.endswith("tokenizer.json") else right(asked)
        )
    )
    with pytest.raises(DigestMismatchError, match=r"tokenizer\.json: its bytes are not"):
        blobstore.import_model(open_hub(endpoint), "m", store=store)
    assert list(store.manifests.names()) == []


def test_a_folder_is_read_again_within_new_limits(
    server: Server, endpoint: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = Budget.__init__.__kwdefaults__ or {}
    monkeypatch.setitem(defaults, "received", 200_000)
    server.play(hub(checkpoint))
    folder = open_hub(endpoint)
    plans = [blobstore.plan_import(folder) for _ in range(20)]
    assert len({len(plan.blobs) for plan in plans}) == 1


@pytest.mark.parametrize("link", ["http://[", "x", "http://x/?a\x7f"])
def test_a_next_page_that_is_nowhere(server: Server, endpoint: str, link: str) -> None:
    def answer(asked: Asked) -> list[bytes]:
        if "/revision/" in asked.target:
            return reply(200, body=json.dumps({"sha": COMMIT}).encode())
        return reply(200, f'Link: <{link}>; rel="next"', body=b"[]")

    server.play(answer)
    with pytest.raises(RemoteError, match="the address of its next page is invalid"):
        blobstore.plan_import(open_hub(endpoint))


@pytest.mark.parametrize("address", ["http://[::1", "http://u:p@[::1/x", "HTTP://[x/m"])
def test_web_addresses_that_are_wrong(address: str) -> None:
    with pytest.raises(UsageError):
        blobstore.open_folder(address)


def test_an_endpoint_may_be_spelt_in_other_ways(
    server: Server, endpoint: str, checkpoint: Path, store: Store
) -> None:
    server.play(hub(checkpoint))
    for spelt in (endpoint.replace("http", "HTTP"), f"{endpoint}/"):
        blobstore.import_model(open_hub(spelt), "m", store=store)
    blobstore.import_model(open_hub(endpoint, "HF://org/name"), "m", store=store)


def test_odd_names_and_deep_folders_are_left_out(
    server: Server, endpoint: str, checkpoint: Path, store: Store
) -> None:
    def odd(rows: list[dict[str, object]]) -> None:
        row = {"type": "file", "size": 1, "oid": "0" * 40}
        deep = "/".join(["a"] * 2000)
        rows += [
            row | {"path": path}
            for path in ("a:b.txt", ".git/x", *[f"{deep}{n}/x" for n in range(300)])
        ]

    server.play(lying(hub(checkpoint), odd))
    result = blobstore.import_model(open_hub(endpoint), "m", store=store)
    left_out = {one.name: one.reason for one in result.coverage.left_out}
    assert "name can't be stored" in left_out["a:b.txt"]
    assert any("folders deep" in reason for reason in left_out.values())


def test_a_revision_with_a_slash_comes_back() -> None:
    for revision in ("a/b", "refs/pr/1", "v1", "main"):
        target = HubTarget("org/name", revision, "x")
        assert parse_hub(str(target)) == target


def test_what_may_not_be_read_is_not_called_missing(server: Server, checkpoint: Path) -> None:
    there = served(checkpoint)
    server.play(lambda asked: reply(403) if asked.target.endswith(".jinja") else there(asked))
    with pytest.raises(RemoteError, match="403"):
        blobstore.plan_import(server.at("name/"))


def test_a_repair_opens_the_draft_as_the_import_did(
    server: Server,
    endpoint: str,
    checkpoint: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_checkpoint(checkpoint / "draft", config=LLAMA_CONFIG)
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    server.play(hub(checkpoint))
    draft = ["--draft", "hf://org/name/draft", "--store", str(store.root)]
    assert run(["import", "hf://org/name", "m", *draft]) == 0
    digest = layers(store, "m")["draft.lm_head.weight"]
    (store.root / "blobs" / digest.replace(":", "-")).unlink()
    assert run(["repair", "m", "--from", "hf://org/name", *draft]) == 0
    assert run(["verify", "m", "--store", str(store.root)]) == 0
