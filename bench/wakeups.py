"""Question: how often does a thread sleep and wake in a push and its wait, and in an exchange of small gradients?

Each package runs in processes of its own, by turns. A row gives, per operation, the voluntary context switches of all
threads and the microseconds of processor time, both from ``getrusage``; other load on the machine hardly changes them.

    python bench/wakeups.py --mxnet-python PATH [--rounds 3] [--count 2000]

``wait`` adds 1 to an array of 16 numbers and waits for it. ``exchange`` pushes and pulls 10,000 floats of four contexts
on a store ``device``. ``function`` pushes a user's function to weftplan's engine, and waits for it.
"""

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time

import blas_setting  # noqa: F401 - takes settings back that halve the speed of NumPy's products


def operation(mx, what):
    """Return the function that is counted."""
    if what == "wait":
        array = mx.nd.zeros((16,))

        def work():
            array.__iadd__(1).wait_to_read()

    elif what == "function":
        engine = mx.engine.get()
        var = engine.new_variable()

        def work():
            engine.push(lambda: None, (), [var])
            engine.wait_for_var(var)

    else:
        store = mx.kv.create("device")
        values = [mx.nd.full((10_000,), k + 1.0, ctx=mx.cpu(k)) for k in range(4)]
        outs = [mx.nd.zeros((10_000,), ctx=mx.cpu(k)) for k in range(4)]
        store.init("w", mx.nd.zeros((10_000,)))

        def work():
            store.push("w", values)
            store.pull("w", out=outs)
            mx.nd.waitall()

    return work


def count(package, what, times):
    """Print (voluntary switches, microseconds of processor time) of an operation of ``package``, as JSON."""
    work = operation(importlib.import_module(package), what)
    for _ in range(200):
        work()
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw, time.process_time()
    for _ in range(times):
        work()
    used, after = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    print(json.dumps([(after - before) / times, used / times * 1e6]))


def main():
    """Count both packages by turns, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mxnet-python", help="Python of an environment with MXNet 1.9.1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=2000)
    arguments = parser.parse_args()
    pythons = {"weftplan": sys.executable, "mxnet": arguments.mxnet_python}
    rows = {}
    for _ in range(arguments.rounds):
        for what in ("wait", "exchange", "function"):
            for package, python in pythons.items():
                if python and not (what == "function" and package == "mxnet"):
                    command = [python, os.path.abspath(__file__), package, what, str(arguments.count)]
                    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                    rows.setdefault((what, package), []).append(json.loads(said.splitlines()[-1]))
    print("| operation | package | voluntary switches | µs of processor time |\n|---|---|---|---|")
    for (what, package), found in rows.items():
        switches, used = map(statistics.median, zip(*found, strict=True))
        print(f"| {what} | {package} | {switches:.1f} | {used:.1f} |")


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in ("weftplan", "mxnet"):
        count(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main()
