"""Engine peer: MXNet 1.9.1 runs Python callbacks pushed through its C API. Needs MXNet's own interpreter.

    python bench/peers/mxnet_engine.py COUNT WORKERS

Prints a JSON object: microseconds per operation for each program, for a push and its wait, and for ``a += 1``.
"""

import ctypes
import importlib.util
import json
import os
import sys
import time

os.environ["MXNET_CPU_WORKER_NTHREADS"] = sys.argv[2]
os.environ.setdefault("MXNET_ENGINE_TYPE", "ThreadedEnginePerDevice")

import mxnet as mx
from mxnet.base import _LIB, check_call

spec = importlib.util.spec_from_file_location(
    "engine_programs", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "engine_programs.py")
)
programs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(programs)


class ContextStruct(ctypes.Structure):
    """The C API's context: device type and index."""

    _fields_ = [("dev_type", ctypes.c_int), ("dev_id", ctypes.c_int)]


SYNC = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


def nothing(run_context, param):
    """Do nothing: the pushed function."""


CALLBACK = SYNC(nothing)
CPU = ContextStruct(1, 0)


def prepare(num_vars, program):
    """Return (one array per variable, arguments of every push); the arrays own the handles in the arguments."""
    arrays = [mx.nd.zeros((1,)) for _ in range(num_vars)]
    mx.nd.waitall()
    handles = [a.handle.value for a in arrays]
    calls = []
    for reads, writes in program:
        r = (ctypes.c_void_p * len(reads))(*(handles[i] for i in reads))
        w = (ctypes.c_void_p * len(writes))(*(handles[i] for i in writes))
        calls.append((r, len(reads), w, len(writes)))
    return arrays, calls


def push(call):
    """Push the empty Python function with the arguments ``call``."""
    r, nr, w, nw = call
    check_call(
        _LIB.MXEnginePushSyncND(
            CALLBACK, None, None, ctypes.byref(CPU), r, nr, w, nw, None, ctypes.c_int(0), b"nothing"
        )
    )


def main():
    """Time every program once, a push and its wait, and ``a += 1``; print microseconds per operation as JSON."""
    count = int(sys.argv[1])
    result = {}
    arrays, calls = prepare(*programs.chain(100))
    for call in calls:
        push(call)
    mx.nd.waitall()
    programs.place()
    for name, make in programs.SHAPES.items():
        arrays, calls = prepare(*make(count))
        programs.settle()
        start = time.perf_counter()
        for call in calls:
            push(call)
        mx.nd.waitall()
        result[name] = (time.perf_counter() - start) / len(calls) * 1e6
        del arrays
    arrays, calls = prepare(1, [((), (0,))])
    rounds = 2000
    start = time.perf_counter()
    for _ in range(rounds):
        push(calls[0])
        arrays[0].wait_to_read()
    result["push_wait"] = (time.perf_counter() - start) / rounds * 1e6
    a = mx.nd.zeros((16,))
    for _ in range(100):
        a += 1
    mx.nd.waitall()
    rounds = 20000
    start = time.perf_counter()
    for _ in range(rounds):
        a += 1
    mx.nd.waitall()
    result["inplace_add"] = (time.perf_counter() - start) / rounds * 1e6
    print(json.dumps(result))


main()
