"""Question: did a change of the planner change a plan? Prints digests of eleven networks' plans under many options.

    python bench/plan_digests.py > before.txt
    python bench/plan_digests.py > after.txt && diff before.txt after.txt
    python bench/plan_digests.py --only resnet50 lstm

Each line has a network, an option set, the peak and the lower bound in bytes, and digests of the order, of the plan's
arrays, and of its notes. Orders refer to nodes by name. If planning fails, the line has the error.
"""

import argparse
import hashlib

import mxnet_networks
import numpy as np

import weftplan as mx
from weftplan import models
from weftplan.errors import MXNetError
from weftplan.planner import PlanOptions, plan_symbol, plan_within

ARRAYS = [
    "entry_storage",
    "entry_nbytes",
    "entry_kind",
    "entry_first",
    "entry_last",
    "entry_inplace",
    "storage_slab",
    "storage_offset",
    "storage_nbytes",
    "slab_device",
    "slab_nbytes",
    "workspace_nbytes",
    "workspace_storage",
    "after_ptr",
    "after_storages",
]
SETS = {
    **{f"inference, {name}": ("null", {"strategy": name}) for name in ("auto", "arena", "match_range", "none")},
    **{f"training, {name}": ("write", {"strategy": name}) for name in ("auto", "arena", "match_range", "none")},
    **{f"training, compat {name}": ("write", {"compat": name}) for name in ("mxnet", "paddle", "paddle_pir")},
    **{f"training, recompute {name}": ("write", {"recompute": name}) for name in ("mxnet", "echo", "sqrt", "cheap")},
    "training, gradients added": ("add", {}),
    "training, 4 colours": ("write", {"num_temp": 4}),
    "training, no in place": ("write", {"enable_inplace": False}),
    "training, all sums in place": ("write", {"inplace_grad_sum_cap": 2}),
}
BUDGETS = {"70 %": (0.7, mx.cpu()), "40 %": (0.4, mx.cpu()), "60 %, simulated": (0.6, mx.sim(0))}


def digest(*parts):
    """Return the first twelve hex digits of the SHA-256 of arrays and other values."""
    state = hashlib.sha256()
    for part in parts:
        state.update(np.ascontiguousarray(part).tobytes() if isinstance(part, np.ndarray) else repr(part).encode())
    return state.hexdigest()[:12]


def line(name, label, planned):
    """Print one plan's peak, lower bound and digests as a line."""
    plan = planned.memory
    order = digest([planned.graph.nodes[n].name for n in planned.order], sorted(planned.skipped), planned.requests)
    arrays = digest(*(getattr(plan, field).astype(np.int64) for field in ARRAYS), plan.strategy)
    print(f"{name}; {label}; {plan.peak}; {plan.lower_bound}; {order}; {arrays}; {digest(plan.notes)}", flush=True)


def main(names):
    """Print a line for each network and option set."""
    for name in names:
        symbol, shapes = mxnet_networks.load(name), models.input_shapes(name, mxnet_networks.batch_of(name))
        for label, (grad_req, options) in SETS.items():
            line(name, label, plan_symbol(symbol, shapes, grad_req=grad_req, options=PlanOptions(**options)))
        for label, (part, context) in BUDGETS.items():

            def make(options, symbol=symbol, shapes=shapes, context=context):
                return plan_symbol(symbol, shapes, grad_req="write", context=context, options=options)

            plain = make(PlanOptions()).memory
            budget = int(part * plain.peak) + sum(plain.external_bytes.values())
            try:
                line(name, label, plan_within(make, PlanOptions(), budget=budget))
            except MXNetError as error:
                print(f"{name}; {label}; {type(error).__name__}; {error}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+")
    every = sorted(path.name.split(".")[0] for path in mxnet_networks.SYMBOLS.iterdir())
    main(parser.parse_args().only or every)
