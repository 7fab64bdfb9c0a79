"""``dist_sync`` in several processes: ranks that leave, arrive late, die, fail, or make different calls."""

from __future__ import annotations

import os
import types
from pathlib import Path

import pytest

from tests.kvstore.ranks import Job, run_ranks
from weftplan.kvstore.distributed.transport import shutdown

TWO = Job(2)


def test_uneven_batches_end_cleanly(tmp_path: Path):
    """Ranks with more batches continue after other ranks have closed the store or exited; ``num_workers`` falls."""
    run_ranks(
        tmp_path,
        3,
        """
        kv.init("w", mx.nd.zeros((3000,)))
        for batch in range(2 + 2 * rank):
            kv.push("w", mx.nd.ones((3000,)))
            expected = sum(batch < 2 + 2 * other for other in range(3))
            assert (value("w", (3000,)) == expected).all(), (rank, batch)
            assert kv.num_workers == expected
        if rank == 1:
            kv.close()
            says(lambda: kv.barrier(), "closed")
        """,
    )


def test_leaving_rank_accepts_overwritten_messages(tmp_path: Path):
    """A rank can leave although the other ranks have overwritten the answers that it still has to read.

    The remaining ranks write message n + 2 over message n without waiting for a leaving rank.
    """
    run_ranks(
        tmp_path,
        3,
        """
        kv.init("w", mx.nd.zeros((3000,)))
        kv.push("w", mx.nd.ones((3000,)))
        assert (value("w", (3000,)) == 3).all()
        if rank == 0:
            assert kv.shares_memory
            shared = kv._group._shared
            send = shared.send
            def slowly(message):
                send(message)
                meet("over")
            shared.send = slowly
            kv.close()
            assert not kv._sequencer._ended.is_set()    # it did not give up
        else:
            for _ in range(4):
                kv.push("w", mx.nd.ones((3000,)))
                assert (value("w", (3000,)) == 2).all()
            meet("over", [rank])
        """,
    )


@pytest.mark.shows("WEFTPLAN_KVSTORE_STALL", "WEFTPLAN_KVSTORE_TIMEOUT")
def test_a_rank_that_does_not_come_is_named(tmp_path: Path):
    """A rank warns when another rank is missing for the stall time, and raises an error after the timeout.

    The error names the missing rank.
    """
    done = run_ranks(
        tmp_path,
        2,
        """
        kv.init("w", mx.nd.zeros((3,)))
        kv.barrier()
        if rank == 0:
            assert kv._group.timeout_s == 50
            kv._group.timeout_s = 1  # from here on: to start may take longer
            kv.push("w", mx.nd.ones((3,)))
            says(lambda: value("w"), "waited", "rank 1", "sum 'w' (3,)", "gave up")
            from weftplan.kvstore.distributed.transport import shutdown as ends
            assert ends.lost()    # who has given up waits for nobody at its end either: MPI_Finalize would
        meet("over", [0])
        os._exit(0)
        """,
        ok=False,
        WEFTPLAN_KVSTORE_STALL="0.2",
        WEFTPLAN_KVSTORE_TIMEOUT="50",
    )
    assert "has waited" in done.stderr
    assert "AssertionError" not in done.stderr


@pytest.mark.parametrize("dies", [False, True])
def test_shutdown_skips_mpi_after_a_death(monkeypatch: pytest.MonkeyPatch, dies: bool):
    """Shutdown finalizes MPI once all ranks have reached their exit, and does not if a rank dies while it waits."""
    looks, ended = [], []

    class Request:
        def Test(self) -> bool:
            looks.append("at the others")
            return not dies and len(looks) == 3

    class Failed:
        def __init__(self) -> None:
            self.size = int(dies and len(looks) == 3)

        def Free(self) -> None:
            pass

    world = types.SimpleNamespace(Ibarrier=Request, Get_failed=Failed)
    fake = types.SimpleNamespace(
        COMM_WORLD=world, Exception=RuntimeError, Is_finalized=lambda: False, Finalize=lambda: ended.append("MPI")
    )
    monkeypatch.setattr(shutdown, "_started_mpi", [(fake, os.getpid())])
    monkeypatch.setattr(shutdown, "_lost", [])
    shutdown._end()
    assert len(looks) == 3
    assert ended == ([] if dies else ["MPI"])


