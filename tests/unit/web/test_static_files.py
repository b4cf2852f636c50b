"""Static files: those of the package only; the scripts of the pages make no markup of text."""

import re
from pathlib import Path

import pytest
from support.web_client import Client

from blobstore.store.local.store import Store
from blobstore.web import application
from blobstore.web.pages import FOLDER, PAGES


def test_files_are_answered_with_their_type_and_tag(client: Client) -> None:
    reply = client.get("/static/js/page.js")
    assert (reply.status, reply.body) == (200, (FOLDER / "js/page.js").read_bytes())
    assert reply.headers["content-type"].partition(";")[0].endswith("/javascript")
    assert reply.headers["cache-control"] == "no-cache"
    assert client.get("/static/js/page.js", if_none_match=reply.headers["etag"]).status == 304
    assert ".type-int4 { --type: #0a74c4; }" in client.get("/static/types.css").body.decode()
    for address in PAGES:
        page = client.get(address)
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert client.get(address, if_none_match=page.headers["etag"]).status == 304


def test_nothing_else_has_an_address(client: Client) -> None:
    for path in (
        "/static/js/%2e%2e/%2e%2e/application.py",
        "/static/..%2fapplication.py",
        "/static//etc/passwd",
        "/static/%00",
    ):
        assert client.get(path).status == 404, path


def test_links_stay_inside(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "static"
    folder.mkdir()
    (folder / "own.js").write_text("own")
    (tmp_path / "secret.js").write_text("secret")
    (folder / "link.js").symlink_to(tmp_path / "secret.js")
    (folder / "up").symlink_to(tmp_path)
    monkeypatch.setattr(application, "FOLDER", folder)
    client = Client(application.application(store, application.Hosts("127.0.0.1")))
    found = [client.get(f"/static/{path}").status for path in ("own.js", "link.js", "up/secret.js")]
    assert found == [200, 404, 404]


def test_browsers_get_a_page_at_a_wrong_address_and_programs_a_document(client: Client) -> None:
    browser = {"accept": "text/html,*/*;q=0.8"}
    for path in ("/models", "/model/", "/static/none.js", "/<b>"):
        lost = client.get(path, **browser)
        assert (lost.status, lost.headers["content-type"]) == (404, "text/html; charset=utf-8")
        assert b"no page at this address" in lost.body
        assert client.get(path).json["error"] == "not found"
    for path in ("/api/none", "/v1/none", "/v2/none"):
        assert client.get(path, **browser).status == 404
        assert client.get(path, **browser).json


SCRIPTS = [path for path in FOLDER.rglob("*.js") if path.parent.name != "vendor"]
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
    r"|DOMParser|createContextualFragment|setHTML|javascript:"
)


COMMENT = re.compile(r"/\*.*?\*/|^\s*//.*?$|\s// .*?$", re.DOTALL | re.MULTILINE)


def test_scripts_make_no_markup_of_text() -> None:
    codes = {path.name: COMMENT.sub("", path.read_text()) for path in SCRIPTS}
    assert len(codes) > 5
    assert {name: found for name, code in codes.items() if (found := MARKUP.findall(code))} == {}
