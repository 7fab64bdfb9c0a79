"""Questions: how small are memory plans, how long does planning take, and do executors allocate what was planned?

Sections (``--only NAME`` runs one; each takes at most about two minutes):

* ``ordinary``: plans of eleven networks for training and inference, compared with MXNet 1.9.1's plan of the same symbol
  file and with the lower bound for the same order of nodes. There is no recomputation; as in MXNet's figure, scratch of
  operators is left out. Goals: never above MXNet's plan; at most 1.005 times the lower bound; geometric mean of ours /
  MXNet's at most 0.88.
* ``recompute``: training plans of the same networks under each recompute policy. Goals: geometric mean at most 0.65 of
  MXNet's default plan at 95 % of the speed or more; no policy above the plan without recomputation. The time is the
  planner's model; ``bench_recompute.py`` measures steps.
* ``deep``: residual networks of up to 1,000 layers and LSTMs of up to 1,000 steps: bytes, modelled speed and planning
  time under ``sqrt`` and ``budget``. Goals: the peak grows with the square root of the depth, at 75 % of the speed or
  more.
* ``time``: processor time and memory from symbol to plan, for graphs of 1,000 to 1,000,000 nodes. Goals: 20 ms
  (1,000), 0.3 s (10,000), 1 s (an unrolled RNN of 20,000 nodes, training), 60 s (1,000,000). Figures are the least and
  the median of seven runs, since a busy machine makes processor time longer, too; the largest graph is planned once.
* ``reality``: compares the bytes that storage hands to an executor with those of its plan, under every strategy and
  policy.
* ``packing``: offsets for hard, planted and large sets of buffers: see ``bench_packing.py``.

MXNet's bytes are exact integers from ``bench/data/mxnet_plans.json``. With ``--mxnet-python PATH`` MXNet also binds the
networks on this machine, and its whole mebibytes are compared with these integers.

    python bench/bench_planner.py --mxnet-python PATH
"""

import argparse
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import blas_setting
import deep_networks
import numpy as np
from mxnet_networks import batch_of, load, symbol_file

import weftplan as mx
import weftplan.ops
from weftplan import models, storage
from weftplan.errors import BudgetError
from weftplan.planner import PlanOptions, plan_symbol, validate

HERE = Path(__file__).parent
POLICIES = ("mxnet", "echo", "sqrt", "cheap")
NODES = (1_000, 10_000, 1_000_000)
TIMED = ("resnet50", "resnet152", "inception_v3", "densenet121", "lstm")
DEEP = {
    "residual network, {:,} layers": deep_networks.residual,
    "LSTM, {:,} steps, an input variable each": deep_networks.lstm,
    "LSTM, {:,} steps, sliced inputs with gradients": deep_networks.sliced_lstm,
}


def geometric_mean(values):
    """Return the geometric mean of positive numbers."""
    return math.exp(statistics.fmean(map(math.log, values)))


def table(*columns):
    """Print the head of a Markdown table, and return a function that prints a row of cells."""
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))

    def row(*cells):
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)

    return row


def timed(function, *args, **named):
    """Call ``function`` and return (wall seconds, its result)."""
    start = time.perf_counter()
    result = function(*args, **named)
    return time.perf_counter() - start, result


def ordinary(args, measured):
    """Print the peaks of our plans and of MXNet's by network, for training and for inference."""
    live = mxnet_now(args.mxnet_python, measured) if args.mxnet_python else {}
    for mode, grad_req in (("training", "write"), ("inference", "null")):
        print(f"\n### {mode}\n")
        row = table(
            "network",
            "ours",
            "/ lower bound",
            "with scratch / lower bound",
            "MXNet 1.9.1",
            "ours / MXNet's",
            "MXNet's / least in its order",
            "edges",
            "planned in",
            *(["MXNet now"] if live else []),
        )
        ratios, worst = [], 1.0
        for name, modes in measured.items():
            symbol, shapes, theirs = load(name), models.input_shapes(name, batch_of(name)), modes[mode]
            options = PlanOptions.from_environment(workspaces=False)
            seconds, planned = min(
                (timed(plan_symbol, symbol, shapes, grad_req=grad_req, options=options) for _ in range(3)),
                key=lambda pair: pair[0],
            )
            validate(planned)
            plan = planned.memory
            full = plan_symbol(symbol, shapes, grad_req=grad_req).memory
            ratios.append(plan.peak / theirs["planned"])
            worst = max(worst, plan.peak / plan.lower_bound, full.peak / full.lower_bound)
            row(
                name,
                f"{plan.peak:,}",
                f"{plan.peak / plan.lower_bound:.4f}",
                f"{full.peak / full.lower_bound:.4f}",
                f"{theirs['planned']:,}",
                f"{ratios[-1]:.4f}",
                f"{theirs['planned'] / theirs['live']:.3f}",
                full.num_reuse_edges,
                f"{seconds * 1e3:.0f} ms",
                *([mxnet_cell(live[name][mode], theirs["planned"])] if live else []),
            )
        print(
            f"\n{mode}: geometric mean of ours / MXNet's {geometric_mean(ratios):.4f} (goal 0.88), worst "
            f"{max(ratios):.4f} (goal 1), worst peak / lower bound {worst:.4f} (goal 1.005)"
        )


