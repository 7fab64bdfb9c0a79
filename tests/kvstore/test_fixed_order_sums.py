"""Sums of arrays have a fixed order of additions, for any number of threads and any block size."""

import threading
from functools import partial

import numpy as np
import pytest

from weftplan.kvstore import fixed_order_sums
from weftplan.kvstore.fixed_order_sums import reduce_arrays, spread_array, sum_grouped_block, sum_sequential_block
from weftplan.support import core_sharing


def sources(count: int, size: int, dtype: str = "float32") -> list[np.ndarray]:
    """Return ``count`` arrays whose sum depends on the order of additions."""
    rng = np.random.default_rng(count * 1000 + size)
    return [(rng.standard_normal(size) * 10.0 ** rng.integers(-4, 5, size)).astype(dtype) for _ in range(count)]


def grouped_oracle(xs: list[np.ndarray]) -> np.ndarray:
    """Return the sum in the order of MXNet's CommCPU: the first array, then the sums of groups of four."""
    acc = xs[0].copy()
    i = 1
    while i < len(xs):
        group = xs[i : i + 4]
        bracket = group[0]
        for term in group[1:]:
            bracket = bracket + term
        acc = acc + bracket
        i += 4
    return acc


def sequential_oracle(xs: list[np.ndarray]) -> np.ndarray:
    """Return the sum from left to right."""
    acc = xs[0].copy()
    for x in xs[1:]:
        acc = acc + x
    return acc


@pytest.mark.parametrize("count", range(1, 11))
@pytest.mark.parametrize(
    ("block_sum", "oracle"), [(sum_grouped_block, grouped_oracle), (sum_sequential_block, sequential_oracle)]
)
def test_order_of_additions(count, block_sum, oracle):
    """For each number of arrays, the sum has the bits of the documented order of additions."""
    xs = sources(count, 1001)
    out = np.empty_like(xs[0])
    reduce_arrays(xs, out, block_sum=block_sum, threads=1, bound=1)
    assert np.array_equal(out, oracle(xs))


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [1, 5, 4095, 4097, 70_001])
def test_threads_and_blocks_do_not_change_bits(threads, size, monkeypatch):
    """On any number of threads, arrays of any size have the bits of a simple loop."""
    monkeypatch.setattr(fixed_order_sums, "BLOCK_BYTES", 1 << 12)
    xs = sources(6, size)
    out = np.full_like(xs[0], np.nan)
    reduce_arrays(xs, out, threads=threads, bound=1)
    assert np.array_equal(out, grouped_oracle(xs))


def test_the_orders_differ():
    """The two orders of additions give different bits for this input, so the tests above can fail."""
    xs = sources(6, 10_000)
    assert not np.array_equal(grouped_oracle(xs), sequential_oracle(xs))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_into_the_first_source(dtype):
    """A sum that overwrites its first source has the bits of MXNet's grouped order."""
    xs = sources(5, 333, "float64")
    xs = [x.astype(dtype) for x in xs] if dtype != "int32" else [(x * 10).astype(dtype) for x in xs]
    want = grouped_oracle(xs)
    reduce_arrays(xs, xs[0], threads=2, bound=1)
    assert np.array_equal(xs[0], want)


def test_empty_and_shaped():
    """Empty arrays and arrays of several dimensions are summed."""
    out = np.empty((0, 3), np.float32)
    reduce_arrays([out, out], out, threads=4, bound=1)
    xs = [x.reshape(10, 20, 5) for x in sources(3, 1000)]
    result = np.empty_like(xs[0])
    reduce_arrays(xs, result, threads=2, bound=10)
    assert np.array_equal(result, grouped_oracle(xs))


def test_without_threads_the_caller_does_all(monkeypatch):
    """If no thread can be started, the caller computes the whole sum; helpers that start later write nothing."""

    class Late:
        """A helper thread that only stores its tasks."""

        def __init__(self):
            self.kept = []

        def give(self, run, work):
            self.kept.append(partial(run, work))

    def refuse(wanted):
        yield late
        raise RuntimeError("can't start new thread")

    late = Late()
    monkeypatch.setattr(fixed_order_sums, "BLOCK_BYTES", 1 << 12)
    monkeypatch.setattr(core_sharing, "_helpers", refuse)
    monkeypatch.setattr(core_sharing._pool, "free", [])
    xs = sources(6, 70_001)
    want = grouped_oracle(xs)
    out = np.empty_like(xs[0])
    reduce_arrays(xs, out, threads=4, bound=1)
    assert np.array_equal(out, want)
    out.fill(0)
    for task in late.kept:
        task(core_sharing._Word())
    assert late.kept
    assert not out.any(), "a thread that comes late has nothing to do"


