"""Check the arguments of ``bind`` and ``simple_bind``, and put them in the order of the symbol's name lists."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from weftplan.device.context import Context
from weftplan.errors import BindError, DTypeError, ParameterError, ShapeError, did_you_mean, listed
from weftplan.ndarray import NDArray
from weftplan.ops.core.floats import dtype_of
from weftplan.support.array_types import DType, DTypeLike
from weftplan.support.tensor_types import Shape
from weftplan.symbol import Symbol
from weftplan.symbol.attribute import read_grad_req
from weftplan.symbol.inference.methods import read_shape
from weftplan.symbol.node import Order, depth_first_order, split_variables, warn, warn_of_ignored

_OPTIONS = (
    "grad_req", "type_dict", "group2ctx", "shared_arg_names", "shared_exec", "shared_buffer", "budget", "dtype",
    "options",
)  # fmt: skip
"""Option names of :func:`~weftplan.executor.binding.simple_bind` to suggest for a misspelt keyword. Its other keywords
are shapes by argument name."""


T = TypeVar("T")
Arrays: TypeAlias = Sequence[NDArray | None] | Mapping[str, NDArray | None]
"""Arrays in the order of names, or by name; None for an unwanted gradient."""
GradReq: TypeAlias = str | Sequence[str] | Mapping[str, str]
"""``write``, ``add`` or ``null`` for gradients: one value for all, a list in argument order, or a value by name."""


def normalize_grad_req(grad_req: object, names: Sequence[str]) -> dict[str, str]:
    """Return ``grad_req`` as a dictionary over all arguments; names that a dictionary lacks get ``null``.

    >>> normalize_grad_req({"w": "add"}, ["x", "w"])
    {'x': 'null', 'w': 'add'}
    """
    if isinstance(grad_req, (list, tuple)):
        if len(grad_req) != len(names):
            raise BindError(f"grad_req has {len(grad_req)} items for {len(names)} arguments {listed(names)}")
        grad_req = dict(zip(names, grad_req, strict=True))
    elif isinstance(grad_req, Mapping):
        _warn_unknown("grad_req", grad_req, names)
    elif not isinstance(grad_req, str):
        raise BindError(f"grad_req must be a str, a list or a dictionary, got {type(grad_req).__name__}")
    return read_grad_req(grad_req, names, BindError)


def _in_order(values: object, names: Sequence[str], what: str) -> list[object]:
    """Return the items of a list or a dictionary in the order of ``names``; None for a name that a dictionary lacks.

    Raises:
        BindError: ``values`` is neither, or a list of the wrong length.
    """
    if isinstance(values, Mapping):
        return [values.get(name) for name in names]
    if not isinstance(values, (list, tuple)):
        raise BindError(f"bind: {what} must be a list or a dictionary, got {type(values).__name__}")
    if len(values) != len(names):
        raise BindError(f"bind: {what} has {len(values)} arrays, needed are {len(names)}: {listed(names)}")
    return list(values)


def collect(values: object, names: Sequence[str], what: str) -> list[NDArray]:
    """Return the arrays of a list or a dictionary in the order of ``names``.

    Raises:
        BindError: ``values`` has another type, arrays are missing, or a list is too long.
        DTypeError: an item is not an NDArray.
    """
    missing = [name for name in names if name not in values] if isinstance(values, Mapping) else []
    if missing:
        raise BindError(f"bind: {what} lacks {listed(missing)}; needed are {listed(names)}")
    arrays: list[NDArray] = []
    for name, array in zip(names, _in_order(values, names, what), strict=True):
        if not isinstance(array, NDArray):
            raise DTypeError(
                f"bind: {what} {name!r} must be an NDArray, got {type(array).__name__}; make one with mx.nd.array(...)"
            )
        arrays.append(array)
    return arrays


def collect_gradients(
    args_grad: object, reqs: Mapping[str, str], args: Sequence[NDArray]
) -> tuple[list[NDArray | None], dict[str, str], dict[str, DType]]:
    """Return gradient arrays or None, the grad_req by name, and the gradient dtypes that differ from the argument's.

    An argument without a gradient array gets the grad_req ``null``.

    Args:
        args_grad: a list or a dictionary of gradient arrays, or None.
        reqs: the requested grad_req of each argument.
        args: the arguments, in the order of ``reqs``.

    Raises:
        BindError: ``args_grad`` has another type, or a list has the wrong length.
        DTypeError: a gradient is not an NDArray.
        ShapeError: the shape of a gradient differs from its argument's.
    """
    names = list(reqs)
    if isinstance(args_grad, Mapping):
        _warn_unknown("args_grad", args_grad, names)
    items = _in_order({} if args_grad is None else args_grad, names, "args_grad")
    grad_reqs = {name: "null" if grad is None else req for (name, req), grad in zip(reqs.items(), items, strict=True)}
    grads: list[NDArray | None] = []
    dtypes: dict[str, DType] = {}
    for name, array, grad in zip(names, args, items, strict=True):
        if grad is None:
            grads.append(None)
            continue
        if not isinstance(grad, NDArray):
            raise DTypeError(
                f"bind: args_grad {name!r} must be an NDArray to write the gradient to, got {type(grad).__name__}; "
                f"make one with mx.nd.zeros({array.shape})"
            )
        if tuple(grad.shape) != tuple(array.shape):
            raise ShapeError(f"bind: argument {name!r} has shape {array.shape}, its gradient array {grad.shape}")
        if grad.np_dtype != array.np_dtype and grad_reqs[name] != "null":
            dtypes[name] = grad.np_dtype
        grads.append(grad)
    return grads, grad_reqs, dtypes


def collect_shapes(shapes: Mapping[str, object], names: Sequence[str], aux_names: Sequence[str]) -> dict[str, object]:
    """Return the keyword arguments of :func:`~weftplan.executor.binding.simple_bind` that name variables.

    Warn about other names, or raise BindError if such a name resembles an option or a variable and its value is not a
    tuple or list.
    """
    every = dict.fromkeys((*names, *aux_names))
    unknown = [name for name in shapes if name not in every]
    for name in unknown:
        hint = did_you_mean(name, [*_OPTIONS, *every])
        if hint and not isinstance(shapes[name], (tuple, list)):
            raise BindError(
                f"simple_bind has no option and the symbol no argument {name!r}; {hint}options: {', '.join(_OPTIONS)}; "
                f"arguments: {listed(names)}"
            )
    if unknown:
        hint = did_you_mean(unknown[0], every)
        warn(f"simple_bind: no arguments or options named {listed(unknown)}; {hint}the arguments are {listed(names)}")
    return {name: shape for name, shape in shapes.items() if name in every}


def check_context(verb: str, ctx: object) -> None:
    """Raise BindError unless ``ctx`` is a context."""
    if not isinstance(ctx, Context):
        raise BindError(f"{verb}: ctx must be a context such as mx.cpu() or mx.gpu(0), got {ctx!r}")


def _warn_unknown(what: str, values: Mapping[str, object], names: Sequence[str]) -> None:
    """Warn about names that are not arguments. MXNet ignores them, but a misspelt name would disable training."""
    legal_names = frozenset(names)
    for name in values:
        if name not in legal_names:
            hint = did_you_mean(name, names)
            warn(f"{what} names {name!r}, which is no argument: {hint}the arguments are {listed(names)}")


def known_shapes(shapes: Mapping[str, object]) -> dict[str, Shape]:
    """Return shapes as tuples of ints, with 0 for unknown dimensions (0 or -1), without wholly unknown shapes, ``()``.

    Raises:
        ShapeError: a shape is not a sequence of integers.
    """
    known: dict[str, Shape] = {}
    for name, shape in shapes.items():
        extents: Any = shape  # if it is no sequence, the next line raises
        try:
            dims = read_shape([operator.index(extent) for extent in extents], f"the shape of {name!r}")
        except TypeError:
            expected = "a tuple of integers such as (32, 10)"
            raise ShapeError(f"the shape of {name!r} must be {expected}, got {shape!r}") from None
        if dims is not None:
            known[name] = dims
    return known


def given_dtypes(type_dict: Mapping[str, DTypeLike | None], names: Sequence[str]) -> dict[str, DType]:
    """Return the dtypes of ``type_dict`` by variable, without None values.

    Raises:
        DTypeError: a value is not a dtype.
        ParameterError: ``names`` lacks a name.
    """
    dtypes: dict[str, DType] = {}
    every = frozenset(names)
    for name, dtype in type_dict.items():
        if dtype is None:
            continue
        if name not in every:
            hint = did_you_mean(name, names)
            raise ParameterError(f"type_dict: no variable is called {name!r}; {hint}variables: {listed(names)}")
        try:
            dtypes[name] = dtype_of(dtype)
        except TypeError as error:
            why = f" ({error})" if dtype == "bfloat16" else ""
            raise DTypeError(
                f"type_dict: {name!r} needs a dtype such as 'float32' or numpy.float32, got {dtype!r}{why}"
            ) from None
    return dtypes


def either(verb: str, name: str, value: T | None, older: str, older_value: T | None) -> T | None:
    """Return the value of an option that has two names, or None; raise BindError if both are given."""
    if value is not None and older_value is not None:
        raise BindError(f"{verb}: {name} and {older} are two names of one option; give {name}")
    return older_value if value is None else value


def names_of(symbol: Symbol) -> tuple[list[str], list[str], Order]:
    """Return argument names, auxiliary state names and depth-first order; warn of attributes that operators ignore.

    Raises:
        BindError: duplicate arguments.
    """
    order = depth_first_order(entry[0] for entry in symbol.entries)
    warn_of_ignored(order[0])
    arguments, states = split_variables(order[0])
    names, aux_names = [node.name for node in arguments], [node.name for node in states]
    by_name(names, names)
    return names, aux_names, order


def by_name(names: Sequence[str], arrays: Sequence[T]) -> dict[str, T]:
    """Return arrays by name; raise BindError for duplicate names."""
    table = dict(zip(names, arrays, strict=True))
    if len(table) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise BindError(f"Duplicate names detected, {twice}: give the variables different names")
    return table
