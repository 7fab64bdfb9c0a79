"""Symbol checks of ``mx.test_utils``: outputs, gradients, central differences, consistency, speed.

Each check binds the symbol on the calling thread, and raises AssertionError if numbers differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from weftplan import ndarray as nd
from weftplan.compat.array_comparisons import Host, host
from weftplan.device.context import Context, current_context
from weftplan.errors import ParameterError
from weftplan.executor import Executor
from weftplan.ndarray import NDArray
from weftplan.support.array_types import DTypeLike
from weftplan.symbol import Symbol
from weftplan.training.metrics.base import Array

Named = Mapping[str, Array] | Sequence[Array]

V = TypeVar("V")


def _named(values: Mapping[str, V] | Sequence[V] | None, names: Sequence[str], what: str) -> dict[str, V]:
    """Return values by name; raise ParameterError if names or the number of values do not match."""
    if values is None:
        return {}
    if isinstance(values, Mapping):
        unknown = sorted({*values} - {*names})
        if unknown:
            raise ParameterError(f"{what}: {unknown} are none of {list(names)}")
        return dict(values)
    if len(values) != len(names):
        raise ParameterError(f"{what}: {len(values)} values for {list(names)}")
    return dict(zip(names, values, strict=True))


def _bound(
    symbol: Symbol,
    location: Named,
    aux_states: Named | None,
    ctx: Context | None,
    dtype: DTypeLike,
    reqs: str | Mapping[str, str],
    grads: Mapping[str, NDArray] | None = None,
) -> Executor:
    """Return an executor on copies of these values; floats among them get ``dtype``."""
    ctx = current_context() if ctx is None else ctx

    def arrays(values: Mapping[str, Array]) -> dict[str, NDArray]:
        bound = {}
        for name, value in values.items():
            array = host(value)
            is_fixed = isinstance(value, NDArray) or array.dtype.kind != "f"
            bound[name] = nd.array(array, ctx=ctx, dtype=array.dtype if is_fixed else dtype)
        return bound

    args = arrays(_named(location, symbol.list_arguments(), "location"))
    aux = arrays(_named(aux_states, symbol.list_auxiliary_states(), "aux_states"))
    executor: Executor = symbol.bind(ctx, args, args_grad=grads, grad_req=reqs, aux_states=aux)
    return executor


def simple_forward(
    sym: Symbol, ctx: Context | None = None, is_train: bool = False, **inputs: Array
) -> Host | list[Host]:
    """Return the outputs of a symbol for NumPy arrays by name; a single output is not a list."""
    executor = _bound(sym, inputs, None, ctx, np.float32, "null")
    outputs = [out.asnumpy() for out in executor.forward(is_train=is_train)]
    return outputs[0] if len(outputs) == 1 else outputs


def _compare(got: Array, expected: Array, rtol: float, atol: float | None, equal_nan: bool, what: str) -> None:
    np.testing.assert_allclose(
        host(got), host(expected), rtol=rtol, atol=1e-20 if atol is None else atol, equal_nan=equal_nan, err_msg=what
    )


def check_symbolic_forward(
    sym: Symbol,
    location: Named,
    expected: Named,
    rtol: float = 1e-4,
    atol: float | None = None,
    aux_states: Named | None = None,
    ctx: Context | None = None,
    equal_nan: bool = False,
    dtype: DTypeLike = np.float32,
) -> list[NDArray]:
    """Compare the outputs with ``expected``; return the outputs."""
    executor = _bound(sym, location, aux_states, ctx, dtype, "null")
    outputs: list[NDArray] = executor.forward(is_train=False)
    wanted = _named(expected, sym.list_outputs(), "expected")
    for name, output in zip(sym.list_outputs(), outputs, strict=True):
        if name in wanted:
            _compare(output, wanted[name], rtol, atol, equal_nan, f"output {name}")
    return outputs


def check_symbolic_backward(
    sym: Symbol,
    location: Named,
    out_grads: Named | None,
    expected: Named,
    rtol: float = 1e-5,
    atol: float | None = None,
    aux_states: Named | None = None,
    grad_req: str | Sequence[str] | Mapping[str, str] = "write",
    ctx: Context | None = None,
    grad_stypes: object = None,
    equal_nan: bool = False,
    dtype: DTypeLike = np.float32,
) -> dict[str, NDArray]:
    """Compare the gradients for ``out_grads`` with ``expected``; return the gradients by name.

    An argument whose ``grad_req`` is ``add`` starts with random numbers, to which its gradient must be added; if it
    is ``null``, the numbers must stay unchanged.
    """
    names = sym.list_arguments()
    values = _named(location, names, "location")
    reqs = dict.fromkeys(names, grad_req) if isinstance(grad_req, str) else _named(grad_req, names, "grad_req")
    gradients = {name: value for name, value in _named(expected, names, "expected").items() if value is not None}
    initial = {name: np.asarray(np.random.normal(size=host(values[name]).shape), dtype) for name in gradients}
    ctx = current_context() if ctx is None else ctx
    grads = {name: nd.array(value, ctx=ctx, dtype=dtype) for name, value in initial.items()}
    executor = _bound(sym, values, aux_states, ctx, dtype, {name: reqs.get(name, "null") for name in names}, grads)
    executor.forward(is_train=True)
    if isinstance(out_grads, Mapping):
        out_grads = [out_grads[name] for name in sym.list_outputs()]
    if out_grads is not None:
        heads: Any = [out_grads] if isinstance(out_grads, NDArray) else out_grads
        out_grads = [
            nd.array(host(gradient), ctx=ctx, dtype=host(gradient).dtype if isinstance(gradient, NDArray) else dtype)
            for gradient in heads
        ]
    executor.backward(out_grads)
    for name, value in gradients.items():
        req, actual = reqs.get(name, "null"), grads[name].asnumpy()
        goal = {"write": host(value), "add": initial[name] + host(value), "null": initial[name]}[req]
        _compare(actual, goal, rtol, atol, equal_nan, f"gradient of {name} (grad_req {req})")
    return grads


def _slopes(total: Callable[[], float], array: NDArray, base: Host, eps: float) -> Host:
    """Return central differences of ``total()`` by each element of ``array``, which holds ``base`` afterwards."""
    slopes = np.zeros(base.shape)
    for index in np.ndindex(base.shape):
        sides = []
        for step in (eps / 2, -eps / 2):
            moved = base.copy()
            moved[index] += step
            array[:] = moved
            sides.append(total())
        slopes[index] = (sides[0] - sides[1]) / eps
    array[:] = base
    return slopes


def numeric_grad(
    executor: Executor,
    location: Mapping[str, Array],
    aux_states: Mapping[str, Array] | None = None,
    eps: float = 1e-4,
    use_forward_train: bool = True,
    dtype: DTypeLike = np.float32,
) -> dict[str, Host]:
    """Return central differences of the sum of output 0 by each float argument in ``location``; zeros for the others.

    Args:
        executor: an executor of the symbol; its arguments hold ``location`` afterwards.
        location: values by name.
        aux_states: values by name, set before each run.
        eps: step of the differences.
        use_forward_train: run as in training.
        dtype: dtype of the results.
    """
    values = {name: np.array(host(value)) for name, value in location.items()}
    for name, value in values.items():
        executor.arg_dict[name][:] = value

    def total() -> float:
        for name, state in (aux_states or {}).items():
            executor.aux_dict[name][:] = state
        return float(executor.forward(is_train=use_forward_train)[0].asnumpy().astype(np.float64).sum())

    return {
        name: (
            _slopes(total, executor.arg_dict[name], value, eps) if value.dtype.kind == "f" else np.zeros(value.shape)
        ).astype(dtype)
        for name, value in values.items()
    }


def check_numeric_gradient(
    sym: Symbol,
    location: Named,
    aux_states: Named | None = None,
    numeric_eps: float = 1e-3,
    rtol: float = 1e-2,
    atol: float | None = None,
    grad_nodes: Sequence[str] | Mapping[str, str] | None = None,
    use_forward_train: bool = True,
    ctx: Context | None = None,
    grad_stype_dict: object = None,
    dtype: DTypeLike = np.float32,
) -> None:
    """Compare gradients of a random weighted sum of the outputs with central differences.

    Args:
        numeric_eps: step of the differences.
        grad_nodes: arguments whose gradients are compared; default: all floats.
        use_forward_train: run as in training, also for the differences.
    """
    names = sym.list_arguments()
    values = {name: np.array(host(value)) for name, value in _named(location, names, "location").items()}
    values = {name: value.astype(dtype) if value.dtype.kind == "f" else value for name, value in values.items()}
    names_checked = list(grad_nodes) if grad_nodes is not None else [n for n in names if values[n].dtype.kind == "f"]
    ctx = current_context() if ctx is None else ctx
    grads = {name: nd.zeros(values[name].shape, ctx=ctx, dtype=values[name].dtype) for name in names_checked}
    reqs = {name: "write" if name in grads else "null" for name in names}
    executor = _bound(sym, values, aux_states, ctx, dtype, reqs, grads)
    states = {name: value.asnumpy() for name, value in executor.aux_dict.items()}
    weights = [np.random.normal(size=out.shape).astype(out.dtype) for out in executor.forward(is_train=True)]
    executor.backward([nd.array(weight, ctx=ctx, dtype=weight.dtype) for weight in weights])
    actual = {name: grad.asnumpy() for name, grad in grads.items()}

    def total() -> float:
        for name, state in states.items():
            executor.aux_dict[name][:] = state
        outputs = executor.forward(is_train=use_forward_train)
        pairs = zip(outputs, weights, strict=True)
        return float(sum((out.asnumpy().astype(np.float64) * weight).sum() for out, weight in pairs))

    for name in names_checked:
        numeric = _slopes(total, executor.arg_dict[name], values[name], numeric_eps)
        _compare(actual[name], numeric, rtol, 1e-4 if atol is None else atol, False, f"gradient of {name}")


_TOLERANCES = {"float16": 1e-1, "float32": 1e-3, "float64": 1e-5}


def check_consistency(
    sym: Symbol | Sequence[Symbol],
    ctx_list: Sequence[Mapping[str, object]],
    scale: float = 1.0,
    grad_req: str | Mapping[str, str] = "write",
    arg_params: Mapping[str, Array] | None = None,
    aux_params: Mapping[str, Array] | None = None,
    rtol: Any = None,
    atol: Any = None,
    raise_on_err: bool = True,
    ground_truth: Any = None,
    equal_nan: bool = False,
    use_uniform: bool = False,
    rand_type: DTypeLike = np.float64,
    *,
    tol: Any = None,
) -> list[Host]:
    """Compare outputs and gradients of a symbol over contexts or dtypes; return those of the finest dtype.

    Args:
        ctx_list: for each run ``{"ctx": context, "type_dict": dtypes by argument, name: shape, …}``.
        scale: scale of the random values.
        rtol, atol: the tolerances, as numbers or by dtype; by default those of the coarser dtype.
        tol: both tolerances, as MXNet up to 1.6 has them.
        raise_on_err: False: differences are printed.
    """
    symbols = [sym] * len(ctx_list) if isinstance(sym, Symbol) else list(sym)
    runs = []
    random = np.random.RandomState(np.random.randint(1 << 31))
    values: dict[str, Host] = {}
    for symbol, facts in zip(symbols, ctx_list, strict=True):
        settings: dict[str, Any] = dict(facts)
        executor = symbol.simple_bind(
            settings.pop("ctx"), grad_req=grad_req, type_dict=settings.pop("type_dict", None), **settings
        )
        for name, array in executor.arg_dict.items():
            if name not in values:
                draw = random.uniform(-0.5, 0.5, array.shape) if use_uniform else random.normal(size=array.shape)
                initial = (arg_params or {}).get(name)
                values[name] = (draw * scale).astype(rand_type) if initial is None else host(initial)
            array[:] = values[name]
        for name, array in executor.aux_dict.items():
            array[:] = host((aux_params or {}).get(name, 0))
        train = any(req != "null" for req in executor.grad_req.values())
        outputs = executor.forward(is_train=train)
        actual = {name: out.asnumpy() for name, out in zip(symbol.list_outputs(), outputs, strict=True)}
        if train:
            executor.backward([out.copy() for out in outputs])
            actual.update((f"gradient of {n}", g.asnumpy()) for n, g in executor.grad_dict.items() if g is not None)
        kind = min((out.np_dtype for out in outputs), key=lambda dtype: np.dtype(dtype).itemsize)
        runs.append((np.dtype(kind), actual))
    truth = max(runs, key=lambda run: run[0].itemsize)[1] if ground_truth is None else dict(ground_truth)
    for number, (kind, actual) in enumerate(runs):
        default = _TOLERANCES.get(kind.name, 0.0)
        explicit = [tol if limit is None else limit for limit in (rtol, atol)]
        limits = [
            default if limit is None else limit[kind] if isinstance(limit, Mapping) else limit for limit in explicit
        ]
        for name, value in actual.items():
            try:
                _compare(value, truth[name], limits[0], limits[1], equal_nan, f"run {number} ({kind}): {name}")
            except AssertionError as error:
                if raise_on_err:
                    raise
                print(error)
    return list(truth.values())


def check_speed(
    sym: Symbol,
    location: Mapping[str, Array] | None = None,
    ctx: Context | None = None,
    N: int = 20,
    grad_req: str | Mapping[str, str] | None = None,
    typ: str = "whole",
    **kwargs: Sequence[int],
) -> float:
    """Return the average seconds of a run, forward and backward (``whole``) or ``forward`` alone, over ``N`` runs.

    ``location`` gives values; else ``kwargs`` give shapes, and values are normally distributed.
    """
    if typ not in ("whole", "forward"):
        raise ParameterError(f"check_speed: typ must be 'whole' or 'forward', got {typ!r}")
    req = grad_req or ("write" if typ == "whole" else "null")
    shapes = kwargs if location is None else {name: host(value).shape for name, value in location.items()}
    executor = sym.simple_bind(current_context() if ctx is None else ctx, grad_req=req, **shapes)
    for name, array in executor.arg_dict.items():
        array[:] = np.random.normal(size=array.shape) if location is None else host(location[name])

    def run() -> None:
        executor.forward(is_train=typ == "whole")
        if typ == "whole":
            executor.backward(executor.outputs)

    run()
    nd.waitall()
    start = time.perf_counter()
    for _ in range(N):
        run()
    nd.waitall()
    return (time.perf_counter() - start) / N
