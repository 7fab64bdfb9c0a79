"""The choice of a node's implementation: its report, its scratch in the plan, and equal results."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine
from weftplan.errors import ConfigError, PlanError
from weftplan.kernels.compiled.scratch import forward_scratch
from weftplan.kernels.compiled.target import host
from weftplan.ops.core import implementations, registry
from weftplan.ops.core.implementations import choose
from weftplan.ops.core.schema import TensorSpec
from weftplan.planner import PlanOptions, validate

ROOT = Path(__file__).parents[3]
HOST = host()
needs_compiler = pytest.mark.skipif(isinstance(HOST, str), reason=f"no compiled kernels: {HOST}")
F32 = np.dtype(np.float32)


def network(**more: Any) -> mx.sym.Symbol:
    """Return a network of two convolutions with pooling between them, a deconvolution, and a loss."""
    net = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=20, pad=(1, 1), name="first", **more)
    net = mx.sym.Pooling(mx.sym.Activation(net, act_type="relu"), kernel=(2, 2), stride=(2, 2), pool_type="max")
    net = mx.sym.Convolution(net, kernel=(3, 3), num_filter=12, num_group=2, stride=(2, 2), no_bias=True, name="second")
    net = mx.sym.Deconvolution(net, kernel=(4, 4), num_filter=6, stride=(2, 2), name="third")
    return mx.sym.LinearRegressionOutput(mx.sym.Flatten(net), mx.sym.Variable("label"))


def trained(kernels: str, steps: int = 3) -> list[Any]:
    """Return the parameters after some steps of gradient descent."""
    symbol = network()
    executor = symbol.simple_bind(mx.cpu(), data=(5, 3, 14, 14), plan_options=PlanOptions(kernels=kernels))
    validate(executor.planned)
    assert executor.allocated_bytes == executor.planned.memory.peak
    rng = np.random.default_rng(3)
    for array in executor.arg_dict.values():
        array[:] = rng.uniform(-0.5, 0.5, array.shape)
    for _ in range(steps):
        executor.forward(is_train=True)
        executor.backward()
        for name, grad in executor.grad_dict.items():
            if grad is not None and name not in ("data", "label"):
                executor.arg_dict[name] -= 0.01 * grad
    return [executor.arg_dict[name].asnumpy() for name in sorted(executor.arg_dict)]


@needs_compiler
@pytest.mark.parametrize("kind", ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice"])
@pytest.mark.parametrize("workers", [1, 2])
def test_training_gives_the_same_bits_everywhere(kind: str, workers: int):
    """Training with compiled kernels gives the same bits on every engine, with one and with two workers."""
    expected = trained("native")
    with engine.using(engine.create(kind, **({} if kind == "NaiveEngine" else {"cpu_workers": workers}))):
        for one, second in zip(trained("native"), expected, strict=True):
            assert one.tobytes() == second.tobytes()


@needs_compiler
def test_training_agrees_with_numpy():
    """Training with compiled kernels and with NumPy's agrees within rounding error."""
    for one, second in zip(trained("native"), trained("numpy"), strict=True):
        np.testing.assert_allclose(one, second, rtol=2e-4, atol=2e-6)


@needs_compiler
def test_the_choice_is_shown():
    """`debug_str` names the kernel of each node that has several, and the reason for NumPy's.

    The plan stores the choices.
    """
    symbol = network()
    native = symbol.simple_bind(mx.cpu(), data=(5, 3, 14, 14), plan_options=PlanOptions(kernels="native"))
    text = native.debug_str()
    assert text.count("Kernel: native\n") == 8
    chosen = {
        native.planned.graph.nodes[nid].name: choice.implementation.name
        for nid, choice in native.planned.kernels.items()
    }
    assert {chosen[name] for name in ("first", "second", "third", "first_backward")} == {"native"}
    numpy = symbol.simple_bind(mx.cpu(), data=(5, 3, 14, 14), plan_options=PlanOptions(kernels="numpy"))
    assert numpy.debug_str().count("Kernel: numpy (chosen by the user)\n") == 8
    half = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3,), num_filter=4)
    bound = half.simple_bind(mx.cpu(), data=(2, 3, 9), type_dict={"data": "bfloat16"}, plan_options=PlanOptions())
    assert (
        "Kernel: numpy (compiled kernels are written for float16, float32 and float64, not bfloat16)"
        in bound.debug_str()
    )


