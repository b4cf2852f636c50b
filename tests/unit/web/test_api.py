"""The API: every answer is a view, every error a document, and hostile names are text."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import quote

import pytest
from support import PYCODE
from support.checkpoints import write_checkpoint
from support.stores import manifest_path
from support.web_client import Client

import blobstore
from blobstore.cli.main import run
from blobstore.inspection.listing import summarize
from blobstore.store.local.store import Store, pack
from blobstore.views.documents import schema_of
from blobstore.web.api import ROUTES
from blobstore.web.application import Hosts, application

HOSTILE, PLAIN = "<img src=x onerror=alert(1)>\u202e.weight", "model.layers.0.mlp.up_proj.weight"


def test_the_list_has_all_models_and_says_what_is_broken(client: Client) -> None:
    reply = client.get("/api/models")
    broken, small = reply.json
    assert reply.headers["content-type"] == "application/json"
    assert (small["name"], small["parameters"]) == ("small:int4", 320)
    assert broken["name"] == "broken:int4"
    assert "is missing" in broken["error"]


def test_clients_of_ollama_see_the_store(client: Client) -> None:
    (small,) = client.get("/api/tags").json["models"]  # the broken one is left out
    assert (small["name"], small["details"]["parameter_size"]) == ("small:int4", "320")
    assert small["digest"] == client.get("/api/model?name=small:int4").json["id"][7:]
    assert client.get("/api/version").json.keys() == {"version"}
    refused = client.get("/api/chat", method="POST")
    assert (refused.status, "ask Ollama" in refused.json["error"]) == (405, True)
    assert client.get("/health").json == {"status": "ok"}


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
    tree = client.get("/api/tree?model=small:int4").json
    names = [one["name"] for one in tree if one["depth"] == 0]
    assert names == [HOSTILE, "a.norm", "model.layers"]


def test_a_tensor_is_found_in_its_blob(client: Client) -> None:
    for tensor in (HOSTILE, "a.norm"):
        query = f"model=small:int4&tensor={quote(tensor)}"
        found = client.get(f"/api/distribution?{query}").json
        assert (found["tensor"], sum(found["values"]["counts"])) == (tensor, found["size"])
        assert (found["codes"] is None) == (tensor == "a.norm")
        assert client.get(f"/api/plots/distribution?{query}").json["$schema"]


def test_results_are_null_until_they_are_kept(client: Client) -> None:
    assert client.get("/api/quality?model=small:int4").json["result"] is None
    assert client.get("/api/damage").json["result"] is None
    reply = client.get("/api/plots/errors?model=small:int4")
    assert (reply.status, "blobstore quality small:int4" in reply.json["hint"]) == (409, True)


ERRORS = {
    "/api/model?name=missing": (404, "model 'missing:latest' not found"),
    "/api/model?name=..%2F..%2Fetc%2Fpasswd": (404, "has 4 parts"),
    "/api/tensors?model=broken:int4": (409, "is missing"),
    "/api/distribution?model=small:int4&tensor=none": (404, "has no tensor 'none'"),
    "/api/distribution?model=small:int4": (400, "'tensor' is missing"),
    "/api/model?name=%ff": (400, "not percent-encoded UTF-8"),
    "/api/models?" + "&" * 70: (400, "too long"),
    "/api/plots/frontier?" + "model=a&" * 61: (400, "is given 61 times, at most 60"),
}


def test_errors_are_documents(client: Client) -> None:
    for target, (status, says) in ERRORS.items():
        reply = client.get(target)
        assert (reply.status, says in reply.json["error"]) == (status, True), target
        assert reply.headers["content-type"] == "application/json"
        assert reply.json.keys() == {"error", "hint"}


def test_an_unexpected_error_has_no_details(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.manifests, "names", Mock(side_effect=RuntimeError("secret")))
    client = Client(application(store, Hosts("127.0.0.1")))
    reply = client.get("/api/models")
    assert reply.status == 500
    assert "secret" not in reply.body.decode()
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_what_a_client_has_is_not_sent_again(client: Client, store: Store) -> None:
    tags = {}
    for target in ("/api/models", "/api/model?name=small:int4", "/api/openapi.json", "/api/usage"):
        tags[target] = tag = client.get(target).headers["etag"]
        again = client.get(target, if_none_match=f'"other", W/{tag}')
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
        assert client.get(target, if_none_match='"other"').status == 200
    path = manifest_path(store, "small:int4")
    manifest = json.loads(path.read_text())
    manifest["layers"].pop()
    path.write_text(json.dumps(manifest))
    target = "/api/model?name=small:int4"
    changed = client.get(target, if_none_match=tags[target])
    assert (changed.status, changed.json["tensors"]) == (200, 1)


def test_a_packed_model_is_shown_and_its_values_are_not_read(store: Store, model: str) -> None:
    pack(store, model)
    client = Client(application(store, Hosts("127.0.0.1")))
    assert client.get(f"/api/model?name={model}").json["packed"] is True
    reply = client.get(f"/api/distribution?model={model}&tensor=a.norm")
    assert (reply.status, reply.json["hint"]) == (409, f"blobstore unpack {model} restores it.")


def test_files_of_a_model_are_text_and_never_a_page(store: Store, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    (source / "README.md").write_text(card := "# <script>alert(1)</script> \u00e9")
    (source / "ids.npy").write_bytes(b"\xff\xfe")
    blobstore.import_model(source, "m", store=store, system="Be kind.")
    client = Client(application(store, Hosts("127.0.0.1")))
    for name, text in {"README.md": card, "system": "Be kind."}.items():
        reply = client.get(f"/api/file?model=m&file={name}")
        assert (reply.status, reply.body.decode()) == (200, text)
        assert reply.headers["content-type"] == "text/plain; charset=utf-8"
        assert reply.headers["x-content-type-options"] == "nosniff"
    for name, status in {"ids.npy": 409, "nothing": 404, "../config.json": 404}.items():
        assert client.get(f"/api/file?model=m&file={name}").status == status


def test_the_document_of_the_api_has_each_route_and_its_answer(client: Client) -> None:
    document = client.get("/api/openapi.json").json
    assert document["openapi"] == "3.1.0"
    assert document["paths"].keys() == {one.path for one in ROUTES}
    for route in ROUTES:
        operation = document["paths"][route.path]["get"]
        named = {one["name"]: one["required"] for one in operation["parameters"]}
        assert named == dict.fromkeys(route.takes, True)
        schema = operation["responses"]["200"]["content"][route.content_type]["schema"]
        definitions = document["components"]["schemas"]
        assert schema == schema_of(route.kind, definitions, "#/components/schemas/")


def test_the_store_has_one_size(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """The Usage page shows what `du` prints and the disk has; models that share count once."""
    blobstore.import_model(PYCODE, "a", store=store, quant="int4")
    blobstore.import_model(PYCODE, "b", store=store, quant="int8")
    assert run(["du", "--json", "--store", str(store.root)]) == 0
    client = Client(application(store, Hosts("127.0.0.1")))
    usage = client.get("/api/usage").json
    listed = {one["name"]: one["size"] for one in client.get("/api/models").json}
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


def test_errors_name_files_without_the_folder(store: Store, model: str, client: Client) -> None:
    layer = store.manifest("small:int4").tensor_layers[0]
    path = store.root / "blobs" / layer.digest.file_name
    path.unlink()
    path.symlink_to("/etc/passwd")
    error = client.get("/api/model?name=small:int4").json["error"]
    assert f"blobs/{layer.digest.file_name}" in error
    assert str(store.root) not in error + client.get("/api/models").body.decode()
