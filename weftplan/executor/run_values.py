"""Values that callers hand to a run: checked before anything changes, then copied into bound arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from weftplan.errors import BindError, DTypeError, ShapeError, listed
from weftplan.ndarray import NDArray


def as_array(value: Any, target: NDArray, what: str) -> Any:
    """``value``, an NDArray or a NumPy array of the shape of ``target``; raises with ``what`` otherwise."""
    if not isinstance(value, (NDArray, np.ndarray, np.generic)):
        if not hasattr(value, "__array__"):
            raise DTypeError(
                f"{what} must be an NDArray or a NumPy array of shape {target.shape}, got {type(value).__name__}; make "
                f"one with mx.nd.array(...)"
            )
        value = np.asarray(value)
    if tuple(value.shape) != tuple(target.shape):
        raise ShapeError(f"{what} was bound with shape {target.shape}, got {tuple(value.shape)}")
    if not isinstance(value, NDArray) and value.dtype.kind not in "biuf":
        raise DTypeError(f"{what} must hold numbers, got dtype {value.dtype}")
    return value


def copy_in(value: Any, target: NDArray) -> None:
    """Copy ``value``, cast to the target's dtype, into ``target``, asynchronously if it is an NDArray."""
    if not isinstance(value, NDArray):
        target[:] = value
        return
    (value if value.dtype == target.dtype else value.astype(target.dtype)).copyto(target)


def unset(executor: Any, given: Collection[str]) -> list[str]:
    """Parameters of an executor that are as ``simple_bind`` has made them, those in ``given`` and labels left out."""
    tables = (executor.arg_dict, executor.aux_dict)
    arrays = {name: array for table in tables for name, array in table.items() if name in executor._inferred}
    found = []
    for name, array in arrays.items():
        if name not in given and not name.endswith("label"):
            array.wait_to_read()
            if array.var.version <= 1:  # the zeros
                found.append(name)
    return found


def output_gradients(out_grads: Any, names: Sequence[str]) -> list[Any]:
    """``out_grads`` as backward takes it (an array, a list or a dictionary), one item per output, None where missing.

    A list may end before the outputs do, as in MXNet.

    Raises:
        BindError: none of these, unknown names, or more gradients than outputs.
    """
    count = len(names)
    if out_grads is None:
        return [None] * count
    if isinstance(out_grads, (NDArray, np.ndarray)):
        out_grads = [out_grads]
    if isinstance(out_grads, Mapping):
        unknown = [name for name in out_grads if name not in names]
        if unknown:
            raise BindError(f"backward: no outputs named {listed(unknown)}; the outputs are {listed(names)}")
        return [out_grads.get(name) for name in names]
    if not isinstance(out_grads, (list, tuple)):
        raise BindError(f"backward: out_grads must be an array, a list or a dictionary, got {type(out_grads).__name__}")
    if len(out_grads) > count:
        raise BindError(f"backward: {len(out_grads)} gradients for {count} outputs {listed(names)}")
    return [*out_grads, *[None] * (count - len(out_grads))]


def by_name(names: Sequence[str], arrays: Sequence[Any]) -> dict[str, Any]:
    """A dictionary of arrays; raises BindError when two have the same name."""
    table = dict(zip(names, arrays, strict=True))
    if len(table) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise BindError(f"Duplicate names detected, {twice}: give the variables different names")
    return table
