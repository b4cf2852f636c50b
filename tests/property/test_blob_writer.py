"""BlobWriter: bytes and digest are right for any pieces, in any order, from any threads."""

import hashlib
import random
import shutil
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings, strategies as st
from support.pieces import cut, put_all, writing

from blobstore.io import durable as files
from blobstore.io.durable import PAGE
from blobstore.store.local import session

NEAR_PAGES = st.builds(
    lambda pages, more: max(1, pages * PAGE + more), st.integers(0, 6), st.integers(-2, 2)
)
SIZES = st.integers(1, 100) | NEAR_PAGES | st.integers(1, 5 * PAGE)
GAPS = st.just(0) | SIZES
DATA = random.Random(2).randbytes(2**22)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("writer")


@settings(max_examples=15)
@given(
    lengths=st.lists(st.tuples(SIZES, GAPS, st.booleans()), min_size=1, max_size=25),
    chance=st.randoms(use_true_random=False),
    threads=st.integers(1, 8),
    direct_from=st.sampled_from([1, PAGE, 2 * PAGE, 2**18]),
)
def test_bytes_and_digest(
    folder: Path,
    lengths: list[tuple[int, int, bool]],
    chance: random.Random,
    threads: int,
    direct_from: int,
) -> None:
    size = sum(length + gap for length, gap, _ in lengths)
    data = DATA[:size]
    pieces = cut(data, lengths, chance)
    offsets = [piece.offset for piece in pieces]
    chance.shuffle(pieces)
    with (
        mock.patch.object(session, "DIRECT_FROM", direct_from),
        mock.patch.object(files, "DIRECT_FROM", direct_from),
        writing(folder, size) as (blob_writer, made),
    ):
        given_back = put_all(blob_writer, pieces, threads)
    (blob,) = made
    assert sorted(given_back) == offsets
    assert blob.digest.hex == hashlib.sha256(data).hexdigest()
    assert blob.path.read_bytes() == data
    shutil.rmtree(folder)
    folder.mkdir()
