"""Stored values that are written when somebody wants them: nobody can tell that they were not there."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from tests.kvstore.ranks import run_to_end
from tests.kvstore.test_shared import shares_memory, two
from weftplan.engine.shield import PATIENCE_NS
from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.arrays.lazy_values import Late, LateChunk, may_be_late
from weftplan.ops.compiled.addresses import address
from weftplan.ops.compiled.exchange.sums import compiled_pieces

LOOP = """
keys, n = ["a", "b"], 5000
for key in [*keys, "c"]:
    kv.init(key, mx.nd.full((n,), 7))
gradients, outs = ([mx.nd.zeros((n,)) for _ in keys] for _ in range(2))
def step(number, ranks=range(size), late=None):
    for place, gradient in enumerate(gradients):
        gradient[:] = number + 10 * place + 100 * rank
    kv.pushpull(keys, gradients, outs)
    for place, out in enumerate(outs):
        want = len(ranks) * (number + 10 * place) + 100 * sum(ranks)
        assert (out.asnumpy() == want).all(), (number, place, out.asnumpy(), want)
    assert late is None or is_late() == late, (number, late)
def is_late():
    return [kv._stored[key].ready is None for key in keys] == [True, True]
def stored(number, ranks=range(size)):
    for place, key in enumerate(keys):
        want = len(ranks) * (number + 10 * place) + 100 * sum(ranks)
        found = value(key, (n,))
        assert (found == want).all(), (number, key, found, want)
def run(first, end):
    for number in range(first, end):
        step(number)
    assert is_late()
