"""``mx.test_utils``: what scripts and tests written for MXNet lean on: comparisons, random arrays, small helpers.

Comparisons of arrays, checks of whole symbols and of distributions stand in files of their own and have their names
here, too. Random arrays come from NumPy's global generator, which such tests seed. Data sets are read from files that
are there (``local_data.py``), never fetched.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
from weftplan.device import gpus
from weftplan.device.context import Context, current_context
from weftplan.errors import ParameterError
from weftplan.ndarray import NDArray
from weftplan.training.data.ndarray_iter import DataBatch, DataIter

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
    """Where arrays are made for which nothing else is said."""
    return current_context()


def set_default_context(ctx: Context) -> None:
    """Make arrays there from now on, where nothing else is said."""
    Context.default_ctx = ctx


def default_dtype() -> type[np.float32]:
    """The dtype of arrays for which nothing else is said."""
    return np.float32


def list_gpus() -> range:
    """Numbers of the GPUs that can be used."""
    return range(gpus.num_gpus())


# -- arrays ------------------------------------------------------------------------------------------------------------


def assert_exception(f: Callable[..., Any], exception_type: type[BaseException], *args: Any, **kwargs: Any) -> None:
    """Raise AssertionError unless the call raises such an error."""
    try:
        f(*args, **kwargs)
    except exception_type:
        return
    raise AssertionError(f"{getattr(f, '__name__', f)} did not raise {exception_type.__name__}")


def same_array(array1: NDArray, array2: NDArray) -> bool:
    """Whether two arrays share their memory; both change for a moment."""
    array1[:] += 1
    if not same(array1, array2):
        array1[:] -= 1
        return False
    array1[:] -= 1
    return same(array1, array2)


# -- random arrays -----------------------------------------------------------------------------------------------------


def rand_shape_nd(num_dim: int, dim: int = 10, allow_zero_size: bool = False) -> tuple[int, ...]:
    """A shape of so many dimensions, each up to ``dim``."""
    return tuple(int(n) for n in np.random.randint(0 if allow_zero_size else 1, dim + 1, size=num_dim))


def rand_shape_2d(dim0: int = 10, dim1: int = 10, allow_zero_size: bool = False) -> tuple[int, int]:
    """A shape of two dimensions."""
    low = 0 if allow_zero_size else 1
    return int(np.random.randint(low, dim0 + 1)), int(np.random.randint(low, dim1 + 1))


def rand_shape_3d(dim0: int = 10, dim1: int = 10, dim2: int = 10, allow_zero_size: bool = False) -> tuple[int, ...]:
    """A shape of three dimensions."""
    low = 0 if allow_zero_size else 1
    return tuple(int(np.random.randint(low, dim + 1)) for dim in (dim0, dim1, dim2))


def rand_coord_2d(x_low: int, x_high: int, y_low: int, y_high: int) -> tuple[int, int]:
    """A place in a rectangle, the high ends left out."""
    return int(np.random.randint(x_low, x_high)), int(np.random.randint(y_low, y_high))


def rand_ndarray(
    shape: Sequence[int],
    stype: str = "default",
    density: float | None = None,
    dtype: Any = None,
    modifier_func: Callable[[Any], Any] | None = None,
    shuffle_csr_indices: bool = False,
    distribution: str | None = None,
    ctx: Context | None = None,
) -> NDArray:
    """Numbers of [-1, 1); of storage type ``row_sparse``, which is dense here, a ``density`` share of rows.

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


def random_arrays(*shapes: Sequence[int]) -> Any:
    """NumPy arrays of normal numbers, one for each shape; one alone is no list."""
    arrays = [np.array(np.random.randn(), np.float32) if not s else np.random.randn(*s).astype(np.float32)
              for s in shapes]  # fmt: skip
    return arrays[0] if len(arrays) == 1 else arrays


def random_uniform_arrays(*shapes: Sequence[int], low: float = 0.0, high: float = 1.0, dtype: Any = None) -> list[Host]:
    """NumPy arrays of uniform numbers, one for each shape."""
    return [np.random.uniform(low, high, tuple(shape)).astype(dtype or np.float32) for shape in shapes]


def random_sample(population: Sequence[Any], k: int) -> list[Any]:
    """So many different ones, in the order in which they stand."""
    chosen = np.sort(np.random.permutation(len(population))[:k])
    return [population[int(place)] for place in chosen]


