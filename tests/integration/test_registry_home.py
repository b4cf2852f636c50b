"""A real registry does what `StoreTests` says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.registries import Registry, registry

from blobstore.io.http.client import HttpClient
from blobstore.store.registry.store import RegistryStore
from blobstore.testing import StoreTests


@pytest.mark.lab
class TestDockerRegistry(StoreTests):
    """A new one for each test: it starts in 20 ms."""

    names = ("m", "m:tag", "ns/m:tag", "n:Tag")
    spellings = ("qwen:Q4", "qwen:q4", "qwen:Q4")
    checks_manifests = True

    server: Registry
    client: HttpClient

    @pytest.fixture(autouse=True)
    def _registry(self, tmp_path: Path) -> Iterator[None]:
        with registry(tmp_path / "registry") as self.server, HttpClient() as self.client:
            yield

    def new_home(self, folder: Path) -> RegistryStore:
        return RegistryStore("registry.ollama.ai", self.client, address=self.server.url)
