"""The scripts of the pages make no markup of text. Their policy forbids the rest."""

import re
from pathlib import Path

from blobstore.web.pages import FOLDER

FILES = sorted(
    path for path in FOLDER.rglob("*") if path.is_file() and path.parent.name != "vendor"
)
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
    r"|DOMParser|createContextualFragment|setHTML|javascript:"
)


def code(path: Path) -> str:
    """Return a file without its comments."""
    return re.sub(
        r"/\*.*?\*/|^\s*//.*$|\s// .*$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE
    )


def test_scripts_make_no_markup_of_text() -> None:
    assert {path.name: found for path in SCRIPTS if (found := MARKUP.findall(code(path)))} == {}
