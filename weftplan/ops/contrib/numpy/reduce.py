"""Reductions of MXNet's NumPy interface; the output of a full reduction has no dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from weftplan.errors import DTypeError, ParameterError
from weftplan.ops.contrib.numpy.derive import derive
from weftplan.ops.core.forms import WorkspaceKernel, workspace_kernel
from weftplan.ops.core.kernels import INDEX
from weftplan.ops.core.params import p_bool, p_dtype, p_int, p_optional, p_shape
from weftplan.ops.core.registry import get, register
from weftplan.ops.core.rules import (
    DTypes,
    Shapes,
    backward,
    floats_only,
    grad,
    merge_dtype,
    merge_shape,
    normalize_axis,
    same_dtype,
    take_bytes,
)
from weftplan.ops.core.schema import DTypeRule, Op, Param, Params, Shape, TensorSpec, Workspace
from weftplan.ops.reduction.moments import moments_backward, moments_forward
from weftplan.ops.reduction.reduce import keepdims_shape, reduced_axes
from weftplan.support.array_types import RawArray


def _p_nothing(value: object) -> None:
    if value is not None and str(value).strip().lower() not in ("none", ""):
        raise ValueError("expected None: another start than the usual one is not supported")


_AXIS = Param("axis", p_optional(p_shape), None, "axes to reduce; None: all")
_DTYPE = Param("dtype", p_optional(p_dtype), None, "accepted when it is the dtype of the tensor")
_KEEP = Param("keepdims", p_bool, False, "keep the reduced axes with size 1")
_INITIAL = Param("initial", _p_nothing, None, "accepted when None")


def _reduced(source: Shape, params: Params, what: str) -> Shape:
    """Return the shape of the output of a reduction of ``source``; ``what`` is its name in errors."""
    axes = reduced_axes({"axis": params["axis"]}, len(source), what)
    if params["keepdims"]:
        return keepdims_shape(source, axes)
    return tuple(dim for axis, dim in enumerate(source) if axis not in axes)


def _shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source = ins[0]
    if source is None:
        return ins, outs
    reduced = _reduced(source, params, "a reduction")
    return ins, [merge_shape(out, reduced, f"output of reducing {source}") for out in outs]


def _unchanged_dtype(name: str, rule: DTypeRule) -> DTypeRule:
    """Return ``rule`` with a check that the parameter dtype is None or the tensor's dtype."""

    def infer(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
        new_ins, new_outs = rule(params, ins, outs)
        target, source = params.get("dtype"), new_ins[0]
        if target is not None and source is not None and target != source:
            raise DTypeError(f"{name} of {source} gives {source}, not dtype={target}: cast its input (Cast)")
        return [*new_ins], [*new_outs]

    return infer


for _name, _base, _params in (
    ("_np_sum", "sum", (_AXIS, _DTYPE, _KEEP, _INITIAL)),
    ("_np_prod", "prod", (_AXIS, _DTYPE, _KEEP, _INITIAL)),
    ("_npi_mean", "mean", (_AXIS, _DTYPE, _KEEP, _INITIAL)),
    ("_np_max", "max", (_AXIS, _KEEP, _INITIAL)),
    ("_np_min", "min", (_AXIS, _KEEP, _INITIAL)),
):
    derive(
        _name,
        _base,
        inputs=("a",),
        params=_params,
        translate=lambda params: {"axis": params["axis"], "keepdims": params["keepdims"], "exclude": False},
        infer_shape=_shape,
        infer_dtype=_unchanged_dtype(_name, same_dtype if _base in ("max", "min") else floats_only(_name)),
        aliases={"max": ("_np_amax", "_npi_max"), "min": ("_np_amin", "_npi_min"), "mean": ()}.get(
            _base, (f"_npi_{_base}",)
        ),
    )

# ----------------------------------------------------------------------------------------------------------- positions


def _position_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    source = ins[0]
    if source is None:
        return ins, outs
    axis = params["axis"]
    axes = None if axis is None else (normalize_axis(axis, len(source), "axis of argmax"),)
    reduced = _reduced(source, {**params, "axis": axes}, "argmax")
    return ins, [merge_shape(outs[0], reduced, f"output of argmax or argmin of {source}")]


def _position_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    return ins, [merge_dtype(outs[0], INDEX, "output of argmax or argmin, which is int64")]


for _name in ("argmax", "argmin"):
    derive(f"_npi_{_name}", _name, infer_shape=_position_shape, infer_dtype=_position_dtype)

# --------------------------------------------------------------------------------------------------------- var and std

_SPREAD = (_AXIS, _DTYPE, Param("ddof", p_int, 0, "taken from the number of elements before dividing"), _KEEP)


def _moments(params: Params, rank: int) -> Params:
    """Return the parameters of ``moments`` for a var or std of a tensor of ``rank`` dimensions."""
    axes = reduced_axes({"axis": params["axis"]}, rank, "var or std")
    return {"axes": axes, "keepdims": params["keepdims"]}


def _correction(params: Params, source: Shape) -> float:
    """Return N / (N - ddof), the factor that corrects a variance over N elements."""
    count = math.prod(source[axis] for axis in reduced_axes({"axis": params["axis"]}, len(source), "var or std"))
    if count <= params["ddof"]:
        raise ParameterError(f"var or std of {count} elements with ddof={params['ddof']}: expected a smaller ddof")
    return count / float(count - params["ddof"])


def _spread(root: bool) -> WorkspaceKernel:
    @workspace_kernel
    def compute(ctx: Workspace, p: Params, a: RawArray, out: RawArray | None, mean: RawArray | None) -> None:
        """Compute the variance, or its root, and the mean, which the gradient needs."""
        source = a.shape
        moments_forward(ctx, _moments(p, len(source)), (a,), [mean, out])
        if out is not None:
            correction = _correction(p, source)
            if correction != 1.0:
                ctx.xp.multiply(out, correction, out=out)
            if root:
                ctx.xp.sqrt(out, out=out)

    return compute


def _spread_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return get("moments").workspace_bytes(_moments(params, len(inputs[0].shape)), inputs, outputs)


def _backward_spread(root: bool) -> WorkspaceKernel:
    @workspace_kernel
    def compute(
        ctx: Workspace, p: Params, g: RawArray, data: RawArray, value: RawArray, mean: RawArray, out: RawArray
    ) -> None:
        xp = ctx.xp
        of_mean, of_var = ctx.take(g.shape, g.dtype), ctx.take(g.shape, g.dtype)
        of_mean.fill(0)
        xp.multiply(g, _correction(p, data.shape), out=of_var)
        if root:
            xp.divide(of_var, value, out=of_var)
            xp.multiply(of_var, 0.5, out=of_var)
        moments_backward(ctx, _moments(p, data.ndim), [of_mean, of_var, data, mean], [out])

    return compute


def _backward_spread_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    ograd, data, _, mean = inputs
    moments = _moments(params, len(data.shape))
    inner = get("_backward_moments").workspace_bytes(moments, [ograd, ograd, data, mean], outputs)
    return inner + take_bytes(ograd, ograd)


for _name, _root, _doc in (("var", False, "Variance over axes."), ("std", True, "Standard deviation over axes.")):
    register(
        Op(
            name=f"_npi_{_name}",
            forward=_spread(_root),
            infer_shape=_shape,
            infer_dtype=_unchanged_dtype(f"_npi_{_name}", floats_only(f"_npi_{_name}")),
            params=_SPREAD,
            inputs=("a",),
            outputs=(_name, "mean"),
            visible_outputs=1,
            gradient=grad(f"_backward_npi_{_name}", "g0", "x0", "y0", "y1"),
            workspace=_spread_workspace,
            doc=_doc,
        )
    )
    backward(
        f"_npi_{_name}",
        _backward_spread(_root),
        ("ograd", "data", "output", "mean"),
        params=_SPREAD,
        workspace=_backward_spread_workspace,
    )
