"""Buckets that are made as one exchange where all processes have all of them: nobody can tell but by the time."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.kvstore.ranks import run_to_end
from tests.kvstore.test_shared import shares_memory

LOOP = """
import random, threading
from weftplan.kvstore.distributed.group.group import Group
keys, n = list("abcdefgh"), int(os.environ.get("SIZE", "3000"))
for key in keys:
    kv.init(key, mx.nd.full((n,), 7))
gradients, outs = ([mx.nd.zeros((n,)) for _ in keys] for _ in range(2))
made, summed = [], Group.sum
def counted(self, shares, totals, description, *given):
    made.append(description)
    return summed(self, shares, totals, description, *given)
Group.sum = counted
def fill(number):
    for place, gradient in enumerate(gradients):
        gradient[:] = number + 10 * place + 100 * rank
    mx.nd.waitall()
def right(number, ranks, arrays=outs):
    for place, out in enumerate(arrays):
        want = len(ranks) * (number + 10 * place) + 100 * sum(ranks)
        assert (out.asnumpy() == want).all(), (number, place, out.asnumpy(), want)
def step(number, ranks=range(size), hold=False):
    fill(number)
    free = threading.Event()
    if hold:
        mx.engine.get().push(free.wait, (), (gradients[4].var,))
    kv.push(keys, gradients)
    kv.pull(keys, outs)
    free.set()
    right(number, ranks)
def together():
    call = kv._calls.of(keys, kv._stored, kv._rule)
    return call.whole is not None and call.pushed == (call.whole,) and call.together
def run(first, end, ranks=range(size)):
    for number in range(first, end):
        step(number, ranks)
    assert together()
"""


def runs(folder: Path, count: int, body: str, **given: Any) -> None:
    """A piece of Python behind :data:`LOOP`, as by :func:`run_to_end`."""
    run_to_end(folder, count, LOOP + textwrap.dedent(body), **given)


@shares_memory
@pytest.mark.parametrize("size", ["3000", "40", "300000"])
def test_buckets_that_are_all_there_are_one_exchange(tmp_path: Path, size: str):
    """Small ones, too; what is more than some megabytes is exchanged bucket by bucket."""
    runs(
        tmp_path,
        2,
        """
        if n > 200000:
            for number in range(20):
                step(number)
            assert not together() and kv._calls.of(keys, kv._stored, kv._rule).whole is None
        else:
            run(0, 20)
            before = kv._group.sequence
            run(20, 30)
            assert kv._group.sequence == before + 10
            assert kv.statistics()["exchange_bytes"] <= 2 * 4 * 8 * n
        """,
        SIZE=size,
    )


@shares_memory
def test_who_has_not_all_of_them_makes_all_exchange_one_by_one(tmp_path: Path):
    """Whoever it is, and however often; some pushes later all try again. What is pulled late is written, too."""
    runs(
        tmp_path,
        3,
        """
        chance = random.Random(5)  # the same on all
        run(0, 20)
        for number in range(20, 300):
            step(number, hold=chance.randrange(40) == rank)
        assert any("together" in what for what in made) and any("together" not in what for what in made)
        made.clear()
        for number in range(300, 320):
            step(number)
        assert together() and sum("together" not in what for what in made) < 50, made
        fill(400)
        if rank == 1:
            free = threading.Event()
            mx.engine.get().push(free.wait, (), (gradients[0].var,))
        kv.push(keys, gradients)
        if rank == 1:
            free.set()
        else:
            time.sleep(0.05)
        kv.pull(keys, outs)
        right(400, range(size))
        run(401, 420)
        """,
    )


@shares_memory
def test_a_gradient_that_failed(tmp_path: Path):
    """Is told on all ranks; buckets that have not failed are summed on all, whether or not they were one operation."""
    runs(
        tmp_path,
        2,
        """
        for failing in (0, 1, 0):
            run(0, 20)
            fill(20)
            if rank == failing:
                spoil(gradients[0])
            kv.push(keys, gradients)
            kv.pull(keys, outs)
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
            kv.barrier()
            assert kv._stored["a"].raw()[0] == 2 * 19 + 100  # a and b are the last bucket
            assert kv._stored["h"].raw()[0] == 2 * (20 + 70) + 100
        run(0, 20)
        """,
    )


@shares_memory
def test_a_rank_leaves_or_dies(tmp_path: Path):
    """The others go on, with the sums of those who are left."""
    runs(
        tmp_path,
        4,
        """
        run(0, 20)
        if rank == 1:
            kv.close()
            right(19, range(4), [kv._stored[key] for key in keys])
        else:
            run(20, 40, [0, 2, 3])
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                step(40)
            except WorkerLostError:
                pass
            kv.recover()
            right(39, [0, 2, 3], [kv._stored[key] for key in keys])
            run(40, 60, [0, 3])
        """,
        ends_well=3,
    )


@shares_memory
def test_ranks_that_push_different_keys(tmp_path: Path):
    """Get the error that they get otherwise."""
    runs(
        tmp_path,
        2,
        """
        run(0, 20)
        mine = keys if rank else keys[:6]
        kv.push(mine, gradients[:len(mine)])
        kv.pull(mine, outs[:len(mine)])
        for out in outs[:len(mine)]:
            try:
                out.wait_to_read()
            except KVStoreError as error:
                assert "do not do the same" in str(error) or "died" in str(error), error
                break
        else:
            raise AssertionError("no error")
        os._exit(0 if print("has come to its end", flush=True) is None else 1)
        """,
    )
