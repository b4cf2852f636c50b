"""The API: every answer is a view, every error a document, and hostile names are text."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest
from support import PYCODE
from support.large_models import blob_of
from support.stores import link_by_hand
from support.web_client import Client

import blobstore
from blobstore.cli.main import run
from blobstore.inspection.listing import summarize
from blobstore.store.local.store import Store
from blobstore.views.documents import schema_of
from blobstore.web import api
from blobstore.web.api import ROUTES, OpenedModel, Served, ServedModel
from blobstore.web.application import Hosts, application

HOSTILE = "<img src=x onerror=alert(1)>\u202e.weight"
PLAIN = "model.layers.0.mlp.up_proj.weight"


def test_the_list_has_all_models_and_says_what_is_broken(client: Client) -> None:
    reply = client.get("/api/models")
    broken, small = reply.json
    assert reply.headers["content-type"] == "application/json"
    assert (small["name"], small["parameters"]) == ("small:int4", 320)
    assert broken["name"] == "broken:int4"
    assert "is missing" in broken["error"]


def test_a_model_and_its_tensors(client: Client, store: Store) -> None:
    facts = client.get("/api/model?name=small:int4").json
    columns = client.get("/api/tensors?model=small:int4").json
    name = store.find("small:int4")
    summary, tensors = summarize(store, name, store.manifests.read(name))
    assert facts["id"] == columns["id"] == str(summary.id)
    assert (facts["tensors"], facts["packed"], facts["documents"]) == (3, False, [])
    assert facts["parameters"] == summary.parameters
    assert columns["names"] == [one.name for one in tensors] == [PLAIN, HOSTILE, "a.norm"]
    assert columns["types"] == ["int4/64", "int4/64", "BF16"]
    assert columns["shapes"] == [[2, 64], [2, 64], [64]]
    assert columns["sizes"] == [one.nbytes for one in tensors]


@pytest.mark.parametrize("tensor", [PLAIN, HOSTILE, "a.norm"])
def test_a_tensor_is_found_in_its_blob(client: Client, tensor: str) -> None:
    query = f"model=small:int4&tensor={quote(tensor)}"
    found = client.get(f"/api/distribution?{query}").json
    assert (found["tensor"], sum(found["values"]["counts"])) == (tensor, found["size"])
    assert (found["codes"] is None) == (tensor == "a.norm")
    assert client.get(f"/api/plots/distribution?{query}").json["$schema"]


def test_results_are_null_until_they_are_kept(client: Client) -> None:
    assert client.get("/api/quality?model=small:int4").json["result"] is None
    assert client.get("/api/damage").json["result"] is None
    reply = client.get("/api/plots/errors?model=small:int4")
    assert reply.status == 409
    assert reply.json["hint"].startswith("blobstore quality small:int4 --against")


@pytest.mark.parametrize(
    ("target", "status", "says"),
    [
        ("/api/model?name=missing", 404, "model 'missing:latest' not found"),
        ("/api/model?name=..%2F..%2Fetc%2Fpasswd", 404, "has 4 parts"),
        ("/api/tensors?model=broken:int4", 409, "is missing"),
        ("/api/distribution?model=small:int4&tensor=none", 404, "has no tensor 'none'"),
        ("/api/distribution?model=small:int4", 400, "'tensor' is missing"),
        ("/api/model?name=a&name=b", 400, "'name' is given 2 times, at most 1"),
        ("/api/model?name=", 404, "is empty"),
        ("/api/model?name=<img>", 404, "invalid character"),
        ("/api/model?name=a&x=1", 400, "'x' is unknown"),
        ("/api/model?name=%ff", 400, "not percent-encoded UTF-8"),
        ("/api/models?" + "&" * 70, 400, "too long"),
        ("/api/plots/frontier?" + "model=a&" * 61, 400, "is given 61 times, at most 60"),
        ("/api/../etc/passwd", 404, "not found"),
    ],
)
def test_errors_are_documents(client: Client, target: str, status: int, says: str) -> None:
    reply = client.get(target)
    assert reply.status == status
    assert reply.headers["content-type"] == "application/json"
    assert reply.json.keys() == {"error", "hint"}
    assert says in reply.json["error"]


def test_an_unexpected_error_is_a_document_without_details(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(store.manifests, "names", fails)
    client = Client(application(store, Hosts("127.0.0.1")))
    reply = client.get("/api/models")
    client.close()
    assert reply.status == 500
    assert "secret" not in reply.body.decode()
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_what_a_client_has_is_not_sent_again(client: Client) -> None:
    for target in ("/api/models", "/api/model?name=small:int4", "/api/openapi.json", "/api/usage"):
        first = client.get(target)
        assert first.headers["cache-control"] == "no-cache"
        again = client.get(target, if_none_match=f'"other", W/{first.headers["etag"]}')
        assert (again.status, again.body) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
        assert client.get(target, if_none_match='"other"').status == 200


def test_a_tag_changes_with_the_model(client: Client, store: Store) -> None:
    first = client.get("/api/model?name=small:int4").headers["etag"]
    path = store.manifests.path.joinpath(*store.find("small:int4").path_parts)
    manifest = json.loads(path.read_text())
    manifest["layers"].pop()
    path.write_text(json.dumps(manifest))
    second = client.get("/api/model?name=small:int4", if_none_match=first)
    assert (second.status, second.json["tensors"]) == (200, 1)


def test_a_packed_model_is_shown_and_its_values_are_not_read(store: Store, model: str) -> None:
    from blobstore.store.local.store import pack

    pack(store, model)
    client = Client(application(store, Hosts("127.0.0.1")))
    assert client.get(f"/api/model?name={model}").json["packed"] is True
    reply = client.get(f"/api/distribution?model={model}&tensor=a.norm")
    client.close()
    assert (reply.status, reply.json["hint"]) == (409, f"blobstore unpack {model} restores it.")


def test_the_document_of_the_api_has_each_route_and_its_answer(client: Client) -> None:
    document = client.get("/api/openapi.json").json
    assert document["openapi"] == "3.1.0"
    assert document["paths"].keys() == {"/api/openapi.json", *(one.path for one in ROUTES)}
    for route in ROUTES:
        operation = document["paths"][route.path]["get"]
        named = {one["name"]: one["required"] for one in operation["parameters"]}
        assert named == dict.fromkeys(route.takes, True)
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        definitions = document["components"]["schemas"]
        assert schema == schema_of(route.kind, definitions, "#/components/schemas/")
    names = [operation["get"]["operationId"] for operation in document["paths"].values()]
    assert len(set(names)) == len(names)


def test_a_lower_store_is_only_read(tmp_path: Path, store: Store, model: str) -> None:
    from blobstore.store.layered import LayeredStore

    upper = Store(tmp_path / "upper")
    client = Client(application(LayeredStore(upper, [store]), Hosts("127.0.0.1")))
    (listed,) = client.get("/api/models").json
    assert listed["store"] == store.address
    assert client.get("/api/tensors?model=small:int4").status == 200
    client.close()
    assert not (store.root / ".blobstore/results").exists()
    assert not (upper.root / ".blobstore/results").exists()


def test_the_store_has_one_size(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """The Usage page shows what `du` prints and the disk has; models that share count once."""
    blobstore.import_model(PYCODE, "a", store=store, quant="int4")
    blobstore.import_model(PYCODE, "b", store=store, quant="int8")
    assert run(["du", "--json", "--store", str(store.root)]) == 0
    client = Client(application(store, Hosts("127.0.0.1")))
    usage = client.get("/api/usage").json
    listed = {one["name"]: one["size"] for one in client.get("/api/models").json}
    client.close()
    assert usage == json.loads(capsys.readouterr().out)
    assert usage["bytes"] == sum(path.stat().st_size for path in (store.root / "blobs").iterdir())
    assert listed == {one["name"]: one["bytes"] for one in usage["models"]}
    assert usage["bytes"] < sum(listed.values())


def test_a_store_that_is_gone_is_an_error(store: Store, client: Client) -> None:
    assert client.get("/api/models").status == 200
    shutil.rmtree(store.root)
    for target in ("/api/models", "/api/usage", "/api/plots/shared"):
        reply = client.get(target)
        assert (reply.status, reply.json["error"]) == (500, "the folder of the store is gone")
    assert client.get("/api/model?name=small:int4").status == 404
    assert client.get("/").status == 200


def test_errors_name_files_without_the_folder_of_the_store(
    store: Store, model: str, client: Client
) -> None:
    layer = store.manifest("small:int4").tensor_layers[0]
    path = store.root / "blobs" / layer.digest.file_name
    path.unlink()
    path.symlink_to("/etc/passwd")
    error = client.get("/api/model?name=small:int4").json["error"]
    assert f"blobs/{layer.digest.file_name}" in error
    listed = {one["name"]: one.get("error", "") for one in client.get("/api/models").json}
    assert f"blobs/{layer.digest.file_name}" in listed["small:int4"]
    assert not [text for text in (error, *listed.values()) if str(store.root) in text]


def test_a_model_is_opened_once_while_it_is_one_of_the_last_four(
    store: Store, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [model, *(f"small:{number}" for number in range(4))]
    for number, name in enumerate(names[1:]):
        link_by_hand(store, name, {f"{number}.weight": blob_of([f"{number}.weight"], "a")})
    opened, go, read = [], threading.Event(), api._read

    def noted(found: ServedModel) -> OpenedModel:
        go.wait()
        opened.append(str(found.name))
        return read(found)

    monkeypatch.setattr(api, "_read", noted)
    models = Served(store)
    found = [models.find(name) for name in names]
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(models.open, found[0]) for _ in range(3)]
        go.set()
        assert len({id(one.result()) for one in waiting}) == 1
    for one in (*found[1:4], found[0], found[4], found[0], found[1]):
        models.open(one)
    assert opened == [*names, names[1]]
