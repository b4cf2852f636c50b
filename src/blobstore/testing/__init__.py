"""Tests for homes: what every store has to do, be it in a folder, in memory or behind a server.

Test an own home (`blobstore.store.ports.Home`) like this::

    from blobstore.testing import StoreTests


    class TestMyHome(StoreTests):
        def new_home(self, folder):
            return MyHome(folder)

pytest runs all of them. ``folder`` is an empty folder, a new one for each test. Override
`StoreTests.other_reader` for homes that several processes share.
"""

from blobstore.testing.blobs import BlobTests
from blobstore.testing.models import ModelTests, TransferTests


class StoreTests(BlobTests, ModelTests, TransferTests):
    """Tests of everything that a home promises. Subclass it, and define `new_home`."""
