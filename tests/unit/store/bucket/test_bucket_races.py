"""Writers of one tag, and clean-ups beside writers, in threads on a bucket in memory."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.bucket_work import (
    BLOBS,
    TAG,
    Done,
    check_moves,
    check_whole,
    come_and_go,
    prune,
    race,
    store_of,
)
from support.buckets import memory_store

from blobstore.store.bucket.leases import Lease
from blobstore.testing.blobs import commit, manifest_of

_LEASES_S = (1.0, 10.0, 100.0)


@pytest.mark.parametrize(
    "count", [20, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_no_move_of_a_tag_is_lost(count: int) -> None:
    store = memory_store()
    commit(store, str(TAG), b"first")
    first = manifest_of(b"first").digest.hex
    with ThreadPoolExecutor(2) as pool:
        stores = [store_of(store.address, {}, 900) for _ in range(2)]
        done = list(pool.map(lambda n: race(stores[n], n, count), range(2)))
    check_moves(store, first, [move for one in done for move in one.moves])
    counts = done[0].counts + done[1].counts
    assert counts["lost"] == counts["named"]


@pytest.mark.parametrize(
    "count", [15, pytest.param(700, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_prune_beside_imports(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three writers of models that share blobs, and a clean-up of blobs of any age beside them.

    If the machine stops a thread for longer than its lease counts, what the others see shows
    nothing. Then all of it is done again, with longer leases.
    """
    lapsed: list[bool] = []
    close = Lease.close

    def noted(lease: Lease) -> None:
        lapsed.append(lease.has_lapsed)
        close(lease)

    monkeypatch.setattr(Lease, "close", noted)
    for lease_s in _LEASES_S:
        lapsed.clear()
        try:
            prune_beside_imports(count, lease_s)
        except AssertionError:
            if any(lapsed) and lease_s != _LEASES_S[-1]:
                continue
            raise
        return


def prune_beside_imports(count: int, lease_s: float) -> None:
    store = memory_store(lease_s)
    with ThreadPoolExecutor(4) as pool:
        writers = [
            pool.submit(come_and_go, store_of(store.address, {}, lease_s), number, count)
            for number in range(3)
        ]
        pruning: list[Done] = []
        while not all(writer.done() for writer in writers):
            pruning.append(prune(store_of(store.address, {}, lease_s), 1))
            check_whole(store)
        counts = sum((writer.result().counts for writer in writers), Counter[str]())
    pruning.append(prune(store, 1))  # the writers may have ended before the first one
    pruned = sum((one.counts for one in pruning), Counter[str]())
    check_whole(store)
    assert pruned["pruned"] > 0
    assert not counts["make: NotFoundError"] + counts["find: NotFoundError"]
    assert counts["make"] + counts["find"] + counts["copy"] + counts["remove"] > count
    assert len(store.blobs.listing()) <= BLOBS
