"""The registry: what it answers, over every kind of home, and what it refuses."""

import json
from typing import Any

import pytest
from support.web_client import Reply, ask

import blobstore
from blobstore.errors import CorruptDataError
from blobstore.formats.documents import CONFIG_MEDIA_TYPE, MANIFEST_MEDIA_TYPE, Descriptor, Manifest
from blobstore.formats.oci import OCI_MANIFEST_MEDIA_TYPE, Signature, tag_of
from blobstore.names import Digest, ModelName
from blobstore.store.local.store import Store, pack
from blobstore.store.memory import MemoryStore
from blobstore.web.application import Hosts, application
from blobstore.web.distribution import distribution_routes, part_of, prefers_oci

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
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Manifest]:
    """An application that only reads its store, and the manifest of the one model there."""
    store = blobstore.open_store(tmp_path_factory.mktemp("filled") / "store")
    manifest = fill(store)
    return app_over(store), manifest


@pytest.fixture
def app(filled: tuple[Any, Manifest]) -> Any:
    return filled[0]


@pytest.fixture
def manifest(filled: tuple[Any, Manifest]) -> Manifest:
    return filled[1]


@pytest.fixture
def store(store: Store) -> Store:
    fill(store)
    return store


def blob(data: bytes = WEIGHTS) -> str:
    return f"{REPOSITORY}/blobs/{Digest.of(data)}"


def test_its_manifest(app: Any, manifest: Manifest) -> None:
    for reference, fields in (("int4", {}), ("INT4", DOCKER), (manifest.digest, {"accept": "*/*"})):
        target = f"{REPOSITORY}/manifests/{reference}"
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
    assert twin.headers["docker-content-digest"] == str(Digest.of(twin.body))
    blobs = [twin.json["config"], *twin.json["layers"]]
    own = [manifest.config, *manifest.layers]
    assert [one["digest"] for one in blobs] == [str(one.digest) for one in own if one is not None]
    again = ask(app, f"{REPOSITORY}/manifests/{Digest.of(twin.body)}", fields=DOCKER)
    assert (again.body, again.headers["content-type"]) == (twin.body, OCI_MANIFEST_MEDIA_TYPE)
    assert twin.headers["vary"] == "Accept"


def test_which_type_a_client_prefers() -> None:
    oci = OCI_MANIFEST_MEDIA_TYPE
    for accept in (f"{oci}, */*", f"{MANIFEST_MEDIA_TYPE};q=0.5, {oci.upper()}"):
        assert prefers_oci(accept.split(","))
        assert prefers_oci([accept])
    exact = f"{MANIFEST_MEDIA_TYPE}, {oci}"
    for accept in ("*/*", exact, f"{oci};q=0.5, {MANIFEST_MEDIA_TYPE}", ",;q=,;;" * 1000):
        assert not prefers_oci([accept])


def test_a_blob(app: Any) -> None:
    assert ask(app, "/v2/").headers["docker-distribution-api-version"] == "registry/2.0"
    answered = ask(app, blob())
    head = ask(app, blob(), "HEAD")
    assert answered.body == WEIGHTS
    assert answered.headers["docker-content-digest"] == str(Digest.of(WEIGHTS))
    assert answered.headers["content-length"] == str(len(WEIGHTS))
    assert answered.headers["location"] == blob()  # Ollama takes the address of parts from it
    assert (head.status, head.body, head.headers) == (200, b"", answered.headers)
    tag = answered.headers["etag"]
    again = ask(app, blob(), fields={"if-none-match": f'"x", W/{tag}'})
    assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)


