"""CUDA C kernels at arrays of nearly 2^31 elements, where 32-bit indices would overflow.

Memory is only reserved (200 GB, on a Linux that overcommits). The first, a middle and the last block of each launch
run, and only their pages are touched.
"""

import sys
import types

import numpy as np
import pytest

from tests.cuda_on_host import build
from tests.cuda_on_host.kernels import CELL, Host, zeros
from tests.standin_cupy.cuda.syntax import CompileException, functions
from tests.support import ops_cuda_sources as cuda
from weftplan.kernels.cuda import batch_norm, columns, dropout, pooling, segments, softmax, updates
from weftplan.ops.core.implementations import provided
from weftplan.ops.core.registry import get, parse_params
from weftplan.ops.nn import rnn_cuda_cells as cells

pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "nothing is missing"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux promises memory that it does not have"),
]


class Far:
    """An array of the fake device, with the part of CuPy's interface that launches use."""

    def __init__(self, *shape, dtype=np.float32):
        self.host = zeros(int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
        self.shape, self.size, self.ndim, self.dtype = shape, self.host.size, len(shape), self.host.dtype
        self.nbytes = self.host.nbytes

    def reshape(self, *shape):
        """Return a view of the same memory with another shape."""
        result = object.__new__(Far)
        result.host = self.host.reshape(*shape)
        result.shape, result.size, result.ndim, result.dtype = (
            result.host.shape,
            self.size,
            result.host.ndim,
            self.dtype,
        )
        return result


class Kernel:
    """A stand-in for ``cupy.RawKernel`` that runs three blocks.

    It records whether the last element of each result was written.
    """

    ended: list = []  # noqa: RUF012 - of all launches of a test

    def __init__(self, code, name, options=()):
        self.code, self.name = code, name

    def __call__(self, grid, block, args):
        parameters = functions(self.code)[self.name].parameters
        assert build.Compiled(self.code, self.name).parameters == [
            f"{'const ' * (p.const and p.pointer)}{p.type}{'*' * p.pointer}" for p in parameters
        ]
        for parameter, inputs in zip(parameters, args, strict=True):
            kind = {int: "int64", float: "float64"}.get(type(inputs)) or str(inputs.dtype)
            assert kind == parameter.type, parameter
        only = [0, grid[0] // 2, grid[0] - 1][0 if self.first else 1 :]
        noted = Host.run(build.Compiled(self.code, self.name), self.name, grid, block, parameters, args, only=only)
        Kernel.ended.append([bool(cells[-CELL : -CELL + 8].view(np.int64)[0]) for cells in noted])

    first = True


XP = types.SimpleNamespace(
    RawKernel=Kernel, cuda=types.SimpleNamespace(compiler=types.SimpleNamespace(CompileException=CompileException))
)
CONTEXT = types.SimpleNamespace(
    xp=XP, is_train=True, recompute=False, generator=lambda: types.SimpleNamespace(key=(np.uint64(1), np.uint64(2))),
    take=lambda shape, dtype: Far(*shape, dtype=dtype),
)  # fmt: skip
MOST = 2**31 - 1


def params(name, **given):
    """Return parsed parameters of an operator."""
    return parse_params(get(name), {k: str(v) for k, v in given.items()})


def _dropout():
    x, mask, y = Far(MOST), Far(MOST, dtype=np.uint8), Far(MOST)
    dropout._forward(CONTEXT, params("Dropout", p=0.5), [x], [y, mask])
    dropout._backward(CONTEXT, params("Dropout", p=0.5), [y, mask], [x])


def _softmax():
    x, y, dx = (Far((1 << 28) - 1, 8) for _ in range(3))
    softmax._run(CONTEXT, "softmax_rows", (x, y), ((1 << 28) - 1, 8, 1), log=False)
    softmax._run(CONTEXT, "softmax_rows_back", (x, y, dx), ((1 << 28) - 1, 8, 1), log=True)
    softmax._output_backward(CONTEXT, params("SoftmaxOutput"), [y, Far((1 << 28) - 1)], [dx])


def _batch_norm():
    x, y, dx = (Far(4, 1 << 21, 255) for _ in range(3))
    vectors = [Far(1 << 21) for _ in range(6)]
    batch_norm._forward(CONTEXT, params("BatchNorm"), [x, *vectors[:4]], [y, *vectors[4:]])
    vectors = [Far(1 << 21) for _ in range(5)]
    batch_norm._backward(CONTEXT, params("BatchNorm"), [y, x, *vectors[:3]], [dx, *vectors[3:]])


def _pooling():
    for kind in ("max", "avg"):
        inputs = params("Pooling", kernel=(3, 3), pad=(1, 1), pool_type=kind)
        x, y, dx = (Far(1, 2047, 1024, 1024) for _ in range(3))
        pooling._forward(CONTEXT, inputs, [x], [y])
        pooling._backward(CONTEXT, inputs, [y, x, y], [dx])
    whole = params("Pooling", kernel=(1, 1), global_pool=True, pool_type="avg")
    pooling._forward(CONTEXT, whole, [Far(1 << 15, 1 << 8, 15, 17)], [Far(1 << 15, 1 << 8, 1, 1)])


def _segments():
    keys = Far(1 << 31, dtype=np.uint64)
    index = Far(MOST, dtype=np.int32)
    segments.each(XP, segments._INDEX, "index_keys", keys.size, (index, keys, MOST, 1 << 20, 0), I=index.dtype)
    segments.launch(XP, segments.SORT, "sort_tile", keys.size // 2048, 1024, (keys, keys.size, 2048))
    keys.host[(1 << 30) - 1], keys.host[-1] = 5, 4  # a pair that has to exchange places
    segments.each(XP, segments.SORT, "sort_step", keys.size // 2, (keys, keys.size, keys.size // 2))
    keys = Far(1 << 20, dtype=np.uint64)
    keys.host[-1] = (1 << 52) + keys.size - 1
    source, out = Far(1, 1 << 20, 2047), Far(1, (1 << 20) + 1, 2047)
    args = (keys, source, out, 1 << 20, (1 << 20) + 1, 2047, 1)
    Kernel.first = False  # its first row has a million terms
    segments.each(XP, segments._SUM, "sum_slices", source.size, args, T=source.dtype)


def _sequences():
    x, y, lengths = Far(1 << 10, 1 << 10, 2047), Far(1 << 10, 1 << 10, 2047), Far(1 << 10)
    lengths.host[...] = 1 << 10
    for name in ("SequenceMask", "SequenceReverse"):
        inputs = params(name, use_sequence_length=True)
        provided("gpu")[name].kernel(CONTEXT, inputs, [x, lengths], [y])


def _cells():
    gates, product = Far(1 << 19, 4 * 1023), Far(1 << 19, 4 * 1023)
    few = [Far(1 << 19, 1023) for _ in range(6)]
    cells.lstm_step(XP, gates, product, *few[:3])
    cells.lstm_back(XP, gates, *few[:4], product, few[4])


def _windows():
    result = columns.Windows(1, (46, 1 << 20), (3, 3), (1, 1), (1, 1), (1, 1), (46, 1 << 20))
    image, wide = Far(4, 1, 46, 1 << 20), Far(4, 9, 46 << 20)
    result.gather(XP, image, wide, 0, 46 << 20)
    result.sum_back(XP, wide, image, 0, 46 << 20)


def _steps():
    for name, states in cuda.STEPS.items():
        arrays = [Far(MOST) for _ in range(2 + states)]
        updates.step(XP, [updates.WeightStep(cuda.step_formula(name, np.float32), arrays, arrays[0])])


@pytest.mark.parametrize(
    "launch",
    [_dropout, _softmax, _batch_norm, _pooling, _segments, _sequences, _cells, _windows, _steps],
    ids=lambda f: f.__name__[1:],
)
def test_the_last_element_is_reached(launch):
    """No index overflows, every access is within its array, and the last block writes the last element."""
    Kernel.ended, Kernel.first = [], True
    launch()
    assert Kernel.ended
    assert all(any(row) for row in Kernel.ended)