@needs_compiler
def test_scratch_is_small():
    """A compiled convolution of large images needs less than 2.2 MB of scratch, NumPy's needs more."""
    op = registry.get("Convolution")
    params = registry.parse_params(op, {"kernel": (3, 3), "num_filter": 64, "pad": (1, 1), "no_bias": True})
    ins = [TensorSpec((8, 64, 224, 224), F32), TensorSpec((64, 64, 3, 3), F32)]
    outs = [TensorSpec((8, 64, 224, 224), F32)]
    numpy, native = (
        choose(op, params, ins, outs, mode).implementation.workspace(params, ins, outs) for mode in ("numpy", "native")
    )
    assert native < 2_200_000 < numpy


def test_without_a_compiler_there_is_numpy(monkeypatch: pytest.MonkeyPatch):
    """Without a compiler every mode chooses NumPy's kernels, and the choice states the reason."""
    monkeypatch.setattr("weftplan.kernels.compiled.convolution.implementation.host", lambda: "no compiler here")
    op = registry.get("Convolution")
    params = registry.parse_params(op, {"kernel": (3, 3), "num_filter": 4})
    ins = [TensorSpec((1, 2, 5, 5), F32), TensorSpec((4, 2, 3, 3), F32), TensorSpec((4,), F32)]
    for mode in implementations.MODES:
        actual = choose(op, params, ins, [TensorSpec((1, 4, 3, 3), F32)], mode)
        assert actual.implementation.name == "numpy"
        assert actual.reason == ("chosen by the user" if mode == "numpy" else "no compiler here")
    trained("native", steps=1)


def test_without_llvmlite_training_has_numpys_bits():
    """A process without llvmlite trains to the bits of the mode ``numpy``."""
    code = (
        "import sys; sys.modules['llvmlite'] = None\n"
        "from tests.kernels.compiled.test_choice import trained\n"
        "print(*(array.tobytes().hex() for array in trained('auto')), sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.split() == [array.tobytes().hex() for array in trained("numpy")]


def test_without_llvmlite_the_reason_names_the_extra():
    """A process without llvmlite computes with NumPy; ``host()`` returns a reason that names llvmlite."""
    code = (
        "import sys; sys.modules['llvmlite'] = None\n"
        "from weftplan.kernels.compiled.target import host; print(host())\n"
        "import weftplan as mx, numpy as np\n"
        "x = mx.sym.Convolution(mx.sym.Variable('data'), kernel=(3, 3), num_filter=2)\n"
        "print(x.simple_bind(mx.cpu(), data=(1, 1, 4, 4)).forward()[0].shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == [
        "llvmlite cannot be imported: import of llvmlite halted; None in sys.modules"
        if "halted" in done.stdout
        else "llvmlite is not installed: pip install 'weftplan[fast]'",
        "(1, 2, 2, 2)",
    ]
    assert "llvmlite" in done.stdout


def test_modes_are_checked(monkeypatch: pytest.MonkeyPatch):
    """An unknown mode, as an option or in the environment, is an error that lists the modes."""
    with pytest.raises(PlanError, match="kernels must be one of auto, numpy, native"):
        PlanOptions(kernels="fast")
    monkeypatch.setenv("WEFTPLAN_KERNELS", "fast")
    with pytest.raises(ConfigError, match="WEFTPLAN_KERNELS"):
        PlanOptions.from_environment()
    monkeypatch.setenv("WEFTPLAN_KERNELS", "numpy")
    assert PlanOptions.from_environment().kernels == "numpy"


def test_importing_needs_no_compiler():
    """``import weftplan`` and its operators do not import llvmlite."""
    code = "import sys, weftplan, weftplan.ops, weftplan.planner; print('llvmlite' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "False\n"


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_after_a_fork_computes():
    """Functions compiled before a fork work in the child, and the child can compile others."""
    code = """
import os, numpy as np
from weftplan.kernels.compiled.convolution import dense
from weftplan.kernels.compiled import size_table as sizes
from weftplan.kernels.compiled.scratch import forward_scratch
from weftplan.ops.nn.conv_geometry import geometry
def run(dtype):
    geo = geometry((2, 3, 8, 8), 5, (3, 3), (1, 1), (1, 1), (1, 1), (8, 8), 1, np.dtype(dtype), 1)
    s = sizes.sizes(geo)
    x = np.ones((2, 3, 8, 8), dtype); w = np.ones((5, 3, 3, 3), dtype); y = np.empty((2, 5, 8, 8), dtype)
    need = forward_scratch(s)
    dense.forward(s, x, w, None, y, np.empty(need.packed, "u1"), np.empty(need.padded, "u1"))()
    assert y[0, 0, 4, 4] == 27 and y[0, 0, 0, 0] == 12
run("f4")
child = os.fork()
if child == 0:
    run("f4"); run("f8"); os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
run("f8")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@needs_compiler
def test_other_threads_run_meanwhile():
    """A kernel releases the interpreter: another thread counts while a long convolution runs."""
    from weftplan.kernels.compiled import size_table
    from weftplan.kernels.compiled.convolution import dense
    from weftplan.ops.nn.conv_geometry import geometry

    geo = geometry((8, 64, 48, 48), 64, (3, 3), (1, 1), (1, 1), (1, 1), (48, 48), 1, F32, 1)
    s = size_table.sizes(geo)
    x, w = np.ones((8, 64, 48, 48), F32), np.ones((64, 64, 3, 3), F32)
    y = np.empty_like(x)
    need = forward_scratch(s)
    scratch = np.empty(need.packed, np.uint8), np.empty(need.padded, np.uint8)
    dense.forward(s, x, w, None, y, *scratch)()
    inside, counted, over = threading.Event(), [0], threading.Event()

    def count() -> None:
        inside.wait()
        while not over.is_set():
            counted[0] += 1
            time.sleep(0)

    second = threading.Thread(target=count)
    second.start()
    most = 0
    try:
        inside.set()
        end = time.monotonic() + 60
        while most <= 20 and time.monotonic() < end:  # on a busy machine it may get no processor during a call
            before = counted[0]
            dense.forward(s, x, w, None, y, *scratch)()
            most = max(most, counted[0] - before)
    finally:
        over.set()
        second.join()
    # If the call kept the interpreter lock, the other thread could run only before and after it.
    assert most > 20


@needs_compiler
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_interrupts_while_compiling_and_running():
    """Ctrl-C at any moment of binding and running raises KeyboardInterrupt, and the next run is correct."""
    code = """
import os, signal, sys, threading, time
import numpy as np, weftplan as mx
from weftplan.planner import PlanOptions
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background of a shell ignores it
def once():
    net = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), pad=(1, 1), num_filter=8, no_bias=True, name="c")
    ex = net.simple_bind(mx.cpu(), data=(2, 3, 16, 16), plan_options=PlanOptions(kernels="native"))
    for array in ex.arg_dict.values(): array[:] = 1
    return ex.forward(is_train=True)[0].asnumpy()[0, 0, 5, 5]
