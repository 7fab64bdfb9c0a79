"""``dist_sync`` in several real processes: sums, updates, order, disagreement, failures, uneven ends."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import weftplan as mx
from tests.kvstore.ranks import PRELUDE, Job, need_mpi, run_ranks
from weftplan.errors import KVStoreError

ROOT = Path(__file__).parents[2]
TWO = Job(2)


def test_everybody_gets_rank_0s_value_and_everybodys_sum(tmp_path: Path):
    """init takes rank 0's value; a push replaces it by the sum over ranks and devices; lists, pushpull, broadcast."""
    run_ranks(
        tmp_path,
        3,
        """
        kv.init("w", mx.nd.zeros((3,)) + 10 + rank)
        assert value("w").tolist() == [10, 10, 10]
        kv.push("w", [mx.nd.ones((3,)) * (rank + 1), mx.nd.ones((3,))])
        assert value("w").tolist() == [9, 9, 9]
        kv.init(["a", "b"], [mx.nd.zeros((2000, 3)), mx.nd.zeros((3,), dtype="float64")])
        kv.push(["b", "a"], [mx.nd.ones((3,), dtype="float64") * rank, mx.nd.ones((2000, 3))])
        assert (value("a", (2000, 3)) == 3).all() and (value("b", dtype="float64") == 3).all()
        grads = [mx.nd.ones((3,)) * rank]
        kv.pushpull("w", grads)
        assert grads[0].tolist() == [3, 3, 3]
        out = mx.nd.empty((3,))
        kv.broadcast("c", mx.nd.ones((3,)) * (5 + rank), out)
        assert out.tolist() == [5, 5, 5]
        assert (rank, size, kv.type) == (kv.rank, 3, "dist_sync") and f"rank {rank} of 3" in repr(kv)
        kv.barrier()
        """,
    )


@TWO.runs(
    """
    kv.init("w", mx.nd.zeros((3000,)))
    for step in range(3):
        kv.push("w", [mx.nd.ones((3000,), ctx=mx.sim(i)) * (rank + i + step) for i in range(2)])
        assert (value("w", (3000,)) == 4 + 4 * step).all()
    assert kv.statistics()["wire_bytes"] == 12000
    kv.init("h", mx.nd.zeros((5,), dtype="float16"))
    kv.push("h", mx.nd.ones((5,), dtype="float16") * 0.5)
    assert (value("h", (5,), "float16") == 1).all()
    kv.init("e", mx.nd.zeros((0, 3)))
    kv.push("e", mx.nd.zeros((0, 3)))
    assert value("e", (0, 3)).shape == (0, 3)
    """,
    STORE="dist_device_sync",
)
def test_sums_over_devices_of_every_process():
    """dist_device_sync sums on simulated devices and goes through host memory; float16 and empty arrays travel, too."""


ORDERED = """
    import hashlib
    for arrival, count, mebibytes, shared in eval(os.environ["RUNS"]):
        os.environ |= {
            "FLAGS_fuse_parameter_groups_size": count,
            "FLAGS_fuse_parameter_memory_size": mebibytes,
            "WEFTPLAN_KVSTORE_SHARED_MEMORY": shared,
        }
        kv = mx.kv.create("dist_sync")
        rng = np.random.default_rng(rank)
        shapes = [(7,), (300, 11), (5, 5), (40000,), (1,), (2, 1500)]
        for i, shape in enumerate(shapes):
            kv.init(i, mx.nd.zeros(shape))
        digest = hashlib.sha256()
        waiting = np.random.default_rng(arrival + 100 * rank)
        for step in range(4):
            grads = [rng.standard_normal(shape).astype("f4") * 10.0 ** rng.integers(-3, 4, shape) for shape in shapes]
            arrays = [mx.nd.array(grad) for grad in grads]
            for array in arrays:  # each is ready at a moment of its own
                pause = float(waiting.random() * 0.004)
                mx.engine.get().push(lambda pause=pause: time.sleep(pause), mutable_vars=[array.var])
            with kv.together():
                for i, array in enumerate(arrays):
                    kv.push(i, array, priority=int(waiting.integers(-5, 5)))
            for i, shape in enumerate(shapes):
                digest.update(value(i, shape).tobytes())
        print("digest", rank, digest.hexdigest())
"""


