"""Devices for the contracts of memory, streams, arrays, operators, executors, stores and training."""

import contextlib

import pytest

import weftplan as mx
from tests import standin_cupy
from weftplan import device, engine

PLACES = ["cpu", "sim", "standin", pytest.param("gpu", marks=pytest.mark.gpu)]
"""The host, the simulated device, the GPU code on a stand-in for CuPy, and a real GPU."""


GPUS = ["standin", pytest.param("gpu", marks=pytest.mark.gpu)]
"""The GPU code only: on the stand-in and on a real GPU."""


@contextlib.contextmanager
def place(where, **engine_settings):
    """Provide the function ``context(i)`` that creates contexts of one kind, for ``i`` from 0 to 3.

    On real GPUs the index is taken modulo their number, so with one GPU all contexts are the same.
    """
    if where == "standin":
        with standin_cupy.installed(**engine_settings):
            yield mx.gpu
    elif where == "gpu":
        count = device.num_gpus()
        kind = engine_settings.pop("kind", None)
        with engine.using(engine.create(kind, **engine_settings) if kind or engine_settings else engine.get()):
            yield lambda index=0: mx.gpu(index % count)
    else:
        yield {"cpu": mx.cpu, "sim": mx.sim}[where]
