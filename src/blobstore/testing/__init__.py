"""Tests for homes: the contract of every store, in a folder, in memory or on a server.

Test your own home (`blobstore.store.ports.Home`) like this::

    from blobstore.testing import StoreTests


    class TestMyHome(StoreTests):
        def new_home(self, folder):
            return MyHome(folder)

An archive is not a home: it is written once, and read afterwards. `ReadingTests` tests what models
are read from (`blobstore.store.ports.Readable`).

pytest runs all the tests. ``folder`` is a new, empty folder for each test. Override
`StoreTests.other_reader` for homes that several processes share.
"""

from collections.abc import Sequence
from pathlib import Path

from blobstore.store.memory import MemoryStore
from blobstore.store.ports import Home
from blobstore.store.transfer import transfer
from blobstore.testing.blobs import BlobTests, ReadingTests as ReadingTests
from blobstore.testing.models import ModelTests, SignatureTests, TransferTests


class StoreTests(ReadingTests, BlobTests, ModelTests, TransferTests, SignatureTests):
    """Tests of everything that a home promises. Subclass it, and define `new_home`."""

    def fill(self, folder: Path, source: MemoryStore, names: Sequence[str]) -> Home:
        home = self.new_home(folder)
        transfer(names, source, home)
        return self.other_reader(home)
