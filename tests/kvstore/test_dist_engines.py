"""Stores of several processes on every kind of engine: values after pushes and updates, and waits that must end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.contract.engines import DRIVERS
from tests.kvstore.ranks import run_ranks
from weftplan import engine
from weftplan.kvstore.distributed.exchange.sequencer import wait_driving

BODY = """
shapes = {"a": (10,), "b": (5000,), "c": (3, 2)}
keys = list(shapes)
outs = [mx.nd.empty(shape) for shape in shapes.values()]

def values():
    kv.barrier()
    kv.pull(keys, out=outs)
    found = [sorted(set(out.asnumpy().ravel().tolist())) for out in outs]
    kv.barrier()
    return found

kv.init(keys, [mx.nd.zeros(shape) for shape in shapes.values()])
assert values() == [[0.0]] * 3
asynchronous = kv.type == "dist_async"
if asynchronous:
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
total = 0
for step in range(2):
    kv.push(keys, [mx.nd.full(shape, step + 1 + rank) for shape in shapes.values()])
    pushed = sum(step + 1 + other for other in range(size))
    total -= pushed
    assert values() == [[total if asynchronous else pushed]] * 3, values()
if not asynchronous:
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
    kv.push(keys, [[mx.nd.ones(shape, ctx=mx.cpu(i)) for i in range(2)] for shape in shapes.values()])
    assert values() == [[pushed - 2.0 * size]] * 3, values()
    kv.pushpull(keys, [mx.nd.ones(shape) for shape in shapes.values()], out=outs)
    assert values() == [[pushed - 3.0 * size]] * 3, values()
print("has come to its end", flush=True)
"""


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("store", ["dist_sync", "dist_device_sync", "dist_async"])
@pytest.mark.parametrize("kind", ["NaiveEngine", "Simulator", "ThreadedEngine"])
def test_stores_work_on_every_engine(tmp_path: Path, kind: str, store: str, size: int):
    """On every engine pulls return the initial values, then the sums over all ranks or the updated weights."""
    done = run_ranks(
        tmp_path, size, BODY, timeout=60, MXNET_ENGINE_TYPE=kind, STORE=store, WEFTPLAN_KVSTORE_TIMEOUT="20"
    )
    assert done.stdout.count("has come to its end") == size


def test_a_wait_for_own_arrays_ends(tmp_path: Path):
    """A barrier after a push whose gradient is never computed raises after the timeout, and names the push."""
    run_ranks(
        tmp_path,
        2,
        """
        kv.init("w", mx.nd.zeros((3,)))
        kv.barrier()
        grad, ends = mx.nd.ones((3,)), []
        mx.engine.get().push_async(ends.append, mutable_vars=[grad.var])
        kv.push("w", grad)
        kv._group.timeout_s = 2
        says(kv.barrier, "sum 'w' (3,)", "of its own", "WEFTPLAN_KVSTORE_TIMEOUT")
        os._exit(0)
        """,
        ok=False,
    )


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_wait_for_an_event_drives_the_engine(driver: str):
    """``wait_driving`` returns False after its timeout, and True once an engine operation has set the event."""
    result = DRIVERS[driver]()
    with engine.using(result):
        over = threading.Event()
        assert not wait_driving(over, 0.01)
        result.push(over.set)
        assert wait_driving(over, 20)
    result.stop()
