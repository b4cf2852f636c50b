"""`blobstore serve` as a process: skopeo, signals, and odd clients."""

import json
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
from integration.shared_models import commit_tensors, contents, same
from support.patient import Served, serving
from support.registries import skopeo

import blobstore
from blobstore import pull
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.names import ModelName
from blobstore.store.local.store import Store

pytestmark = pytest.mark.lab

LARGE = 2**26  # more than waits in the kernel
PATIENCE_S = 600


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with a model that skopeo reads, and one with a large blob of zeros."""
    store = blobstore.open_store(tmp_path_factory.mktemp("served") / "store")
    commit_tensors(store, "m:int4", (100, 3000, 700_000), oci=True)
    with store.session() as session:
        digest = session.put(bytes(LARGE)).digest
        layer = Descriptor("application/vnd.ollama.image.tensor", digest, LARGE)
        session.publish(ModelName.parse("large:x"), Manifest(layers=(layer,)))
    return store


@pytest.fixture(scope="module")
def served(store: Store) -> Iterator[Served]:
    with serving("--store", str(store.root), errors=subprocess.STDOUT) as running:
        yield running


def test_skopeo_and_we_copy_a_model(served: Served, store: Store, tmp_path: Path) -> None:
    place = f"docker://{served.host}/library/m"
    words = ("copy", "--preserve-digests", "--src-tls-verify=false")
    skopeo(*words, f"{place}:int4", f"dir:{tmp_path}/dir")
    for digest, data in contents(store, "m:int4").items():
        assert (tmp_path / "dir" / digest.removeprefix("sha256:")).read_bytes() == data
    exact = store.manifest("m:int4").digest
    skopeo(*words, f"{place}@{exact}", f"dir:{tmp_path}/again")
    found = skopeo("list-tags", "--tls-verify=false", place)
    assert json.loads(found)["Tags"] == ["int4"]
    there = blobstore.open_store(tmp_path / "there")
    pull(f"{served.host}/library/m:int4@{exact}", there, name="mine")
    assert same(store, there, "m:int4", "mine")


def begun(served: Served, store: Store) -> socket.socket:
    """Return a client that asked for the large blob, and has read little of it."""
    client = socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S)
    target = f"/v2/library/large/blobs/{store.manifest('large:x').layers[0].digest}"
    client.sendall(f"GET {target} HTTP/1.1\r\nHost: {served.host}\r\n\r\n".encode())
    assert client.recv(1000).startswith(b"HTTP/1.1 200 OK")
    return client


def test_a_signal_ends_requests_in_flight(store: Store) -> None:
    place = ("--store", str(store.root))
    with (
        serving(*place, errors=subprocess.STDOUT, waits_at_end=True) as served,
        begun(served, store) as client,
        closing(HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)) as idle,
    ):
        idle.request("HEAD", "/v2/")
        idle.getresponse().read()
        served.process.send_signal(signal.SIGINT)
        assert idle.sock.recv(1) == b""  # so the signal was seen
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", served.port))
        left = LARGE - 1000
        while left > 0 and (piece := client.recv(2**20)):
            left -= len(piece)
        assert left <= 0
        output, _ = served.process.communicate(timeout=PATIENCE_S)
        assert (served.process.returncode, output) == (0, "")


def test_a_client_that_never_reads_does_not_keep_the_server(store: Store) -> None:
    with (
        serving("--store", str(store.root), errors=subprocess.STDOUT) as served,
        begun(served, store),
    ):
        code, output = served.end()
    assert code == 0
    assert "Traceback" not in output


def test_clients_that_connect_and_go_in_a_loop(store: Store, tmp_path: Path) -> None:
    said, place = tmp_path / "said", ("--store", str(store.root))
    with said.open("w") as errors, serving(*place, errors=errors.fileno()) as served:
        # Half of what it allows itself, and twice what it needs: connections wait 256 at a time.
        resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, (1500, 1500))
        for _ in range(4000):
            socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S).close()
        assert (*served.end(), said.read_text()) == (0, "", "")
