"""Rules of the pages' files: no markup from text, no inline code, nothing from elsewhere, small."""

from __future__ import annotations

import re
from pathlib import Path

from blobstore.web.pages import FOLDER, PAGES, page

FILES = sorted(
    path for path in FOLDER.rglob("*") if path.is_file() and path.parent.name != "vendor"
)
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
    r"|DOMParser|createContextualFragment|setHTML|javascript:"
)
INLINE = re.compile(
    r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)|javascript:", re.IGNORECASE
)
ELSEWHERE = re.compile(r"""(https?:|wss?:)?//[a-z0-9]""", re.IGNORECASE)
NAMESPACE = "http://www.w3.org/2000/svg"


def code(path: Path) -> str:
    """Return a file without its comments."""
    return re.sub(
        r"/\*.*?\*/|^\s*//.*$|\s// .*$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE
    )


def test_scripts_make_no_markup_of_text() -> None:
    assert {path.name: found for path in SCRIPTS if (found := MARKUP.findall(code(path)))} == {}


def test_pages_have_no_inline_code() -> None:
    assert {one: found for one in PAGES if (found := INLINE.findall(page(one)))} == {}


def test_nothing_is_requested_from_elsewhere() -> None:
    for path in FILES:
        assert not ELSEWHERE.search(code(path).replace(NAMESPACE, "")), path


def test_files_that_are_named_exist() -> None:
    """Pages and modules name files of the package, by their addresses or beside themselves."""
    for address in PAGES:
        for name in re.findall(r'(?:href|src)="/static/([^"]+)"', page(address)):
            assert name == "types.css" or (FOLDER / name).is_file(), (address, name)
    for path in FILES:
        text = path.read_text()
        for name in re.findall(r'from "\./([^"]+)"|import "\./([^"]+)"', text):
            assert (path.parent / "".join(name)).is_file(), (path, name)
