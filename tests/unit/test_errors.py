"""Errors are also those of Python that a programmer expects, and keep what they say in any case."""

import errno
import pickle
from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint

import blobstore
from blobstore import errors
from blobstore.io.durable import os_errors
from blobstore.store.local.store import Store
from blobstore.store.memory import MemoryStore


@pytest.mark.parametrize(
    ("ours", "general", "builtin"),
    [
        (errors.UsageError, errors.BlobStoreError, ValueError),
        (errors.UnsupportedSourceError, errors.BlobStoreError, ValueError),
        (errors.MissingFileError, errors.NotFoundError, FileNotFoundError),
        (errors.AccessError, errors.StorageError, PermissionError),
        (errors.ModelNotFoundError, errors.NotFoundError, KeyError),
        (errors.TensorNotFoundError, errors.NotFoundError, KeyError),
    ],
)
def test_both_are_caught(
    ours: type[errors.BlobStoreError],
    general: type[errors.BlobStoreError],
    builtin: type[Exception],
) -> None:
    for kind in (general, builtin):
        with pytest.raises(kind) as caught:
            raise ours("it is gone", path="/x", errno=errno.ENOENT, hint="look")
        error = caught.value
        assert isinstance(error, errors.BlobStoreError)
        again = pickle.loads(pickle.dumps(error))
        for one in (error, again, error.about(model="m"), error.without_traceback()):
            assert str(one) == one.message == "it is gone"
            assert (one.path, one.errno, one.hint) == ("/x", errno.ENOENT, "look")
        assert str(error.at("there")) == "there: it is gone"


def test_an_error_of_ours_is_not_wrapped_again() -> None:
    with pytest.raises(errors.MissingFileError, match=r"^mine$"), os_errors("write", "y"):
        raise errors.MissingFileError("mine")


def test_what_a_programmer_expects(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(FileNotFoundError):
        blobstore.read_header(tmp_path / "missing.safetensors")
    with pytest.raises(ValueError, match="int5"):
        blobstore.import_model(write_checkpoint(tmp_path / "m"), store=store, quant="int5")
    for home in (store, MemoryStore()):
        with pytest.raises(KeyError) as caught:
            blobstore.open_model("m", store=home)
        assert "model 'm:latest'" in str(caught.value)
    blobstore.import_model(tmp_path / "m", "m", store=store)
    with blobstore.open_model("m", store=store) as model, pytest.raises(KeyError):
        model["missing"]