def test_same_bits_whatever_comes_first(tmp_path: Path):
    """Random arrival, priorities, threads, buckets and the way of the data change no bit: sums are in rank order."""
    found = []
    for threads, runs in (
        ("1", [(1, "1", "-1", "1")]),
        ("4", [(2, "-1", "0.05", "0"), (3, "3", "0.01", "1")]),
    ):
        done = run_ranks(
            tmp_path,
            3,
            ORDERED,
            RUNS=repr(runs),
            MXNET_CPU_WORKER_NTHREADS=threads,
            MXNET_KVSTORE_BIGARRAY_BOUND="1000",
        )
        found += re.findall(r"digest \d ([0-9a-f]{64})", done.stdout)
    assert len(found) == 3 * 3
    assert len(set(found)) == 1


JOINED = """
    shapes = [(7,), (300, 11), (1,), (2, 1500), (5,)]
    for i, shape in enumerate(shapes):
        kv.init(i, mx.nd.zeros(shape, dtype="float64" if i == 4 else "float32"))
    kv.barrier()
    def refused(arrays):
        raise AssertionError("a copy")
    kept, np.concatenate = np.concatenate, refused
    grads = [mx.nd.full(s, i + rank, dtype="float64" if i == 4 else "float32") for i, s in enumerate(shapes)]
    for step in range(2):
        if os.environ["WAY"] == "list":
            kv.push(list(range(5)), grads)
        else:
            with kv.together():
                for i, grad in enumerate(grads):
                    kv.push(i, grad)
        for i, shape in enumerate(shapes):
            assert (value(i, shape, grads[i].dtype) == 2 * i + 1).all(), i
    np.concatenate = kept
    assert kv.statistics()["merged_bytes"] == sum(grad.nbytes for grad in grads)
"""
APART = {"FLAGS_fuse_parameter_groups_size": "-1", "WEFTPLAN_KVSTORE_SHARED_MEMORY": "0"}


@TWO.runs(JOINED, WAY="together", **APART)
def test_buckets_are_joined_without_a_copy():
    """What is pushed together lies side by side, in the order in which it travels; sums and updates are right."""


@TWO.runs(JOINED, WAY="list", **APART)
def test_buckets_of_a_list_are_joined_without_a_copy():
    """The same where keys and gradients are lists."""


def test_updates_are_the_same_everywhere(tmp_path: Path):
    """With an optimizer the weights of all ranks are those of one process that adds in rank order."""
    done = run_ranks(
        tmp_path,
        2,
        """
        kv.init("w", mx.nd.ones((4000,)))
        kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9))
        rng = np.random.default_rng(3 + rank)
        for _ in range(5):
            kv.push("w", mx.nd.array(rng.standard_normal(4000).astype("f4")))
        np.save(f"{os.environ['FOLDER']}/{rank}.npy", value("w", (4000,)))
        """,
        FOLDER=str(tmp_path),
    )
    assert done.stderr == ""
    alone = mx.kv.create("device")
    alone.init("w", mx.nd.ones((4000,)))
    alone.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9))
    rngs = [np.random.default_rng(3), np.random.default_rng(4)]
    for _ in range(5):
        alone.push("w", [mx.nd.array(rng.standard_normal(4000).astype("f4")) for rng in rngs])
    out = mx.nd.empty((4000,))
    alone.pull("w", out=out)
    for rank in range(2):
        assert np.load(tmp_path / f"{rank}.npy").tobytes() == out.asnumpy().tobytes()


