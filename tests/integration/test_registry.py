"""Push to and pull from docker-registry: plain, behind all that it can have, and by skopeo."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from integration.shared_models import commit_tensors, contents, same
from support.registries import CERTIFICATE, PASSWORD, USER, Bucket, Registry, moto, registry, skopeo

from blobstore import open_store
from blobstore.errors import BlobStoreError
from blobstore.store.local.store import Store
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
    assert push("m", store, to=target).copied.blobs == count
    assert pull(target, other, name="m").copied.blobs == count
    assert plain.tags()["library/twice:int4"] == manifest.raw
    assert same(store, other, "m")
    for done in (
        push("m", store, to=target),
        push("m", store, to=at(plain, "mounted")),
        pull(target, other, name="m"),
    ):
        assert done.there.blobs == count
    assert plain.incomplete() == []


@dataclass(frozen=True, slots=True)
class Known:
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
    """As it is; also a copy by skopeo, where the manifest and its layers are of the OCI's type."""
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
