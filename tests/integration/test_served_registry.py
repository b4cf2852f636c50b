"""`blobstore serve` as a process: real clients, many at once, signals, and ports."""

from __future__ import annotations

import hashlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest
from support import PYCODE
from support.patient import Served, serving
from support.registries import cannot_run, skopeo

import blobstore
from blobstore import pull, verify
from blobstore.formats.documents import Descriptor, Manifest
from blobstore.names import Digest, ModelName
from blobstore.store.local.store import Store

pytestmark = pytest.mark.lab

LARGE = 2**26  # more than waits in the kernel
PATIENCE_S = 120
COMMAND = (sys.executable, "-m", "blobstore")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with a quantized model, and one with a large blob of zeros."""
    store = blobstore.open_store(tmp_path_factory.mktemp("served") / "store")
    blobstore.import_model(PYCODE, "pycode-5m:int4", store=store, quant="int4")
    zeros = bytes(LARGE)
    with store.session() as session:
        session.put(zeros)
        layer = Descriptor("application/vnd.ollama.image.tensor", Digest.of(zeros), LARGE)
        session.publish(ModelName.parse("large:x"), Manifest(layers=(layer,)))
    return store


@pytest.fixture
def served(store: Store) -> Iterator[Served]:
    with serving("--store", str(store.root), errors=subprocess.STDOUT) as running:
        yield running


def large_blob(store: Store) -> str:
    return f"/v2/library/large/blobs/{store.manifest('large:x').layers[0].digest}"


def blobs_of(store: Store) -> dict[str, bytes]:
    return {
        blob.hex: (store.root / "blobs" / blob.file_name).read_bytes() for blob in wanted(store)
    }


def wanted(store: Store) -> list[Digest]:
    return [blob.digest for blob in store.manifest("pycode-5m:int4").descriptors]


def test_skopeo_copies_a_model(served: Served, store: Store, tmp_path: Path) -> None:
    place = f"docker://{served.host}/library/pycode-5m:int4"
    skopeo("copy", "--src-tls-verify=false", place, f"dir:{tmp_path}/dir")
    for digits, data in blobs_of(store).items():
        assert (tmp_path / "dir" / digits).read_bytes() == data
    skopeo("copy", "--preserve-digests", "--src-tls-verify=false", place, f"oci:{tmp_path}/oci:m")
    (entry,) = json.loads((tmp_path / "oci/index.json").read_bytes())["manifests"]
    again = f"docker://{served.host}/library/pycode-5m@{entry['digest']}"
    skopeo("copy", "--src-tls-verify=false", again, f"dir:{tmp_path}/again")
    found = skopeo("list-tags", "--tls-verify=false", f"docker://{served.host}/library/pycode-5m")
    assert json.loads(found)["Tags"] == ["int4"]


def test_pull_gives_the_same_model(served: Served, store: Store, tmp_path: Path) -> None:
    there = blobstore.open_store(tmp_path / "there")
    done = pull(f"{served.host}/library/pycode-5m:int4", there, name="mine")
    assert there.manifest("mine").raw == store.manifest("pycode-5m:int4").raw
    assert verify(there).is_sound
    exact = f"{served.host}/library/pycode-5m:int4@{done.digest}"
    assert pull(exact, there, name="exact").digest == done.digest


def test_curl_continues_a_download(served: Served, store: Store, tmp_path: Path) -> None:
    data = max(blobs_of(store).values(), key=len)
    part = tmp_path / "part"
    part.write_bytes(data[:1000])
    place = f"http://{served.host}/v2/library/pycode-5m/blobs/{Digest.of(data)}"
    subprocess.run(["curl", "-sS", "-C", "-", "-o", part, place], check=True)
    assert part.read_bytes() == data


def test_fifty_clients_at_once(served: Served, store: Store) -> None:
    targets = [f"/v2/library/pycode-5m/blobs/{digest}" for digest in wanted(store)]

    def pulled(_number: int) -> list[str]:
        client = HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
        found = []
        for target in ("/v2/library/pycode-5m/manifests/int4", *targets):
            client.request("GET", target)
            answer = client.getresponse()
            assert answer.status == 200
            found.append(hashlib.sha256(answer.read()).hexdigest())
        client.close()
        return found

    with ThreadPoolExecutor(50) as clients:
        found = list(clients.map(pulled, range(50)))
    digits = [store.manifest("pycode-5m:int4").digest.hex, *(one.hex for one in wanted(store))]
    assert found == [digits] * 50
    assert served.end() == (0, "")


def begun(served: Served, target: str) -> socket.socket:
    """Return a client that asked for a blob, and has read little of it."""
    client = socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S)
    client.sendall(f"GET {target} HTTP/1.1\r\nHost: {served.host}\r\n\r\n".encode())
    assert client.recv(1000).startswith(b"HTTP/1.1 200 OK")
    return client


def rest(client: socket.socket) -> int:
    total = 0
    with suppress(ConnectionError):
        while piece := client.recv(2**20):
            total += len(piece)
    return total


def test_a_signal_ends_requests_in_flight(store: Store) -> None:
    place = ("--store", str(store.root))
    with (
        serving(*place, errors=subprocess.STDOUT, waits_at_end=True) as served,
        begun(served, large_blob(store)) as client,
    ):
        served.process.send_signal(signal.SIGINT)
        while True:  # it listens no more, so the signal was seen
            try:
                socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S).close()
            except ConnectionError:
                break
        assert rest(client) > LARGE - 1000
        output, _ = served.process.communicate(timeout=PATIENCE_S)
        assert (served.process.returncode, output) == (0, "")


def test_a_client_that_never_reads_does_not_keep_the_server(served: Served, store: Store) -> None:
    with begun(served, large_blob(store)):
        code, output = served.end()
    assert code == 0
    assert "Traceback" not in output


def refused(*line: str | Path, without: Sequence[str] = ()) -> str:
    """Return what a server prints that can't start; ``without``: a command that runs it."""
    whole = [*without, *COMMAND, "serve", *map(str, line)]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


def test_two_servers_on_a_port(served: Served, store: Store) -> None:
    message = refused("--port", str(served.port), "--store", store.root)
    taken = f"Error: port {served.port} of 127.0.0.1 is in use by another process"
    assert message.splitlines()[0] == taken
    assert "--port N" in message


def test_a_port_for_root(store: Store) -> None:
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 80:
        cannot_run("every user may use port 80 here")
    without = ["setpriv", "--bounding-set=-net_bind_service"]
    message = refused("--port", "80", "--store", store.root, without=without)
    assert message.startswith("Error: port 80 of 127.0.0.1 may not be used\nHint: ")
