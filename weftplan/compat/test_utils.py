"""``mx.test_utils``: comparisons, random arrays and helpers for scripts and tests written for MXNet.

Comparisons of arrays, checks of whole symbols and of distributions are in files of their own and are re-exported here.
Random arrays come from NumPy's global generator, which such tests seed. Data sets are read from local files
(``local_data.py``), never downloaded.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

from weftplan import ndarray as nd
from weftplan.compat.array_comparisons import (
    Host,
    almost_equal,
    almost_equal_ignore_nan,
    assert_almost_equal,
    assert_almost_equal_ignore_nan,
    assert_almost_equal_with_err,
    compare_ndarray_tuple,
    find_max_violation,
    get_atol,
    get_rtol,
    same,
)
from weftplan.compat.array_helpers import (
    assign_each,
    assign_each2,
    collapse_sum_like,
    create_2d_tensor,
    effective_dtype,
    same_symbol_structure,
)
from weftplan.compat.distribution_checks import (
    chi_square_check,
    gen_buckets_probs_with_ppf,
    mean_check,
    var_check,
    verify_generator,
)
from weftplan.compat.local_data import (
    download,
    get_cifar10,
    get_mnist,
    get_mnist_iterator,
    get_mnist_ubyte,
    get_zip_data,
)
from weftplan.compat.symbol_checks import (
    check_consistency,
    check_numeric_gradient,
    check_speed,
    check_symbolic_backward,
    check_symbolic_forward,
    numeric_grad,
    simple_forward,
)
from weftplan.data.batch import DataBatch
from weftplan.data.data_iter import DataIter
from weftplan.device import gpus
from weftplan.device.context import Context, current_context
from weftplan.errors import ParameterError
from weftplan.kvstore.mxnet_states import State
from weftplan.ndarray import NDArray
from weftplan.support.array_types import DTypeLike, RawArray
from weftplan.training.optimizers.base import Optimizer

__all__ = [
    "DummyIter",
    "EnvManager",
    "almost_equal",
    "almost_equal_ignore_nan",
    "assert_almost_equal",
    "assert_almost_equal_ignore_nan",
    "assert_almost_equal_with_err",
    "assert_exception",
    "assign_each",
    "assign_each2",
    "check_consistency",
    "check_numeric_gradient",
    "check_speed",
    "check_symbolic_backward",
    "check_symbolic_forward",
    "chi_square_check",
    "collapse_sum_like",
    "compare_ndarray_tuple",
    "compare_optimizer",
    "create_2d_tensor",
    "create_vector",
    "default_context",
    "default_dtype",
    "discard_stderr",
    "download",
    "effective_dtype",
    "environment",
    "find_max_violation",
    "gen_buckets_probs_with_ppf",
    "get_atol",
    "get_cifar10",
    "get_mnist",
    "get_mnist_iterator",
    "get_mnist_ubyte",
    "get_rtol",
    "get_zip_data",
    "list_gpus",
    "mean_check",
    "np_reduce",
    "numeric_grad",
    "rand_coord_2d",
    "rand_ndarray",
    "rand_shape_2d",
    "rand_shape_3d",
    "rand_shape_nd",
    "random_arrays",
    "random_sample",
    "random_uniform_arrays",
    "retry",
    "same",
    "same_array",
    "same_symbol_structure",
    "set_default_context",
    "set_env_var",
    "simple_forward",
    "var_check",
    "verify_generator",
]


# -- defaults ----------------------------------------------------------------------------------------------------------


def default_context() -> Context:
    """Return the default context of arrays."""
    return current_context()


def set_default_context(ctx: Context) -> None:
    """Set the default context of arrays."""
    Context.default_ctx = ctx


def default_dtype() -> type[np.float32]:
    """Return the default dtype of arrays."""
    return np.float32


def list_gpus() -> range:
    """Return the numbers of the usable GPUs."""
    return range(gpus.num_gpus())


# -- arrays ------------------------------------------------------------------------------------------------------------


def assert_exception(
    f: Callable[..., object], exception_type: type[BaseException], *args: object, **kwargs: object
) -> None:
    """Raise AssertionError unless the call raises ``exception_type``."""
    try:
        f(*args, **kwargs)
    except exception_type:
        return
    raise AssertionError(f"{getattr(f, '__name__', f)} did not raise {exception_type.__name__}")


def same_array(array1: NDArray, array2: NDArray) -> bool:
    """Return whether two arrays share their memory; the test changes both temporarily."""
    array1[:] += 1
    if not same(array1, array2):
        array1[:] -= 1
        return False
    array1[:] -= 1
    return same(array1, array2)


# -- random arrays -----------------------------------------------------------------------------------------------------


def rand_shape_nd(num_dim: int, dim: int = 10, allow_zero_size: bool = False) -> tuple[int, ...]:
    """Return a random shape of ``num_dim`` dimensions, each up to ``dim``."""
    return tuple(int(n) for n in np.random.randint(0 if allow_zero_size else 1, dim + 1, size=num_dim))


def rand_shape_2d(dim0: int = 10, dim1: int = 10, allow_zero_size: bool = False) -> tuple[int, int]:
    """Return a random shape of two dimensions."""
    low = 0 if allow_zero_size else 1
    return int(np.random.randint(low, dim0 + 1)), int(np.random.randint(low, dim1 + 1))


def rand_shape_3d(dim0: int = 10, dim1: int = 10, dim2: int = 10, allow_zero_size: bool = False) -> tuple[int, ...]:
    """Return a random shape of three dimensions."""
    low = 0 if allow_zero_size else 1
    return tuple(int(np.random.randint(low, dim + 1)) for dim in (dim0, dim1, dim2))


def rand_coord_2d(x_low: int, x_high: int, y_low: int, y_high: int) -> tuple[int, int]:
    """Return a random point in a rectangle; upper bounds are exclusive."""
    return int(np.random.randint(x_low, x_high)), int(np.random.randint(y_low, y_high))


def rand_ndarray(
    shape: Sequence[int],
    stype: str = "default",
    density: float | None = None,
    dtype: DTypeLike | None = None,
    modifier_func: Callable[[float], float] | None = None,
    shuffle_csr_indices: bool = False,
    distribution: str | None = None,
    ctx: Context | None = None,
) -> NDArray:
    """Return random numbers of [-1, 1); for ``row_sparse``, which is dense here, a ``density`` share of nonzero rows.

    Raises:
        ParameterError: another storage type.
    """
    if stype not in ("default", "row_sparse"):
        raise ParameterError(f"rand_ndarray: storage type {stype!r} is absent on purpose; use 'default'")
    values = np.random.uniform(-1.0, 1.0, tuple(shape)).astype(dtype or np.float32)
    if stype == "row_sparse":
        values[np.random.rand(len(values)) >= (np.random.rand() if density is None else density)] = 0
    if modifier_func is not None:
        values = np.vectorize(modifier_func, otypes=[values.dtype])(values)
    return nd.array(values, ctx=ctx, dtype=values.dtype).tostype(stype)


def random_arrays(*shapes: Sequence[int]) -> Host | list[Host]:
    """Return NumPy arrays of normal numbers, one per shape; a single array is not a list."""
    arrays = [np.array(np.random.randn(), np.float32) if not s else np.random.randn(*s).astype(np.float32)
              for s in shapes]  # fmt: skip
    return arrays[0] if len(arrays) == 1 else arrays


def random_uniform_arrays(
    *shapes: Sequence[int], low: float = 0.0, high: float = 1.0, dtype: DTypeLike | None = None
) -> list[Host]:
    """Return NumPy arrays of uniform numbers, one per shape."""
    return [np.random.uniform(low, high, tuple(shape)).astype(dtype or np.float32) for shape in shapes]


T = TypeVar("T")
P = ParamSpec("P")


def random_sample(population: Sequence[T], k: int) -> list[T]:
    """Return ``k`` distinct elements, in their original order."""
    chosen = np.sort(np.random.permutation(len(population))[:k])
    return [population[int(index)] for index in chosen]


def create_vector(size: int, dtype: DTypeLike = np.int64) -> NDArray:
    """Return the numbers from 0 to ``size - 1``."""
    return nd.arange(0, size, dtype=dtype)


def np_reduce(
    dat: RawArray, axis: int | Sequence[int] | None, keepdims: bool, numpy_reduce_func: Callable[..., RawArray]
) -> Host:
    """Apply a single-axis reduction of NumPy to several axes."""
    axes = list(range(dat.ndim)) if axis is None else [axis] if isinstance(axis, int) else list(axis)
    result = dat
    for one in sorted((k % dat.ndim for k in axes), reverse=True):
        result = numpy_reduce_func(result, axis=one)
    if keepdims:
        result = np.reshape(result, [1 if k in {a % dat.ndim for a in axes} else n for k, n in enumerate(dat.shape)])
    return np.asarray(result)


# -- helpers -----------------------------------------------------------------------------------------------------------


def retry(n: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that lets a test fail by AssertionError ``n - 1`` times."""
    if n < 1:
        raise ParameterError(f"retry: expected at least 1, got {n}")

    def decorate(test: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            for attempts in reversed(range(n)):
                try:
                    return test(*args, **kwargs)
                except AssertionError:
                    if not attempts:
                        raise
            raise AssertionError("unreachable: the last attempt returns or raises")

        return run

    return decorate


def set_env_var(key: str, val: str, default_val: str = "") -> str:
    """Set an environment variable; return its previous value."""
    previous = os.environ.get(key, default_val)
    os.environ[key] = val
    return previous


@contextlib.contextmanager
def environment(*args: Any) -> Iterator[None]:
    """Set environment variables within ``with``: ``(name, value)`` or a dictionary; None unsets a variable.

    >>> with environment("MXNET_BACKWARD_DO_MIRROR", "1"):
    ...     os.environ["MXNET_BACKWARD_DO_MIRROR"]
    '1'
    """
    if len(args) not in (1, 2):
        raise ParameterError(f"environment: give a name and a value, or a dictionary, got {len(args)} arguments")
    settings = dict(args[0]) if len(args) == 1 else {args[0]: args[1]}
    previous = {name: os.environ.get(name) for name in settings}

    def put(values: Mapping[str, object]) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = str(value)

    put(settings)
    try:
        yield
    finally:
        put(previous)


class EnvManager:
    """Context manager that sets an environment variable."""

    def __init__(self, key: str, val: str) -> None:
        self._key, self._value = key, val
        self._previous: str | None = None

    def __enter__(self) -> None:
        self._previous = os.environ.get(self._key)
        os.environ[self._key] = self._value

    def __exit__(self, *exc: object) -> None:
        if self._previous is None:
            os.environ.pop(self._key, None)
        else:
            os.environ[self._key] = self._previous


@contextlib.contextmanager
def discard_stderr() -> Iterator[None]:
    """Discard all output to the standard error within ``with``."""
    stderr_copy = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr_copy, 2)
            os.close(stderr_copy)