interrupted = 0
for delay in (0.01, 0.05, 0.1, 0.15, 0.2, 0.3):
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        while timer.is_alive(): once()
        time.sleep(0.2)
    except KeyboardInterrupt:
        interrupted += 1
    timer.join()
    assert once() == 27, once()
print(interrupted)
"""
    environment = {**os.environ, "WEFTPLAN_KERNEL_CACHE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 6


@needs_compiler
@pytest.mark.shows("WEFTPLAN_KERNELS")
def test_the_variable_chooses_who_computes(monkeypatch: pytest.MonkeyPatch):
    """WEFTPLAN_KERNELS decides whether the next bind uses compiled or NumPy's kernels."""
    net = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=8, no_bias=True, name="conv")
    for mode in ("numpy", "native"):
        monkeypatch.setenv("WEFTPLAN_KERNELS", mode)
        executor = net.simple_bind(mx.cpu(), grad_req="null", data=(1, 3, 8, 8))
        assert executor.memory_plan.kernels["conv"].startswith(mode)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_kernel_that_needs_no_scratch(channels):
    """A 1x1 deconvolution needs no scratch and runs in a graph whose plan has no workspace."""
    net = mx.sym.Deconvolution(mx.sym.Variable("x"), kernel=(1, 1), num_filter=2, no_bias=True, name="up")
    x = np.random.default_rng(0).random((2, channels, 4, 5), dtype=np.float32)
    weight = np.random.default_rng(1).random((channels, 2, 1, 1), dtype=np.float32)
    executor = net.simple_bind(mx.cpu(), grad_req="null", x=x.shape, plan_options=PlanOptions(kernels="native"))
    actual = executor.forward(x=x, up_weight=weight)[0].asnumpy()
    np.testing.assert_allclose(actual, np.einsum("nchw,cf->nfhw", x, weight[:, :, 0, 0]), rtol=1e-5)