@TWO.runs(
    """
    settings = {"type": "2bit", "threshold": 0.5}
    kv.set_gradient_compression(settings)
    alone = mx.kv.create("device")
    alone.set_gradient_compression(settings)
    for store in (kv, alone):
        store.init("w", mx.nd.zeros((50001,)))
    rngs = [np.random.default_rng(i) for i in range(2)]
    for _ in range(3):
        grads = [mx.nd.array(rng.standard_normal(50001).astype("f4")) for rng in rngs]
        kv.push("w", grads[rank])
        alone.push("w", grads)
        out = mx.nd.empty((50001,))
        alone.pull("w", out=out)
        assert value("w", (50001,)).tobytes() == out.asnumpy().tobytes()
    assert kv.statistics()["residual_bytes"] == 4 * 50001
    """,
)
def test_compressed_sums_are_those_of_one_process():
    """Two bits an element: two processes give what one process with two devices gives."""


def test_uneven_batches_end_cleanly(tmp_path: Path):
    """Ranks with more batches go on without those that have closed the store or ended."""
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


@pytest.mark.shows("WEFTPLAN_KVSTORE_STALL", "WEFTPLAN_KVSTORE_TIMEOUT")
def test_a_rank_that_does_not_come_is_named(tmp_path: Path):
    """Waiting has an end: a warning after the stall time, an error that names the rank after the timeout."""
    done = run_ranks(
        tmp_path,
        2,
        """
        kv.init("w", mx.nd.zeros((3,)))
        kv.barrier()
        over = os.path.join(os.environ["FOLDER"], "over")
        if rank == 0:
            assert kv._group.timeout_s == 50
            kv._group.timeout_s = 1  # from here on: to start may take longer
            kv.push("w", mx.nd.ones((3,)))
            says(lambda: value("w"), "waited", "rank 1", "sum 'w' (3,)", "gave up")
            open(over, "w").close()
        while not os.path.exists(over):
            time.sleep(0.01)
        os._exit(0)
        """,
        ok=False,
        FOLDER=str(tmp_path),
        WEFTPLAN_KVSTORE_STALL="0.2",
        WEFTPLAN_KVSTORE_TIMEOUT="50",
    )
    assert "has waited" in done.stderr
    assert "AssertionError" not in done.stderr


def test_a_killed_rank_is_an_error_and_the_others_go_on(tmp_path: Path):
    """SIGKILL: the others get WorkerLostError that names it; after recover() their values agree and sums are right."""
    done = run_ranks(
        tmp_path,
        3,
        """
        kv.init("w", mx.nd.ones((5000,)))
        kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0, momentum=0.5))
        kv.push("w", mx.nd.ones((5000,)))
        assert (value("w", (5000,)) == -2).all()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        kv.push("w", mx.nd.ones((5000,)))
        try:
            value("w", (5000,))
            raise AssertionError("no error")
        except WorkerLostError as error:
            assert "rank 1 died" in str(error) and "recover" in str(error), str(error)
        try:
            kv.barrier()
            raise AssertionError("no error")
        except WorkerLostError:
            pass
        assert kv.recover() == 2
        before = value("w", (5000,))
        assert (before == -2).all()
        kv.push("w", mx.nd.ones((5000,)))
        assert (value("w", (5000,)) == -2 - 1.5 - 2).all()
        kv.barrier()
        print("survived", rank)
        """,
        ok=False,
    )
    assert done.stdout.count("survived") == 2, done.stdout + done.stderr


def test_one_process_alone(tmp_path: Path):
    """Without a launcher the job has one member: the store works, and says what it is."""
    need_mpi()
    body = """
        kv.init("w", mx.nd.zeros((2,)))
        kv.push("w", [mx.nd.ones((2,)), mx.nd.ones((2,))])
        assert value("w", (2,)).tolist() == [2, 2]
        assert (kv.rank, kv.num_workers) == (0, 1)
        kv.barrier()
        kv.close()
        says(lambda: kv.push("w", mx.nd.ones((2,))), "closed")
        """
    script = tmp_path / "alone.py"
    script.write_text(PRELUDE + textwrap.dedent(body))
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_a_pull_makes_a_small_exchange_itself(tmp_path: Path):
    """Where nobody holds it up: nothing is pending when the pull returns, but for a thread that was on its way."""
    run_ranks(
        tmp_path,
        2,
        """
        from weftplan import engine
        kv.init("w", mx.nd.zeros((3,)))
        out, gradient, pending = mx.nd.zeros((3,)), mx.nd.ones((3,)), engine.get().statistics
        for step in range(5000):
            kv.push("w", gradient)
            kv.pull("w", out)
            over = pending().pending == 0
            assert out.asnumpy().tolist() == [2] * 3
            kv.push("w", mx.nd.full((3,), over))
            if value("w").tolist() == [2] * 3:  # on both
                break
        else:
            raise AssertionError("it was always pending")
        kv.barrier()
        """,
    )