def mxnet_now(python, measured):
    """Return MXNet's plans, made on this machine now: {network: {mode: whole mebibytes}}."""
    requests = {
        name: {"file": str(symbol_file(name)), "shapes": models.input_shapes(name, batch_of(name))} for name in measured
    }
    done = subprocess.run(
        [python, str(HERE / "peers" / "mxnet_planner.py")],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the MXNet peer failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def mxnet_cell(mebibytes, nbytes):
    """Return the cell of MXNet's mebibytes now; it shows the stored figure as well if that differs."""
    return f"{mebibytes} MiB" + ("" if mebibytes == nbytes >> 20 else f" (stored: {nbytes >> 20})")


def recompute(args, measured):
    """Print each policy's peak relative to MXNet's default plan, and the modelled time that ``cheap`` adds."""
    row = table(
        "network",
        "MXNet 1.9.1",
        "its mirror",
        "ours, off",
        *(f"ours, {policy}" for policy in POLICIES),
        "time of cheap",
    )
    ratios = {policy: [] for policy in ("off", *POLICIES)}
    for name, modes in measured.items():
        symbol, shapes, theirs = load(name), models.input_shapes(name, batch_of(name)), modes["training"]
        cells, spent = [], ""
        for policy in ("off", *POLICIES):
            options = PlanOptions.from_environment(workspaces=False, recompute=policy)
            memory = plan_symbol(symbol, shapes, grad_req="write", options=options).memory
            ratio = memory.peak / theirs["planned"]
            if policy == "cheap":
                spent = more_time(memory)
            ratios[policy].append(ratio)
            cells.append(f"{ratio:.3f}")
        assert all(ratios[policy][-1] <= ratios["off"][-1] for policy in POLICIES), f"{name}: a policy raised the peak"
        row(
            name,
            f"{theirs['planned']:,}",
            f"{theirs['mirror'] / theirs['planned']:.3f}",
            *cells,
            spent,
        )
    means = ", ".join(f"{policy} {geometric_mean(ratios[policy]):.3f}" for policy in ratios)
    print(f"\ngeometric means of ours / MXNet's default plan: {means} (goal: 0.65 at 95 % of the speed)")


def more_time(plan):
    """Return the modelled time that recomputation adds, as the plan's note words it; "nothing" without such a note."""
    note = next((note for note in plan.notes if "run twice" in note), " for nothing")
    return note.rsplit(" for ", 1)[-1]


def step(executor):
    """Run one training step (forward and backward), and wait for it."""
    executor.forward(is_train=True)
    executor.backward()
    mx.nd.waitall()


def deep(args, measured):
    """Print peaks and planning times of deep networks: ``sqrt`` at three depths, and budgets at the largest."""
    row = table(
        "network", "nodes", "policy", "off", "peak", "/ off", "peak / sqrt(depth)", "modelled speed", "CPU time"
    )
    for name, make in DEEP.items():
        for depth in (100, 400, 1000):
            symbol, shapes, grad_req = make(depth)
            plain = plan_symbol(symbol, shapes, grad_req=grad_req, options=PlanOptions(strategy="arena"))
            off, nodes = plain.memory.peak, f"{plain.graph.num_nodes:,}"
            row(name.format(depth), nodes, "off", f"{off:,}", f"{off:,}", "1", per_root(off, depth), "100 %", "")
            for policy in ("sqrt",) if depth < 1000 else ("sqrt", 2, 4, 8, 16):
                named = {"budget": off // policy} if isinstance(policy, int) else {"recompute": policy}
                label = f"budget off / {policy}" if isinstance(policy, int) else policy
                gc.collect()
                start = time.process_time()
                try:
                    planned = plan_symbol(
                        symbol, shapes, grad_req=grad_req, options=PlanOptions(strategy="arena", **named)
                    )
                except BudgetError as error:
                    cells = ("", f"refused, least {error.smallest:,}", "", "", "")
                else:
                    peak = planned.memory.peak
                    cells = (
                        f"{off:,}",
                        f"{peak:,}",
                        f"{peak / off:.4f}",
                        per_root(peak, depth),
                        f"{100 / (1 + more_share(planned.memory)):.1f} %",
                    )
                row(name.format(depth), nodes, label, *cells, f"{time.process_time() - start:.1f} s")
    print(
        "\nGoals: peak / sqrt(depth) does not grow with the depth, at >= 75 % of the speed; 1,000 nodes in <= 10 s. "
        "bench_recompute.py --deep measures the speed."
    )


def per_root(nbytes, depth):
    """Return the cell of bytes divided by the square root of the depth."""
    return f"{nbytes / math.sqrt(depth):,.0f}"


def more_share(plan):
    """Return the share of a step's modelled time that recomputation adds, from the planner's note; 0.03 means 3 %."""
    words = more_time(plan).split()
    return float(words[0]) / 100 if words[0] != "nothing" else 0.0


def planning_time(args, measured):
    """Print the processor time and memory of planning graphs, each in its own process."""
    row = table(
        "graph", "nodes", "planned in", "median", "µs a node", "memory of the process", "bytes a node", "peak / bound"
    )
    requests = [(f"{name}, {mode}", 0) for name in TIMED for mode in ("training", "inference")]
    requests += [("chain with skips, inference", n) for n in NODES[: 2 if args.quick else 3]]
    requests += [("unrolled RNN, training", 20_000), ("chain with skips, training", 10_000)]
    for kind, nodes in requests:
        done = subprocess.run(
            [sys.executable, str(HERE / "planning_time.py"), kind, str(nodes)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{kind}, {nodes} nodes failed:\n{done.stderr[-2000:]}")
        report = json.loads(done.stdout)
        row(
            kind,
            f"{report['nodes']:,}",
            f"{1e3 * report['seconds']:,.1f} ms",
            f"{1e3 * report['median']:,.1f} ms",
            f"{1e6 * report['seconds'] / report['nodes']:.1f}",
            f"{report['rss'] / 1e6:,.0f} MB",
            f"{(report['rss'] - report['before']) / report['nodes']:,.0f}",
            f"{report['ratio']:.4f}",
        )


def reality(args, measured):
    """Print the planned bytes and those that storage handed out, by network, strategy and policy."""
    row = table("network", "strategy", "recompute", "planned", "handed out by storage", "after two steps", "same")
    for name in ("mlp", "lenet", "resnet"):
        symbol, shapes = models.get(name), models.input_shapes(name, 4)
        for strategy, policy in (
            *((s, "off") for s in ("none", "match_range", "arena", "auto")),
            *(("auto", p) for p in POLICIES),
        ):
            options = PlanOptions.from_environment(strategy=strategy, recompute=policy)
            planned, bound, after = handed_out(symbol, shapes, options)
            same = "yes" if planned == bound == after else "NO"
            row(name, strategy, policy, f"{planned:,}", f"{bound:,}", f"{after:,}", same)


def handed_out(symbol, shapes, options):
    """Return (planned bytes, bytes that storage handed out for a bind, the same after two steps)."""
    # The arrays of the previous case are freed at the first push after their finalizers have run.
    gc.collect()
    args, grads, states = args_of(symbol, shapes)
    pool = storage.get(mx.cpu())
    before = pool.statistics().requested_bytes
    executor = symbol.bind(mx.cpu(), args, grads, "write", aux_states=states, plan_options=options)
    bound = pool.statistics().requested_bytes - before
    for _ in range(2):
        step(executor)
    after = pool.statistics().requested_bytes - before
    assert executor.allocated_bytes == executor.memory_plan.peak
    return executor.memory_plan.peak, bound, after


def args_of(symbol, shapes):
    """Return filled arrays for a bind: arguments, gradients, auxiliary states."""
    arg_shapes, _, aux_shapes = symbol.infer_shape(**shapes)
    make = [mx.nd.array(np.full(s, 0.1, np.float32)) for s in arg_shapes]
    grads = [mx.nd.zeros(s) for s in arg_shapes]
    states = [mx.nd.array(np.full(s, 0.5, np.float32)) for s in aux_shapes]
    mx.nd.waitall()
    return make, grads, states


def packing(args, measured):
    """Run ``bench_packing.py``."""
    script = HERE / "bench_packing.py"
    subprocess.run([sys.executable, str(script)], check=True)


SECTIONS = {
    "ordinary": ordinary,
    "recompute": recompute,
    "deep": deep,
    "time": planning_time,
    "reality": reality,
    "packing": packing,
}


def main():
    """Run the sections and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, action="append", help="run this section; may be repeated")
    parser.add_argument("--quick", action="store_true", help="without the graph of 10^6 nodes")
    parser.add_argument("--mxnet-python", help="interpreter of a virtual environment with mxnet==1.9.1")
    args = parser.parse_args()
    measured = json.loads((HERE / "data" / "mxnet_plans.json").read_text())["networks"]
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}")
    print(blas_setting.describe())
    for name in args.only or SECTIONS:
        print(f"\n## {name}\n")
        seconds, _ = timed(SECTIONS[name], args, measured)
        print(f"\n({seconds:.0f} s)")


if __name__ == "__main__":
    main()