class DummyIter(DataIter):
    """An endless iterator over the first batch of another iterator, to measure speed without reading."""

    def __init__(self, real_iter: DataIter) -> None:
        super().__init__(real_iter.batch_size)
        self.real_iter = real_iter
        self.provide_data, self.provide_label = real_iter.provide_data, real_iter.provide_label
        self.the_batch = next(real_iter)

    def next(self) -> DataBatch:
        return self.the_batch


def compare_optimizer(
    opt1: Optimizer,
    opt2: Optimizer,
    shape: Sequence[int],
    dtype: DTypeLike,
    w_stype: str = "default",
    g_stype: str = "default",
    rtol: float = 1e-4,
    atol: float = 1e-5,
    compare_states: bool = True,
    ntensors: int = 1,
) -> None:
    """Raise AssertionError unless two optimizers update equal weights by equal gradients equally.

    ``shape`` may be a list with the shapes of ``ntensors`` weights.
    """
    if isinstance(shape, list):
        for one in shape[:ntensors]:
            compare_optimizer(opt1, opt2, tuple(one), dtype, w_stype, g_stype, rtol, atol, compare_states)
        return
    weights = rand_ndarray(shape, w_stype, dtype=dtype)
    grads = rand_ndarray(shape, g_stype, dtype=dtype)
    pairs = []
    for optimizer in (opt1, opt2):
        weight = weights.copy()
        state = optimizer.create_state_multi_precision(0, weight)
        optimizer.update_multi_precision(0, weight, grads.copy(), state)
        pairs.append((weight, state))
    if compare_states:
        for lhs, right in zip(_flat(pairs[0][1]), _flat(pairs[1][1]), strict=True):
            assert_almost_equal(lhs, right, rtol, atol, ("state 1", "state 2"))
    assert_almost_equal(pairs[0][0], pairs[1][0], rtol, atol, ("weight 1", "weight 2"))


def _flat(state: State) -> list[NDArray]:
    if state is None:
        return []
    return [part for one in state for part in _flat(one)] if isinstance(state, (list, tuple)) else [state]
