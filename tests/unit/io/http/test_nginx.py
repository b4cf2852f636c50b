"""What a real server does: nginx, whose log says which requests it got. Marked `lab`."""

from collections.abc import Iterator

import pytest
from support.corpus import refusal
from support.nginx import Nginx, nginx as run_nginx

from blobstore.errors import CorruptDataError
from blobstore.formats.safetensors.header import header_of
from blobstore.io.http.remote_files import Remote

from .conftest import KIB, safetensors_file

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    root = tmp_path_factory.mktemp("hub")
    with run_nginx(tmp_path_factory.mktemp("nginx"), root) as running:
        yield running


def test_ranges_are_of_one_version_of_a_file(nginx: Nginx) -> None:
    path, data = nginx.root / "large", safetensors_file(300 * KIB)
    path.write_bytes(data)
    nginx.requests()
    with Remote() as remote:
        reader = remote.open(f"{nginx.url}/large")
        assert header_of(reader).data_start == 300 * KIB + 8
        path.write_bytes(data + b"x")
        assert isinstance(refusal(lambda: reader.read(len(data) - 4, 4)), CorruptDataError)
    asked = nginx.requests()
    assert [(status, one) for status, _, one in asked] == [
        ("206", "bytes=0-65535"),
        ("206", f"bytes=65536-{300 * KIB + 7}"),
        ("200", f"bytes={len(data) - 4}-{len(data) - 1}"),  # If-Range did not match
    ]
    assert len({connection for _, connection, _ in asked}) == 1
