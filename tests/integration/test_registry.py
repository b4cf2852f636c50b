"""Push to and pull from a real registry: docker-registry, plain and behind all that it can have."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import token_server as tokens_of
from support.lab.mounts import keep_mounts_private, mount
from support.registries import (
    CERTIFICATE,
    PASSWORD,
    USER,
    Bucket,
    Registry,
    moto,
    registry,
    skopeo,
)
from support.relay import relay
from support.shared_models import (
    OCI_MANIFEST,
    commit_tensors,
    contents,
    manifest_of,
    same,
    tensor_blob,
)
from support.small_registry import digest_of

from blobstore import open_store, transfer, verify
from blobstore.errors import BlobStoreError, DigestMismatchError, NotFoundError, StorageError
from blobstore.formats.documents import MANIFEST_MEDIA_TYPE
from blobstore.io.http.client import HttpClient
from blobstore.store.local.store import Store
from blobstore.store.ports import How
from blobstore.store.registry.logins import Login, Secret
from blobstore.store.registry.store import RegistryAccess, RegistryStore, pull, push

pytestmark = pytest.mark.lab
SIZES = (100, 3000, 3001, 20_000, 1_500_000, 2_500_000)
HEADS = 4000
"""Bytes of a request's and a reply's heads, at most."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry without logins; each test has repositories of its own."""
    with registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


def at(server: Registry, repository: str, tag: str = "int4") -> str:
    return f"{server.host}/library/{repository}:{tag}"


def empty(folder: Path) -> Store:
    return open_store(folder / "another")


def test_a_model_comes_back_as_it_was(plain: Registry, store: Store, tmp_path: Path) -> None:
    commit_tensors(store, "m", SIZES)
    sent = push("m", store, to=at(plain, "back"))
    assert sent.blobs == {How.COPIED: len(SIZES) + 1}
    assert plain.incomplete() == []
    other = empty(tmp_path)
    pull(at(plain, "back"), other, name="n")
    assert same(store.root, other.root, "m", "n")
    assert verify(other).is_sound
    assert plain.tags()["library/back:int4"] == store.manifests.text(store.find("m"))


def test_a_second_push_and_pull_move_no_blobs(
    plain: Registry, store: Store, tmp_path: Path
) -> None:
    manifest = commit_tensors(store, "m", SIZES)
    asks = 4 * len(manifest.descriptors) + 10
    with relay(plain.port) as between:
        target = f"{between.host}/library/twice:int4"
        push("m", store, to=target)
        pull(target, empty(tmp_path), name="m")
        assert between.up > manifest.size < between.down
        between.reset()
        again = push("m", store, to=target)
        assert again.blobs == {How.THERE: len(manifest.descriptors)}
        assert between.up < len(manifest.raw) + asks * HEADS < 200_000
        between.reset()
        pull(target, empty(tmp_path), name="m")
        assert between.down < len(manifest.raw) + asks * HEADS
    assert not [line for line in plain.log.splitlines() if '"PUT /v2/library/twice/blobs' in line][
        len(manifest.descriptors) :
    ]


def test_blobs_of_other_repositories_are_mounted(plain: Registry, store: Store) -> None:
    """Those that the store has pushed to before."""
    manifest = commit_tensors(store, "m", SIZES)
    with relay(plain.port) as between:
        push("m", store, to=f"{between.host}/library/first:int4")
        between.reset()
        sent = push("m", store, to=f"{between.host}/library/second:int4")
        assert sent.blobs == {How.THERE: len(manifest.descriptors)}
        assert between.up < 100_000
    mounts = [
        line for line in plain.log.splitlines() if "library/second" in line and "mount" in line
    ]
    assert len(mounts) == len(manifest.descriptors)
    assert plain.incomplete() == []


def test_by_digest(plain: Registry, store: Store, tmp_path: Path) -> None:
    first = commit_tensors(store, "m", (100, 200))
    push("m", store, to=at(plain, "pinned"))
    commit_tensors(store, "m", (100, 300))
    push("m", store, to=at(plain, "pinned"))
    other = empty(tmp_path)
    pull(f"{at(plain, 'pinned')}@{first.digest}", other, name="old")
    pull(at(plain, "pinned"), other, name="new")
    assert other.manifests.text(other.find("old")) == first.raw
    assert same(store.root, other.root, "m", "new")
    with pytest.raises(NotFoundError):
        pull(f"{at(plain, 'pinned')}@sha256:{'0' * 64}", other, name="none")


def test_a_tag_is_replaced_and_others_stay(plain: Registry, store: Store, tmp_path: Path) -> None:
    commit_tensors(store, "a", (100,), seed=1)
    commit_tensors(store, "b", (100,), seed=2)
    push("a", store, to=at(plain, "tags", "one"))
    push("b", store, to=at(plain, "tags", "two"))
    push("b", store, to=at(plain, "tags", "one"))
    texts = {tag: plain.tags()[f"library/tags:{tag}"] for tag in ("one", "two")}
    assert set(texts.values()) == {store.manifests.text(store.find("b"))}


