"""CUDA C compiled to machine code of the host: threads synchronize as on a GPU; undefined behaviour is detected."""

import numpy as np
import pytest

from tests.cuda_on_host import build
from tests.cuda_on_host.kernels import on_host
from tests.standin_cupy import installed
from tests.standin_cupy.cuda.memory import KernelError

pytestmark = pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "nothing is missing")

LANES = list(range(64))
TREE = """__shared__ int s[64]; int t = threadIdx.x; s[t] = i; __syncthreads();
    for (int k = 32; k > 0; k /= 2) { if (t < k) s[t] = s[t] + s[t + k]; __syncthreads(); } out[i] = s[0];"""
RIGHT = [
    ("out[i] = -7 / 2 + (-7 % 2) * 10;", [-13] * 64),
    ("out[i] = (int)(-2.9f) + (int)1e30 + (int)(0.0f / (float)(i - i));", [2147483645] * 64),
    ("out[i] = (int)((long long)((float)-i * 1e30f) >> 60);", [0] + [-8] * 63),
    ("out[i] = (long long)(0.0f / (float)(i - i)) < 0ll ? 1 : 0;", [1] * 64),
    ("out[i] = (unsigned char)(i * 5) + (int)threadIdx.x - (int)blockDim.x;", [i * 5 % 256 + i - 64 for i in LANES]),
    ("double n = 0.0 / (i - i); out[i] = (int)((unsigned long long)n >> 63) + (int)n / 1073741824;", [-1] * 64),
    (TREE, [2016] * 64),
    ("out[i] = __shfl_sync(0xffffffffu, i, 3);", [i // 32 * 32 + 3 for i in LANES]),
    ("out[i] = __shfl_down_sync(0xffffffffu, i, 4u);", [i + 4 if i % 32 < 28 else i for i in LANES]),
    ("out[i] = __shfl_up_sync(0xffffffffu, i, 1u, 8);", [i - 1 if i % 8 else i for i in LANES]),
    ("out[i] = __shfl_xor_sync(0xffffffffu, i, 5);", [i ^ 5 for i in LANES]),
    ("out[i] = (int)(__ballot_sync(0xffffffffu, i % 3 == 0) & 1023u);", [0b1001001001] * 32 + [0b10010010] * 32),
    ("out[i] = __any_sync(0xffffffffu, i == 40) + 2 * __all_sync(0xffffffffu, i < 40);", [2] * 32 + [1] * 32),
    ("int s = i; for (int k = 16; k > 0; k /= 2) s += __shfl_xor_sync(0xffffffffu, s, k); out[i] = s;",
     [496] * 32 + [1520] * 32),
    ("__shared__ int s[64]; s[i] = i; __syncwarp(); out[i] = s[i ^ 1];", [i ^ 1 for i in LANES]),
    ("atomicAdd(out + 0, 1);", [64] + [0] * 63),
]  # fmt: skip
WRONG = [
    ("out[i + 1] = 0;", "writes element 64 of out of k, which has 64"),
    ("out[i] = a[i - 1];", "reads element -1 of a of k"),
    ("__shared__ int s[64]; s[i] = i; __syncthreads(); out[i] = s[i + 1];", "reads element 64 of shared memory s"),
    ("__shared__ int s[64]; out[i] = s[i];", "which no thread of the block has written"),
    ("out[0] = i;", "writes, as another thread does, element 0 of out"),
    ("out[i] = 1; out[i] = out[63 - i];", "race: it"),
    ("__shared__ int s[64]; s[i] = i; out[i] = s[63 - i];", "no thread of the block has written|without a barrier"),
    (TREE.replace("s[t] + s[t + k]; __syncthreads(); }", "s[t] + s[t + k]; }"), "without a barrier"),
    ("__shared__ int s[64]; s[i] = i; __syncwarp(); out[i] = s[63 - i];", "without a barrier|no thread of the block"),
    ("if (i < 3) __syncthreads();", "some threads of a block only"),
    ("if (i < 3) __syncthreads();\nelse __syncthreads();", "different calls of __syncthreads"),
    ("if (i > 40) return; out[i] = __shfl_sync(0xffffffffu, i, 3);", "lanes of its warp that have ended"),
    ("if (i < 7) out[i] = __shfl_down_sync(0x7fu, i, 1u);", "lane 7, which is not in its mask 0x7f"),
    ("int s[2]; s[0] = 1; s[i % 3] = 2; out[i] = s[0];", "beyond a local array"),
    ("out[i] = 1 / (i - 3);", "division by 0"),
    ("out[i] = 2147483600 + i;", "an addition overflows in line 1 of k"),
    ("out[i] = (i + 1) * 100000000;", "a multiplication overflows"),
    ("out[i] = 1 << (i + 1);", "a shift by too many bits"),
]
HEAD = 'extern "C" __global__ void k(int* out, const int* a) { int i = blockIdx.x * blockDim.x + threadIdx.x; '


def source(body):
    """Return the source of a kernel with an integer ``i`` for each of 64 threads."""
    return f"{HEAD}{body} }}"


@pytest.fixture(scope="module")
def xp():
    """The stand-in with all kernels compiled in advance, each run in four orders of its threads."""
    build.build(source(body) for body, _ in RIGHT + WRONG)
    with installed() as module, on_host((0, 1, 2, 3)):
        yield module


def run(xp, body, blocks=1):
    """Run a kernel with 64 threads in total; return its 64 outputs."""
    out = xp.asarray(np.zeros(64, np.int32))
    xp.RawKernel(source(body), "k")((blocks,), (64 // blocks,), (out, xp.asarray(np.zeros(64, np.int32))))
    return out.get().tolist()


@pytest.mark.parametrize(("body", "wanted"), RIGHT)
def test_results_of_a_gpu(xp, body, wanted):
    """Arithmetic, casts out of range, barriers, shuffles and votes give a GPU's results."""
    assert run(xp, body) == wanted


@pytest.mark.parametrize(("body", "text"), WRONG)
def test_undefined_behaviour_is_detected(xp, body, text):
    """Accesses out of bounds, races, wrong barriers, uninitialised memory and overflow raise KernelError."""
    with pytest.raises(KernelError, match=text):
        run(xp, body)


def test_launches_after_a_failure(xp):
    """After a failed launch, whose threads may stop anywhere, the next launch gives right results."""
    for _ in range(3):
        with pytest.raises(KernelError):
            run(xp, "if (i < 3) __syncthreads();")
        assert run(xp, TREE) == [2016] * 64


def test_blocks_may_not_rely_on_each_other(xp):
    """A race between two blocks raises KernelError, for two writes and for a write and a read."""
    for body in ("out[threadIdx.x] = i;", "out[i] = 1; out[i] = out[(i + 32) % 64];"):
        with pytest.raises(KernelError, match="race"):
            run(xp, body, blocks=2)


def test_the_compiler_names_the_parameters(xp):
    """An argument whose dtype differs from the compiled signature raises TypeError."""
    compiled = build.Compiled(source(RIGHT[0][0]), "k")
    assert compiled.parameters == ["int32*", "const int32*"]
    kernel = xp.RawKernel(source(RIGHT[0][0]), "k")
    with pytest.raises(TypeError, match="points to int32"):
        kernel((1,), (64,), (xp.zeros(64), xp.zeros(64, np.int32)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32, np.int64, np.int8, np.uint8])
def test_sum_kernels_of_a_store(xp, dtype):
    """The sum kernel of a store gives NumPy's sums for every dtype; float16 is added in float32."""
    from weftplan.kvstore.gpu_sum import _kernel

    arrays = [np.arange(300).astype(dtype) * dtype(k) for k in (1, 2, 3)]
    inputs = [xp.asarray(x) for x in arrays]
    out = xp.zeros(300, dtype)
    _kernel(xp, 3, dtype is np.float16)(*inputs, out)
    want = sum(x.astype(np.float32) for x in arrays) if dtype is np.float16 else arrays[0] + arrays[1] + arrays[2]
    np.testing.assert_array_equal(out.get(), want.astype(dtype))
