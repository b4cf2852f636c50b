"""Makes the pictures of docs/pictures: ``python tests/bench/pictures.py [FOLDER]``.

Pages of a store with the fixtures in several types, in Debian's Chromium, as WebP. The fonts are
those of a GNOME desktop (Debian's fonts-inter and fonts-jetbrains-mono), if they are installed.
"""

from __future__ import annotations

import base64
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import PYCODE, PYCODE_MOE, ROOT
from support.browser import WIDE, Theme, Watched, chromium, watched
from support.page_store import keep_errors, served

import blobstore
from blobstore.store.local.store import Store, open_store

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession

PLACE = ROOT / "docs" / "pictures"
TYPES = ("int4", "int8", "nvfp4", "mxfp4", "mxfp8")
SCALE = 1.5
LARGEST = 300_000
"""Bytes of a picture."""
_FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig>
<include>/etc/fonts/fonts.conf</include>
<match><test name="family"><string>sans-serif</string></test>
<edit name="family" mode="prepend" binding="strong"><string>Inter</string></edit></match>
<match><test name="family"><string>system-ui</string></test>
<edit name="family" mode="prepend" binding="strong"><string>Inter</string></edit></match>
<match><test name="family"><string>ui-monospace</string></test>
<edit name="family" mode="prepend" binding="strong"><string>JetBrains Mono</string></edit></match>
</fontconfig>"""


class Picture(NamedTuple):
    """A page, where it is scrolled to, and how it is drawn."""

    name: str
    path: str
    query: dict[str, str | list[str]]
    theme: Theme = "light"
    size: tuple[int, int] = WIDE
    part: str = "body"


GATE = "model.layers.0.mlp.gate_proj.weight"
MODEL: dict[str, str | list[str]] = {"name": "pycode-5m:int4"}
PICTURES = (
    Picture("model", "/model", MODEL, size=(1280, 900)),
    Picture("tensor", "/model", {**MODEL, "tensor": GATE, "search": "layers.0"}, part="#tensors"),
    Picture("compare", "/compare", {"model": [f"pycode-5m:{kind}" for kind in TYPES]}),
)


def main() -> None:
    """Make the pictures."""
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else PLACE
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "fonts.conf").write_text(_FONTS)
        os.environ["FONTCONFIG_FILE"] = str(folder / "fonts.conf")
        store = open_store(folder / "store")
        fill(store)
        with served(store) as origin, chromium() as browser:
            for picture in PICTURES:
                data = taken(browser, origin, picture)
                (place / f"{picture.name}.webp").write_bytes(data)
                print(f"{picture.name}.webp: {len(data):,} bytes")
                assert len(data) <= LARGEST, picture


def fill(store: Store) -> None:
    """Import the fixtures in several types, and measure their errors."""
    for kind in TYPES:
        name = f"pycode-5m:{kind}"
        blobstore.import_model(PYCODE, name, store=store, quant=kind)
        keep_errors(store, name)
    blobstore.import_model(PYCODE_MOE, "pycode-moe-5m:nvfp4", store=store, quant="nvfp4")
    blobstore.import_model(PYCODE_MOE, "pycode-moe-5m:int4", store=store, quant="int4")


def taken(browser: Browser, origin: str, picture: Picture) -> bytes:
    """Open the page of a picture, and return it."""
    size, theme = picture.size, picture.theme
    with watched(browser, origin, size=size, theme=theme, scale=SCALE) as site:
        return drawn(site, picture)


def drawn(site: Watched, picture: Picture) -> bytes:
    """Return a picture as WebP, which only Chromium's own protocol gives."""
    page = site.open(picture.path, **picture.query)
    page.locator(picture.part).evaluate(
        "part => scrollTo(0, part.closest('section, body').offsetTop - 16)"
    )
    session: CDPSession = page.context.new_cdp_session(page)
    width, height = picture.size
    clip = {"x": 0, "y": page.evaluate("scrollY"), "width": width, "height": height, "scale": SCALE}
    options = {"format": "webp", "quality": 80, "clip": clip}
    return base64.b64decode(session.send("Page.captureScreenshot", options)["data"])


if __name__ == "__main__":
    main()