@TWO.runs(
    """
    eng = mx.engine.get()
    keys, shapes = list("abcd"), [(40_000,), (3,), (0,), (70, 100)]
    for key, shape in zip(keys, shapes):
        kv.init(key, mx.nd.zeros(shape))
    outs = [mx.nd.empty(shape) for shape in shapes]

    def step(gradients, keys=keys):
        for gradient in gradients:
            gradient.wait_to_read()
        mx.nd.waitall()
        kv.barrier()
        open_ = threading.Event()
        eng.push(open_.wait, (), (gradients[0].var,))
        before = eng.statistics().pushed
        kv.push(keys, gradients)
        pushed, before = eng.statistics().pushed - before, eng.statistics().pushed
        kv.pull(keys, outs)
        pulled = eng.statistics().pushed - before
        open_.set()
        for place, (key, out) in enumerate(zip(keys, outs)):
            assert (out.asnumpy() == 2 * place + 3).all(), (key, out)
        return pushed, pulled

    import threading
    gradients = [mx.nd.full(shape, rank + 1 + place) for place, shape in enumerate(shapes)]
    assert step(gradients) == (1, 1)           # the arrays get their memory now
    assert step(gradients) == (1, 0)

    one = mx.nd.full((80_000,), 1.0 + rank)   # parts of one array: a var that both would wait for is one
    gradients[0] = one[:40_000]
    assert step(gradients) == (1, 0)
    outs[0] = one[40_000:]                     # read by the push, written by the pull
    assert step(gradients) == (1, 1)
    kept, outs[1] = outs[1], mx.nd.empty((6,))[:3]
    assert step(gradients) == (1, 1)

    def fail():
        raise ValueError("no gradient")
    if rank == 0:
        eng.push(fail, (), (gradients[1].var,))
    kv.push(keys, gradients)
    kv.pull(keys, outs)
    for out in outs:
        try:
            out.wait_to_read()
            raise SystemExit("no error")
        except ValueError as error:
            assert rank == 0 and "no gradient" in str(error)
        except KVStoreError as error:
            assert rank == 1 and "rank 0 has no value for it" in str(error) and "no gradient" in str(error)
    try:
        mx.nd.waitall()
    except ValueError:
        assert rank == 0
    gradients = [mx.nd.full(shape, rank + 1 + place) for place, shape in enumerate(shapes)]
    outs = [mx.nd.empty(shape) for shape in shapes]
    failed = any(kv._stored[key].var.failure is not None for key in keys)
    assert step(gradients)[0] == (4 if failed else 1)
    """,
    FLAGS_fuse_parameter_groups_size="-1",
)
def test_one_operation_for_all_gradients_of_a_bucket():
    """A list of keys is pushed as one, and that operation writes what is pulled, where nobody uses that; else one
    operation copies it. All of it has the fate of its bucket.

    Keys whose arrays cannot share an operation have their own, and the result is the same.
    """


