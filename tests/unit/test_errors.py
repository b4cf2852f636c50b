"""Errors are also those of Python that a programmer expects, and keep what they say in any case."""

import errno
import pickle

import pytest

from blobstore import errors
from blobstore.io.durable import os_errors


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
