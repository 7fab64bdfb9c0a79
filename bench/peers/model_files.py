"""Peer of ``bench_models.py``: opens, binds and runs model files in PACKAGE (``weftplan`` or ``mxnet``).

Reads a JSON object per line, a job, and answers with a line: {"wall": seconds, "cpu": seconds of all threads}, and the
results of the job. Jobs: ``load`` (a pair of files), ``bind`` (mode ``inference`` or ``training``), ``bind_and_fill``
(a bind, until all arrays are filled), ``bind_and_run`` (a bind and the first run), ``facts`` (planned bytes), ``run``
(once), ``runs`` (repeatedly; the median), ``outputs`` (statistics of the first output).
"""

import gc
import importlib
import json
import os
import re
import statistics
import sys
import time
import warnings

import numpy as np

warnings.filterwarnings("ignore")
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # a framework's own output goes to stderr
package = sys.argv[1]
mx = importlib.import_module(package)
held = {}


def load(job):
    """Load a symbol and its parameters into ``held``."""
    held.clear()
    symbol, stored = mx.sym.load(job["symbol"]), mx.nd.load(job["params"])
    mx.nd.waitall()
    held.update(symbol=symbol, stored=stored)
    return {}


def bind(job):
    """Bind an executor for the job's shapes and store it in ``held``."""
    held.pop("executor", None)
    shapes = {name: tuple(shape) for name, shape in job["shapes"].items()}
    reqs = "null" if job["mode"] == "inference" else {
        name: "null" if name in shapes else "write" for name in held["symbol"].list_arguments()
    }  # fmt: skip
    executor = held["symbol"].simple_bind(mx.cpu(), grad_req=reqs, **shapes)
    held.update(executor=executor, training=job["mode"] == "training", shapes=shapes)
    return {}


def bind_and_fill(job):
    """Bind, and wait for other threads: both frameworks return while these still fill arrays with zeros."""
    bind(job)
    mx.nd.waitall()
    return {}


def bind_and_run(job):
    """Bind, and make the first run, which prepares calls in weftplan."""
    bind(job)
    return run(job)


def facts(job):
    """Copy the parameters and random inputs into the executor, and return its planned bytes."""
    executor = held["executor"]
    parts = {"arg": {}, "aux": {}}
    for name, value in held["stored"].items():
        kind, _, remaining = name.partition(":")
        parts[kind][remaining] = value
    executor.copy_params_from(parts["arg"], parts["aux"])
    random = np.random.RandomState(0)
    for name, shape in held["shapes"].items():
        # Small whole numbers are valid as pixels, as words of a vocabulary and as classes.
        executor.arg_dict[name][:] = mx.nd.array(random.randint(0, 5, shape).astype(np.float32))
    mx.nd.waitall()
    if package == "weftplan":
        plan = executor.memory_plan
        return {"planned": plan.reported_bytes, "with_scratch": plan.peak}
    match = re.search(r"Total (\d+) MB allocated", executor.debug_str())
    return {"planned": int(match.group(1)) << 20}


def run(job):
    """Run forward, and backward if the executor is bound for training."""
    executor = held["executor"]
    executor.forward(is_train=held["training"])
    if held["training"]:
        executor.backward()
    mx.nd.waitall()
    return {}


def runs(job):
    """Return the median of the runs within the job's ``seconds``, at least three; a run before them does not count."""
    run(job)
    wall, used = [], []
    end = time.perf_counter() + job["seconds"]
    while len(wall) < 3 or time.perf_counter() < end:
        start, before = time.perf_counter(), time.process_time()
        run(job)
        wall.append(time.perf_counter() - start)
        used.append(time.process_time() - before)
    return {"wall": statistics.median(wall), "cpu": statistics.median(used)}


def outputs(job):
    """Return the largest and the mean absolute value of the first output."""
    value = held["executor"].outputs[0].asnumpy()
    return {"largest": float(np.abs(value).max()), "mean": float(np.abs(value).mean())}


JOBS = {
    "load": load, "bind": bind, "bind_and_fill": bind_and_fill, "bind_and_run": bind_and_run, "facts": facts,
    "run": run, "runs": runs, "outputs": outputs,
}  # fmt: skip
for line in sys.stdin:
    job = json.loads(line)
    gc.collect()
    start, used = time.perf_counter(), time.process_time()
    try:
        found = JOBS[job["do"]](job)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    answers.write(json.dumps({"wall": time.perf_counter() - start, "cpu": time.process_time() - used, **found}) + "\n")
