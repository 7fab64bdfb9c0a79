"""NVIDIA's compilers, if installed, accept every CUDA C kernel; no GPU is needed."""

import re

import pytest

from tests.support import cuda_bounds
from tests.support import ops_cuda_sources as cuda

REGISTERS = 65536
"""Registers of one block, on every GPU since 2014."""


def check_compiled(sources, folder):
    """Compile the sources with nvcc and check each kernel.

    Its registers must suffice for the threads of its launch, and no register may spill to memory.
    """
    names = [name for text in sources for name in re.findall(r"__global__ void (\w+)\(", text)]
    actual = cuda.nvcc(sources, folder)
    assert sorted(name for name, *_ in actual) == sorted(names)
    for name, text, registers, spilled in actual:
        threads = cuda.threads_of(text, name)
        assert -(-registers // 8) * 8 * threads <= REGISTERS, f"{name}: {registers} registers, {threads} threads"
        assert not spilled, f"{name} spills {spilled} bytes"


@pytest.mark.skipif(cuda.NVCC is None, reason="nvcc is not installed")
def test_nvcc_takes_every_source(tmp_path):
    """nvcc compiles the float32 sources without warnings or spills, within the registers of a block.

    Slow sources (random numbers, optimizer steps) are compiled only in `test_nvcc_takes_every_dtype`.
    """
    long = ("philox", "updates", "dropout")
    check_compiled([text for label, text in cuda.texts(every=False).items() if not label.startswith(long)], tmp_path)


@pytest.mark.stress
@pytest.mark.skipif(cuda.NVCC is None, reason="nvcc is not installed")
def test_nvcc_takes_every_dtype(tmp_path):
    """nvcc compiles every source for every dtype without warnings or spills."""
    check_compiled(list(cuda.texts(every=True).values()), tmp_path)


@pytest.mark.skipif(cuda.NVCC is None, reason="nvcc is not installed")
def test_a_mistake_is_noticed(tmp_path):
    """``nvcc`` raises for an unknown name and for an unused variable."""
    for code in ("y[0] = x;", "int unused = 3;"):
        with pytest.raises(AssertionError):
            cuda.nvcc([f'extern "C" __global__ void wrong(float* y) {{ {code} }}'], tmp_path)


def _or_skip(text):
    try:
        return cuda.nvrtc(text)
    except ImportError as error:
        pytest.skip(str(error))


def test_nvrtc_takes_a_source_of_every_file():
    """CuPy's own compiler, with its options, compiles one kernel of each file."""
    for text in {label.partition(".")[0]: text for label, text in cuda.texts(every=False).items()}.values():
        assert len(_or_skip(text)) > 0


@pytest.mark.stress
def test_nvrtc_takes_every_source():
    """CuPy's own compiler compiles every source for every dtype."""
    for text in cuda.texts(every=True).values():
        assert len(_or_skip(text)) > 0


BOUND_BY_MEMORY = ("piece_sums", "piece_squares", "piece_products", "normalize", "normalize_back", "pool_largest",
                   "pool_sum", "find_largest", "pool_back", "spread_back", "pool_whole", "softmax_columns",
                   "softmax_columns_back", "drop", "drop_back")  # fmt: skip
"""Kernels whose arithmetic must take less time than their memory accesses."""


@pytest.mark.skipif(cuda.NVCC is None, reason="nvcc is not installed")
def test_kernels_bound_by_memory_divide_no_long_numbers(tmp_path):
    """Kernels bound by memory have no 64-bit division, and no 32-bit division in a loop.

    A 64-bit division by a variable takes about a hundred instructions. One call of Philox serves eight elements of
    Dropout.
    """
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
    """Issuing a kernel's instructions takes less time than moving its bytes, on an H100 and an H200.

    The instructions are counted in machine code, for elementwise nodes, normalisation, pooling and softmax.
    ``cuda_bounds.ABOVE`` lists the exceptions.
    """
    for rows in cuda_bounds.measured().values():
        for row, count in rows:
            for gpu, ratio in cuda_bounds.bounds(count, row.nbytes).items():
                most = cuda_bounds.ABOVE.get((gpu, row.kernel), 1.0)
                assert ratio <= most, (
                    f"{row.kernel} ({row.call}) on {gpu}: {count:.0f} instructions, {row.nbytes} bytes"
                )


def test_the_page_has_the_bounds_of_every_kernel():
    """The page lists every kernel; ``python -m tests.support.cuda_bounds --write`` writes it."""
    text = cuda_bounds.PAGE.read_text()
    for row in cuda_bounds.KERNELS:
        assert f"| `{row.kernel}` | {row.call} |" in text
