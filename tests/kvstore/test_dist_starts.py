"""``dist_sync`` in several processes: missing ranks, silent exits, forked children, late or different calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kvstore import ranks
from tests.kvstore.ranks import Job, run_ranks

TWO = Job(2)


def test_rank_without_a_store_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """If rank 1 never creates a store, creating one on rank 0 raises after the timeout and names rank 1."""
    body = """
        import os, time
        import weftplan as mx
        from weftplan.errors import WorkerLostError
        over = os.path.join(os.environ["FOLDER"], "over")
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            while not os.path.exists(over):
                time.sleep(0.01)
            os._exit(0)
        for words in ("rank 0 has waited 1 s for rank 1 to create a store", "MPI was not started before"):
            try:
                mx.kv.create("dist_sync")
                raise AssertionError("no error")
            except WorkerLostError as error:
                assert words in str(error), error
        print("was told", flush=True)
        open(over, "w").close()
        """
    monkeypatch.setattr(ranks, "PRELUDE", "")
    done = run_ranks(
        tmp_path,
        2,
        body,
        ok=False,
        WEFTPLAN_KVSTORE_STALL="0.1",
        WEFTPLAN_KVSTORE_TIMEOUT="1",
    )
    assert "was told" in done.stdout, done.stdout + done.stderr
    assert "for rank 1 to create a store" in done.stderr


def test_a_second_store_that_one_rank_does_not_create(tmp_path: Path):
    """Creating a second store raises after the timeout if another rank creates none; the first store still sums."""
    run_ranks(
        tmp_path,
        2,
        """
        kv.init("w", mx.nd.zeros((3,)))
        kv.barrier()
        if rank == 0:
            os.environ["WEFTPLAN_KVSTORE_TIMEOUT"] = "0.5"
            try:
                mx.kv.create("dist_sync")
                raise AssertionError("no error")
            except WorkerLostError as error:
                assert "for rank 1 to create the same store" in str(error), error
        kv.push("w", mx.nd.ones((3,)))
        assert value("w").tolist() == [2, 2, 2]
        """,
    )


def test_silent_exit_is_noticed_before_timeout(tmp_path: Path):
    """If a rank calls ``os._exit(5)``, which MPI does not report, the others get a WorkerLostError and can recover."""
    done = run_ranks(
        tmp_path,
        3,
        """
        kv.init("w", mx.nd.zeros((5000,)))
        kv.barrier()
        if rank == 1:
            os._exit(5)
        try:
            kv.push("w", mx.nd.ones((5000,)))
            value("w", (5000,))
            raise AssertionError("no error")
        except WorkerLostError as error:
            assert "rank 1 died" in str(error), error
        assert kv.recover() == 2
        kv.push("w", mx.nd.ones((5000,)))
        assert (value("w", (5000,)) == 2).all()
        print("survived", flush=True)
        """,
        ok=False,
    )
    assert done.stdout.count("survived") == 2, done.stdout + done.stderr


def test_exit_does_not_wait_for_rank_that_gave_up(tmp_path: Path):
    """A rank that has noted a loss exits with its own status without finalizing MPI; the other ranks also exit."""
    done = run_ranks(
        tmp_path,
        3,
        """
        kv.barrier()
        if rank == 1:
            from weftplan.kvstore.distributed.transport import shutdown as ends
            ends.note_loss()
        kv.close()
        print("has come to its end", flush=True)
        sys.exit(3 * (rank == 1))
        """,
        timeout=60,
        ok=False,
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.count("has come to its end") == 3


@TWO.runs(
    """
    kv.init("w", mx.nd.zeros((3,)))
    kv.push("w", mx.nd.ones((3,)))
    assert value("w").tolist() == [2, 2, 2]
    read, write = os.pipe()
    child = os.fork()
    if not child:
        told = []
        for call in (lambda: kv.push("w", mx.nd.ones((3,))), kv.barrier, lambda: mx.kv.create("dist_sync")):
            try:
                call()
                told.append("nothing")
            except KVStoreError as error:
                told.append(str(error).split(" from which ")[0])
        told.append(str(value("w").tolist()))
        kv.close()
        os.write(write, "|".join(told).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read().split("|")
    assert told[0] == told[1] == "this store belongs to the process", told
    assert "forked from one that shares a store" in told[2] and told[3] == "[2.0, 2.0, 2.0]", told
    os.waitpid(child, 0)
    kv.push("w", mx.nd.ones((3,)))
    assert value("w").tolist() == [2, 2, 2]
    """
)
def test_a_forked_child_exchanges_nothing():
    """In a forked child, pulls work and calls that exchange raise an error; the parent's store continues to work.

    The other ranks would take the child's messages for the parent's.
    """


@TWO.runs(
    """
    from weftplan.kvstore.distributed.exchange.tickets import Ticket, TicketPart
    kv.barrier()
    kv.close()
    told, part = [], TicketPart()
    part.arrive((), (), None, told.append)
    kv._sequencer.put(Ticket("too late", [part], None))
    assert "closed" in str(told[0]), told
    """
)
def test_exchange_after_close_fails():
    """An exchange that is queued after ``close`` fails with an error, so that its waiter does not hang."""


@TWO.runs(
    """
    def sgd(**more):
        return mx.optimizer.create("sgd", learning_rate=1.0, wd=0.0, **more)

    kv.init("w", mx.nd.zeros((3,)))
    says(lambda: kv._send_command_to_servers(0, "stop"), "has no servers that take commands")
    says(lambda: kv.set_updater(None if rank else lambda key, merged, stored: None), "use an updater", "use no updater")
    schedule = mx.lr_scheduler.FactorScheduler(step=10, factor=0.5 + 0.1 * rank)
    says(lambda: kv.set_optimizer(sgd(lr_scheduler=schedule)), '"factor": 0.5', '"factor": 0.6')
    weighing = sgd()
    weighing.set_lr_mult({"w": 1.0 + rank})
    says(lambda: kv.set_optimizer(weighing), '"lr_mult": {"w": 1.0}', '"lr_mult": {"w": 2.0}')
    kv.push("w", mx.nd.ones((3,)))
    assert value("w").tolist() == [2, 2, 2]  # nobody has taken an optimizer that another one has not
    kv.set_updater(lambda key, merged, stored: None)
    kv.push("w", mx.nd.ones((3,)))
    assert value("w").tolist() == [2, 2, 2]
    """
)
def test_different_updaters_are_refused():
    """If ranks differ in having an updater, in a schedule or in multipliers, the call raises and sets no updater."""


@TWO.runs(
    """
    keys = [f"a_long_name_of_a_parameter_{number}" for number in range(300)]
    kv.init(keys, [mx.nd.zeros((3,)) for _ in keys])
    mine = [key for key in keys if rank == 0 or not key.endswith("_111")]
    kv.push(mine, [mx.nd.ones((3,)) for _ in mine])
    error = says(lambda: value(keys[0]), f"rank {rank} wants to ... ", f"rank {1 - rank} to ... ", "_112'")
    assert str(error).count("parameter_111'") == 1, error
    """,
    FLAGS_fuse_parameter_groups_size="-1",
)
def test_long_calls_are_quoted_from_where_they_differ():
    """If the key lists of two ranks are too long for a message, the error quotes them from the first difference."""
