"""An application over a small store, called without sockets."""

import pytest
from support.large_models import blob_of
from support.stores import blob_path, link_by_hand
from support.web_client import Client

from blobstore.store.local.store import Store
from blobstore.web.application import Hosts, application

HOSTILE = "<img src=x onerror=alert(1)>\u202e.weight"
PLAIN = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def model(store: Store) -> str:
    blobs = {PLAIN: blob_of([PLAIN], "a"), HOSTILE: blob_of([HOSTILE, "a.norm"], "a")}
    link_by_hand(store, "small:int4", blobs)
    return "small:int4"


@pytest.fixture
def broken(store: Store) -> str:
    data = blob_of([PLAIN], "b")
    link_by_hand(store, "broken:int4", {PLAIN: data})
    blob_path(store, data).unlink()
    return "broken:int4"


@pytest.fixture
def client(store: Store, model: str, broken: str) -> Client:
    return Client(application(store, Hosts("127.0.0.1", ["models.example"])))
