"""Published checkpoints have their published parameter counts, locally and from nginx."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors
from support.corpus import INDEX_NAME, refusal
from support.nginx import Nginx, nginx as run_nginx
from support.published import COUNTS, header, index, shards, write
from support.remotes import Remote, open_all

from blobstore.errors import CorruptDataError, NotFoundError
from blobstore.formats.safetensors.header import Header, header_of as read_header, parse_header
from blobstore.inspection.inspect import inspect
from blobstore.io.ranges import FileReader
from blobstore.source.files import MAX_INDEX, ShardIndex
from blobstore.source.web import WebFolder

from .test_reader import safetensors_file

KIB = 2**10
SHARDED = {
    repository: len(shards(repository)) for repository in COUNTS if len(shards(repository)) > 1
}


def count(headers: list[Header]) -> dict[str, int]:
    """Return the elements of each dtype."""
    counts: Counter[str] = Counter()
    for one in headers:
        for entry in one.tensors.values():
            counts[entry.dtype.value] += math.prod(entry.shape)
    return dict(counts)


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    """A web server with all repositories, laid out as the Hub has them."""
    root = tmp_path_factory.mktemp("hub")
    for repository in COUNTS:
        write(repository, root / repository / "resolve" / "main")
    with run_nginx(tmp_path_factory.mktemp("nginx"), root) as running:
        yield running


@pytest.fixture
def remote() -> Iterator[Remote]:
    """A client with connections of its own."""
    with Remote() as made:
        yield made


@pytest.mark.parametrize("repository", COUNTS)
def test_headers_have_the_published_counts(repository: str) -> None:
    headers = [header(tensors) for tensors in shards(repository).values()]
    assert count([parse_header(text[8:], None) for text in headers]) == COUNTS[repository]


@pytest.mark.parametrize("repository", [name for name in COUNTS if name not in SHARDED])
def test_files_are_read_as_the_reference_reads_them(repository: str, tmp_path: Path) -> None:
    path = write(repository, tmp_path) / "model.safetensors"
    with FileReader(path) as reader, safetensors.safe_open(path, "numpy") as reference:
        ours = read_header(reader)
        assert count([ours]) == COUNTS[repository]
        assert set(ours.tensors) == set(reference.keys())
    assert path.stat().st_blocks < 2000  # the data are a hole


def test_what_else_is_published_of_bloom() -> None:
    assert SHARDED == {"EleutherAI/gpt-neox-20b": 46, "bigscience/bloom": 72}
    document = json.loads(index("bigscience/bloom"))
    assert document["metadata"] == {"total_size": 352494542848}
    assert document["weight_map"]["h.0.input_layernorm.bias"] == "model_00002-of-00072.safetensors"
    layer = header(shards("bigscience/bloom")["model_00012-of-00072.safetensors"])
    entry = parse_header(layer[8:], None).tensors["h.10.input_layernorm.weight"]
    assert (entry.dtype.value, entry.shape, entry.begin, entry.end) == (
        "BF16",
        (14336,),
        3288649728,
        3288678400,
    )


def header_length(repository: str, name: str) -> int:
    return int.from_bytes(header(shards(repository)[name])[:8], "little")


@pytest.mark.lab
@pytest.mark.parametrize("repository", COUNTS)
def test_a_web_server_gives_the_same_headers(repository: str, nginx: Nginx, remote: Remote) -> None:
    nginx.requests()
    folder = WebFolder(remote, f"{nginx.url}/{repository}/resolve/main")
    names = sorted(shards(repository))
    if repository in SHARDED:
        parsed = ShardIndex.parse(folder.read(INDEX_NAME, MAX_INDEX))
        assert sorted(set(parsed.weight_map.values())) == names
    with folder.reading(names, read_header) as found:
        headers = list(found)
    assert count(headers) == COUNTS[repository]
    for name, remote_header in zip(names, headers, strict=True):
        with FileReader(nginx.root / repository / "resolve" / "main" / name) as reader:
            assert remote_header == read_header(reader)
    asked = nginx.requests()
    lengths = [header_length(repository, name) for name in names]
    assert len(asked) == sum(2 if 8 + length > 64 * KIB else 1 for length in lengths) + (
        repository in SHARDED
    )
    assert len({request.connection for request in asked}) <= 16
    shard_bytes = sum(request.sent for request in asked if not request.path.endswith(".json"))
    assert shard_bytes <= sum(length + 128 * KIB for length in lengths)


@pytest.mark.lab
def test_bloom_in_73_requests(nginx: Nginx, remote: Remote) -> None:
    nginx.requests()
    folder = WebFolder(remote, f"{nginx.url}/bigscience/bloom/resolve/main")
    names = sorted(set(ShardIndex.parse(folder.read(INDEX_NAME, MAX_INDEX)).weight_map.values()))
    assert len(open_all(folder, names)) == 72
    assert len(nginx.requests()) == 73


@pytest.mark.lab
@pytest.mark.parametrize("repository", COUNTS)
def test_inspections_have_the_published_counts(repository: str, nginx: Nginx) -> None:
    nginx.requests()
    here = inspect(nginx.root / repository / "resolve" / "main")
    there = inspect(
        f"hf://{repository}" if "/" in repository else f"{nginx.url}/{repository}/resolve/main",
        endpoint=nginx.url,
    )
    assert dict(here.parameter_count) == dict(there.parameter_count) == COUNTS[repository]
    assert here.headers == there.headers
    assert len(nginx.requests()) <= 2 * len(shards(repository)) + 1 + LOOKED_FOR


LOOKED_FOR = 4
"""What is missing here: config.json, an index or a single file, and the Hub's API."""


