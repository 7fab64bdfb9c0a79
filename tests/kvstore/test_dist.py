"""``dist_sync`` in several processes: sums, the order of additions, updates and compression."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import weftplan as mx
from tests.kvstore.ranks import PRELUDE, Job, need_mpi, run_ranks, run_to_end
from weftplan.errors import KVStoreError

ROOT = Path(__file__).parents[2]
TWO = Job(2)


def test_init_takes_rank_0_and_push_sums(tmp_path: Path):
    """``init`` and ``broadcast`` give every rank the value of rank 0; a push stores the sum over ranks and devices.

    ``pushpull`` writes the sum into the gradients. Lists of keys work in any order.
    """
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
    """``dist_device_sync`` sums arrays of simulated devices over all processes, also float16 and empty arrays."""


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
            for array in arrays:  # each is ready after a random pause
                pause = float(waiting.random() * 0.004)
                mx.engine.get().push(lambda pause=pause: time.sleep(pause), mutable_vars=[array.var])
            kv.push(list(range(len(arrays))), arrays, priority=int(waiting.integers(-5, 5)))
            for i, shape in enumerate(shapes):
                digest.update(value(i, shape).tobytes())
        print("digest", rank, digest.hexdigest())
"""


def test_same_bits_whatever_comes_first(tmp_path: Path):
    """Arrival order, priorities, thread counts, bucket sizes and shared memory change no bit of the sums.

    All sums are added in rank order.
    """
    matches = []
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
        matches += re.findall(r"digest \d ([0-9a-f]{64})", done.stdout)
    assert len(matches) == 3 * 3
    assert len(set(matches)) == 1


def test_updates_are_the_same_everywhere(tmp_path: Path):
    """With an optimizer, each of two ranks gets the weights of one process that adds the gradients in rank order."""
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
    """With 2-bit compression, two processes compute the same bits as one process with two devices."""


def test_one_process_alone(tmp_path: Path):
    """Without a launcher a store is rank 0 of 1; it sums pushes, and a push after ``close`` raises an error."""
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


def test_without_mpi_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    """Without mpi4py, creating a store raises a KVStoreError that names the extra to install."""
    monkeypatch.setitem(__import__("sys").modules, "mpi4py.MPI", None)
    with pytest.raises(KVStoreError, match=r"pip install 'weftplan\[mpi\]'"):
        mx.kv.create("dist_sync")


@TWO.runs(
    """
    says(lambda: kv.agree(f"resume at step {rank}"), "do not do the same", "resume at step 0", "resume at step 1")
    kv.agree("resume at step 3")
    """
)
def test_agree_compares_what_the_processes_do():
    """``agree`` raises an error with both texts if the ranks pass different texts; equal texts pass."""


def test_sums_of_arrays_that_may_be_offloaded(tmp_path: Path):
    """With ``WEFTPLAN_SPILL=host``, exchanges of two ranks return the sums over both, and end."""
    body = """
    keys = ["a", "b", "c"]
    kv.init(keys, [mx.nd.zeros((3,)), mx.nd.zeros((2000,)), mx.nd.zeros((5,))])
    for step in range(4):
        grads = [mx.nd.ones((size,)) * (rank + step) for size in (3, 2000, 5)]
        kv.pushpull(keys, grads)
        for grad in grads:
            assert (grad.asnumpy() == 1 + 2 * step).all()
        kv.push("b", mx.nd.ones((2000,)) * step)
        assert (value("b", (2000,)) == 2 * step).all()
    kv.barrier()
    """
    run_to_end(tmp_path, 2, body, WEFTPLAN_SPILL="host")


@TWO.runs(
    """
    from weftplan.kvstore.distributed.exchange.bucket_operation import BucketPart

    for name in ("_arrive", "push"):
        original, gradient, calls = getattr(BucketPart, name), mx.nd.ones((3,)), []

        def fail(part, argument):
            setattr(BucketPart, name, original)
            raise RuntimeError("no arrays here")

        kv.init(name, mx.nd.zeros((3,)))
        kv.barrier()
        mx.engine.get().push(lambda: time.sleep(0.05), mutable_vars=[gradient.var])  # the engine starts the operation
        if rank:
            setattr(BucketPart, name, fail)
        try:
            kv.push(name, gradient)
            print(value(name), file=sys.stderr)
            raise AssertionError(f"{name}: no error")
        except (KVStoreError, RuntimeError) as error:
            assert "no arrays here" in str(error), error
        kv.push(name, gradient)
        assert value(name).tolist() == [2, 2, 2], (name, value(name))
    """
)
def test_part_that_fails_to_start_fails_one_exchange():
    """If an operation raises before it has handed over its arrays, every rank gets the error; the next exchange works.

    So it is if the operation cannot be pushed.
    """