def test_several_models_at_once(plain: Registry, store: Store, tmp_path: Path) -> None:
    for number in range(3):
        commit_tensors(store, f"m{number}", (100, 5000 + number))
    names = {f"m{number}": at(plain, f"several{number}") for number in range(3)}
    home = RegistryStore(plain.host, HttpClient(), address=plain.url)
    transfer(names, store, home)
    transfer({remote: name for name, remote in names.items()}, home, empty(tmp_path))
    for name in names:
        assert same(store.root, empty(tmp_path).root, name)
    assert {str(name) for name in home.manifests.names()} >= set(names.values())


@pytest.mark.parametrize("kind", ["htpasswd", "tls", "relative", "s3", "s3 that redirects"])
def test_other_registries(kind: str, store: Store, tmp_path: Path) -> None:
    commit_tensors(store, "m", SIZES)
    access = RegistryAccess()
    options: dict[str, Any] = {}
    if kind == "tls":
        access = RegistryAccess(ca_file=str(CERTIFICATE))
    with moto(tmp_path / "s3") as url:
        bucket = Bucket(url, redirects="redirects" in kind) if "s3" in kind else None
        options = {"htpasswd": kind == "htpasswd", "tls": kind == "tls"}
        options["relative"] = kind == "relative"
        with registry(tmp_path / "registry", bucket=bucket, **options) as server:
            reference = f"{server.url}/library/m:int4"
            if kind == "htpasswd":
                with pytest.raises(BlobStoreError, match="login"):
                    push("m", store, to=reference)
                access = RegistryAccess(credentials=Known(server.host, USER, PASSWORD))  # type: ignore[arg-type]
            push("m", store, to=reference, access=access)
            if bucket is None:
                assert server.incomplete() == []
            pull(reference, empty(tmp_path), name="m", access=access)
            assert PASSWORD not in server.log
    assert same(store.root, empty(tmp_path).root, "m")


def test_a_registry_behind_a_token_server(store: Store, tmp_path: Path) -> None:
    manifest = commit_tensors(store, "m", SIZES)
    with (
        tokens_of.token_server(tmp_path / "tokens") as tokens,
        registry(tmp_path / "registry", tokens=tokens) as server,
    ):
        realms = (f"127.0.0.1:{tokens.port}",)
        reference = at(server, "m")
        with pytest.raises(BlobStoreError):
            push("m", store, to=reference, access=RegistryAccess(realms=realms))
        known = Known(server.host, tokens_of.USER, tokens_of.PASSWORD)
        access = RegistryAccess(realms=realms, credentials=known)  # type: ignore[arg-type]
        push("m", store, to=reference, access=access)
        assert server.incomplete() == []
        pull(reference, empty(tmp_path), name="m", access=RegistryAccess(realms=realms))
        assert same(store.root, empty(tmp_path).root, "m")
        scopes = {scope for asked in tokens.asked for scope in asked.scopes}
        assert scopes <= {"repository:library/m:pull", "repository:library/m:pull,push"}
        assert len(tokens.asked) < len(manifest.descriptors)


class Known:
    """Credentials of one registry."""

    def __init__(self, host: str, user: str, password: str) -> None:
        self._host = host
        self._login = Login(user, Secret(password))

    def find(self, host: str, _repository: str) -> Login | None:
        return self._login if host == self._host else None


def test_skopeo_reads_what_we_pushed(plain: Registry, store: Store, tmp_path: Path) -> None:
    """As it is; and copies it, where its manifest has the OCI's type.

    skopeo refuses layers of other types than docker's own in docker's manifests.
    """
    ours = commit_tensors(store, "ours", SIZES)
    push("ours", store, to=at(plain, "ours"))
    flags = ("--tls-verify=false",)
    raw = skopeo("inspect", "--raw", *flags, f"docker://{at(plain, 'ours')}")
    assert raw.encode() == ours.raw
    oci = commit_tensors(store, "oci", SIZES, oci=True)
    push("oci", store, to=at(plain, "oci"))
    seen = json.loads(skopeo("inspect", *flags, f"docker://{at(plain, 'oci')}"))
    assert seen["Digest"] == str(oci.digest)
    assert seen["Layers"] == [str(layer.digest) for layer in oci.layers]
    from_here = ("copy", "--preserve-digests", "--src-tls-verify=false")
    for kind in ("dir", "oci"):
        target = tmp_path / kind
        skopeo(*from_here, f"docker://{at(plain, 'oci')}", f"{kind}:{target}")
        blobs = target if kind == "dir" else target / "blobs" / "sha256"
        for digest, data in contents(store, "oci").items():
            assert (blobs / digest.removeprefix("sha256:")).read_bytes() == data
    assert (tmp_path / "dir" / "manifest.json").read_bytes() == oci.raw


