"""Faults around a GPU: each raises a clear exception, and the process continues."""

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.standin_cupy import CUDARuntimeError, machine
from weftplan import device
from weftplan.errors import DeviceError
from weftplan.kernels.cuda import dropout
from weftplan.ops.core import cuda_source


def add_one(context):
    """Return the list [2, 2, 2], computed on gpu(0)."""
    return (mx.nd.ones((3,), ctx=context(0)) + 1).asnumpy().tolist()


def run_dropout(context):
    """Run Dropout forward in training mode on gpu(0); return its output."""
    executor = mx.sym.Dropout(mx.sym.Variable("x"), p=0.5).simple_bind(context(0), x=(4,))
    executor.forward(is_train=True)
    return executor.outputs[0].asnumpy()


def test_a_driver_that_is_missing(monkeypatch):
    """CuPy without a driver raises DeviceError with CUDA's message and the package to install."""
    with place("standin") as context:

        def fail():
            raise CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")

        monkeypatch.setattr(device.get(context(0)).xp.cuda.runtime, "getDeviceCount", fail)
        with pytest.raises(DeviceError, match=r"no usable NVIDIA driver or GPU \(cudaErrorInsuff.*pip install"):
            device.get(context(1))
        assert device.num_gpus() == 0


def test_a_kernel_that_does_not_compile(monkeypatch):
    """A kernel that does not compile raises DeviceError with its name, its dtype and a variable that avoids it.

    Other operations still run, and so does the kernel after its source is corrected.
    """
    good = dropout._SOURCE
    with place("standin") as context:
        monkeypatch.setattr(dropout, "_SOURCE", good.replace("unsigned int t", "unsigned number t"))
        with pytest.raises(DeviceError, match=r"kernel drop for float32 does not compile .*WEFTPLAN_KERNELS=numpy"):
            run_dropout(context)
        assert add_one(context) == [2, 2, 2]
        monkeypatch.setattr(dropout, "_SOURCE", good)
        assert run_dropout(context).shape == (4,)


def test_a_compiler_that_is_missing():
    """Without CUDA's compiler library, a kernel raises DeviceError with the extra that installs the library."""
    cuda_source._compiled.cache_clear()
    with place("standin") as context:
        machine.libraries_missing = True
        with pytest.raises(DeviceError, match=r"kernel drop cannot be compiled: libnvrtc.*weftplan\[cuda12\]"):
            run_dropout(context)
        machine.libraries_missing = False
        assert run_dropout(context).shape == (4,)


def test_an_array_of_another_device():
    """Operands on two GPUs raise DeviceError at the call."""
    with place("standin") as context:
        x, y = mx.nd.ones((3,), ctx=context(0)), mx.nd.ones((3,), ctx=context(1))
        with pytest.raises(DeviceError, match=r"gpu\(0\).*gpu\(1\)|gpu\(1\).*gpu\(0\)"):
            mx.nd.elemwise_add(x, y)
        assert add_one(context) == [2, 2, 2]


def test_an_array_of_another_stream():
    """A CuPy array with pending work on another stream is read after that work."""
    with place("standin") as context:
        xp = device.get(context(0)).xp
        with xp.cuda.Stream(non_blocking=True):
            x = xp.asarray(np.arange(3, dtype=np.float32))
            x *= 2
            shared = mx.nd.from_dlpack(x)
        assert (shared + 1).asnumpy().tolist() == [1, 3, 5]
