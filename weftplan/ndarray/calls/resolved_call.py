"""Resolved calls: parsed parameters, shapes, dtypes and the kernel of an operator call, cached.

A call is resolved on the calling thread, so that errors are raised at the call. The result is cached per (operator,
parameters, shapes, dtypes). Any thread may call this module: two threads may resolve the same call, with the same
outcome.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weftplan import config
from weftplan.errors import DTypeError, ParameterError, ShapeError, own
from weftplan.ndarray.array import NDArray
from weftplan.ops.core import implementations, registry, tiling
from weftplan.ops.core.schema import DType, InplacePair, Kernel, Op, Shape, TensorSpec

_MAX_PLANS = 4096


@dataclass(frozen=True, slots=True)
class SettledCall:
    """The part of a call that depends only on operator, parameters, shapes and dtypes."""

    params: Mapping[str, Any]
    outputs: tuple[tuple[int, Shape, DType], ...]
    """Bytes, shape and dtype of each output."""
    visible: int
    ignored: frozenset[int]
    inplace: tuple[InplacePair, ...]
    kernel: Kernel
    workspace: int


_plans: dict[Any, SettledCall] = {}


def settled(
    op: Op, inputs: Sequence[NDArray], params: Mapping[str, object], targets: Sequence[NDArray], on_gpu: bool = False
) -> SettledCall:
    """Resolve a call, or return the cached result of an equal call."""
    if op.single:
        return _settle(op, inputs, params, targets, on_gpu)
    key: Any = (
        op.name,
        on_gpu,
        tuple((name, params[name], _isolated(params[name])) for name in sorted(params)),
        tuple((a.shape, a.np_dtype) for a in inputs),
        tuple((a.shape, a.np_dtype) for a in targets) if targets else None,
    )
    try:
        plan = _plans.get(key)
    except TypeError:  # a parameter that cannot be hashed, such as a list
        key, plan = None, None
    if plan is None:
        plan = _settle(op, inputs, params, targets, on_gpu)
        if key is not None:
            if len(_plans) >= _MAX_PLANS:
                _plans.clear()
            _plans[key] = plan
    return plan


def _isolated(value: object) -> object:
    """Return a key that distinguishes equal values of different meaning, also in tuples: 1, True, 1.0; 0.0, -0.0."""
    return repr(value) if isinstance(value, tuple | float | np.floating) else value.__class__


def _settle(
    op: Op, inputs: Sequence[NDArray], params: Mapping[str, object], targets: Sequence[NDArray], on_gpu: bool
) -> SettledCall:
    if op.variadic is not None and op.variadic not in params:
        params = {**params, op.variadic: len(inputs)}
    parsed = registry.parse_params(op, params)
    ignored = op.ignored_keys(params)
    if ignored:
        warnings.warn(f"{op.name} ignores {', '.join(ignored)}, as in MXNet", stacklevel=7)
    names = op.input_names(parsed)
    if len(inputs) != len(names):
        raise ParameterError(
            f"{op.name}: expected {len(names)} inputs ({', '.join(names) or 'none'}), got {len(inputs)}"
        )
    for name, array in zip(names, inputs, strict=True):
        if 0 in array.shape:
            raise ShapeError(f"{op.name}: input {name} has shape {array.shape}; operators do not take empty arrays")
    count, visible = op.num_outputs(parsed), op.num_visible_outputs(parsed)
    if targets and len(targets) not in (visible, count):
        raise ParameterError(f"{op.name}: out= needs {visible} arrays, got {len(targets)}")
    shapes: list[Shape | None] = [a.shape for a in inputs]
    kinds: list[DType | None] = [a.np_dtype for a in inputs]
    out_shapes = [*(t.shape for t in targets), *[None] * (count - len(targets))]
    target_kinds = [*(t.np_dtype for t in targets), *[None] * (count - len(targets))]
    try:
        ins, outs = op.infer_shape(parsed, list(shapes), list(out_shapes))
        in_kinds, out_kinds = op.infer_dtype(parsed, list(kinds), list(target_kinds))
    except (ShapeError, DTypeError) as error:
        shown = ", ".join(f"{name}: {a.shape} {a.np_dtype}" for name, a in zip(names, inputs, strict=True))
        raise type(error)(f"{op.name}({shown}): {error}") from own(error)
    for name, array, shape, dtype in zip(names, inputs, ins, in_kinds, strict=True):
        if shape is not None and shape != array.shape:
            raise ShapeError(f"{op.name}: input {name} must have shape {shape}, got {array.shape}")
        if dtype is not None and dtype != array.np_dtype:
            raise DTypeError(f"{op.name}: input {name} must be {dtype}, got {array.np_dtype}; use astype")
    specs = []
    for name, shape, dtype in zip(op.output_names(parsed), outs, out_kinds, strict=True):
        if shape is None or 0 in shape:
            raise ShapeError(f"{op.name}: the shape of output {name} cannot be told from the inputs (known: {shape})")
        specs.append(TensorSpec(tuple(shape), np.dtype(np.float32) if dtype is None else np.dtype(dtype)))
    for target, spec in zip(targets, specs, strict=False):
        if target.shape != spec.shape or target.np_dtype != spec.dtype:
            came, result = f"{target.shape} {target.np_dtype}", f"{spec.shape} {spec.dtype}"
            raise ShapeError(f"{op.name}: out has {came}, the result {result}")
    sources = [TensorSpec(a.shape, a.np_dtype) for a in inputs]
    # On a host single calls use NumPy; compiled kernels are only for plans.
    mode = "numpy"
    if on_gpu:
        mode = config.get("WEFTPLAN_KERNELS")
    chosen = implementations.choose(op, parsed, sources, specs, mode, on="gpu" if on_gpu else "host").implementation
    with tiling.using(tiling.of("gpu" if on_gpu else "cpu")):
        scratch = chosen.workspace(parsed, sources, specs)
    return SettledCall(
        params=parsed,
        outputs=tuple((spec.nbytes, spec.shape, spec.dtype) for spec in specs),
        visible=visible,
        ignored=frozenset(op.ignored(parsed)),
        inplace=tuple(op.inplace_pairs(parsed)),
        kernel=chosen.kernel,
        workspace=scratch,
    )


def may_share(plan: SettledCall, i: int, k: int, array: NDArray, target: NDArray) -> bool:
    """Return whether writing ``target`` as output ``k`` cannot corrupt input ``i``."""
    if i in plan.ignored or array.chunk is not target.chunk:
        return True
    if array.offset >= target.offset + target.nbytes or target.offset >= array.offset + array.nbytes:
        return True
    same = array.offset == target.offset and array.nbytes == target.nbytes
    return same and any(pair.input == i and pair.output == k for pair in plan.inplace)
