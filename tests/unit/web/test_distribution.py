"""The registry: what it answers, over every kind of home, and what it refuses."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.web_client import Reply, ask

import blobstore
from blobstore.errors import CorruptDataError
from blobstore.formats.documents import (
    CONFIG_MEDIA_TYPE,
    MANIFEST_MEDIA_TYPE,
    Descriptor,
    Manifest,
)
from blobstore.formats.oci import OCI_MANIFEST_MEDIA_TYPE
from blobstore.formats.signatures import Signature, tag_of
from blobstore.names import Digest, ModelName
from blobstore.store.layered import LayeredStore
from blobstore.store.local.store import Store, pack
from blobstore.store.memory import MemoryStore
from blobstore.store.transfer import transfer
from blobstore.web.application import Hosts, application
from blobstore.web.distribution import ServedModels, distribution_routes, part_of, prefers_oci

WEIGHTS, CONFIG = bytes(range(256)) * 100, b'{"model_format":"safetensors"}'
REPOSITORY = "/v2/library/tiny"
DOCKER = {"accept": MANIFEST_MEDIA_TYPE}
OCI = {"accept": f"{OCI_MANIFEST_MEDIA_TYPE}, {MANIFEST_MEDIA_TYPE}"}
MISSING = f"sha256:{'0' * 64}"


def app_over(home: Any) -> Any:
    return application(home, Hosts("127.0.0.1"), more=distribution_routes(home))


def fill(home: Any, name: str = "tiny:int4", weights: bytes = WEIGHTS) -> Manifest:
    parsed = ModelName.parse(name)
    layer = Descriptor("application/vnd.ollama.image.tensor", Digest.of(weights), len(weights))
    config = Descriptor(CONFIG_MEDIA_TYPE, Digest.of(CONFIG), len(CONFIG))
    manifest = Manifest(config=config, layers=(layer,))
    with home.session(name=parsed) as session:
        session.put(weights)
        session.put(CONFIG)
        session.publish(parsed, manifest)
    return manifest


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store that no test changes."""
    store = blobstore.open_store(tmp_path_factory.mktemp("filled") / "store")
    fill(store)
    return store


@pytest.fixture(scope="module")
def app(filled: Store) -> Any:
    return app_over(filled)


