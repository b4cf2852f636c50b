"""Tests for homes: what every store has to do, whether it lies in a folder, in memory or behind a server.

Who writes a home of their own (`blobstore.store.ports.Home`) writes beside it::

    from blobstore.testing import StoreTests


    class TestMyHome(StoreTests):
        def new_home(self, folder):
            return MyHome(folder)

and pytest runs them all. ``folder`` is empty, and another one for each test.
`StoreTests.other_reader` may be given, for homes that several processes share.
"""

from blobstore.testing.blobs import BlobTests
from blobstore.testing.models import ModelTests
from blobstore.testing.transfers import TransferTests


class StoreTests(BlobTests, ModelTests, TransferTests):
    """Everything that a home promises. Subclass it, and give it `new_home`."""
