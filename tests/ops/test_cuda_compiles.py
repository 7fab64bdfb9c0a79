"""An installed compiler of NVIDIA's accepts every kernel in CUDA C; no GPU is needed."""

import re

import pytest

from tests.support import cuda_bounds
from tests.support import ops_cuda_sources as cuda

REGISTERS = 65536
"""Of one block, on every GPU since 2014."""


def compiled(sources, folder):
    """nvcc's report on each kernel: the launch's number of threads is allowed, and no register spills to memory."""
    names = [name for text in sources for name in re.findall(r"__global__ void (\w+)\(", text)]
    actual = cuda.nvcc(sources, folder)
    assert sorted(name for name, *_ in actual) == sorted(names)
    for name, text, registers, spilled in actual:
        threads = cuda.threads_of(text, name)
        assert -(-registers // 8) * 8 * threads <= REGISTERS, f"{name}: {registers} registers, {threads} threads"
        assert not spilled, f"{name} spills {spilled} bytes"


@pytest.mark.skipif(cuda.NVCC is None, reason="nvcc is not installed")
def test_nvcc_takes_every_source(tmp_path):
    """In float32: no warning, no spills, and few enough registers for the threads of its blocks.

    Sources that take the compiler seconds, random numbers and steps of 24 weights, stand in the long test alone.
    """
    long = ("philox", "updates", "dropout")
    compiled([text for label, text in cuda.texts(every=False).items() if not label.startswith(long)], tmp_path)


@pytest.mark.stress
@pytest.mark.skipif(cuda.NVCC is None, reason="nvcc is not installed")
def test_nvcc_takes_every_dtype(tmp_path):
    """The same for every dtype that a letter of a source may stand for."""
    compiled(list(cuda.texts(every=True).values()), tmp_path)


@pytest.mark.skipif(cuda.NVCC is None, reason="nvcc is not installed")
def test_a_mistake_is_noticed(tmp_path):
    """An unknown name, an unused variable, and too few registers are detected."""
    for code in ("y[0] = x;", "int unused = 3;"):
        with pytest.raises(AssertionError):
            cuda.nvcc([f'extern "C" __global__ void wrong(float* y) {{ {code} }}'], tmp_path)


def _or_skip(text):
    try:
        return cuda.nvrtc(text)
    except ImportError as error:
        pytest.skip(str(error))


def test_nvrtc_takes_a_source_of_every_file():
    """CuPy's own compiler, with its options, makes machine code of one kernel of each file."""
    for text in {label.partition(".")[0]: text for label, text in cuda.texts(every=False).items()}.values():
        assert len(_or_skip(text)) > 0


@pytest.mark.stress
def test_nvrtc_takes_every_source():
    """The same of every source, for every dtype."""
    for text in cuda.texts(every=True).values():
        assert len(_or_skip(text)) > 0


BOUND_BY_MEMORY = ("piece_sums", "piece_squares", "piece_products", "normalize", "normalize_back", "pool_largest",
                   "pool_sum", "find_largest", "pool_back", "spread_back", "pool_whole", "softmax_columns",
                   "softmax_columns_back", "drop", "drop_back")  # fmt: skip
"""Kernels whose arithmetic is to take less time than their memory."""


@pytest.mark.skipif(cuda.NVCC is None, reason="nvcc is not installed")
def test_kernels_bound_by_memory_divide_no_long_numbers(tmp_path):
    """A division of 64 bits by a number that the compiler does not know takes some hundred instructions; a loop over
    elements has none of 32 bits, either. One call of Philox serves eight elements of Dropout."""
    kernels = {}
    for label, text in cuda.texts(every=False).items():
        if label.startswith(("batch_norm", "pooling", "softmax._ROWS", "dropout")):
            kernels |= cuda.ptx(text, tmp_path)
    for name in BOUND_BY_MEMORY:
        body = kernels[name]
        assert not re.search(r"\b(div|rem)\.[su]64", body), name
        assert len(re.findall(r"\b(?:div|rem)\.[su]32", body)) <= 9, name
        for loop in cuda.loops(body):
            assert not re.search(r"\b(div|rem)\.[su]32", loop), f"{name} divides in a loop"
    assert len(re.findall(r"mul\.hi\.u64", kernels["drop"])) <= 8 * 2.5
    assert "st.shared" in kernels["drop"]


@pytest.mark.skipif(cuda.NVCC is None or cuda.CUOBJDUMP is None, reason="nvcc or cuobjdump is not installed")
def test_no_kernel_is_bound_by_instructions():
    """Issuing the instructions of elementwise nodes, normalisation, pooling and softmax takes less time than moving
    their bytes, on an H100 and but for the exceptions on an H200, by the machine code of each kernel."""
    for rows in cuda_bounds.measured().values():
        for row, count in rows:
            for gpu, ratio in cuda_bounds.bounds(count, row.nbytes).items():
                most = cuda_bounds.ABOVE.get((gpu, row.kernel), 1.0)
                assert ratio <= most, (
                    f"{row.kernel} ({row.call}) on {gpu}: {count:.0f} instructions, {row.nbytes} bytes"
                )


def test_the_page_has_the_bounds_of_every_kernel():
    """``python -m tests.support.cuda_bounds --write`` writes them where the tools are."""
    text = cuda_bounds.PAGE.read_text()
    for row in cuda_bounds.KERNELS:
        assert f"| `{row.kernel}` | {row.call} |" in text
