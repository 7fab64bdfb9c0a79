"""``Executor.reshape``: the same symbol for other input shapes, with as many arrays kept as fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from weftplan.errors import BindError, ShapeError, did_you_mean, listed
from weftplan.executor.arguments import as_shape
from weftplan.executor.arrays import complete_shapes, view_as
from weftplan.executor.executor import Executor
from weftplan.ndarray import NDArray, zeros


def reshaped(
    rebind: Callable[..., Executor],
    old: Executor,
    partial_shaping: bool,
    allow_up_sizing: bool,
    shapes: Mapping[str, Any],
) -> Executor:
    """An executor like ``old`` for other shapes; ``rebind`` binds the same symbol in the same way to given arrays.

    Raises:
        BindError: an unknown name.
        ShapeError: a change that was not allowed.
    """
    unknown = [name for name in shapes if name not in old.arg_names]
    if unknown:
        hint = did_you_mean(unknown[0], old.arg_names)
        raise BindError(
            f"reshape: no arguments named {listed(unknown)}; {hint}the arguments are {listed(old.arg_names)}"
        )
    arg_shapes, aux_shapes = complete_shapes(old.symbol, {n: as_shape(n, s) for n, s in shapes.items()})

    def fit(name: str, array: NDArray, shape: tuple[int, ...]) -> NDArray:
        if tuple(array.shape) == tuple(shape):
            return array
        if name not in shapes and not partial_shaping:
            raise ShapeError(
                f"reshape: the shape of {name!r}, which was not given, changes from {array.shape} to {shape}; "
                f"give it, or pass partial_shaping=True"
            )
        if int(np.prod(shape, dtype=np.int64)) > array.size:
            if not allow_up_sizing:
                raise ShapeError(
                    f"reshape: {name!r} grows from {array.shape} to {shape}; pass allow_up_sizing=True for a new array"
                )
            return zeros(shape, ctx=array.context, dtype=array.dtype)
        return view_as(array, shape)

    args, grads = [], {}
    for name, array, grad, shape in zip(old.arg_names, old.arg_arrays, old.grad_arrays, arg_shapes, strict=True):
        args.append(fit(name, array, shape))
        if grad is not None:
            grads[name] = fit(name, grad, shape)
    aux = [fit(n, a, s) for n, a, s in zip(old.aux_names, old.aux_arrays, aux_shapes, strict=True)]
    new = rebind(args, grads, aux_states=aux, shared_exec=old)
    new._monitor = old._monitor
    new._inferred, new._unset = old._inferred, old._unset
    return new
