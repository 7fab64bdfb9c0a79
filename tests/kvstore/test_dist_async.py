"""``dist_async`` in several processes: pushes to servers, ranges of values, learning rates, errors and lost ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kvstore.ranks import Job, run_ranks
from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.server import HEADER, Header, Verb
from weftplan.kvstore.partition import placement

TWO = Job(2)


def test_every_push_is_applied_once(tmp_path: Path):
    """After a barrier every rank reads the initial value minus all pushes, for whole and for divided values.

    A server owns each small value as a whole; large values are divided over all servers. A pull sees the pushes that
    its own rank made before.
    """
    run_ranks(
        tmp_path,
        3,
        """
        shapes = {"small": (5,), "large": (40, 100), "host": (3,)}
        for key, shape in shapes.items():
            kv.init(key, mx.nd.ones(shape) * (1 + rank))
            assert (value(key, shape) == 1).all()
        kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
        for step in range(4):
            for key, shape in shapes.items():
                kv.push(key, [mx.nd.ones(shape) * (rank + 1), mx.nd.ones(shape)])
                assert (value(key, shape) <= 1 - (step + 1) * (rank + 2)).all()  # a pull sees the push before it
        kv.barrier()
        for key, shape in shapes.items():
            assert (value(key, shape) == 1 - 4 * (2 + 3 + 4)).all(), value(key, shape)
        seen = kv.statistics()
        assert seen["staleness_max"] <= seen["staleness_sum"] <= 2 * 12 * 3
        assert seen["server_bytes"] % 4 == 0 and seen["server_bytes"] > 0
        kv.barrier()
        """,
        STORE="dist_async",
        MXNET_KVSTORE_BIGARRAY_BOUND="1000",
    )


@TWO.runs(
    """
    kv.init("w", mx.nd.zeros((3,)))
    sgd = mx.optimizer.create("sgd", learning_rate=1.0)
    kv.set_optimizer(sgd)
    if rank == 0:
        kv.push("w", mx.nd.ones((3,)))
        assert value("w").tolist() == [-1, -1, -1]
        sgd.set_learning_rate(10.0)
        kv.push("w", mx.nd.ones((3,)))
        assert value("w").tolist() == [-11, -11, -11]
    kv.barrier()
    """,
    STORE="dist_async",
)
def test_rates_reach_the_servers():
    """``set_learning_rate`` on a worker takes effect on the servers with the worker's next push."""


@TWO.runs(
    """
    kv.init("w", mx.nd.zeros((3,)))
    says(lambda: kv.push("w", mx.nd.ones((3,))), "needs an optimizer")
    says(lambda: kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0 + rank)), "do not do the same")
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
    grad = mx.nd.ones((3,))
    spoil(grad)
    kv.push("w", grad)
    error = None
    try:
        value("w")
    except Exception as raised:
        error = raised
    assert "no data left" in str(error), error
    kv.push("w", mx.nd.ones((3,)))
    kv.barrier()
    assert value("w").tolist() == [-2, -2, -2]
    kv.barrier()
    """,
    STORE="dist_async",
)
def test_mistakes():
    """A push without an optimizer, optimizers that differ, and a failed gradient raise errors.

    A later push is applied.
    """


@TWO.runs(
    """
    kv.init("w", mx.nd.zeros((3,)))
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0, wd=0.0))
    for step in range(1, 4):
        grad = mx.nd.ones((3,))
        mx.engine.get().push(lambda: time.sleep(0.05), mutable_vars=[grad.var])
        kv.push("w", grad)
        kv.barrier()
        assert value("w").tolist() == [-2 * step] * 3
        kv.barrier()
    """,
    STORE="dist_async",
)
def test_barrier_waits_for_pushes():
    """``barrier`` returns after all earlier pushes have been applied, even if a gradient takes 50 ms to compute."""


@TWO.runs(
    """
    from weftplan.data.worker_share import PartOfBatchIter
    mx.random.seed(1)
    rng = np.random.default_rng(0)
    labels = np.arange(128) % 2
    data = (rng.standard_normal((128, 4)) + 3 * labels[:, None]).astype("f4")
    batches = PartOfBatchIter(mx.io.NDArrayIter(data, labels, batch_size=32), rank=rank, num_workers=size)
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2), name="softmax")
    module = mx.mod.Module(net)
    module.fit(batches, kvstore=kv, num_epoch=15, optimizer_params={"learning_rate": 0.2})
    accuracy = dict(module.score(mx.io.NDArrayIter(data, labels, batch_size=16), "acc"))["accuracy"]
    assert accuracy > 0.9, accuracy
    kv.barrier()
    """,
    STORE="dist_async",
)
def test_module_trains():
    """``Module.fit`` over ``dist_async`` learns a separable task on every rank."""