def test_what_skopeo_pushed_is_pulled(plain: Registry, store: Store, tmp_path: Path) -> None:
    oci = commit_tensors(store, "oci", SIZES, oci=True)
    folder = tmp_path / "dir"
    folder.mkdir()
    for digest, data in contents(store, "oci").items():
        (folder / digest.removeprefix("sha256:")).write_bytes(data)
    (folder / "manifest.json").write_bytes(oci.raw)
    (folder / "version").write_text("Directory Transport Version: 1.1\n")
    to_there = ("copy", "--preserve-digests", "--dest-tls-verify=false")
    skopeo(*to_there, f"dir:{folder}", f"docker://{at(plain, 'skopeo')}")
    pull(at(plain, "skopeo"), empty(tmp_path), name="oci")
    assert same(store.root, empty(tmp_path).root, "oci")


@pytest.mark.parametrize("media_type", [MANIFEST_MEDIA_TYPE, OCI_MANIFEST])
def test_what_curl_uploaded_is_pulled(plain: Registry, media_type: str, tmp_path: Path) -> None:
    blobs = [tensor_blob("layer0", 5000), tensor_blob("layer1", 100)]
    raw = manifest_of(b"{}", blobs, oci=media_type == OCI_MANIFEST)
    repository = f"curl{len(media_type)}"
    base = f"{plain.url}/v2/library/{repository}"
    for data in (b"{}", *blobs):
        head = _curl("-i", "-X", "POST", f"{base}/blobs/uploads/", "-d", "")
        (line,) = (line for line in head.splitlines() if line.lower().startswith("location:"))
        place = f"{line.split(': ', 1)[1]}&digest={digest_of(data)}"
        _curl("-X", "PUT", "-H", "Content-Type: application/octet-stream", place, data=data)
    kind = f"Content-Type: {media_type}"
    _curl("-X", "PUT", "-H", kind, f"{base}/manifests/int4", data=raw)
    pull(at(plain, repository), empty(tmp_path), name="m")
    assert empty(tmp_path).manifests.text(empty(tmp_path).find("m")) == raw
    assert set(contents(empty(tmp_path), "m").values()) == {b"{}", *blobs}


def test_a_blob_that_rotted_in_the_registry(plain: Registry, store: Store, tmp_path: Path) -> None:
    manifest = commit_tensors(store, "m", (100, 4000), seed="rot")
    push("m", store, to=at(plain, "rot"))
    digits = manifest.layers[1].digest.hex
    path = plain.folder / f"root/docker/registry/v2/blobs/sha256/{digits[:2]}/{digits}/data"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DigestMismatchError, match=digits):
        pull(at(plain, "rot"), empty(tmp_path), name="m")
    assert empty(tmp_path).manifests.names() == []


def _curl(*arguments: str, data: bytes | None = None) -> str:
    body = [] if data is None else ["--data-binary", "@-"]
    line = ["curl", "-sS", "--fail", *body, *arguments]
    done = subprocess.run(line, input=data, capture_output=True, check=True, timeout=300)
    return done.stdout.decode()


def test_a_full_disk(plain: Registry, store: Store, tmp_path: Path) -> None:
    """The pull is refused, nothing of the model is there, and it goes on where there is room."""
    commit_tensors(store, "small", (100, 3000))
    commit_tensors(store, "large", SIZES)
    for name in ("small", "large"):
        push(name, store, to=at(plain, name))
    keep_mounts_private()
    disk = tmp_path / "disk"
    disk.mkdir()
    with mount("tmpfs", disk, f"size={sum(SIZES) // 2}"):
        target = open_store(disk / "store")
        pull(at(plain, "small"), target, name="small")
        with pytest.raises(StorageError, match="no space left"):
            pull(at(plain, "large"), target, name="large")
        assert [str(name) for name in target.manifests.names()] == ["small:latest"]
        assert same(store.root, target.root, "small")
        assert verify(target).is_sound
        subprocess.run(["mount", "-o", f"remount,size={3 * sum(SIZES)}", disk], check=True)
        pull(at(plain, "large"), target, name="large")
        assert same(store.root, target.root, "large")


def test_connections_that_break(plain: Registry, store: Store, tmp_path: Path) -> None:
    """Once on the way there: docker-registry forgets an upload that broke off."""
    manifest = commit_tensors(store, "m", SIZES)
    with relay(plain.port, most=2**15) as between:
        target = f"{between.host}/library/breaks:int4"
        between.after(1_000_000, between.cut)
        push("m", store, to=target)
        assert plain.incomplete() == []

        def again() -> None:
            between.cut()
            between.after(1_000_000, again)

        between.reset()
        again()
        pull(target, empty(tmp_path), name="m")
        assert between.down < manifest.size + 100_000
    assert same(store.root, empty(tmp_path).root, "m")


def test_names_that_a_registry_does_not_have(plain: Registry, store: Store) -> None:
    commit_tensors(store, "m", (100,))
    for name in ("library/Upper", "_a/_b"):
        with pytest.raises(BlobStoreError, match=name.rpartition("/")[2]):
            push("m", store, to=f"{plain.host}/{name}:int4")