def test_after_a_loss_a_program_ends_with_its_own_status(tmp_path: Path):
    """If a survivor of a loss exits with status 7, the launcher also returns 7."""
    done = run_ranks(
        tmp_path,
        2,
        """
        kv.init("w", mx.nd.zeros((3,)))
        kv.barrier()
        meet("barrier")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        kv.push("w", mx.nd.ones((3,)))
        says(lambda: value("w"), "rank 1")
        sys.exit(7)
        """,
        ok=False,
    )
    assert done.returncode == 7, done.stderr


@pytest.mark.parametrize("lost", [[0], [1], [0, 1], [1, 2], [2, 0]], ids=str)
@pytest.mark.parametrize("shared", ["1", "0"])
def test_killed_ranks_are_an_error_and_the_others_go_on(tmp_path: Path, lost: list[int], shared: str):
    """After each loss, of any rank, the others get a WorkerLostError that names it.

    After ``recover()`` the weights and the optimizer states are those before the loss, the remaining ranks are numbered
    from 0, and a push sums over them.
    """
    done = run_ranks(
        tmp_path,
        len(lost) + 2,
        """
        shape, weight, velocity, left = (5000,), 1.0, 0.0, size
        kv.init("w", mx.nd.ones(shape))
        kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0, momentum=0.5))

        def step():
            global weight, velocity
            kv.push("w", mx.nd.ones(shape))
            velocity = 0.5 * velocity - left
            weight += velocity
            assert (value("w", shape) == weight).all(), (left, value("w", shape), weight)

        step()
        ranks = list(range(size))
        for lost in map(int, os.environ["LOST"].split()):
            meet(f"before the end of {lost}", ranks)
            if rank == lost:
                os.kill(os.getpid(), signal.SIGKILL)
            kv.push("w", mx.nd.ones(shape))
            says(lambda: value("w", shape), f"rank {lost} died", "recover")
            says(kv.barrier)
            left -= 1
            ranks.remove(lost)
            assert kv.recover() == left
            assert kv.rank == ranks.index(rank)
            assert (value("w", shape) == weight).all()
            step()
            kv.init(f"after {lost}", mx.nd.full((3,), float(rank)))
            assert (value(f"after {lost}") == ranks[0]).all()
            says(lambda: kv.push("w", mx.nd.ones((4,))), f"rank {rank}: push")
        kv.barrier()
        print("survived", rank)
        """,
        ok=False,
        LOST=" ".join(map(str, lost)),
        WEFTPLAN_KVSTORE_SHARED_MEMORY=shared,
    )
    assert done.stdout.count("survived") == 2, done.stdout + done.stderr


@TWO.runs(
    """
    kv.init("w", mx.nd.zeros((3,)))
    kv.init("bad", mx.nd.zeros((3 + rank,)))
    says(lambda: kv.push("w", mx.nd.ones((4,))), f"rank {rank}: push: key 'w'", "(3,)", "(4,)", "float32")
    says(lambda: kv.pull("nobody", mx.nd.ones((4,))), f"rank {rank}: pull: key 'nobody'", "Did you init?")
    says(lambda: value("bad", (3 + rank,)), "do not do the same", "(3,)", "(4,)", "rank 0", "rank 1")
    kv.init(["x", "y"], [mx.nd.zeros((3,))] * 2)
    kv.push("xy"[rank], mx.nd.ones((3,)))
    says(lambda: value("xy"[rank]), "'x'", "'y'", "in the same order")
    sgd = mx.optimizer.create("sgd", learning_rate=0.1 + rank)
    says(lambda: kv.set_optimizer(sgd), "0.1", "1.1")
    kv.set_updater(None)
    kv.push("w", mx.nd.ones((3,)))
    assert value("w").tolist() == [2, 2, 2]
    """,
)
def test_different_calls_raise_on_every_rank():
    """If ranks differ in an initial shape, a pushed key or an optimizer, every rank raises an error that quotes both.

    An invalid call raises an error that names its own rank. The store works afterwards.
    """


@TWO.runs(
    """
    kv.init("w", mx.nd.zeros((3,)))
    grad = mx.nd.ones((3,))
    if rank == 1:
        spoil(grad)
    kv.push("w", grad)
    error = None
    try:
        value("w")
    except Exception as raised:
        error = raised
    assert "no data left" in str(error), error
    if rank == 0:
        assert "rank 1 has no value" in str(error)
    kv.push("w", mx.nd.ones((3,)))
    assert value("w").tolist() == [2, 2, 2]
    """,
)
def test_failed_gradient_raises_on_every_rank():
    """If a gradient fails on rank 1, both ranks raise its error, which names rank 1 on rank 0.

    The next push replaces the failed value on both ranks.
    """
