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
LONGEST = 300


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


def test_files_are_small_enough_to_read() -> None:
    long = {path.name: len(path.read_text().splitlines()) for path in FILES}
    assert {name: lines for name, lines in long.items() if lines >= LONGEST} == {}


def test_files_that_are_named_exist() -> None:
    """Pages and modules name files of the package, by their addresses or beside themselves."""
    for address in PAGES:
        for name in re.findall(r'(?:href|src)="/static/([^"]+)"', page(address)):
            assert name == "types.css" or (FOLDER / name).is_file(), (address, name)
    for path in FILES:
        text = path.read_text()
        for name in re.findall(r'from "\./([^"]+)"|import "\./([^"]+)"', text):
            assert (path.parent / "".join(name)).is_file(), (path, name)


def test_every_script_is_used() -> None:
    scripts = ["report", "plan", "theme-early", *(name for name, _ in PAGES.values())]
    text = "".join(path.read_text() for path in FILES) + "".join(f"/{name}.js" for name in scripts)
    assert [path.name for path in SCRIPTS if f"/{path.name}" not in text] == []


def test_the_interpreter_finds_what_it_imports() -> None:
    text = (FOLDER / "vendor" / "vega-interpreter.js").read_text()
    assert "import " not in text.split("function", 1)[0]
    names = re.search(r"const \{ ([\w, ]+) \} = globalThis\.vega;", text)
    assert names is not None
    vega = (FOLDER / "vendor" / "vega.min.js").read_text()
    assert all(f"t.{name}=" in vega for name in names[1].split(", "))
