"""The stand-in's CUDA C computes C's results and refuses undefined behaviour."""

import numpy as np
import pytest

from tests.standin_cupy import installed, meter
from tests.standin_cupy.cuda.memory import KernelError
from tests.standin_cupy.cuda.syntax import CompileException


@pytest.fixture(scope="module")
def xp():
    """The module of the stand-in."""
    with installed() as module:
        yield module


def run(xp, body, out, *arrays, threads=8, blocks=1, parameters="", before=""):
    """Run a kernel whose body may use ``out``, the arrays ``a``, ``b``, … and the index ``i``; return ``out``."""
    named = [f"const {C[str(x.dtype)]}* {name}" for name, x in zip("abcd", arrays, strict=False)]
    head = ", ".join([f"{C[str(out.dtype)]}* out", *named])
    index = "int i = blockIdx.x * blockDim.x + threadIdx.x;"
    source = f'{before} extern "C" __global__ void kernel({head}) {{ {index} {body} }}'
    target = xp.asarray(out)
    xp.RawKernel(source, "kernel")((blocks,), (threads,), (target, *map(xp.asarray, arrays)))
    return target.get()


C = {"float32": "float", "float64": "double", "int32": "int", "int64": "long long", "uint64": "unsigned long long"}


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("out[i] = i * 2 + 1;", [1, 3, 5, 7, 9, 11, 13, 15]),
        ("out[i] = -7 / 2 + (-7 % 2) * 10;", [-13] * 8),
        ("out[i] = i % 2 == 0 ? i : -i;", [0, -1, 2, -3, 4, -5, 6, -7]),
        ("int s = 0; for (int k = 0; k <= i; ++k) { if (k == 3) continue; if (k == 6) break; s += k; } out[i] = s;",
         [0, 1, 3, 3, 7, 12, 12, 12]),
        ("int s = i; while (s > 2) s -= 2; out[i] = s;", [0, 1, 2, 1, 2, 1, 2, 1]),
        ("out[i] = (int)(2147483647u + 1u);", [-2147483648] * 8),
        ("out[i] = (1 << i) >> 1 & 0xff ^ 3;", [3, 2, 1, 7, 11, 19, 35, 67]),
        ("if (i > 5) return; out[i] = 9;", [9] * 6 + [0, 0]),
        ("int k = i; int j = k++; out[i] = j + k;", [1, 3, 5, 7, 9, 11, 13, 15]),
        ("out[i] = i < 0 && 1 / 0 > 0 || !(i > 3);", [1, 1, 1, 1, 0, 0, 0, 0]),
        ("out[i] = (int)(-2.9f) + (int)1e30;", [2147483645] * 8),
        ("out[i] = twice(i, 2);", [0, 2, 4, 6, 8, 10, 12, 14]),
    ],
)  # fmt: skip
def test_results_of_c(xp, body, wanted):
    """Precedence, division towards zero, overflow, diverging loops and functions give C's results."""
    before = "__device__ int twice(int x, int n) { if (n == 0) return 0; int y = x; return x * n; }"
    assert run(xp, body, np.zeros(8, np.int32), before=before).tolist() == wanted


def test_floats_stay_floats(xp):
    """float and double give a double, float alone stays float, and a literal without f is a double."""
    a = np.full(8, 1e-8, np.float32)
    assert run(xp, "out[i] = (a[i] + 1.0f) - 1.0f;", np.zeros(8), a).tolist() == [0.0] * 8
    assert run(xp, "out[i] = (a[i] + 1.0) - 1.0;", np.zeros(8), a).min() > 9e-9


@pytest.mark.parametrize(
    ("kind", "wanted"), [("float32", [0, -(2**63), 2**63]), ("float64", [-(2**31), -(2**63), 2**63])]
)
def test_casts_of_nan(xp, kind, wanted):
    """A NaN cast to int, long long or unsigned long long gives the value of PTX's tables."""
    a = np.full(8, np.nan, kind)
    for dtype, value in zip((np.int32, np.int64, np.uint64), wanted, strict=True):
        assert run(xp, f"out[i] = ({C[np.dtype(dtype).name]})a[i];", np.zeros(8, dtype), a).tolist() == [value] * 8