"""


def runs(folder: Path, count: int, body: str, **given: Any) -> None:
    """A piece of Python behind :data:`LOOP`, as by :func:`run_to_end`."""
    run_to_end(folder, count, LOOP + textwrap.dedent(body), **given)


@shares_memory
def test_what_nobody_reads_is_not_written(tmp_path: Path):
    """Until somebody does: then it is right, and written at once for a while."""
    runs(
        tmp_path,
        3,
        """
        run(0, 9)
        stored(8)
        assert not is_late()
        for number in range(9, 9 + 32):
            step(number, late=False)
        run(50, 53)
        kv.pull("b", outs[0])  # the array of another key
        assert (outs[0].asnumpy() == size * 62 + 100 * sum(range(size))).all()
        """,
    )


@shares_memory
def test_other_exchanges_come_in_between(tmp_path: Path):
    """Small ones, large ones, of one key alone, barriers, new keys and failures leave what is stored as it was."""
    runs(
        tmp_path,
        3,
        """
        kv.init("small", mx.nd.zeros((3,)))
        def small():
            kv.push("small", mx.nd.ones((3,)))
            assert (value("small") == size).all()
        def large():
            kv.push("c", mx.nd.ones((n,)))
            assert (value("c", (n,)) == size).all()
        def new():
            kv.init(f"new {number}", mx.nd.full((2 * n,), rank))
            assert (value(f"new {number}", (2 * n,)) == 0).all()
        def one():
            kv.push("b", mx.nd.ones((n,)))
            assert (value("b", (n,)) == size).all()
            step(number - 1)
        def fails():
            if rank == 1:
                spoil(gradients[1])
            kv.pushpull(keys, gradients, outs)
            try:
                outs[0].wait_to_read()
            except Exception as error:
                assert "no data left" in str(error), error
            else:
                raise AssertionError("no error")
            for array in [*gradients, *outs, *map(kv._stored.get, keys)]:
                try:
                    array.wait_to_read()
                except Exception:
                    pass
            for place, key in enumerate(keys):
                want = size * (number - 1 + 10 * place) + 100 * sum(range(size))
                assert (kv._stored[key].raw() == want).all(), key
        number = 100
        for between in (small, large, new, kv.barrier, one, fails, fails):
            for ahead in (5, 6):
                run(number, number + 40)
                number += 40
                between()
                assert not is_late()
                if between is not fails:
                    stored(number - 1)
        """,
    )


@shares_memory
def test_exchanges_that_take_turns(tmp_path: Path):
    """Each would write over the sums of the other: both write what is stored at once."""
    runs(
        tmp_path,
        2,
        """
        other, out = mx.nd.full((n,), 1 + rank), mx.nd.zeros((n,))
        run(0, 5)
        for number in range(5, 15):
            kv.pushpull("c", other, out)
            assert (out.asnumpy() == 3).all()
            assert not is_late()
            step(number, late=False)
        other[:] = 0
        kv.pushpull("c", other, out)
        out.wait_to_read()
        stored(14)
        """,
    )


@shares_memory
def test_a_rank_dies_when_others_have_added(tmp_path: Path):
    """What was stored before is there: the sums of the lost exchange are at another place."""
    runs(
        tmp_path,
        2,
        """
        run(0, 8)
        group = kv._group
        if rank == 1:
            words = group._last.short._words[2:6].copy()
            words[1] = group.sequence
            group._shared.send(words.tobytes())  # as if it had shown its share
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        for gradient in gradients:
            gradient[:] = 1000
        try:
            kv.pushpull(keys, gradients, outs)
            outs[0].wait_to_read()
        except WorkerLostError as error:
            assert "rank 1 died" in str(error), error
        else:
            raise AssertionError("no error")
        assert group._last.begun.stage == 2
        kv.recover()
        stored(7)
        """,
        ends_well=1,
    )


@shares_memory
def test_a_rank_leaves(tmp_path: Path):
    """It keeps what it had, and so do the others."""
    runs(
        tmp_path,
        3,
        """
        run(0, 7)
        if rank == 1:
            kv.close()
            time.sleep(0.5)
            stored(6)
        else:
            kv.push(keys, gradients)
            left = [0, 2]
            for number in range(7, 15):
                step(number, left)
            stored(14, left)
        """,
    )


@shares_memory
def test_a_rank_dies(tmp_path: Path):
    """What was stored before the exchange that fails is what the others go on with."""
    runs(
        tmp_path,
        3,
        """
        run(0, 8)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            kv.push(keys, gradients)
            kv.pull(keys, outs)
            [out.wait_to_read() for out in outs]
        except WorkerLostError:
            pass
        kv.recover()
        assert not is_late()
        stored(7)
        for number in range(8, 60):
            step(number, [0, 2])
        assert is_late()
        stored(59, [0, 2])
        """,
        ends_well=2,
    )


@shares_memory
def test_a_child_has_its_own(tmp_path: Path):
    """A fork copies what is stored; exchanges of the parent do not change it in the child."""
    runs(
        tmp_path,
        2,
        """
        run(0, 8)
        ready, go = os.pipe()
        child = os.fork()
        if not child:
            os.read(ready, 1)
            found = [kv._stored[key].asnumpy() for key in keys]
            want = [size * (7 + 10 * place) + 100 * sum(range(size)) for place in range(2)]
            os._exit(0 if all((one == other).all() for one, other in zip(found, want)) else 3)
        run(8, 50)
        os.write(go, b"1")
        assert os.waitpid(child, 0)[1] == 0
        stored(49)
        """,
    )


@shares_memory
@pytest.mark.parametrize("patience_ns", [PATIENCE_NS, 100_000])
@pytest.mark.parametrize("buckets", [1, 2])
def test_interrupts_at_random_moments(tmp_path: Path, buckets: int, patience_ns: int):
    """Ctrl-C leaves an exchange made or not made, on a busy machine, too, where a step may last as long as Ctrl-C is
    held back: what was pushed is summed everywhere and is what is stored, what was not can be pushed again, and nobody
    waits for ever."""
    runs(
        tmp_path,
        2,
        """
        import random, threading
        from weftplan.engine import shield
        shield.PATIENCE_NS = int(os.environ["PATIENCE"])
        chance, calm, over, hits, late = random.Random(f"{os.environ['SEED']} {rank}"), True, False, 0, 0
        def interrupted(number, frame):
            global hits
            if not calm:
                hits += 1
                raise KeyboardInterrupt
        signal.signal(signal.SIGINT, interrupted)
        def interrupt():
            while not over:
                time.sleep(chance.random() ** 2 * 0.004)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        run(0, 30)
        threading.Thread(target=interrupt, daemon=True).start()
        step_number, begun = 0, time.monotonic()
        # Whoever is interrupted pushes what it has not pushed, so all come to the same number of exchanges.
        while step_number < int(os.environ["STEPS"]):
            before = kv._group.sequence
            try:
                calm = False
                step(step_number)
                calm = True
            except KeyboardInterrupt:
                calm = True
                mx.nd.waitall()
                if kv._group.sequence == before:
                    continue
                made = kv._group.sequence - before  # one for all buckets, or one for each
                assert 1 <= made <= int(os.environ["SEED"]), made
                late += is_late()
                if chance.random() < 0.3:
                    stored(step_number)
            calm = True
            step_number += 1
        over = True
        stored(step_number - 1)
        assert hits > 20 and late > 5, (hits, late)
        """,
        SEED=str(buckets),
        PATIENCE=str(patience_ns),
        FLAGS_fuse_parameter_groups_size=str(3 - buckets),
        STEPS="3000",
    )


@shares_memory
def test_who_was_taken_for_dead_is_told_that_its_values_are_lost():
    """The others may have written over them."""
    first, second = two()
    array = may_be_late(mx.nd.zeros((4,)))
    assert type(array.chunk) is LateChunk
    array[:] = 1
    array.wait_to_read()
    sums = np.full((2, 4), 2, np.float32)
    pieces = [compiled_pieces([(16, address(one), address(array.raw()))], 1, np.dtype("f4")) for one in sums]
    late = Late(first, [one for one in pieces if one], sums)
    late.be_of([array])
    for lost in (False, True):
        assert late.may_wait(0)
        late.withhold(1)
        assert not late.may_wait(1)
        assert array.ready is None
        if not lost:
            second.begin(0)
            second.send(b"the next one")
            late.settle()
            assert array.asnumpy().tolist() == [2] * 4
            continue
        second.begin(1)
        second.send(b"without you")
        with pytest.raises(KVStoreError, match="gone on without this one"):
            array.asnumpy()
