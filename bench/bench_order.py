"""Question: how much memory does the search for an order of execution save, and is its order proved to be the best?

The graphs are published networks as ``torch.export`` hands them over (recorded by ``peers/export_orders.py``;
inference, one sample) and random graphs. Goals: never above the order given; the best known or proved bound on every
graph that the search finishes within two seconds of processor time.

The order given depends on the exporter. PyTorch 2.13 hands ResNet-50, GPT-2 and BERT over in an order that is proved
best (ratio 1.000); in the order of an earlier ``torch.fx`` export 0.818, 0.693 and 0.923 of its bound were possible.
NASNet and PNASNet need 0.856 and 0.762 of the order given (0.827 and 0.768 in the earlier export).

    python bench/bench_order.py [--only networks|random]
"""

import argparse
import gzip
import json
import math
import os
import platform
import random
import time
from pathlib import Path

from weftplan.ops.core.schema import InplacePair
from weftplan.planner import PlanOptions, plan_program, validate
from weftplan.planner.liveness import dependencies
from weftplan.planner.order import choose_order, deepest_first, lower_bound
from weftplan.planner.program import VARIABLE, Graph, Program, Work

ORDERS = Path(__file__).parent / "data" / "orders"
WORKS = {
    "v": VARIABLE,
    "n": Work(label="step"),
    "i": Work(label="step", inplace=(InplacePair(0, 0),)),
    "o": Work(label="view", over=(InplacePair(0, 0, identity=True),)),
}


def program_of(nodes, heads):
    """Return the program of recorded nodes [kind, input numbers, bytes]."""
    graph = Graph(
        names=[f"n{k}" for k in range(len(nodes))],
        works=[WORKS[kind] for kind, _, _ in nodes],
        inputs=[reads for _, reads, _ in nodes],
        controls=[[] for _ in nodes],
        heads=heads,
    )
    return Program(graph=graph, nbytes=[nbytes for _, _, nbytes in nodes])


def networks():
    """Yield (name, program) of every recorded network."""
    for path in sorted(ORDERS.glob("*.json.gz")):
        record = json.loads(gzip.decompress(path.read_bytes()))
        yield path.name.split(".")[0], program_of(record["nodes"], record["heads"])


def random_graphs(count, seeds):
    """Yield (name, program): each node reads one to three of the last dozen results; sizes span two decades."""
    for seed in range(seeds):
        rng = random.Random(seed)
        nodes = [["v", [], 1024]]
        for k in range(1, count + 1):
            reads = sorted({rng.randrange(max(0, k - 12), k) for _ in range(rng.randint(1, 3))})
            nodes.append([rng.choice("nni"), reads, int(1024 * 10 ** rng.uniform(0, 2))])
        read = {r for _, reads, _ in nodes for r in reads}
        last = [k for k in range(1, count + 1) if k not in read]
        nodes.append(["n", last, 64])
        yield f"random {count} #{seed}", program_of(nodes, [count + 1])


def row(name, program):
    """Print the bounds of one program's orders relative to the order given; return that of the chosen order."""
    options = PlanOptions()
    given = lower_bound(program, program.order, options=options)
    deepest = lower_bound(program, deepest_first(program.order, dependencies(program)), options=options)
    began = time.process_time()
    chosen = choose_order(program, options)
    seconds = time.process_time() - began
    planned = plan_program(program)
    validate(planned)
    assert planned.memory.peak <= plan_program(program, PlanOptions(reorder=False)).memory.peak
    print(
        f"| {name} | {len(program.order)} | {given:,} | {deepest / given:.3f} | {chosen.bound / given:.3f} | "
        f"{planned.memory.peak / given:.3f} | {'yes' if chosen.proved else 'no'} | {seconds:.2f} |",
        flush=True,
    )
    return chosen.bound / given, chosen.proved


def main():
    """Print a row for each graph, and geometric means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["networks", "random"])
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; processor time\n")
    print("| graph | nodes | bytes in the order given | depth first | chosen | planned | proved | s |")
    print("|---|---|---|---|---|---|---|---|")
    groups = {"networks": networks(), "random": (pair for n in (40, 80) for pair in random_graphs(n, 12))}
    for group, programs in groups.items():
        if args.only in (None, group):
            rows = [row(*pair) for pair in programs]
            mean = math.exp(sum(math.log(ratio) for ratio, _ in rows) / len(rows))
            print(f"\n{group}: geometric mean {mean:.3f}, proved {sum(proved for _, proved in rows)} of {len(rows)}\n")


if __name__ == "__main__":
    main()