@TWO.runs(
    """
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0, wd=0.0))
    for key in ("a", "b"):
        kv.init(key, mx.nd.zeros((3,)))
    says(lambda: kv.init("bad", mx.nd.zeros((3 + rank,))), "do not do the same")
    says(lambda: kv.push("bad", mx.nd.ones((3 + rank,))), "Did you init?")
    number = kv._keys.number("a")
    part = kv._server._ranges.pop(number, None)
    kv.barrier()
    kv.push("a", mx.nd.ones((3,)))
    says(lambda: value("a"), "which is not here")
    kv.barrier()
    if part is not None:
        kv._server._ranges[number] = part
    kv.barrier()
    for key in ("a", "b"):
        kv.push(key, mx.nd.ones((3,)) * 2)
    kv.barrier()
    assert value("a").tolist() == value("b").tolist() == [-4, -4, -4]
    says(kv.recover, "start again from a checkpoint")
    kv.barrier()
    """,
    STORE="dist_async",
)
def test_gradient_of_refused_push_is_dropped():
    """A server refuses a push of a key that it does not have and drops the gradient; only later pushes are applied."""


@TWO.runs(
    """
    import dataclasses
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0, wd=0.0))
    for key in ("a", "b"):
        kv.init(key, mx.nd.zeros((3,)))
    number = kv._keys.number("a")
    part = kv._server._ranges.get(number)
    kv.barrier()
    if part is not None:
        kv._server._ranges[number] = dataclasses.replace(part, values=np.zeros(5, np.float32))
    kv.barrier()
    kv.push("a", mx.nd.ones((3,)))
    says(lambda: value("a"), "has 20 bytes here")
    kv.barrier()
    if part is not None:
        kv._server._ranges[number] = part
    kv.barrier()
    for key in ("a", "b"):
        kv.push(key, mx.nd.ones((3,)) * 2)
    kv.barrier()
    assert value("a").tolist() == value("b").tolist() == [-4, -4, -4]
    """,
    STORE="dist_async",
)
def test_gradient_of_another_size_is_dropped():
    """A server refuses a gradient of the wrong size and drops it; only later pushes are applied."""


@TWO.runs(
    """
    import dataclasses
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0, wd=0.0))
    kv.init("w", mx.nd.zeros((3,)))
    kv.push("w", mx.nd.ones((3,)))
    kv.barrier()
    value("w")
    fields = [getattr(part, field.name) for part in kv._server._ranges.values() for field in dataclasses.fields(part)]
    assert sum(getattr(field, "nbytes", 0) for field in fields) == kv._server.nbytes
    kv.barrier()
    """,
    STORE="dist_async",
)
def test_server_has_two_arrays_for_each_range():
    """After a push a server has the current values and one gradient of each range, as ``nbytes`` says."""


@TWO.runs(
    """
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0, wd=0.0))
    kv.init("w", mx.nd.zeros((3,)))
    grad = mx.nd.ones((3,))
    mx.engine.get().push(lambda: time.sleep(0.2), mutable_vars=[grad.var])
    kv.push("w", grad)
    kv.close()
    mx.nd.waitall()
    for part in kv._server._ranges.values():
        held = np.asarray(part.values)
        assert held.tolist() == [-2] * held.size  # every process has pushed before it closed
    """,
    STORE="dist_async",
)
def test_close_applies_earlier_pushes():
    """``close`` waits until pushes whose gradients are still being computed have been applied."""


@given(st.integers(0, 10**6), st.integers(0, 10**5), st.integers(1, 9), st.integers(1, 1000))
def test_ranges_cover_a_value_once(number: int, size: int, servers: int, bound: int):
    """The ranges of a value are consecutive, cover it from 0 to its size, and belong to different servers."""
    ranges = placement(number, size, servers, bound)
    assert [first for _, first, _ in ranges] == [0, *(end for _, _, end in ranges[:-1])]
    assert ranges[-1][2] == size
    assert len({server for server, _, _ in ranges}) == len(ranges)
    assert all(0 <= server < servers for server, _, _ in ranges)


@given(st.binary(max_size=2 * HEADER))
def test_hostile_headers_are_errors(data: bytes):
    """``Header.decode`` turns any bytes into a valid header, or raises an error that names the sending rank."""
    refused = None
    try:
        actual = Header.decode(data, 5)
    except KVStoreError as error:
        refused = str(error)
    assert "rank 5" in refused if refused is not None else Header.decode(actual.encode(), 5) == actual


def test_headers_come_back():
    """Decoding an encoded header returns an equal header, with or without a rate; damaged bytes raise an error."""
    for header in (Header(Verb.PUSH, 3, 7, 40, 0.1), Header(Verb.PULL, 2**40)):
        assert Header.decode(header.encode(), 0) == header
    with pytest.raises(KVStoreError, match="another kind"):
        Header.decode(b"\x80\x04" + bytes(HEADER - 2), 0)


