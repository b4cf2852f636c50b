"""What a real server does: nginx, whose log says which requests it got. Marked `lab`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.corpus import INDEX_NAME, refusal
from support.nginx import Nginx, nginx as run_nginx
from support.sparse import write_sparse_folder

from blobstore.errors import CorruptDataError, NotFoundError
from blobstore.formats.safetensors.header import header_of
from blobstore.inspection.inspect import inspect
from blobstore.io.http.remote_files import Remote
from blobstore.source.files import MAX_INDEX, ShardIndex
from blobstore.source.web import WebFolder

from .conftest import KIB, open_all, safetensors_file

pytestmark = pytest.mark.lab
SHARDS = 72


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    """A web server of the files below a folder."""
    root = tmp_path_factory.mktemp("hub")
    with run_nginx(tmp_path_factory.mktemp("nginx"), root) as running:
        yield running


@pytest.fixture
def remote() -> Iterator[Remote]:
    """A client with connections of its own."""
    with Remote() as made:
        yield made


def test_a_checkpoint_is_inspected_with_a_request_a_shard(nginx: Nginx, remote: Remote) -> None:
    tensors = {f"h.{layer}.weight": ("BF16", (1000, 1000)) for layer in range(SHARDS)}
    write_sparse_folder(nginx.root / "sharded", tensors, shards=SHARDS)
    nginx.requests()
    folder = WebFolder(remote, f"{nginx.url}/sharded")
    places = ShardIndex.parse(folder.read(INDEX_NAME, MAX_INDEX)).weight_map
    assert places.keys() == tensors.keys()
    assert len(open_all(folder, sorted(places.values()))) == SHARDS
    asked = nginx.requests()
    assert len(asked) == 1 + SHARDS
    assert len({request.connection for request in asked}) <= 16
    assert dict(inspect(f"{nginx.url}/sharded").parameter_count) == {"BF16": SHARDS * 10**6}


def test_a_large_header_takes_two_requests(nginx: Nginx, remote: Remote) -> None:
    data = safetensors_file(300 * KIB)
    (nginx.root / "large").write_bytes(data)
    nginx.requests()
    reader = remote.open(f"{nginx.url}/large")
    assert header_of(reader).data_start == 300 * KIB + 8
    assert reader.read(len(data) - 4, 4) == data[-4:]
    asked = nginx.requests()
    assert [(request.status, request.range, request.body) for request in asked] == [
        (206, "bytes=0-65535", 64 * KIB),
        (206, f"bytes=65536-{300 * KIB + 7}", 236 * KIB + 8),
        (206, f"bytes={len(data) - 4}-{len(data) - 1}", 4),
    ]
    assert len({request.connection for request in asked}) == 1


def test_a_file_that_is_replaced(nginx: Nginx, remote: Remote) -> None:
    path = nginx.root / "replaced"
    path.write_bytes(safetensors_file(100, 200 * KIB))
    reader = remote.open(f"{nginx.url}/replaced")
    path.write_bytes(safetensors_file(100, 201 * KIB))
    assert isinstance(refusal(lambda: reader.read(100 * KIB, 10)), CorruptDataError)
    assert nginx.requests()[-1].status == 200  # If-Range did not match


def test_empty_missing_and_compressible_files(nginx: Nginx, remote: Remote) -> None:
    folder = WebFolder(remote, nginx.url)
    (nginx.root / "empty").write_bytes(b"")
    (nginx.root / "text.json").write_bytes(b" " * 100_000)
    assert refusal(lambda: header_of(folder.open("empty"))).rule == "F1"
    assert isinstance(refusal(lambda: folder.open("missing")), NotFoundError)
    assert folder.read("text.json", 100_000) == b" " * 100_000
    assert nginx.requests()[-1].body == 100_000
