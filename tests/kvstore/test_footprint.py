"""Memory of distributed stores: plans predict it before a job runs, and jobs use exactly these bytes."""

from __future__ import annotations

import itertools
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

import weftplan as mx
from tests.kvstore.ranks import run_ranks
from weftplan.errors import PlanError
from weftplan.kvstore.distributed.transport.shared_memory import can_share

NET = """
    net = mx.sym.Variable("data")
    for width in (300, 7, 41):
        net = mx.sym.Activation(mx.sym.FullyConnected(net, num_hidden=width), act_type="tanh")
    net = mx.sym.SoftmaxOutput(net, name="softmax")
"""

TRAINED = (
    NET
    + """
    cases = eval(os.environ["CASES"])
    for shared, (store, contexts, compressed) in [("0", case) for case in cases] + [("1", case) for case in cases]:
        os.environ["WEFTPLAN_KVSTORE_SHARED_MEMORY"] = shared
        kv, contexts = mx.kv.create(store), eval(contexts)
        if compressed:
            kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        module = mx.mod.Module(net, context=contexts)
        module.bind([("data", (8, 50))], [("softmax_label", (8,))])
        module.init_params(mx.init.Uniform(0.1))
        module.init_optimizer(kvstore=kv, optimizer="sgd", optimizer_params={"learning_rate": 0.1, "momentum": 0.9})
        batch = mx.io.DataBatch([mx.nd.ones((8, 50))], [mx.nd.zeros((8,))])
        for _ in range(2):
            module.forward_backward(batch)
            module.update()
        mx.nd.waitall()
        kv.barrier()
        planned = net.plan(data=(8, 50), softmax_label=(8,), context=contexts, kvstore=kv, optimizer="momentum")
        planned = {name: nbytes for name, nbytes in planned.external_bytes.items() if name.startswith("kvstore_")}
        kept = {f"kvstore_{name.removesuffix('_bytes')}": nbytes for name, nbytes in kv.statistics().items()
                if name.endswith("_bytes") and name != "joined_bytes" and nbytes}
        assert planned == kept, (shared, store, contexts, planned, kept)
        print("kept", shared, store, len(contexts), compressed, sum(kept.values()), flush=True)
"""
)

CASES = [
    ("dist_sync", "[mx.cpu()]", 0),
    ("dist_sync", "[mx.cpu(0), mx.cpu(1)]", 0),
    ("dist_sync", "[mx.cpu()]", 1),
    ("dist_device_sync", "[mx.sim(0), mx.sim(1)]", 0),
    ("dist_async", "[mx.cpu()]", 0),
]
"""Store, contexts of each process, and 1 for a store with gradient compression, else 0."""


def test_jobs_keep_what_their_plans_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stores in a job use the planned bytes on every rank, with and without shared memory.

    A plan for the name of a store predicts the bytes of the largest rank.
    """
    monkeypatch.setenv("MXNET_KVSTORE_BIGARRAY_BOUND", "10000")
    done = run_ranks(tmp_path, 2, TRAINED, CASES=repr(CASES))
    scope: dict[str, Any] = {"mx": mx}
    exec(textwrap.dedent(NET), scope)
    for shared, (store, contexts, compressed) in itertools.product("01", CASES):
        monkeypatch.setenv("WEFTPLAN_KVSTORE_SHARED_MEMORY", shared)
        devices = eval(contexts, scope)
        matches = re.findall(rf"kept {shared} {store} {len(devices)} {compressed} (\d+)", done.stdout)
        assert len(matches) == 2, (shared, store, done.stdout)
        if compressed:  # the name of a store does not tell
            continue
        shapes = {"data": (8, 50), "softmax_label": (8,)}
        plan = scope["net"].plan(shapes, context=devices, kvstore=store, workers=2, optimizer="momentum")
        planned = sum(nbytes for name, nbytes in plan.external_bytes.items() if name.startswith("kvstore_"))
        assert planned == max(map(int, matches)), (shared, store)


def test_a_plan_needs_to_know_how_many_processes():
    """A plan for ``dist_sync`` outside a job raises an error unless ``workers`` is a number from 1 to 65,536."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4)
    with pytest.raises(PlanError, match=r"'dist_sync' keeps depends on how many .* give workers=, such as workers=4"):
        net.plan(data=(8, 5), context=[mx.cpu()], kvstore="dist_sync")
    for workers in (0, -1, True, 1.5, 1 << 17):
        with pytest.raises(PlanError, match="workers must be a number of processes from 1 to 65,536"):
            net.plan(data=(8, 5), context=[mx.cpu()], kvstore="dist_sync", workers=workers)


def test_a_plan_in_a_job_is_that_of_its_process(monkeypatch):
    """In a job, a plan reads rank, size and the number of local processes from the variables of Open MPI."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1001)
    for name, number in (("SIZE", 3), ("RANK", 1), ("LOCAL_SIZE", 3)):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(number))

    def exchange():
        return net.plan(data=(8, 5), context=[mx.cpu()], kvstore="dist_sync").external_bytes["kvstore_exchange"]

    monkeypatch.setenv("WEFTPLAN_KVSTORE_SHARED_MEMORY", "0")
    total = 1001 * 6  # the bias and the weight, exchanged as one array
    assert exchange() == 3 * 4 * (total * 2 // 3 - total // 3)
    if can_share_with("1", monkeypatch):
        assert exchange() == 4 * total + 4 * (total * 2 // 3 - total // 3)
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
        assert exchange() == 3 * 4 * (total * 2 // 3 - total // 3)


def can_share_with(setting: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Set ``WEFTPLAN_KVSTORE_SHARED_MEMORY``, and return whether processes can share memory on this machine then."""
    monkeypatch.setenv("WEFTPLAN_KVSTORE_SHARED_MEMORY", setting)
    return can_share()
