"""Tests for homes: the contract of every store, in a folder, in memory or behind a server.

Test your own home (`blobstore.store.ports.Home`) like this::

    from blobstore.testing import StoreTests


    class TestMyHome(StoreTests):
        def new_home(self, folder):
            return MyHome(folder)

pytest runs all the tests. ``folder`` is a new, empty folder for each test. Override
`StoreTests.other_reader` for homes that several processes share.
"""

from blobstore.testing.blobs import BlobTests
from blobstore.testing.models import ModelTests, TransferTests


class StoreTests(BlobTests, ModelTests, TransferTests):
    """Tests of everything that a home promises. Subclass it, and define `new_home`."""