def test_the_upper_half_of_a_product(xp):
    """``__umul64hi`` gives the upper half of the product of Python's integers."""
    rng = np.random.default_rng(3)
    a, b = (rng.integers(0, 2**64, 8, np.uint64) for _ in range(2))
    actual = run(xp, "out[i] = __umul64hi(a[i], b[i]);", np.zeros(8, np.uint64), a, b)
    assert actual.tolist() == [int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]


def test_blocks_share_memory(xp):
    """A tree of sums in shared memory, with a barrier between its levels, gives the sum of each block."""
    body = """__shared__ float s[4]; int t = threadIdx.x; s[t] = a[i]; __syncthreads();
    for (int k = 2; k > 0; k /= 2) { if (t < k) s[t] += s[t + k]; __syncthreads(); }
    if (t == 0) out[blockIdx.x] = s[0];"""
    assert run(xp, body, np.zeros(2, np.float32), np.arange(8, dtype=np.float32), threads=4, blocks=2).tolist() == [
        6,
        22,
    ]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("out[i + 1] = 0;", "writes element 1 to 8 of out"),
        ("out[i] = a[i - 1];", "reads element -1 to 6 of a"),
        ("out[0] = i;", "several threads write one element"),
        ("out[i] = 1; out[i] = out[7 - i];", "reads what was written by"),
        ("__shared__ int s[8]; s[threadIdx.x] = i; out[i] = s[7 - threadIdx.x];", "race on shared array s"),
        ("__shared__ int s[8]; out[i] = s[0]; s[threadIdx.x] = i;", "overwrites what is read by several threads"),
        ("if (i < 3) __syncthreads();", "some threads of a block"),
        ("int s[2]; s[i] = 1;", r"local array s\[2\]"),
        ("out[i] = 1 / (i - 3);", "divides a whole number by 0"),
    ],
)
def test_undefined_results_are_refused(xp, body, text):
    """Accesses out of bounds, races and barriers that some threads miss raise KernelError."""
    with pytest.raises(KernelError, match=text):
        run(xp, body, np.zeros(8, np.int32), np.zeros(8, np.int32))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("out[i] = nothing;", "no variable is called nothing"),
        ("a[i] = 1;", "is const"),
        ("out[i] = 1", "expected ';'"),
        ("out[i] = foo(1);", "no function is called foo"),
        ("out[i] = a[i] % 2;", "whole numbers"),
        ("wchar x = 1;", "expected"),
    ],
)
def test_invalid_code_is_refused(xp, body, text):
    """Code that NVRTC would refuse raises CompileException."""
    with pytest.raises(CompileException, match=text):
        run(xp, body, np.zeros(8, np.int32), np.zeros(8, np.float32))


def test_floats_are_not_added_by_atomics(xp):
    """``atomicAdd`` of integers gives their sum; of floats, whose order is not fixed, it raises KernelError."""
    assert run(xp, "atomicAdd(out + i % 2, i);", np.zeros(2, np.int32)).tolist() == [12, 16]
    with pytest.raises(KernelError, match="no fixed order"):
        run(xp, "atomicAdd(out + i % 2, 1.0f);", np.zeros(2, np.float32))


def test_arguments_are_checked(xp):
    """A wrong number or dtype of arguments raises TypeError; a wrong layout or a too large block raises ValueError.

    The call of a kernel that does not exist raises CompileException.
    """
    kernel = xp.RawKernel(
        'extern "C" __global__ void k(float* x, long long n) { if (threadIdx.x < n) x[0] = 1.0f; }', "k"
    )
    x = xp.zeros(4, np.float32)
    before = meter.launches["k"]
    kernel((1,), (1,), (x, 1))
    assert x.tolist() == [1, 0, 0, 0]
    assert meter.launches["k"] == before + 1
    for args, text in (
        ((x, np.int32(1)), "n is int64"),
        ((xp.zeros(4), 1), "points to float32"),
        ((x,), "2 parameters"),
    ):
        with pytest.raises(TypeError, match=text):
            kernel((1,), (1,), args)
    with pytest.raises(ValueError, match="not contiguous"):
        kernel((1,), (1,), (x[::2], 1))
    with pytest.raises(ValueError, match="CUDA_ERROR_INVALID_VALUE"):
        kernel((1,), (2048,), (x, 1))
    with pytest.raises(CompileException, match="no kernel is called other"):
        xp.RawKernel("", "other")((1,), (1,), ())