@pytest.fixture(scope="module")
def manifest(filled: Store) -> Manifest:
    return filled.manifest("tiny:int4")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with one model, which the test may change."""
    found = blobstore.open_store(tmp_path / "store")
    fill(found)
    return found


def blob(data: bytes = WEIGHTS) -> str:
    return f"{REPOSITORY}/blobs/{Digest.of(data)}"


@pytest.mark.parametrize(
    ("reference", "fields"), [("int4", {}), ("INT4", DOCKER), ("digest", {"accept": "*/*"})]
)
def test_a_manifest_is_the_models_own(
    app: Any, manifest: Manifest, reference: str, fields: dict[str, str]
) -> None:
    target = f"{REPOSITORY}/manifests/{reference.replace('digest', str(manifest.digest))}"
    answered, head = (ask(app, target, method, fields) for method in ("GET", "HEAD"))
    assert answered.body == manifest.raw
    assert answered.headers["docker-content-digest"] == str(manifest.digest)
    assert answered.headers["etag"] == f'"{manifest.digest}"'
    assert answered.headers["content-type"] == MANIFEST_MEDIA_TYPE
    assert answered.headers["content-length"] == str(len(manifest.raw))
    assert (head.status, head.headers) == (200, answered.headers)


def test_tools_for_containers_get_a_twin_over_the_same_blobs(app: Any, manifest: Manifest) -> None:
    twin = ask(app, f"{REPOSITORY}/manifests/int4", fields=OCI)
    assert twin.headers["content-type"] == twin.json["mediaType"] == OCI_MANIFEST_MEDIA_TYPE
    assert (
        twin.headers["docker-content-digest"] == str(Digest.of(twin.body)) != str(manifest.digest)
    )
    blobs = [twin.json["config"], *twin.json["layers"]]
    own = [manifest.config, *manifest.layers]
    assert [one["digest"] for one in blobs] == [str(one.digest) for one in own if one is not None]
    again = ask(app, f"{REPOSITORY}/manifests/{Digest.of(twin.body)}", fields=DOCKER)
    assert (again.body, again.headers["content-type"]) == (twin.body, OCI_MANIFEST_MEDIA_TYPE)
    assert twin.headers["vary"] == "Accept"


def test_a_manifest_of_ocis_type_is_its_own_twin(store: Store) -> None:
    raw = store.manifest("tiny:int4").raw.replace(
        MANIFEST_MEDIA_TYPE.encode(), OCI_MANIFEST_MEDIA_TYPE.encode()
    )
    with store.session() as session:
        session.publish(ModelName.parse("tiny:oci"), Manifest.parse(raw))
    for fields in (DOCKER, OCI):
        assert ask(app_over(store), f"{REPOSITORY}/manifests/oci", fields=fields).body == raw


@pytest.mark.parametrize(
    ("accept", "oci"),
    [
        ([], False),
        (["*/*"], False),
        ([f"{OCI_MANIFEST_MEDIA_TYPE}, */*"], True),
        ([f"{MANIFEST_MEDIA_TYPE}, {OCI_MANIFEST_MEDIA_TYPE}"], False),
        ([f"{OCI_MANIFEST_MEDIA_TYPE};q=0.5, {MANIFEST_MEDIA_TYPE}"], False),
        ([f"{MANIFEST_MEDIA_TYPE};q=0.5", OCI_MANIFEST_MEDIA_TYPE.upper()], True),
        ([f"{OCI_MANIFEST_MEDIA_TYPE};q=0"], False),
        ([",;q=,;;" * 1000], False),
    ],
)
def test_which_type_a_client_prefers(accept: list[str], oci: bool) -> None:
    assert prefers_oci(accept) is oci


def test_a_blob(app: Any) -> None:
    assert ask(app, "/v2/").headers["docker-distribution-api-version"] == "registry/2.0"
    answered = ask(app, blob())
    head = ask(app, blob(), "HEAD")
    assert answered.body == WEIGHTS
    assert answered.headers["docker-content-digest"] == str(Digest.of(WEIGHTS))
    assert answered.headers["content-length"] == str(len(WEIGHTS))
    assert answered.headers["accept-ranges"] == "bytes"
    assert answered.headers["location"] == blob()  # Ollama takes the address of parts from it
    assert (head.status, head.body, head.headers) == (200, b"", answered.headers)


@pytest.mark.parametrize(
    ("field", "part"),
    [
        ("bytes=0-0", range(1)),
        ("bytes=3-", range(3, 10)),
        (f"bytes=5-{'9' * 18}", range(5, 10)),
        ("bytes=-3", range(7, 10)),
        ("bytes=-99", range(10)),
        ("bytes= 1-2 ", range(1, 3)),
        # There are no such bytes.
        ("bytes=10-", range(0)),
        ("bytes=-0", range(0)),
        # Not valid, or not one range: ignored (RFC 9110 section 14.2).
        (None, None),
        ("bytes=5-4", None),
        ("bytes=-", None),
        ("bytes=0-1,3-4", None),
        ("items=0-1", None),
        ("bytes=٣-٤", None),  # digits, but not ASCII
        (f"bytes={'9' * 19}-", None),
    ],
)
def test_which_part_a_range_asks_for(field: str | None, part: range | None) -> None:
    assert part_of(10, field) == part
    assert part_of(0, field) in (None, range(0))


def test_a_part_of_a_blob(app: Any) -> None:
    whole = ask(app, blob(), "HEAD", {"range": "bytes=0-9"})
    assert whole.headers["content-length"] == str(len(WEIGHTS))
    answered = ask(app, blob(), fields={"range": "bytes=300-309"})
    assert (answered.status, answered.body) == (206, WEIGHTS[300:310])
    assert answered.headers["content-range"] == f"bytes 300-309/{len(WEIGHTS)}"
    assert answered.headers["content-length"] == "10"
    beyond = ask(app, blob(), fields={"range": f"bytes={len(WEIGHTS)}-"})
    assert (beyond.status, beyond.code) == (416, "RANGE_INVALID")
    assert beyond.headers["content-range"] == f"bytes */{len(WEIGHTS)}"


def test_a_part_of_another_version_is_not_sent(app: Any) -> None:
    asked = {"range": "bytes=0-9"}
    same = ask(app, blob(), fields={**asked, "if-range": f'"{Digest.of(WEIGHTS)}"'})
    other = ask(app, blob(), fields={**asked, "if-range": '"another"'})
    assert (same.status, len(same.body)) == (206, 10)
    assert (other.status, other.body) == (200, WEIGHTS)


@pytest.mark.parametrize("target", [blob(), f"{REPOSITORY}/manifests/int4"])
def test_what_a_client_has_is_not_sent_again(app: Any, target: str) -> None:
    tag = ask(app, target).headers["etag"]
    answered = ask(app, target, fields={"if-none-match": f'"x", W/{tag}'})
    assert (answered.status, answered.body, answered.headers["etag"]) == (304, b"", tag)


def test_lists_come_in_pages() -> None:
    home = MemoryStore()
    for name in ("tiny:b", "tiny:a", "tiny:c", "hf.co/org/other:x", "mine/other:y"):
        fill(home, name)
    app = app_over(home)
    first = ask(app, f"{REPOSITORY}/tags/list?n=2")
    assert first.json == {"name": "library/tiny", "tags": ["a", "b"]}
    following = first.headers["link"]
    assert following == f'<{REPOSITORY}/tags/list?n=2&last=b>; rel="next"'
    last = ask(app, f"{REPOSITORY}/tags/list?n=2&last=b")
    assert last.json["tags"] == ["c"]
    assert "link" not in last.headers
    assert ask(app, f"{REPOSITORY}/tags/list?n=0").json["tags"] == []
    repositories = ask(app, "/v2/_catalog").json["repositories"]
    assert repositories == ["hf.co/org/other", "library/tiny", "mine/other"]
    assert ask(app, "/v2/_catalog?n=1&last=library/tiny").json["repositories"] == ["mine/other"]
    assert ask(app, "/v2/hf.co/org/other/tags/list").json["tags"] == ["x"]
    assert ask(app, "/v2/tiny/tags/list").json["tags"] == ["a", "b", "c"]
    for wrong in ("n=-1", "n=x", "n=1e3", f"n={'9' * 10}"):
        assert ask(app, f"/v2/_catalog?{wrong}").code == "PAGINATION_NUMBER_INVALID"


def test_a_page_of_a_list_has_at_most_a_thousand_names() -> None:
    home = MemoryStore()
    manifest = fill(home, "tiny:0000")
    names = (ModelName.parse(f"tiny:{number:04}") for number in range(1001))
    home.manifests.all.update(dict.fromkeys(names, manifest.raw))
    page = ask(app_over(home), f"{REPOSITORY}/tags/list?n=5000")
    assert len(page.json["tags"]) == 1000
    assert "last=0999" in page.headers["link"]


@pytest.mark.parametrize(
    ("target", "status", "code"),
    [
        (f"{REPOSITORY}/manifests/int8", 404, "MANIFEST_UNKNOWN"),
        ("/v2/library/other/manifests/int4", 404, "MANIFEST_UNKNOWN"),
        (f"{REPOSITORY}/blobs/{MISSING}", 404, "BLOB_UNKNOWN"),
        ("/v2/library/other/tags/list", 404, "NAME_UNKNOWN"),
        (f"{REPOSITORY}/blobs/sha256:00", 400, "DIGEST_INVALID"),
        (f"{REPOSITORY}/blobs/%2e%2e%2fmanifests", 404, "NAME_UNKNOWN"),
        (f"{REPOSITORY}/manifests/sha256:xyz", 400, "DIGEST_INVALID"),
        (f"{REPOSITORY}/manifests/a%00b", 404, "MANIFEST_UNKNOWN"),
        (f"{REPOSITORY}/manifests/{'t' * 129}", 404, "MANIFEST_UNKNOWN"),
        (f"{REPOSITORY}/manifests/", 404, "NAME_UNKNOWN"),
        ("/v2/../../etc/passwd", 404, "NAME_UNKNOWN"),
        ("/v2/..%2f..%2fblobs/manifests/int4", 404, "NAME_UNKNOWN"),
        (f"/v2/{'a' * 500}/manifests/int4", 404, "NAME_UNKNOWN"),
        ("/v2/%ff%fe/manifests/int4", 404, "NAME_UNKNOWN"),
        ("/v2//manifests/int4", 404, "NAME_UNKNOWN"),
        ("/v2/library/tiny", 404, "NAME_UNKNOWN"),
        ("/v2/library/tiny/blobs/uploads/", 404, "NAME_UNKNOWN"),
        (f"{REPOSITORY}/manifests/{tag_of(Digest('0' * 64))}", 404, "MANIFEST_UNKNOWN"),
        (f"{REPOSITORY}/referrers/x", 400, "DIGEST_INVALID"),
    ],
)
def test_what_is_refused(app: Any, target: str, status: int, code: str) -> None:
    answered = ask(app, target)
    assert (answered.status, answered.code) == (status, code)


def test_writes_are_refused(app: Any) -> None:
    manifest, uploads = f"{REPOSITORY}/manifests/int4", f"{REPOSITORY}/blobs/uploads/"
    for method, target in (("PUT", manifest), ("POST", uploads), ("DELETE", blob())):
        answered = ask(app, target, method)
        assert (answered.status, answered.code) == (405, "UNSUPPORTED")
        assert answered.headers["allow"] == "GET, HEAD"


def test_only_blobs_of_the_repository_have_an_address(store: Store) -> None:
    """Not those of another model, those that no model names, and no other file of the store."""
    manifest = store.manifest("tiny:int4")
    fill(store, "other:x", b"another")
    (store.root / "blobs" / Digest.of(b"stray").file_name).write_bytes(b"stray")
    app = app_over(store)
    assert ask(app, f"/v2/library/other/blobs/{Digest.of(b'another')}").body == b"another"
    for data in (b"another", b"stray", manifest.raw):
        assert ask(app, blob(data)).code == "BLOB_UNKNOWN"


def test_referrers_are_none(app: Any) -> None:
    answered = ask(app, f"{REPOSITORY}/referrers/{MISSING}?artifactType=a/b")
    assert answered.json["manifests"] == []
    assert answered.headers["content-type"] == "application/vnd.oci.image.index.v1+json"
    assert answered.headers["oci-filters-applied"] == "artifactType"


def test_changes_are_seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_over(store)
    assert ask(app, blob()).body == WEIGHTS
    changed = fill(store, weights=b"new")
    assert ask(app, f"{REPOSITORY}/manifests/int4").body == changed.raw
    assert ask(app, blob(b"new")).body == b"new"
    fill(store, "other:x", b"new")  # it keeps the blob
    store.remove("tiny:int4")
    assert ask(app, f"{REPOSITORY}/manifests/int4").code == "MANIFEST_UNKNOWN"
    monkeypatch.setattr("blobstore.web.distribution._FRESH_S", 1e-9)  # else two seconds
    assert ask(app, blob(b"new")).code == "BLOB_UNKNOWN"


def damaged_by(store: Store, kind: str) -> tuple[int, str]:
    path = store.root / "blobs" / Digest.of(WEIGHTS).file_name
    if kind == "cut":
        path.write_bytes(b"short")
        return 409, "SIZE_INVALID"
    path.unlink()
    if kind == "linked":
        target = store.root / "secret"
        target.write_bytes(WEIGHTS)
        path.symlink_to(target)
        return 500, "UNKNOWN"
    return 404, "BLOB_UNKNOWN"


@pytest.mark.parametrize("kind", ["cut", "missing", "linked"])
def test_a_damaged_blob_is_not_sent(store: Store, kind: str) -> None:
    app = app_over(store)
    status, code = damaged_by(store, kind)
    for method in ("GET", "HEAD"):
        answered = ask(app, blob(), method)
        assert (answered.status, answered.code) == (status, code)
        assert str(store.root).encode() not in answered.body


def test_a_damaged_manifest(store: Store) -> None:
    app = app_over(store)
    fill(store, "tiny:sound", b"sound")
    path = store.root / "manifests/registry.ollama.ai/library/tiny/int4"
    path.write_bytes(b"{")
    answered = ask(app, f"{REPOSITORY}/manifests/int4")
    assert (answered.status, answered.code) == (409, "MANIFEST_INVALID")
    assert ask(app, blob(b"sound")).body == b"sound"
    assert ask(app, f"{REPOSITORY}/tags/list").json["tags"] == ["int4", "sound"]


def test_a_hostile_media_type_is_not_repeated(store: Store, manifest: Manifest) -> None:
    path = store.root / "manifests/registry.ollama.ai/library/tiny/int4"
    app = app_over(store)
    for kind in ("application/x\r\ny: z", "é/b", "none", "text/html"):
        path.write_bytes(json.dumps(json.loads(manifest.raw) | {"mediaType": kind}).encode())
        for fields, sent in ((DOCKER, MANIFEST_MEDIA_TYPE), (OCI, OCI_MANIFEST_MEDIA_TYPE)):
            answered = ask(app, f"{REPOSITORY}/manifests/int4", fields=fields)
            assert answered.headers["content-type"] == sent


def test_signatures_have_cosigns_tag(store: Store) -> None:
    manifest = store.manifest("tiny:int4")
    payload = b'{"a payload": 1}'
    name = ModelName.parse("tiny:int4")
    store.signatures.add(name, manifest.digest, [Signature.of(payload, b"signed")])
    app = app_over(store)
    answered = ask(app, f"{REPOSITORY}/manifests/{tag_of(manifest.digest)}", fields=DOCKER)
    assert answered.headers["content-type"] == OCI_MANIFEST_MEDIA_TYPE
    by_digest = ask(app, f"{REPOSITORY}/manifests/{answered.headers['docker-content-digest']}")
    assert by_digest.body == answered.body
    (layer,) = answered.json["layers"]
    assert ask(app, f"{REPOSITORY}/blobs/{layer['digest']}").body == payload
    config = ask(app, f"{REPOSITORY}/blobs/{answered.json['config']['digest']}")
    assert config.json["rootfs"]["diff_ids"] == [layer["digest"]]
    assert ask(app, f"{REPOSITORY}/tags/list").json["tags"] == ["int4"]


def test_a_packed_model_is_served_decoded(store: Store) -> None:
    weights = bytes(2**20)  # sent in pieces
    manifest = fill(store, "big:x", weights)
    pack(store, "big:x")
    assert not (store.root / "blobs" / Digest.of(weights).file_name).exists()
    app = app_over(store)
    assert ask(app, "/v2/_catalog").json["repositories"] == ["library/big", "library/tiny"]
    assert ask(app, "/v2/library/big/manifests/x").body == manifest.raw
    target = f"/v2/library/big/blobs/{Digest.of(weights)}"
    assert ask(app, target).body == weights
    assert ask(app, target, "HEAD").headers["content-length"] == str(len(weights))
    part = ask(app, target, fields={"range": "bytes=1048570-"})
    assert (part.status, part.body) == (206, bytes(6))


def test_the_last_piece_of_a_blob_that_is_damaged_on_the_way_is_not_sent() -> None:
    home = MemoryStore()
    weights = bytes(2**20 + 10)
    fill(home, weights=weights)
    home.blobs.all[Digest.of(weights)] = bytes(2**20 + 9) + b"x"
    reply = Reply()
    with pytest.raises(CorruptDataError, match="its bytes are not those"):
        ask(app_over(home), blob(weights), reply=reply)
    assert reply.pieces == [bytes(2**20)]


def test_other_homes(filled: Store, manifest: Manifest, tmp_path: Path) -> None:
    memory = MemoryStore()
    transfer({"tiny:int4": "tiny:int4"}, filled, memory)
    empty = blobstore.open_store(tmp_path / "upper")
    for home in (memory, LayeredStore(empty, [filled])):
        app = app_over(home)
        assert ask(app, f"{REPOSITORY}/manifests/int4").body == manifest.raw
        assert ask(app, blob()).body == WEIGHTS
        part = ask(app, blob(), fields={"range": "bytes=-5"})
        assert (part.status, part.body) == (206, WEIGHTS[-5:])


def test_a_slow_model_does_not_hold_up_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, "slow:int4", b"slow" * 100)
    begun, go_on = threading.Event(), threading.Event()
    text = store.manifests.text

    def slow(name: ModelName) -> bytes:
        if name.model == "slow":
            begun.set()
            go_on.wait()
        return text(name)

    monkeypatch.setattr(store.manifests, "text", slow)
    served = ServedModels(store)
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(served.tagged, ModelName.parse("slow:int4"), oci=False)
        begun.wait()
        other = served.tagged(ModelName.parse("tiny:int4"), oci=False)
        go_on.set()
        assert waits.result().raw != other.raw
