"""Sums over processes that are one compiled call: what it does, and that it leaves what takes long to the driver."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.kvstore.ranks import run_ranks
from tests.kvstore.test_shared import shares_memory, two
from weftplan.kvstore.distributed.transport.shared_memory import SharedMemory
from weftplan.kvstore.distributed.transport.wire import Kind, encoded
from weftplan.ops.compiled.addresses import address
from weftplan.ops.compiled.exchange import rendezvous
from weftplan.ops.compiled.exchange.rendezvous import BEGUN, DONE, TOLD, MeetingSum
from weftplan.ops.compiled.exchange.sums import Pieces, compiled_pieces

SIZE, CUT = 37, 20


class Rank:
    """One of two processes: the first adds the first elements, the second one the others."""

    def __init__(self, place: int, memory: SharedMemory) -> None:
        self.place, self.memory = place, memory
        self.share = np.arange(SIZE, dtype=np.float32) + 1000 * place
        self.shown, self.total = (np.zeros(SIZE, np.float32) for _ in range(2))
        self.sums = np.zeros((2, SIZE), np.float32)
        self.ranges = [slice(CUT), slice(CUT, SIZE)]

    def sum_with(self, other: Rank) -> MeetingSum:
        """What makes the sum with the other one."""
        mine, theirs = self.ranges[self.place], self.ranges[other.place]
        terms = [self.share, other.shown] if self.place == 0 else [other.shown, self.share]
        return self.memory.sum_of(
            [other.place],
            steps(1, (theirs, self.share, self.shown)),
            [steps(2, (mine, *terms, sums)) for sums in self.sums],
            [
                steps(1, (mine, self.sums[turn], self.total), (theirs, other.sums[turn], self.total))
                for turn in range(2)
            ],
            heads(0),
        )


def steps(terms: int, *pieces: object) -> Pieces:
    """Pieces of arrays: (which elements, terms…, target)."""
    table = [(arrays[0][where].nbytes, *[address(one[where]) for one in arrays]) for where, *arrays in pieces]
    found = compiled_pieces(table, terms, np.dtype(np.float32))
    assert found is not None
    return found


def heads(sequence: int) -> bytes:
    """Both messages of a sum."""
    return b"".join(encoded(kind, sequence, b"the same", 4 * SIZE) for kind in (Kind.READY, Kind.SUMMED))


def pair() -> tuple[Rank, Rank, MeetingSum, MeetingSum]:
    """Two processes, and their sums."""
    one, other = (Rank(place, memory) for place, memory in enumerate(two()))
    return one, other, one.sum_with(other), other.sum_with(one)


@shares_memory
def test_a_sum_goes_as_far_as_the_others_have_come():
    """And its result changes last; it can be made again, and then leaves the sums before it where they are."""
    one, other, first, second = pair()
    want = one.share + other.share
    for sequence in (3, 4, 5):
        before = one.sums[1 - sequence % 2].copy()
        one.total[:] = other.total[:] = 0
        assert one.memory.make(first, sequence) == BEGUN
        assert one.memory.make(first, None) == BEGUN
        assert other.memory.make(second, sequence) == TOLD
        assert not other.total.any()
        assert one.memory.make(first, None) == DONE
        assert other.memory.make(second, None) == DONE
        np.testing.assert_array_equal(one.total, want)
        np.testing.assert_array_equal(other.total, want)
        np.testing.assert_array_equal(one.sums[1 - sequence % 2], before)
        np.testing.assert_array_equal(one.sums[sequence % 2][one.ranges[0]], want[one.ranges[0]])
        one.share += 1
        want += 1


@shares_memory
@pytest.mark.parametrize("sent", [1, 2])
def test_whose_message_is_another_one_is_left_to_the_caller(sent: int):
    """Nothing is added to what another rank means otherwise, and nothing is taken where one has failed to add."""
    one, other, first, _ = pair()
    assert one.memory.make(first, 3) == BEGUN
    if sent == 2:
        other.memory.send(heads(3)[: len(heads(3)) // 2])
        assert one.memory.make(first, None) == TOLD
    other.memory.send(encoded(Kind.FAILED, 3, b"the same", 4 * SIZE, b"no memory"))
    for _ in range(2):
        assert one.memory.make(first, None) == (BEGUN if sent == 1 else TOLD)
    assert one.sums.any() == (sent == 2)
    assert not one.total.any()
    assert one.memory.missing([1]) == []
    assert bytes(one.memory.received(1)).endswith(b"no memory")


@shares_memory
@pytest.mark.parametrize("size", [5000, 300])
def test_the_same_arrays_again_and_again(tmp_path: Path, size: int):
    """Sums of arrays that come again are right whoever is late, and whatever has happened in between."""
    run_ranks(
        tmp_path,
        3,
        """
        from weftplan.kvstore.distributed.transport.shared_memory import SharedMemory
        keys, size = ["a", "b"], int(os.environ["SIZE"])
        kv.init(keys, [mx.nd.zeros((size,)) for _ in keys])
        gradients, outs = ([mx.nd.zeros((size,)) for _ in keys] for _ in range(2))
        make, stages = SharedMemory.make, []
        def counted(self, *given):
            stages.append(make(self, *given))
            return stages[-1]
        SharedMemory.make = counted
        def exchange(step, failing=None):
            for place, gradient in enumerate(gradients):
                gradient[:] = step + 10 * place + 100 * rank
            if failing == rank:
                spoil(gradients[1])
            if step % 4 == rank:
                time.sleep(0.02)
            kv.push(keys, gradients)
            kv.pull(keys, outs)
            return [out.asnumpy() for out in outs]
        def check(step):
            for place, sums in enumerate(exchange(step)):
                assert (sums == 3 * (step + 10 * place) + 300).all(), (step, place, sums)
        for step in range(12):
            check(step)
        assert 3 in stages and 1 in stages, stages
        for failing in range(3):
            try:
                exchange(7, failing)
            except Exception as error:
                assert "no data left" in str(error), error
            else:
                raise AssertionError("no error")
            for gradient in gradients:
                try:
                    gradient.wait_to_read()
                except Exception:
                    pass
            for step in range(4):
                check(step)
        kv.push("a" if rank else "b", mx.nd.zeros((size,)))
        says(lambda: value("a" if rank else "b", (size,)), "the processes do not do the same")
        for step in range(4):
            check(step)
        if rank == 2:
            kv.close()
        else:
            for step in range(8):
                for sums in exchange(step):
                    pass
                assert (sums == 2 * (step + 10) + 100).all(), sums
        """,
        SIZE=str(size),
    )


@shares_memory
@pytest.mark.parametrize("size", [5000, 300])
def test_a_pull_while_others_are_awaited(tmp_path: Path, size: int):
    """Is written by the exchange, which has begun without it."""
    run_ranks(
        tmp_path,
        2,
        """
        size = int(os.environ["SIZE"])
        share = np.full(size, 1 + rank, "f4")
        total, pulled = np.zeros(size, "f4"), np.zeros(size, "f4")
        also, begun = [], os.path.join(os.environ["FOLDER"], "begun")
        def exchange(group):
            for _ in group.sum([share], [total], "sum it", None, also):
                if step == 2 and rank == 0 and not also:
                    assert group._known["sum it", 0].work.stage == 1
                    also.append([pulled])
                    open(begun, "w").close()
                yield
        for step in range(3):
            while step == 2 and rank == 1 and not os.path.exists(begun):
                time.sleep(0.01)
            total[:] = 0
            kv._sequencer.call(exchange)
            assert (total == 3).all()
        assert (pulled == 3).all() == (rank == 0)
        """,
        FOLDER=str(tmp_path),
        SIZE=str(size),
    )


@shares_memory
def test_what_others_read_is_written_in_the_way_that_took_less_time():
    """Both ways are tried now and then, by all at once; neither changes a bit, wherever arrays begin and end."""
    one, other, first, second = pair()
    want = one.share + other.share
    ways = []
    for sequence in range(600):
        one.total[:] = other.total[:] = 0
        assert one.memory.make(first, sequence) == BEGUN
        assert other.memory.make(second, sequence) == TOLD
        assert one.memory.make(first, None) == DONE
        assert other.memory.make(second, None) == DONE
        np.testing.assert_array_equal(one.total, want)
        np.testing.assert_array_equal(other.total, want)
        ways.append(first._words[rendezvous._PAST])
        if sequence % 128 < 8:
            assert ways[-1] == second._words[rendezvous._PAST] == (sequence % 128 >= 4)
        else:
            first._words[rendezvous._TIMES : rendezvous._TIMES + 2] = (1, 2) if sequence < 256 else (2, 1)
    assert not any(ways[9:128] + ways[137:256])
    assert all(ways[265:384] + ways[393:512])