@pytest.mark.parametrize("nbytes", [16, 400_000])
def test_what_is_pulled_is_what_was_pushed_last(tmp_path: Path, nbytes: int):
    """The operation of a push writes what is pulled only where no later push of a key is between; in place, too."""
    run_ranks(
        tmp_path,
        3,
        f"""
        import threading
        eng, size = mx.engine.get(), {nbytes} // 4
        keys = ["a", "b", "c"]
        kv.init(keys, [mx.nd.zeros((size,)) for _ in keys])

        def made(step):
            return [mx.nd.full((size,), 100 * step + 10 * place + rank) for place in range(3)]

        def total(step, place):
            return 3 * (100 * step + 10 * place) + 3

        outs, again = [mx.nd.empty((size,)) for _ in keys], [mx.nd.empty((size,)) for _ in keys]
        for step in range(1, 9):
            gradients, late, open_ = made(step), made(step + 50), threading.Event()
            mx.nd.waitall()
            eng.push(open_.wait, (), (gradients[0].var,))
            kv.push(keys, gradients)
            if step % 4 == 1:
                kv.push("b", late[1])
            if step % 4 == 2:
                kv.push(keys[1:], late[1:])
            kv.pull(keys, outs)
            kv.pull(keys[::-1], again[::-1])
            if step % 4 == 3:
                kv.push(keys, late)  # what is pulled before is of the push before
            open_.set()
            for place in range(3):
                was_late = (step % 4 == 1 and place == 1) or (step % 4 == 2 and place > 0)
                wanted = total(step + 50 * was_late, place)
                for pulled in (outs, again):
                    assert (pulled[place].asnumpy() == wanted).all(), (step, place, pulled[place], wanted)
            before = made(step)
            kv.pushpull(keys, before)
            for place, array in enumerate(before):
                assert (array.asnumpy() == total(step, place)).all(), (step, place, array)
            before = made(step)
            kv.pushpull(keys, before, [before[1], before[2], before[0]])  # each is read before it is written
            for place in range(3):
                assert (before[(place + 1) % 3].asnumpy() == total(step, place)).all(), (step, place)
        """,
        FLAGS_fuse_parameter_groups_size="-1",
    )


@pytest.mark.parametrize("groups", ["1", "2", "-1"])
def test_a_list_of_keys_is_updated_as_single_keys_are(tmp_path: Path, groups: str):
    """To the bit, and with the operations of a few buckets instead of those of every key."""
    run_ranks(
        tmp_path,
        2,
        f"""
        groups = {groups}
        eng, shapes = mx.engine.get(), [(300, 70), (3,), (2000,), (5, 5), (1,)]
        rng = np.random.default_rng(rank)
        steps = [[mx.nd.array(rng.standard_normal(shape).astype("f4")) for shape in shapes] for _ in range(4)]
        found, pushed = [], []
        for listed in (True, False):
            store = mx.kv.create("dist_sync")
            keys, outs = [f"w{{place}}" for place in range(len(shapes))], [mx.nd.empty(shape) for shape in shapes]
            store.init(keys, [mx.nd.ones(shape) for shape in shapes])
            store.set_optimizer(mx.optimizer.create("adam", learning_rate=0.1))
            for gradients in steps:
                mx.nd.waitall()
                before = eng.statistics().pushed
                if listed:
                    store.pushpull(keys, gradients, outs)
                else:
                    for key, gradient, out in zip(keys, gradients, outs):
                        store.pushpull(key, gradient, out)
                pushed.append(eng.statistics().pushed - before)
                found.append([out.asnumpy() for out in outs])
        for one, other in zip(found[:4], found[4:]):
            assert all(a.tobytes() == b.tobytes() for a, b in zip(one, other))
        count = -(-len(shapes) // groups) if groups > 0 else 1
        assert pushed[3] <= 3 * count, pushed      # exchange, update, copy
        assert pushed[7] >= 2 * len(shapes) or groups == 1, pushed
        """,
        FLAGS_fuse_parameter_groups_size=groups,
    )


