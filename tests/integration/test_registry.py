"""Push to and pull from docker-registry: plain, behind all that it can have, and beside others."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.mounts import keep_mounts_private, mount
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
    commit_tensors,
    contents,
    manifest_of,
    same,
    tensor_blob,
)
from support.small_registry import digest_of

from blobstore import open_store, verify
from blobstore.errors import BlobStoreError, DigestMismatchError, NotFoundError, StorageError
from blobstore.formats.documents import MANIFEST_MEDIA_TYPE
from blobstore.store.local.store import Store
from blobstore.store.ports import How
from blobstore.store.registry.logins import Login, Secret
from blobstore.store.registry.store import RegistryAccess, pull, push

pytestmark = pytest.mark.lab
SIZES = (100, 3000, 3001, 20_000, 1_500_000, 2_500_000)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    """A registry without logins; each test has repositories of its own."""
    with registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def other(tmp_path: Path) -> Store:
    """Another, empty store."""
    return open_store(tmp_path / "another")


def at(server: Registry, repository: str, tag: str = "int4") -> str:
    return f"{server.host}/library/{repository}:{tag}"


def test_a_second_push_and_pull_move_no_blobs(plain: Registry, store: Store, other: Store) -> None:
    manifest = commit_tensors(store, "m", SIZES)
    target, count = at(plain, "twice"), len(manifest.descriptors)
    assert push("m", store, to=target).blobs == {How.COPIED: count}
    assert pull(target, other, name="m").blobs == {How.COPIED: count}
    assert plain.tags()["library/twice:int4"] == manifest.raw
    assert same(store, other, "m")
    for done in (
        push("m", store, to=target),
        push("m", store, to=at(plain, "mounted")),
        pull(target, other, name="m"),
    ):
        assert done.blobs == {How.THERE: count}
    assert plain.incomplete() == []


def test_by_digest(plain: Registry, store: Store, other: Store) -> None:
    first = commit_tensors(store, "m", (100, 200))
    push("m", store, to=at(plain, "pinned"))
    commit_tensors(store, "m", (100, 300))
    push("m", store, to=at(plain, "pinned"))
    pull(f"{at(plain, 'pinned')}@{first.digest}", other, name="old")
    assert other.manifest("old").raw == first.raw
    with pytest.raises(NotFoundError):
        pull(f"{at(plain, 'pinned')}@sha256:{'0' * 64}", other, name="none")


@dataclass(frozen=True, slots=True)
class Known:
    """Credentials of one registry."""

    host: str

    def find(self, host: str, _repository: str) -> Login | None:
        return Login(USER, Secret(PASSWORD)) if host == self.host else None


@pytest.mark.parametrize("kind", ["htpasswd", "tls", "relative", "s3", "s3 that redirects"])
def test_other_registries(kind: str, store: Store, other: Store, tmp_path: Path) -> None:
    commit_tensors(store, "m", SIZES)
    access = RegistryAccess(ca_file=str(CERTIFICATE)) if kind == "tls" else RegistryAccess()
    with ExitStack() as running:
        options: dict[str, Any] = {kind: True}
        if "s3" in kind:
            url = running.enter_context(moto(tmp_path / "s3"))
            options = {"bucket": Bucket(url, redirects="redirects" in kind)}
        server = running.enter_context(registry(tmp_path / "registry", **options))
        reference = f"{server.url}/library/m:int4"
        if kind == "htpasswd":
            with pytest.raises(BlobStoreError, match="login"):
                push("m", store, to=reference)
            access = RegistryAccess(credentials=Known(server.host))  # type: ignore[arg-type]
        push("m", store, to=reference, access=access)
        pull(reference, other, name="m", access=access)
        assert PASSWORD not in server.log
    assert same(store, other, "m")


def test_skopeo_reads_what_we_pushed_and_we_what_it_pushed(
    plain: Registry, store: Store, other: Store, tmp_path: Path
) -> None:
    """As it is; and copies it, where its manifest has the OCI's type.

    skopeo refuses layers of other types than docker's own in docker's manifests.
    """
    ours = commit_tensors(store, "ours", SIZES)
    push("ours", store, to=at(plain, "ours"))
    raw = skopeo("inspect", "--raw", "--tls-verify=false", f"docker://{at(plain, 'ours')}")
    assert raw.encode() == ours.raw
    oci = commit_tensors(store, "oci", SIZES, oci=True)
    push("oci", store, to=at(plain, "oci"))
    words = ("copy", "--preserve-digests", "--src-tls-verify=false", "--dest-tls-verify=false")
    folder = tmp_path / "dir"
    skopeo(*words, f"docker://{at(plain, 'oci')}", f"dir:{folder}")
    for digest, data in contents(store, "oci").items():
        assert (folder / digest.removeprefix("sha256:")).read_bytes() == data
    assert (folder / "manifest.json").read_bytes() == oci.raw
    skopeo(*words, f"dir:{folder}", f"docker://{at(plain, 'skopeo')}")
    pull(at(plain, "skopeo"), other, name="oci")
    assert same(store, other, "oci")


def test_what_curl_uploaded_is_pulled(plain: Registry, other: Store) -> None:
    blobs = [tensor_blob("layer0", 5000), tensor_blob("layer1", 100)]
    raw = manifest_of(b"{}", blobs)
    base = f"{plain.url}/v2/library/curl"
    for data in (b"{}", *blobs):
        head = curl("-i", "-X", "POST", f"{base}/blobs/uploads/", "-d", "")
        (line,) = (line for line in head.splitlines() if line.lower().startswith("location:"))
        place = f"{line.split(': ', 1)[1]}&digest={digest_of(data)}"
        curl("-X", "PUT", "-H", "Content-Type: application/octet-stream", place, data=data)
    kind = f"Content-Type: {MANIFEST_MEDIA_TYPE}"
    curl("-X", "PUT", "-H", kind, f"{base}/manifests/int4", data=raw)
    pull(at(plain, "curl"), other, name="m")
    assert other.manifest("m").raw == raw
    assert set(contents(other, "m").values()) == {b"{}", *blobs}


def curl(*arguments: str, data: bytes | None = None) -> str:
    body = [] if data is None else ["--data-binary", "@-"]
    line = ["curl", "-sS", "--fail", *body, *arguments]
    done = subprocess.run(line, input=data, capture_output=True, check=True, timeout=300)
    return done.stdout.decode()


def test_a_blob_that_rotted_in_the_registry(plain: Registry, store: Store, other: Store) -> None:
    digits = commit_tensors(store, "m", (100, 4000), seed="rot").layers[1].digest.hex
    push("m", store, to=at(plain, "rot"))
    path = plain.folder / f"root/docker/registry/v2/blobs/sha256/{digits[:2]}/{digits}/data"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DigestMismatchError, match=digits):
        pull(at(plain, "rot"), other, name="m")
    assert other.manifests.names() == []


def test_a_full_disk(plain: Registry, store: Store, tmp_path: Path) -> None:
    """The pull is refused, nothing of the model is there, and it goes on where there is room."""
    commit_tensors(store, "large", SIZES)
    push("large", store, to=at(plain, "large"))
    keep_mounts_private()
    disk = tmp_path / "disk"
    disk.mkdir()
    with mount("tmpfs", disk, f"size={sum(SIZES) // 2}"):
        target = open_store(disk / "store")
        with pytest.raises(StorageError, match="space"):
            pull(at(plain, "large"), target, name="large")
        assert target.manifests.names() == []
        assert verify(target).is_sound
        subprocess.run(["mount", "-o", f"remount,size={3 * sum(SIZES)}", disk], check=True)
        pull(at(plain, "large"), target, name="large")
        assert same(store, target, "large")


def test_connections_that_break(plain: Registry, store: Store, other: Store) -> None:
    """Once on the way there: docker-registry forgets an upload that broke off."""
    commit_tensors(store, "m", SIZES)
    with relay(plain.port) as between:
        target = f"{between.host}/library/breaks:int4"
        between.after(1_000_000, between.cut)
        push("m", store, to=target)
        assert plain.incomplete() == []
        cuts = 0

        def cut() -> None:
            nonlocal cuts
            cuts += 1
            between.cut()
            between.after(1_000_000, cut)

        cut()
        pull(target, other, name="m")
        assert cuts > 2
    assert same(store, other, "m")