def create_vector(size: int, dtype: Any = np.int64) -> NDArray:
    """The numbers from 0 on."""
    return nd.arange(0, size, dtype=dtype)


def np_reduce(
    dat: Any, axis: int | Sequence[int] | None, keepdims: bool, numpy_reduce_func: Callable[..., Any]
) -> Host:
    """What a reduction of NumPy of one axis gives over several."""
    axes = list(range(dat.ndim)) if axis is None else [axis] if isinstance(axis, int) else list(axis)
    result = dat
    for one in sorted((k % dat.ndim for k in axes), reverse=True):
        result = numpy_reduce_func(result, axis=one)
    if keepdims:
        result = np.reshape(result, [1 if k in {a % dat.ndim for a in axes} else n for k, n in enumerate(dat.shape)])
    return np.asarray(result)


# -- helpers -----------------------------------------------------------------------------------------------------------


def retry(n: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a test may fail by AssertionError ``n - 1`` times."""
    if n < 1:
        raise ParameterError(f"retry: expected at least 1, got {n}")

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> Any:
            for left in reversed(range(n)):
                try:
                    return test(*args, **kwargs)
                except AssertionError:
                    if not left:
                        raise
            return None

        return run

    return decorate


def set_env_var(key: str, val: str, default_val: str = "") -> str:
    """Set an environment variable; what it was."""
    before = os.environ.get(key, default_val)
    os.environ[key] = val
    return before


@contextlib.contextmanager
def environment(*args: Any) -> Iterator[None]:
    """Within ``with`` environment variables have other values: ``(name, value)`` or a dictionary; None unsets one.

    >>> with environment("MXNET_BACKWARD_DO_MIRROR", "1"):
    ...     os.environ["MXNET_BACKWARD_DO_MIRROR"]
    '1'
    """
    if len(args) not in (1, 2):
        raise ParameterError(f"environment: give a name and a value, or a dictionary, got {len(args)} arguments")
    wanted = dict(args[0]) if len(args) == 1 else {args[0]: args[1]}
    before = {name: os.environ.get(name) for name in wanted}

    def put(values: dict[str, Any]) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = str(value)

    put(wanted)
    try:
        yield
    finally:
        put(before)


class EnvManager:
    """Within ``with`` an environment variable has another value."""

    def __init__(self, key: str, val: str) -> None:
        self._key, self._value = key, val
        self._before: str | None = None

    def __enter__(self) -> None:
        self._before = os.environ.get(self._key)
        os.environ[self._key] = self._value

    def __exit__(self, *exc: object) -> None:
        if self._before is None:
            os.environ.pop(self._key, None)
        else:
            os.environ[self._key] = self._before


@contextlib.contextmanager
def discard_stderr() -> Iterator[None]:
    """Within ``with`` what anybody writes to the standard error goes nowhere."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


class DummyIter(DataIter):
    """The first batch of another iterator, for ever: to measure speed without reading."""

    def __init__(self, real_iter: DataIter) -> None:
        super().__init__(real_iter.batch_size)
        self.real_iter = real_iter
        self.provide_data, self.provide_label = real_iter.provide_data, real_iter.provide_label
        self.the_batch = next(real_iter)

    def next(self) -> DataBatch:
        return self.the_batch


def compare_optimizer(
    opt1: Any,
    opt2: Any,
    shape: Sequence[int],
    dtype: Any,
    w_stype: str = "default",
    g_stype: str = "default",
    rtol: float = 1e-4,
    atol: float = 1e-5,
    compare_states: bool = True,
) -> None:
    """Raise AssertionError unless two optimizers change equal weights by equal gradients in the same way."""
    weights = rand_ndarray(shape, w_stype, dtype=dtype)
    grads = rand_ndarray(shape, g_stype, dtype=dtype)
    pairs = []
    for optimizer in (opt1, opt2):
        weight = weights.copy()
        state = optimizer.create_state_multi_precision(0, weight)
        optimizer.update_multi_precision(0, weight, grads.copy(), state)
        pairs.append((weight, state))
    if compare_states:
        for left, right in zip(_flat(pairs[0][1]), _flat(pairs[1][1]), strict=True):
            assert_almost_equal(left, right, rtol, atol, ("state 1", "state 2"))
    assert_almost_equal(pairs[0][0], pairs[1][0], rtol, atol, ("weight 1", "weight 2"))


def _flat(state: Any) -> list[Any]:
    if state is None:
        return []
    return [part for one in state for part in _flat(one)] if isinstance(state, (list, tuple)) else [state]
