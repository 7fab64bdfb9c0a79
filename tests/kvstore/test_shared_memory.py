"""Memory that the processes of one host share: messages, areas for sums, and stores that use them."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np
import pytest

from tests.kvstore.ranks import run_ranks
from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.arrays.contiguous import pieces
from weftplan.kvstore.distributed.transport.shared_memory import Area, Areas, SharedMemory
from weftplan.kvstore.distributed.transport.wire import SIZE

shares_memory = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not hasattr(os, "memfd_create"),
    reason="processes share no memory on this kind of machine",
)


def make_two_ends() -> tuple[SharedMemory, SharedMemory]:
    """Return the shared memory of two ranks, each as one process has it."""
    first, second = Areas.new(), Areas.new()
    assert first is not None
    assert second is not None
    return (
        SharedMemory(first, {1: Areas.accept(second.offer())}),
        SharedMemory(second, {0: Areas.accept(first.offer())}),
    )


@shares_memory
def test_messages_come_in_order():
    """A message is missing until it is sent, arrives unchanged, and stays valid while its sender sends one more.

    After ``begin``, which starts a new agreement, messages of the earlier agreement count as missing.
    """
    first, second = make_two_ends()
    for step in range(5):
        told = bytes([step]) * (step * 1000)
        first.send(told)
        assert first.missing([1]) == [1]
        second.send(b"x" + told[:10])
        assert first.missing([1]) == [] == second.missing([0])
        assert bytes(first.received(1)) == b"x" + told[:10]
        kept = second.received(0)
        first.send(b"later")
        assert bytes(kept) == told
        second.send(b"later")
        assert bytes(second.received(0)) == b"later"
    first.begin(1)
    second.begin(1)
    first.send(b"anew")
    second.send(b"anew too")
    assert first.missing([1]) == []
    assert bytes(first.received(1)) == b"anew too"
    for _ in range(2):  # without waiting until the first rank has read it
        second.send(b"gone on")
    assert first.missing([1]) == [1]
    assert first.behind([1]) == [] == second.missing([])
    assert second.behind([0]) == [0]
    first.begin(2)  # rank 1 has not begun it: its messages do not count
    first.send(b"after a loss")
    second.send(b"before it")
    assert first.missing([1]) == [1]


@shares_memory
def test_room_grows_and_is_read_only_for_others():
    """The other process reads arrays of any size and cannot write to them; reading beyond the area is an error."""
    first, second = make_two_ends()
    for size in (10, 3_000_000, 5):
        area = first.mine.shares
        area.reach(size)
        area.payload[:size] = np.arange(size) % 251
        seen = second.shares(0, size)
        assert (seen[:size] == np.arange(size) % 251).all()
        with pytest.raises(ValueError, match="read-only"):
            seen[0] = 1
    with pytest.raises(KVStoreError, match="rank 0 shares less memory"):
        second.sums(0, 1 << 22)


@shares_memory
def test_hostile_lengths_are_errors():
    """A length beyond a message raises an error that names the rank."""
    first, second = make_two_ends()
    first.send(b"")
    second.send(b"")
    second.mine.shares.words[1 + 8192 // 8] = SIZE + 1
    with pytest.raises(KVStoreError, match=f"rank 1 sent {SIZE + 1} bytes"):
        first.received(1)


@shares_memory
def test_areas_of_others_are_recognised():
    """An offer of shared memory is refused if its host, process, file or number of words is wrong."""
    area = Area.new()
    host, process, file, mark = area.offer().decode().split()
    for words in ([host + "x", process, file, mark], [host, process, file, "00" * 16], [host, process, file]):
        with pytest.raises(ValueError, match=r"host|another file|unpack"):
            Area.accept(words)
    with pytest.raises(OSError, match="proc"):
        Area.accept([host, "0", file, mark])
    assert Area.accept([host, process, file, mark]).data[48:64].hex() == mark


def test_pieces_cover_a_range_once():
    """``pieces`` of a range of concatenated arrays are exactly that range, for any bounds."""
    arrays = [np.arange(3), np.arange(0), np.arange(3, 9).reshape(2, 3), np.arange(9, 10)]
    for first in range(11):
        for end in range(first, 11):
            actual = list(pieces(arrays, first, end))
            assert [value for _, piece in actual for value in piece] == list(range(first, end))
            assert all(place == piece[0] for place, piece in actual)


@shares_memory
@pytest.mark.shows("WEFTPLAN_KVSTORE_SHARED_MEMORY")
def test_sums_of_growing_and_shrinking_arrays(tmp_path: Path):
    """Arrays of very different sizes, pushed without a pause, are summed over three ranks.

    This holds with shared memory and without.

    Shared memory needs no merge buffers. A failed gradient raises its error on every rank; a later push stores its own
    sum.
    """
    run_ranks(
        tmp_path,
        3,
        """
        for shared in (False, True):
            os.environ["WEFTPLAN_KVSTORE_SHARED_MEMORY"] = str(int(shared))
            kv = mx.kv.create("dist_sync")
            assert kv._group.is_atomic == shared
            sizes = [3000, 70000, 5, 2000, 200001, 1]
            for i, n in enumerate(sizes):
                kv.init(i, mx.nd.zeros((n,)))
            chance = np.random.default_rng(5)
            rounds = [chance.permutation(len(sizes)).tolist() for _ in range(12)]
            for step, order in enumerate(rounds):
                grads = {i: np.arange(sizes[i]) % 97 + 1000 * rank + step for i in order}
                for i in order:
                    kv.push(i, mx.nd.array(grads[i].astype("f4")))
                outs = {i: mx.nd.empty((sizes[i],)) for i in order}
                for i in reversed(order):
                    kv.pull(i, out=outs[i])
                for i in order:
                    assert (outs[i].asnumpy() == 3 * (grads[i] - 1000 * rank) + 3000).all(), (step, i)
            figures = kv.statistics()
            planned = kv.buffer_bytes([(n, 4 * n) for n in sizes], [mx.cpu()], updates=False)
            assert figures["merged_bytes"] == (0 if shared else 4 * sum(sizes)), figures
            assert not shared or planned["merged"] == 0
            before = value(0, (3000,))
            broken = mx.nd.ones((3000,))
            if rank == 1:
                spoil(broken)
            kv.push(0, broken)
            kv.push(0, mx.nd.ones((3000,)))  # nobody has been told yet
            try:
                value(0, (3000,))
                raise AssertionError("no error")
            except (KVStoreError, ValueError) as error:
                assert "no data left" in str(error), error
            kv.push(0, mx.nd.ones((3000,)))
            assert (value(0, (3000,)) == 3).all()
        """,
    )
