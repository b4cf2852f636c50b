"""A manifest that is taken for a plain one is valid, and its blobs are picked out rightly."""

import json
from contextlib import suppress
from typing import Any

from hypothesis import example, given, settings, strategies as st

from blobstore.errors import BlobStoreError
from blobstore.formats.documents import Manifest
from blobstore.store.references import is_plain, missing_blob, needs_of

HEX = st.integers(0, 2**256 - 1).map("{:064x}".format)
TEXT = st.text(max_size=5) | st.sampled_from(
    ['"digest":"sha256:', 'a"b', "a\\b", "<&>", "\x7f", "é", "x" * 300]
)
DESCRIPTOR = st.fixed_dictionaries(
    {"mediaType": TEXT, "digest": HEX.map("sha256:{}".format), "size": st.integers(0, 2**50)},
    optional={"from": TEXT, "name": TEXT},
)
MANIFEST = st.fixed_dictionaries(
    {"schemaVersion": st.just(2), "mediaType": st.just("m")}, optional={"config": DESCRIPTOR}
).flatmap(
    lambda head: st.lists(DESCRIPTOR, max_size=4).map(lambda layers: {**head, "layers": layers})
)
ONE, TWO = ({"mediaType": "m", "digest": f"sha256:{0:064}", "size": size} for size in (1, 2))
TWO_SIZES = {"schemaVersion": 2, "mediaType": "m", "config": ONE, "layers": [TWO]}
"""One blob that has two sizes."""
COMPACT: dict[str, Any] = {"separators": (",", ":"), "ensure_ascii": False}


def slow(raw: bytes) -> dict[str, int] | None:
    with suppress(BlobStoreError):
        return {blob.digest.hex: blob.size for blob in Manifest.parse(raw).descriptors}
    return None


def fast(raw: bytes) -> dict[str, int] | None:
    with suppress(BlobStoreError):
        return dict(needs_of(raw, "manifest"))
    return None


@settings(max_examples=40)
@example(TWO_SIZES, COMPACT, "\n", None)
@given(
    MANIFEST,
    st.sampled_from([COMPACT, COMPACT, {}, {"indent": 1}]),
    st.sampled_from(["\n", "", " ", "\n\n"]),
    st.none() | st.tuples(st.integers(0), st.binary(max_size=2), st.integers(0, 3)),
)
def test_picked_out_or_parsed_it_is_the_same(
    document: dict[str, Any], style: dict[str, Any], end: str, damage: tuple[int, bytes, int] | None
) -> None:
    raw = (json.dumps(document, **style) + end).encode("utf-8", "surrogatepass")
    if damage is not None:
        at, new, cut = damage
        at %= len(raw)
        raw = raw[:at] + new + raw[at + cut :]
    needs = slow(raw)
    assert fast(raw) == needs
    if needs is None:
        assert not is_plain(raw)
    else:
        assert missing_blob(raw, set(needs), is_plain=is_plain(raw)) is None
        for lost in needs:
            assert missing_blob(raw, needs.keys() - {lost}, is_plain=is_plain(raw)) == lost


def test_a_digest_that_is_none_is_not_passed_over() -> None:
    layer = {**ONE, "digest": "sha256:" + "Z" * 64}
    raw = json.dumps({**TWO_SIZES, "layers": [layer]}, **COMPACT).encode()
    assert slow(raw) is None
    assert fast(raw) is None
    assert not is_plain(raw)