def test_an_error_waits_for_the_other_threads(monkeypatch):
    """If the caller's share fails, the sum raises only after the other threads have finished with the arrays.

    caller:  [share: raises] ......................... raises
    helper:  [share ............................ ends]
    """
    began, go, ended = threading.Event(), threading.Event(), threading.Event()
    caller = threading.get_ident()

    def block_sum(blocks, out, scratch):
        if threading.get_ident() == caller:
            assert began.wait(60)
            threading.Timer(0.05, go.set).start()
            raise ZeroDivisionError("a share")
        began.set()
        assert go.wait(60)
        ended.set()

    monkeypatch.setattr(fixed_order_sums, "BLOCK_BYTES", 1 << 12)
    xs = sources(3, 4096)
    with pytest.raises(ZeroDivisionError, match="a share"):
        reduce_arrays(xs, np.empty_like(xs[0]), block_sum=block_sum, threads=2, bound=1)
    assert ended.is_set()


def test_an_error_of_another_thread_reaches_the_caller(monkeypatch):
    """If a helper's share fails, the sum raises its error."""
    caller, began = threading.get_ident(), threading.Event()

    def block_sum(blocks, out, scratch):
        if threading.get_ident() == caller:
            assert began.wait(60)
            return
        began.set()
        raise MemoryError("elsewhere")

    monkeypatch.setattr(fixed_order_sums, "BLOCK_BYTES", 1 << 12)
    xs = sources(3, 4096)
    with pytest.raises(MemoryError, match="elsewhere"):
        reduce_arrays(xs, np.empty_like(xs[0]), block_sum=block_sum, threads=2, bound=1)


@pytest.mark.parametrize(
    ("dtype", "block_sum"),
    [("float16", sum_sequential_block), ("bfloat16", sum_sequential_block), ("bfloat16", sum_grouped_block)],
)
def test_half_precision_is_summed_in_float32(dtype, block_sum):
    """Half-precision sums are rounded once at the end, so small terms are not lost.

    The exception is float16 in MXNet's grouped order.
    """
    result = np.dtype(dtype if dtype == "float16" else pytest.importorskip("ml_dtypes").bfloat16)
    sources = [np.full(5, 2048, result)] + [np.ones(5, result) for _ in range(16)]
    out = np.empty(5, result)
    for target in (out, sources[0]):
        reduce_arrays(sources, target, block_sum=block_sum, threads=1, bound=10)
        assert target.astype(np.float32).tolist() == [2064] * 5


@pytest.mark.parametrize("block_sum", [sum_grouped_block, sum_sequential_block])
def test_compiled_loops_change_no_bit(block_sum, monkeypatch):
    """Compiled loops, on one thread or three, give the bits of NumPy."""
    monkeypatch.setattr(fixed_order_sums, "BLOCK_BYTES", 1 << 12)
    xs, actual = sources(7, 70_001), []
    for compiled, threads in ((True, 1), (True, 3), (False, 1)):
        out = np.full_like(xs[0], np.nan)
        reduce_arrays(xs, out, block_sum=block_sum, threads=threads, bound=1, compiled=compiled)
        actual.append(out.tobytes())
    assert len(set(actual)) == 1


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_one_array_to_several(dtype, compiled, monkeypatch):
    """``spread_array`` fills every target, on one thread and on three."""
    monkeypatch.setattr(fixed_order_sums, "BLOCK_BYTES", 1 << 10)
    source = sources(1, 5003, dtype)[0]
    for threads in (1, 3):
        targets = [np.zeros_like(source) for _ in range(3)]
        spread_array(source, targets, threads=threads, bound=1, compiled=compiled)
        for target in targets:
            np.testing.assert_array_equal(target, source)
