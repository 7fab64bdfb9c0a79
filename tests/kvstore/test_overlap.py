"""Exchanges overlap with backward: a gradient is exchanged while gradients of earlier layers are computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kvstore.ranks import run_ranks
from tests.support.scripts import script

NETWORK = """
    import json, threading
    CustomOp, CustomOpProp, register = mx.operator.CustomOp, mx.operator.CustomOpProp, mx.operator.register

    exchanged, late = threading.Event(), []

    class Gate(CustomOp):
        '''The identity, whose backward waits until the gradient of the layer after it has been exchanged.'''

        def forward(self, is_train, req, in_data, out_data, aux):
            self.assign(out_data[0], req[0], in_data[0])

        def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
            if not exchanged.wait(60):
                late.append(True)
            self.assign(in_grad[0], req[0], out_grad[0])

    @register("gate")
    class GateProp(CustomOpProp):
        def create_operator(self, ctx, shapes, dtypes):
            return Gate()

    for size, shared in ((160, "1"), (128, "0")):  # large enough for separate operations
        os.environ["WEFTPLAN_KVSTORE_SHARED_MEMORY"] = shared
        kv = mx.kv.create("dist_sync")
        exchanged.clear()
        mx.profiler.recorder.clear()
        net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=size, no_bias=True, name="first")
        net = mx.sym.Custom(net, op_type="gate")
        net = mx.sym.FullyConnected(net, num_hidden=size, no_bias=True, name="last")
        net = mx.sym.LinearRegressionOutput(net, name="out")
        shapes = {"data": (2, 3), "out_label": (2, size)}
        reqs = {name: "null" if name in shapes else "write" for name in net.list_arguments()}
        bound = net.simple_bind(mx.cpu(), grad_req=reqs, **shapes)
        names = ["first_weight", "last_weight"]
        for i, name in enumerate(names):
            bound.arg_dict[name][:] = 0.1
            kv.init(i, bound.arg_dict[name])
        bound.arg_dict["data"][:] = 1 + rank
        kv.barrier()
        mx.profiler.set_config(filename=os.path.join(os.environ["FOLDER"], f"{rank}.json"))
        mx.profiler.set_state("run")
        bound.forward(is_train=True)
        bound.backward()
        kv.push([0, 1], [bound.grad_dict[name] for name in names])
        last = value(1, bound.grad_dict["last_weight"].shape)  # while backward waits in the gate
        before = not exchanged.is_set()
        exchanged.set()
        first = value(0, bound.grad_dict["first_weight"].shape)
        mx.profiler.set_state("stop")
        assert before and not late, "the gradient of the last layer was not exchanged during backward"
        assert (last != 0).any() and (first != 0).any()
        mx.profiler.dump()
        trace = json.load(open(os.path.join(os.environ["FOLDER"], f"{rank}.json")))["traceEvents"]
        ran = [e for e in trace if e.get("ph") == "X" and e.get("cat") != "push"]
        spans = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in ran]
        exchange = min(end for name, _, end in spans if name == "KVStoreExchange")
        backward = max(end for name, _, end in spans if "backward" in name.lower() or "Custom" in name)
        assert exchange < backward, (exchange, backward, spans)
        print("overlapped", rank)
"""


def test_the_last_gradient_travels_while_backward_runs(tmp_path: Path):
    """The gradient of the last layer is exchanged while backward of the first layer waits for it.

    This holds in shared memory and over MPI, and in the profiler's trace the exchange ends before backward does.
    """
    done = run_ranks(tmp_path, 2, NETWORK, FOLDER=str(tmp_path), FLAGS_fuse_parameter_groups_size="1")
    assert done.stdout.count("overlapped") == 4


@pytest.mark.parametrize("store", ["device", "dist_device_sync"])
def test_most_of_an_exchange_is_hidden_on_devices_with_streams(store: str) -> None:
    """On four simulated GPUs with NVLink, more than half of an exchange runs during backward.

    An in-order schedule, in which computation waits for every exchange, would hide nothing.
    """
    measure = script("draw_overlap")
    compute, exchange, step, part, _ = measure.hidden(measure.LINKS["nvlink_mesh"], store=store)
    assert part > 0.5
    assert step < compute + 0.5 * exchange


def test_slow_kernels_make_a_route_of_few_additions() -> None:
    """With slow kernels, an exchange below a PCIe tree uses a route of few additions and takes less than 12 ms.

    Sixteen additions of 0.5 ms, one after the other, cost more than a chain in sixteen pieces saves on the wires.
    """
    measure = script("draw_overlap")
    exchange = measure.hidden(measure.LINKS["pcie_tree"], steps=1)[1]
    assert exchange < 12e-3  # 23 ms with a chain in sixteen pieces