@pytest.mark.parametrize("on_store", ["0", "1"])
def test_a_module_exchanges_its_gradients_in_buckets(tmp_path: Path, on_store: str):
    """It has the bits of one that exchanges them one by one, and fewer operations."""
    run_ranks(
        tmp_path,
        2,
        """
        def trained(joins):
            mx.random.seed(3)
            store = mx.kv.create("dist_sync")
            if not joins:
                store.joined = lambda keys: None
            data = mx.sym.Variable("data")
            for width in (20, 30, 10):
                layer = mx.sym.FullyConnected(data, num_hidden=width, name=f"layer{width}")
                data = mx.sym.Activation(layer, act_type="relu")
            module = mx.mod.Module(mx.sym.SoftmaxOutput(data, name="softmax"))
            module.bind([("data", (8, 12))], [("softmax_label", (8,))])
            module.init_params(mx.init.Xavier())
            module.init_optimizer(kvstore=store, optimizer="adam", optimizer_params={"learning_rate": 0.01})
            rng = np.random.default_rng(rank)
            for _ in range(4):
                images, labels = rng.standard_normal((8, 12)).astype("f4"), rng.integers(0, 10, 8)
                module.forward_backward(mx.io.DataBatch([mx.nd.array(images)], [mx.nd.array(labels)]))
                mx.nd.waitall()
                before = mx.engine.get().statistics().pushed
                module.update()
                pushed = mx.engine.get().statistics().pushed - before
            return {name: array.asnumpy() for name, array in module.get_params()[0].items()}, pushed

        (joined, few), (single, many) = trained(True), trained(False)
        assert few <= 6 and many >= 12, (few, many)     # two buckets of three gradients
        for name, array in joined.items():
            assert array.tobytes() == single[name].tobytes(), name
        """,
        MXNET_UPDATE_ON_KVSTORE=on_store,
    )


def test_without_mpi_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    """A missing mpi4py is a KVStoreError that names the extra."""
    monkeypatch.setitem(__import__("sys").modules, "mpi4py.MPI", None)
    with pytest.raises(KVStoreError, match=r"pip install 'weftplan\[mpi\]'"):
        mx.kv.create("dist_sync")


@TWO.runs(
    """
    net = mx.sym.Variable("data")
    for width in (7, 300, 5):
        net = mx.sym.Activation(mx.sym.FullyConnected(net, num_hidden=width), act_type="tanh")
    net = mx.sym.SoftmaxOutput(net, name="softmax")
    shapes = {"data": (4, 3), "softmax_label": (4,)}
    reqs = {name: "null" if name in shapes else "write" for name in net.list_arguments()}
    bound = net.simple_bind(mx.cpu(), grad_req=reqs, **shapes)
    names = [name for name in net.list_arguments() if name not in shapes]
    for i, name in enumerate(names):
        bound.arg_dict[name][:] = np.random.default_rng(i).standard_normal(bound.arg_dict[name].shape) * 0.1
        kv.init(i, bound.arg_dict[name])
    for step in range(3):
        bound.arg_dict["data"][:] = 0.1 * (1 + step + rank)
        bound.arg_dict["softmax_label"][:] = rank
        bound.forward(is_train=True)
        bound.backward()
        mine = [bound.grad_dict[name].asnumpy() for name in names]
        kv.push(list(range(len(names))), [bound.grad_dict[name] for name in names])
        sums = [value(i, grad.shape) for i, grad in enumerate(mine)]
        for name, grad in zip(names, mine):
            assert (bound.grad_dict[name].asnumpy() == grad).all(), name  # a push changes no gradient
        assert (sums[-1] != mine[-1]).any()
    assert kv.statistics()["joined_bytes"] == 0
    apart = [mx.nd.array(grad) for grad in mine]
    kv.push(list(range(len(names))), apart)
    assert all((value(i, grad.shape) == sums[i]).all() for i, grad in enumerate(mine))
    assert kv.statistics()["joined_bytes"] == sum(grad.nbytes for grad in mine)
    """,
    FLAGS_fuse_parameter_groups_size="-1",
    WEFTPLAN_KVSTORE_SHARED_MEMORY="0",
)
def test_buckets_of_a_bound_network_copy_nothing():
    """Gradients that a bind makes lie side by side in the order of their buckets: an exchange joins them in place."""


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
def test_ranks_that_do_different_things_are_told():
    """Another shape at init, another key, another optimizer: every rank is told both sides, and the store goes on.

    A mistake of one rank alone names that rank.
    """


@TWO.runs(
    """
    kv.init("w", mx.nd.zeros((3,)))
    grad = mx.nd.ones((3,))
    if rank == 1:
        def broken():
            raise ValueError("no data left")
        mx.engine.get().push(broken, mutable_vars=[grad.var])
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
def test_a_gradient_that_failed_is_everybodys_error():
    """One rank's gradient fails: all ranks get an error that names it, and the next push works."""
