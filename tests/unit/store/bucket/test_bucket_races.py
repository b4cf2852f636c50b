"""Writers of one tag, and clean-ups beside writers, in threads on a bucket in memory."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.bucket_work import TAG, check_moves, check_whole, come_and_go, prune, race
from support.buckets import memory_store, same

from blobstore.testing.blobs import commit, manifest_of

_LONG = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=_LONG)])
def test_no_move_of_a_tag_is_lost(count: int) -> None:
    store = memory_store()
    commit(store, str(TAG), b"first")
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda number: race(same(store), number, count), range(2)))
    moves = [move for one in done for move in one.moves]
    check_moves(store, manifest_of(b"first").digest.hex, moves)


@pytest.mark.parametrize("count", [6, pytest.param(700, marks=_LONG)])
def test_prune_beside_imports(count: int) -> None:
    """Three writers of models that share blobs, and a clean-up of blobs of any age beside them."""
    store = memory_store()
    pruned, counts = Counter[str](), Counter[str]()
    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(come_and_go, same(store), seed, count) for seed in range(3)]
        for _ in range(count // 2):
            pruned += prune(same(store)).counts
            check_whole(store)
        for writer in writers:
            counts += writer.result().counts
    pruned += prune(store).counts
    check_whole(store)
    assert pruned["pruned"] > 0
    assert counts["make"] > 0
    assert not counts["make: NotFoundError"]
