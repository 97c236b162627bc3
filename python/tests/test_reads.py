"""Which blocks may still be read, and which hold what their hash says."""

from collections import Counter

from kvferry.vllm.reads import Reads

A, B, C = (bytes([n]) * 32 for n in (1, 2, 3))


def test_a_store_ends_when_every_rank_is_done():
    reads = Reads()
    store = reads.add([1, 2], [A, B], ranks=2)
    assert reads.store_of(A) == reads.store_of(B) == store
    reads.ended(Counter({store: 1}))
    assert reads.unfinished([store]) == {store}
    reads.ended(Counter({store: 1}))
    assert reads.unfinished([store]) == set() and reads.store_of(A) is None
    reads.ended(Counter({store: 1, 99: 1}))
    assert reads.reuse([1, 2]) == []


def test_reuse_names_the_stores_that_read():
    reads = Reads()
    first, second = reads.add([1, 2], [A, B], 1), reads.add([2, 3], [B, C], 1)
    assert reads.reuse([7]) == []
    assert reads.reuse([2]) == [first, second]
    # Neither counts as a store of these hashes any more: another one must be begun.
    assert reads.store_of(A) is None and reads.store_of(C) is None
    # Until they ended they are revoked again, which does nothing.
    assert reads.reuse([1]) == [first]
    reads.ended(Counter({first: 1, second: 1}))
    assert reads.reuse([1, 2, 3]) == []
    assert not reads._by_block and not reads._by_hash and not reads._unfinished


def test_content_belongs_to_a_weights_generation():
    reads = Reads()
    assert not reads.current(1)  # nobody said that it was written
    reads.reuse([1])
    assert reads.current(1)
    store = reads.add([1], [A], 1)
    reads.forget_contents()
    assert not reads.current(1) and reads.store_of(A) is None
    assert reads.reuse([1]) == [store]
    assert reads.current(1)