def test_death_of_a_rank_raises_on_the_others(tmp_path):
    """After rank 1 is killed, pushes or pulls on each survivor raise a WorkerLostError that names rank 1."""
    done = run_ranks(
        tmp_path,
        3,
        """
        kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
        for key in range(3):  # each server owns one of the keys
            kv.init(key, mx.nd.zeros((4,)))
        kv.barrier()
        meet("barrier")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                for key in range(3):
                    kv.push(key, mx.nd.ones((4,)))
                    value(key, (4,))
        except WorkerLostError as error:
            import re
            assert re.search(r"ranks? (0, )?1(, 2)? died", str(error)), error  # another rank may have exited since
            print("told", rank, flush=True)
        """,
        ok=False,
        STORE="dist_async",
    )
    assert sorted(done.stdout.split("\n")[:-1]) == ["told 0", "told 2"], done.stdout + done.stderr


@pytest.mark.parametrize("bound", ["1000000", "8"], ids=["whole", "split"])
def test_a_worker_that_leaves_keeps_its_ranges(tmp_path: Path, bound: str):
    """After a worker has closed its store, the others find the values where they were, and may create more."""
    run_ranks(
        tmp_path,
        3,
        """
        kv.set_optimizer(mx.optimizer.create("test", rescale_grad=1.0))
        keys = list(range(6))
        kv.init(keys, [mx.nd.zeros((10,))] * 6)
        kv.barrier()
        if rank == 0:
            kv.close()
        else:
            kv.barrier()
            assert kv.num_workers == 2
            kv.init(6, mx.nd.zeros((10,)))
            for key in [*keys, 6]:
                kv.push(key, mx.nd.ones((10,)))
            kv.barrier()
            assert all((value(key, (10,)) == 2).all() for key in [*keys, 6])
        """,
        STORE="dist_async",
        MXNET_KVSTORE_BIGARRAY_BOUND=bound,
    )


def test_a_stopped_worker_holds_up_no_other(tmp_path: Path):
    """While one rank delays the data of a push after its header, pushes and pulls of the other ranks complete."""
    done = run_ranks(
        tmp_path,
        3,
        """
        from weftplan.kvstore.distributed.server import ANSWER, HEADER, REQUEST, REQUEST_DATA, Header, Verb
        kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
        kv.init(0, mx.nd.zeros((1_000_000,)))
        number = kv._keys.number(0)
        (server, _, _), = kv._ranges[0]
        late = (server + 1) % 3
        kv.barrier()
        if rank == late:
            byte, header = kv._mpi.BYTE, Header(Verb.PUSH, number, 0, 4_000_000)
            kv._comm.Send([header.encode(), byte], dest=server, tag=REQUEST)
            meet("over")
            data = np.ones(1_000_000, "f4")
            kv._comm.Send([data.view("u1"), byte], dest=server, tag=REQUEST_DATA)
            kv._comm.Recv([bytearray(HEADER), byte], source=server, tag=ANSWER)
        else:
            for step in range(3):
                kv.push(0, mx.nd.ones((1_000_000,)))
                kv.pull(0, out=mx.nd.empty((1_000_000,)))
                mx.nd.waitall()
            meet("over", [rank])
        kv.barrier()
        while (value(0, (1_000_000,)) != -7).any():
            time.sleep(0.01)
        kv.barrier()
        print("came to its end", flush=True)
        """,
        STORE="dist_async",
        MXNET_KVSTORE_BIGARRAY_BOUND="10000000",
        WEFTPLAN_KVSTORE_TIMEOUT="20",
    )
    assert done.stdout.count("came to its end") == 3


def test_a_worker_that_stops_is_named(tmp_path: Path):
    """While rank 2 is suspended, the other servers answer; a pull from its server raises an error that names rank 2."""
    done = run_ranks(
        tmp_path,
        3,
        """
        kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
        for key in range(3):
            kv.init(key, mx.nd.zeros((4,)))
        kv.barrier()
        meet("barrier")
        if rank == 2:
            if not os.fork():
                time.sleep(4)
                os.kill(os.getppid(), signal.SIGKILL)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.3)
        kv._group.timeout_s = 1
        mine = [key for key in range(3) if kv._ranges[key][0][0] != 2]
        for step in range(20):
            for key in mine:
                kv.push(key, mx.nd.ones((4,)))
                value(key, (4,))
        (theirs,) = set(range(3)) - set(mine)
        kv.push(theirs, mx.nd.ones((4,)))
        says(lambda: value(theirs, (4,)), "for rank 2 to answer push")
        print("told", rank, flush=True)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        ok=False,
        STORE="dist_async",
    )
    assert sorted(done.stdout.split("\n")[:-1]) == ["told 0", "told 1"], done.stdout + done.stderr
