"""Question: how long does the first bind of a process take, with nothing cached and with plans and kernels cached?

Each figure comes from a new process; three kinds alternate: weftplan with an empty folder of plans and compiled
kernels, weftplan with the files that the first process left there, and MXNet 1.9.1. A process imports its framework,
binds a network for training, and makes two steps. The first step prepares calls of kernels and compiles or loads
kernels, so its extra time over the second step counts as part of the bind. Figures are medians, in milliseconds of
processor time of all threads.

    python bench/bench_first_bind.py [--mxnet-python PATH] [--networks resnet18 lenet] [--rounds 9]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import blas_setting

import weftplan as mx

CHILD = """
import importlib, json, sys, time, warnings
warnings.filterwarnings("ignore")
clock = time.process_time
package, text, shapes = sys.argv[1], sys.argv[2], {k: tuple(v) for k, v in json.loads(sys.argv[3]).items()}
start = clock()
mx = importlib.import_module(package)
if package == "weftplan":
    importlib.import_module("weftplan.executor")
imported = clock() - start
start = clock()
symbol = mx.sym.load(text)
loaded = clock() - start
wanted = {name: "null" if name in shapes else "write" for name in symbol.list_arguments()}
start = clock()
executor = symbol.simple_bind(mx.cpu(), grad_req=wanted, **shapes)
bound = clock() - start
mx.nd.waitall()
steps = []
for _ in range(2):
    start = clock()
    executor.forward(is_train=True)
    executor.backward()
    mx.nd.waitall()
    steps.append(clock() - start)
more = max(steps[0] - steps[1], 0.0)
print(json.dumps({"import": imported, "load": loaded, "bind": bound, "first step": more, "bind in all": bound + more}))
"""
COLUMNS = ("import", "load", "bind", "first step", "bind in all")


def measured(python, package, text, shapes, cache):
    """Run one new process, and return the milliseconds of CPU time of each column."""
    env = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"), "XDG_CACHE_HOME": cache}
    command = [python, "-c", CHILD, package, str(text), json.dumps(shapes)]
    shown = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    return {key: value * 1e3 for key, value in json.loads(shown.stdout.splitlines()[-1]).items()}


def main():
    """Measure the networks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mxnet-python", help="a Python that imports MXNet 1.9.1")
    parser.add_argument("--networks", nargs="+", default=["mlp", "lenet", "resnet18", "mobilenet", "lstm"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    inputs = parser.parse_args()
    print(blas_setting.describe())
    if sys.dont_write_bytecode:
        print("PYTHONDONTWRITEBYTECODE is set: every import compiles the package again")
    print(f"| network | process | {' | '.join(COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 2) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for name in inputs.networks:
            text = Path(folder, f"{name}-symbol.json")
            text.write_text(mx.models.get(name).tojson())
            shapes = mx.models.input_shapes(name, inputs.batch)
            rows = {"weftplan, nothing cached": [], "weftplan, plans and kernels cached": []}
            if inputs.mxnet_python:
                rows["MXNet 1.9.1"] = []
            for k in range(inputs.rounds):
                cache = Path(folder, f"{name}-{k}")
                cache.mkdir(mode=0o700)
                for row, actual in rows.items():
                    ours = row != "MXNet 1.9.1"
                    python = sys.executable if ours else inputs.mxnet_python
                    actual.append(measured(python, "weftplan" if ours else "mxnet", text, shapes, str(cache)))
            for row, actual in rows.items():
                medians = (statistics.median(each[column] for each in actual) for column in COLUMNS)
                print(f"| {name} | {row} | {' | '.join(f'{value:.1f}' for value in medians)} |", flush=True)


if __name__ == "__main__":
    main()