# What else a real server does


@pytest.mark.lab
def test_a_large_header_takes_two_requests(nginx: Nginx, remote: Remote) -> None:
    data = safetensors_file(300 * KIB)
    (nginx.root / "large").write_bytes(data)
    nginx.requests()
    reader = remote.open(f"{nginx.url}/large")
    assert read_header(reader).data_start == 300 * KIB + 8
    assert reader.read(len(data) - 4, 4) == data[-4:]
    asked = nginx.requests()
    assert [(request.status, request.range, request.body) for request in asked] == [
        (206, "bytes=0-65535", 64 * KIB),
        (206, f"bytes=65536-{300 * KIB + 7}", 236 * KIB + 8),
        (206, f"bytes={len(data) - 4}-{len(data) - 1}", 4),
    ]
    assert len({request.connection for request in asked}) == 1


@pytest.mark.lab
def test_a_file_that_is_replaced(nginx: Nginx, remote: Remote) -> None:
    path = nginx.root / "replaced"
    path.write_bytes(safetensors_file(100, 200 * KIB))
    reader = remote.open(f"{nginx.url}/replaced")
    path.write_bytes(safetensors_file(100, 201 * KIB))
    error = refusal(lambda: reader.read(100 * KIB, 10))
    assert isinstance(error, CorruptDataError)
    assert nginx.requests()[-1].status == 200  # If-Range did not match


@pytest.mark.lab
def test_empty_missing_and_short_files(nginx: Nginx, remote: Remote) -> None:
    folder = WebFolder(remote, nginx.url)
    (nginx.root / "empty").write_bytes(b"")
    (nginx.root / "short").write_bytes(b"{}")
    assert refusal(lambda: read_header(folder.open("empty"))).rule == "F1"
    assert refusal(lambda: read_header(folder.open("short"))).rule == "F1"
    assert isinstance(refusal(lambda: folder.open("missing")), NotFoundError)
    assert folder.read("short", 2) == b"{}"


@pytest.mark.lab
def test_nothing_is_compressed_on_the_way(nginx: Nginx, remote: Remote) -> None:
    (nginx.root / "text.json").write_bytes(b" " * 100_000)
    assert remote.read_page(f"{nginx.url}/text.json", 100_000)[0] == b" " * 100_000
    assert nginx.requests()[-1].body == 100_000
