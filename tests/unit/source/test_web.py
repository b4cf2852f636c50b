"""A checkpoint that lies behind a server or on the Hub is imported as one that lies here."""

import json
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from support.checkpoints import LLAMA_CONFIG, safetensors_bytes, small_tensors, write_checkpoint
from support.corpus import accepted, refusal, rejected
from support.hub_stand_in import COMMIT, hub
from support.layouts import files_of, write
from support.servers import Answer, Asked, Server, files, reply

import blobstore
from blobstore import errors
from blobstore.inspection.inspection import TargetKind
from blobstore.io.http.remote_files import Remote
from blobstore.names import Digest
from blobstore.source.folders import HUB
from blobstore.source.web import HubFolder, HubTarget, WebFolder
from blobstore.store.local.store import Store

ETAG = 'ETag: "v1"'
WEIGHTS = "model.safetensors"


@pytest.fixture
def endpoint(server: Server) -> str:
    return server.at("").rstrip("/")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with files beside it: a large one, one in a folder, one that is left out."""
    folder = write_checkpoint(tmp_path / "name", config=LLAMA_CONFIG)
    vocabulary = json.dumps({"model": {"vocab": {}}})
    own = {"tokenizer.json": vocabulary.encode(), "tokenizer.model": bytes(range(256)) * 300}
    return write(folder, {**own, "1_Pooling/config.json": "{}", "optimizer.pt": bytes(100)})


def served(folder: Path, line: str = ETAG, place: str = "name") -> Answer:
    return files({f"{place}/{name}": data for name, data in files_of(folder).items()}, line)


def instead(answer: Answer, ending: str, other: list[bytes]) -> Answer:
    """Answer as ``answer``, but with ``other`` to targets with this ending."""
    return lambda asked: other if asked.target.endswith(ending) else answer(asked)


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


# Names


def test_names_of_files_stay_below_their_folder() -> None:
    with Remote() as remote:
        folder = WebFolder(remote, "https://h/a")
        for case in accepted("path"):
            url = folder.url(case.data.decode())
            assert url.startswith("https://h/a/"), case.id
            assert not set(url) & set("?#")
        for case in rejected("path"):
            name = case.data.decode("utf-8", "surrogatepass")
            assert isinstance(refusal(partial(folder.url, name)), errors.InvalidNameError), case.id
        assert folder.url("x #1%.json") == "https://h/a/x%20%231%25.json"
        assert WebFolder(remote, "https://h/a/").url("c") == folder.url("c")
        assert refusal(lambda: WebFolder(remote, "https://h/a?b")).rule == "R2"


REPOSITORIES = ["a/", "a/b/c", "a/..", ".a", "a--b", "a#b", "ä", "a%2fb", "a/b.git", "a" * 97]
REVISIONS = ["", "/a", "a..b", "-a", "a b", "a?", "a\\b", "a.lock/b", "a@{b", "@"]


def test_what_is_not_a_repository_or_a_revision_is_refused() -> None:
    targets = [HubTarget(name, "main", "") for name in REPOSITORIES]
    targets += [HubTarget("a/b", name, "") for name in REVISIONS]
    with Remote() as remote:
        for target in targets:
            assert refusal(partial(HubFolder, remote, target, HUB)).rule == "R2", target


# Imports


def test_a_repository_is_imported(
    server: Server, endpoint: str, checkpoint: Path, store: Store
) -> None:
    answers = hub(checkpoint)
    answers.page = 2
    server.play(answers)
    here = blobstore.import_model(checkpoint, "here", store=store, quant="int4")
    there = blobstore.import_model(open_hub(endpoint), "there", store=store, quant="int4")
    assert layers(store, "there") == layers(store, "here")
    assert there.coverage == here.coverage
    assert {"tokenizer.model", "1_Pooling/config.json"} <= layers(store, "there").keys()
    with blobstore.open_model("there", store=store) as model:
        document = json.loads(model.document("blobstore.json"))
    assert document["revision"] == COMMIT
    digest = Digest.of((checkpoint / WEIGHTS).read_bytes())
    assert [file["version"] for file in document["sources"]] == [digest.hex]


def test_a_plan_names_the_commit_and_its_content(
    server: Server, endpoint: str, checkpoint: Path, store: Store, tmp_path: Path
) -> None:
    def read() -> blobstore.ImportPlan:
        return blobstore.read_plan(
            tmp_path / "plan.json", open_source=lambda address: open_hub(endpoint, address)
        )

    server.play(hub(checkpoint))
    plan = blobstore.plan_import(open_hub(endpoint, "hf://org/name@v1"))
    blobstore.write_plan(plan, tmp_path / "plan.json")
    address = json.loads((tmp_path / "plan.json").read_text())["source"]["address"]
    assert address == f"hf://org/name@{COMMIT}"
    script = server.play(hub(checkpoint))
    blobstore.run_plan(read(), "there", store)
    blobstore.import_model(checkpoint, "here", store=store)
    assert layers(store, "there") == layers(store, "here")
    fetched = [asked.target for asked in script.asked if "/resolve/" in asked.target]
    assert all(target.startswith(f"/org/name/resolve/{COMMIT}/") for target in fetched)

    changed = {name: array * 2 for name, array in small_tensors().items()}
    (checkpoint / WEIGHTS).write_bytes(safetensors_bytes(changed))
    server.play(hub(checkpoint))
    with pytest.raises(errors.CorruptDataError):
        read()


def test_plans_with_secrets_are_private(server: Server, checkpoint: Path, tmp_path: Path) -> None:
    server.play(files({f"name/{WEIGHTS}?key=secret": (checkpoint / WEIGHTS).read_bytes()}, ETAG))
    place = tmp_path / "plan.json"
    for address, mode in ((server.at(f"name/{WEIGHTS}?key=secret"), 0o600), (checkpoint, 0o644)):
        blobstore.write_plan(blobstore.plan_import(address), place)
        assert stat.S_IMODE(place.stat().st_mode) == mode


# What servers may not do


def test_a_server_without_validators_or_ranges(server: Server, checkpoint: Path) -> None:
    server.play(served(checkpoint, "X-Other: 1"))
    with pytest.raises(errors.UnsupportedSourceError, match="ETag or Last-Modified"):
        blobstore.plan_import(server.at("name/"))
    assert blobstore.inspect(server.at("name/")).kind is TargetKind.FOLDER
    whole = reply(200, ETAG, body=(checkpoint / WEIGHTS).read_bytes())
    server.play(instead(served(checkpoint), WEIGHTS, whole))
    with pytest.raises(errors.UnsupportedSourceError, match="ranges of bytes"):
        blobstore.plan_import(server.at("name/"))


def test_what_may_not_be_read_is_not_called_missing(server: Server, checkpoint: Path) -> None:
    server.play(instead(served(checkpoint), ".jinja", reply(403)))
    with pytest.raises(errors.RemoteError, match="403"):
        blobstore.plan_import(server.at("name/"))


Rows = list[dict[str, object]]


def listing(answer: Answer, change: Callable[[Rows], object]) -> Answer:
    """Answer as ``answer``, with another listing: what ``change`` returns, or made of the rows."""

    def changed(asked: Asked) -> Iterator[bytes]:
        chunks = list(answer(asked))
        if "/tree/" not in asked.target:
            yield from chunks
            return
        body = json.loads(chunks[0].partition(b"\r\n\r\n")[2])
        yield from reply(200, body=json.dumps(change(body) or body).encode())

    return changed


WRONG: list[tuple[Callable[[Rows], object], type[errors.BlobStoreError]]] = [
    (lambda rows: rows[0].update(path="../x"), errors.RemoteError),
    (lambda _: {"error": "no"}, errors.RemoteError),
    (lambda rows: [row | {"size": 5} for row in rows], errors.RemoteError),
    (lambda rows: [row for row in rows if row["path"] == "config.json"], errors.NotFoundError),
]


def test_a_listing_that_is_wrong_is_refused(
    server: Server, endpoint: str, checkpoint: Path, store: Store
) -> None:
    for change, kind in WRONG:
        server.play(listing(hub(checkpoint), change))
        with pytest.raises(kind):
            blobstore.import_model(open_hub(endpoint), "m", store=store)
        assert list(store.manifests.names()) == []


def test_odd_and_deep_names_are_left_out(server: Server, endpoint: str, checkpoint: Path) -> None:
    deep = "/".join(["a"] * 2000)

    def odd(rows: Rows) -> None:
        names = ("a:b.txt", ".git/x", *[f"{deep}{number}/x" for number in range(300)])
        rows += [{"type": "file", "size": 1, "oid": "0" * 40, "path": path} for path in names]

    server.play(listing(hub(checkpoint), odd))
    coverage = blobstore.plan_import(open_hub(endpoint)).coverage
    left_out = {one.name: one.reason for one in coverage.left_out}
    assert "name can't be stored" in left_out["a:b.txt"]
    assert any("folders deep" in reason for reason in left_out.values())


@pytest.mark.parametrize("is_large", [True, False])
def test_a_file_that_is_not_the_declared_one(
    server: Server, endpoint: str, checkpoint: Path, store: Store, *, is_large: bool
) -> None:
    """A large file has a SHA-256, and others the name that git has for their bytes."""

    def other(rows: Rows) -> None:
        for row in rows:
            if row["path"] == "tokenizer.model":
                large = {"oid": "0" * 64, "size": row["size"], "pointerSize": 1}
                row.update({"lfs": large} if is_large else {"oid": "0" * 40})

    server.play(listing(hub(checkpoint), other))
    with pytest.raises(errors.DigestMismatchError, match=r"tokenizer\.model"):
        blobstore.import_model(open_hub(endpoint), "m", store=store)
    changed = (checkpoint / "tokenizer.json").read_bytes().replace(b"vocab", b"Vocab")
    server.play(instead(hub(checkpoint), "tokenizer.json", reply(200, body=changed)))
    with pytest.raises(errors.DigestMismatchError, match=r"tokenizer\.json"):
        blobstore.import_model(open_hub(endpoint), "m", store=store)
    assert list(store.manifests.names()) == []


def pages(link: str) -> Answer:
    """Answer as the Hub, with an empty page and a link to the next one."""

    def answer(asked: Asked) -> list[bytes]:
        if "/revision/" in asked.target:
            return reply(200, body=json.dumps({"sha": COMMIT}).encode())
        return reply(200, f'Link: <{link}>; rel="next"', body=b"[]")

    return answer


def test_a_listing_without_end_next_page_or_commit(server: Server, endpoint: str) -> None:
    script = server.play(pages("http://169.254.169.254/?recursive=true&cursor=1"))
    with pytest.raises(errors.LimitExceededError, match="100 pages"):
        blobstore.plan_import(open_hub(endpoint))
    assert len(script.asked) == 101  # and none of them elsewhere: a server does not say where
    server.play(pages("http://x/?a\x7f"))
    with pytest.raises(errors.RemoteError, match="next page"):
        blobstore.plan_import(open_hub(endpoint))
    for sha in (None, "main", "../x"):
        server.play(reply(200, body=json.dumps({"sha": sha}).encode()))
        with pytest.raises(errors.RemoteError, match="commit"):
            blobstore.plan_import(open_hub(endpoint))


def test_a_mirror_without_api_is_a_folder(server: Server, endpoint: str, checkpoint: Path) -> None:
    server.play(served(checkpoint, place="org/name/resolve/main"))
    plan = blobstore.plan_import(open_hub(endpoint))
    assert "tokenizer.model" in {layer.name for layer in plan.layers}
