"""Static files: those of the package by a list, and nothing else of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.web_client import Client

from blobstore.store.local.store import Store
from blobstore.web.application import PAGES, application, static_files
from blobstore.web.guard import Hosts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of pages, with files that must not be served."""
    folder = tmp_path / "static"
    (folder / "js").mkdir(parents=True)
    (folder / "shell.html").write_text("<title>{title}</title>{script}: {main}")
    for name in ("index", "model", "compare", "usage"):
        (folder / f"{name}.html").write_text(name)
    (folder / "other.html").write_text("not a page")
    (folder / "js" / "page.js").write_text("1")
    (folder / "js" / "notes.md").write_text("not of a kind")
    (folder / "icon.svg").write_text("<svg/>")
    (tmp_path / "secret.js").write_text("secret")
    (folder / "link.js").symlink_to(tmp_path / "secret.js")
    (folder / "up").symlink_to(tmp_path)
    return folder


def test_only_files_of_known_kinds_are_listed(folder: Path) -> None:
    found = static_files(folder)
    assert {address: file.content_type for address, file in found.items()} == {
        **dict.fromkeys(PAGES, "text/html; charset=utf-8"),
        "/static/icon.svg": "image/svg+xml",
        "/static/js/page.js": "text/javascript; charset=utf-8",
    }
    assert found["/model"].data == b"<title>Model</title>model.js: model"


def test_files_are_answered_with_their_type_and_tag(folder: Path, store: Store) -> None:
    client = Client(application(store, Hosts("127.0.0.1"), files=static_files(folder)))
    reply = client.get("/static/js/page.js")
    assert (reply.status, reply.body) == (200, b"1")
    assert reply.headers["content-type"] == "text/javascript; charset=utf-8"
    assert client.get("/static/js/page.js", if_none_match=reply.headers["etag"]).status == 304
    for path in (
        "/static/js/notes.md",
        "/static/other.html",
        "/static/link.js",
        "/static/up/secret.js",
        "/static/js/../../secret.js",
        "/static/js/%2e%2e/%2e%2e/secret.js",
        "/static//etc/passwd",
        "/static/",
        "/static",
        "//",
    ):
        assert client.get(path).status == 404, path
    client.close()


def test_the_package_has_its_pages() -> None:
    found = static_files()
    assert found["/static/vendor/vega.min.js"].data.startswith(b"!function")


def test_types_have_the_colours_of_plots(store: Store) -> None:
    client = Client(application(store, Hosts("127.0.0.1")))
    assert ".type-int4 { --type: #0a74c4; }" in client.get("/static/types.css").body.decode()
    client.close()