def test_which_part_a_range_asks_for() -> None:
    for field, part in {
        "bytes=0-0": range(1),
        "bytes=3-": range(3, 10),
        "bytes=-3": range(7, 10),
        "bytes=10-": range(0),  # there are no such bytes
        # Not valid, or not one range: ignored (RFC 9110 section 14.2).
        "bytes=5-4": None,
        "bytes=0-1,3-4": None,
        "bytes=٣-٤": None,  # digits, but not ASCII
        f"bytes={'9' * 19}-": None,
    }.items():
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
    other = ask(app, blob(), fields={"range": "bytes=0-9", "if-range": '"another version"'})
    assert (other.status, other.body) == (200, WEIGHTS)


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
    repositories = ask(app, "/v2/_catalog").json["repositories"]
    assert repositories == ["hf.co/org/other", "library/tiny", "mine/other"]
    assert ask(app, "/v2/_catalog?n=1&last=library/tiny").json["repositories"] == ["mine/other"]
    assert ask(app, "/v2/hf.co/org/other/tags/list").json["tags"] == ["x"]
    for wrong in ("n=-1", "n=1e3", f"n={'9' * 10}"):
        assert ask(app, f"/v2/_catalog?{wrong}").code == "PAGINATION_NUMBER_INVALID"


def test_what_is_refused(app: Any) -> None:
    for target, status, code in (
        (f"{REPOSITORY}/manifests/int8", 404, "MANIFEST_UNKNOWN"),
        (f"{REPOSITORY}/blobs/{MISSING}", 404, "BLOB_UNKNOWN"),
        ("/v2/library/other/tags/list", 404, "NAME_UNKNOWN"),
        (f"{REPOSITORY}/blobs/sha256:00", 400, "DIGEST_INVALID"),
        (f"{REPOSITORY}/blobs/%2e%2e%2fmanifests", 404, "NAME_UNKNOWN"),
        (f"{REPOSITORY}/manifests/a%00b", 404, "MANIFEST_UNKNOWN"),
        ("/v2/..%2f..%2fblobs/manifests/int4", 404, "NAME_UNKNOWN"),
        ("/v2/library/tiny/blobs/uploads/", 404, "NAME_UNKNOWN"),
        (f"{REPOSITORY}/manifests/{tag_of(Digest('0' * 64))}", 404, "MANIFEST_UNKNOWN"),
    ):
        answered = ask(app, target)
        assert (answered.status, answered.code) == (status, code), target


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


def test_changes_are_seen(store: Store) -> None:
    app = app_over(store)
    assert ask(app, blob()).body == WEIGHTS
    changed = fill(store, weights=b"new")
    assert ask(app, f"{REPOSITORY}/manifests/int4").body == changed.raw
    assert ask(app, blob(b"new")).body == b"new"
    fill(store, "other:x", b"new")  # it keeps the blob
    store.remove("tiny:int4")
    assert ask(app, f"{REPOSITORY}/manifests/int4").code == "MANIFEST_UNKNOWN"


def test_a_damaged_blob_is_not_sent(store: Store) -> None:
    app, path = app_over(store), store.root / "blobs" / Digest.of(WEIGHTS).file_name

    def answers(status: int, code: str) -> None:
        for method in ("GET", "HEAD"):
            answered = ask(app, blob(), method)
            assert (answered.status, answered.code) == (status, code)
            assert str(store.root).encode() not in answered.body

    path.write_bytes(b"short")
    answers(409, "SIZE_INVALID")
    path.unlink()
    answers(404, "BLOB_UNKNOWN")
    (store.root / "secret").write_bytes(WEIGHTS)
    path.symlink_to(store.root / "secret")
    answers(500, "UNKNOWN")


def test_a_hostile_media_type_is_not_repeated(store: Store, manifest: Manifest) -> None:
    path = store.root / "manifests/registry.ollama.ai/library/tiny/int4"
    app = app_over(store)
    for kind in ("application/x\r\ny: z", "é/b", "text/html"):
        path.write_bytes(json.dumps(json.loads(manifest.raw) | {"mediaType": kind}).encode())
        answered = ask(app, f"{REPOSITORY}/manifests/int4", fields=DOCKER)
        assert answered.headers["content-type"] == MANIFEST_MEDIA_TYPE
    path.write_bytes(b"{")
    damaged = ask(app, f"{REPOSITORY}/manifests/int4")
    assert (damaged.status, damaged.code) == (409, "MANIFEST_INVALID")


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
