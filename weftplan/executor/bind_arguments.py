"""What callers of ``bind`` give, checked and brought into the order of the symbol's name lists."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weftplan.device.context import Context
from weftplan.errors import BindError, DTypeError, ParameterError, ShapeError, did_you_mean, listed
from weftplan.ndarray import NDArray
from weftplan.ops.floats import dtype_of
from weftplan.planner.options import read_grad_req
from weftplan.symbol import unknown
from weftplan.symbol.provenance import warn


def normalize_grad_req(grad_req: Any, names: Sequence[str]) -> dict[str, str]:
    """``grad_req`` as a dictionary over all arguments.

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


def collect(given: Any, names: Sequence[str], what: str) -> list[NDArray]:
    """The arrays ``given`` as a list or a dictionary, one for every name.

    Raises:
        BindError: arrays are missing, or the list is too long.
        DTypeError: something is no NDArray.
    """
    if isinstance(given, Mapping):
        missing = [name for name in names if name not in given]
        if missing:
            raise BindError(f"bind: {what} lacks {listed(missing)}; needed are {listed(names)}")
        arrays = [given[name] for name in names]
    elif isinstance(given, (list, tuple)):
        if len(given) != len(names):
            raise BindError(f"bind: {what} has {len(given)} arrays, needed are {len(names)}: {listed(names)}")
        arrays = list(given)
    else:
        raise BindError(f"bind: {what} must be a list or a dictionary, got {type(given).__name__}")
    for name, array in zip(names, arrays, strict=True):
        if not isinstance(array, NDArray):
            raise DTypeError(
                f"bind: {what} {name!r} must be an NDArray, got {type(array).__name__}; make one with mx.nd.array(...)"
            )
    return arrays


def collect_optional(given: Any, names: Sequence[str]) -> list[NDArray | None]:
    """As :func:`collect` for gradients, None where none was given; what is in the list is not checked here."""
    if given is None:
        return [None] * len(names)
    if isinstance(given, Mapping):
        _warn_unknown("args_grad", given, names)
        return [given.get(name) for name in names]
    if not isinstance(given, (list, tuple)):
        raise BindError(f"bind: args_grad must be a list or a dictionary, got {type(given).__name__}")
    if len(given) != len(names):
        raise BindError(f"bind: args_grad has {len(given)} items, needed are {len(names)}: {listed(names)}")
    return list(given)


def check_context(verb: str, ctx: Any) -> None:
    """Raise BindError unless ``ctx`` is a context."""
    if not isinstance(ctx, Context):
        raise BindError(f"{verb}: ctx must be a context such as mx.cpu() or mx.gpu(0), got {ctx!r}")


def _warn_unknown(what: str, given: Mapping[str, Any], names: Sequence[str]) -> None:
    """Extra names are allowed, as in MXNet, but a misspelt one would silently train nothing."""
    known = frozenset(names)
    for name in given:
        if name not in known:
            hint = did_you_mean(name, names)
            warn(f"{what} names {name!r}, which is no argument: {hint}the arguments are {listed(names)}")


def as_shape(name: str, shape: Any) -> tuple[int, ...]:
    """``shape`` of the argument ``name`` as a tuple of ints, 0 for what is unknown (0 or -1); raises ShapeError."""
    try:
        dims: tuple[int, ...] = unknown.read([operator.index(d) for d in shape], f"the shape of {name!r}")
        return dims
    except TypeError:
        raise ShapeError(f"the shape of {name!r} must be a tuple of integers such as (32, 10), got {shape!r}") from None


def given_dtypes(type_dict: Mapping[str, Any], names: Sequence[str]) -> dict[str, np.dtype[Any]]:
    """The dtypes that ``type_dict`` gives to variables; raises DTypeError, or ParameterError for an unknown name."""
    known: dict[str, np.dtype[Any]] = {}
    every = frozenset(names)
    for name, dtype in type_dict.items():
        if dtype is None:
            continue
        if name not in every:
            hint = did_you_mean(name, names)
            raise ParameterError(f"type_dict: no variable is called {name!r}; {hint}variables: {listed(names)}")
        try:
            known[name] = dtype_of(dtype)
        except TypeError as error:
            why = f" ({error})" if dtype == "bfloat16" else ""
            raise DTypeError(
                f"type_dict: {name!r} needs a dtype such as 'float32' or numpy.float32, got {dtype!r}{why}"
            ) from None
    return known
