"""softmax, softmin, log_softmax and SoftmaxActivation.

All of them use the kernels of ``softmax_core.py``, softmin with negated data. Every gradient is computed from the
output, without the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftplan.errors import ParameterError
from weftplan.ops.core.forms import WorkspaceKernel, workspace_kernel
from weftplan.ops.core.params import p_bool, p_dtype, p_enum, p_float, p_int, p_optional
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    UNARY_INPLACE,
    DTypes,
    Shapes,
    backward,
    floats_only,
    merge_dtype,
    merge_shape,
    normalize_axis,
    same_shape,
)
from weftplan.ops.core.schema import (
    EntryRef,
    GradientBuilder,
    InplacePair,
    Op,
    Param,
    Params,
    Shape,
    TensorSpec,
    Workspace,
)
from weftplan.ops.nn.softmax_core import (
    as_rows,
    backward_bytes,
    forward_bytes,
    softmax,
    softmax_backward,
    softmax_bare,
)
from weftplan.support.array_types import RawArray

_PARAMS = (
    Param("axis", p_int, -1, "The axis along which the outputs sum to 1."),
    Param("temperature", p_optional(p_float), None, "Divisor of the data (default 1)."),
    Param("dtype", p_optional(p_dtype), None, "Dtype of the output (default: the data's)."),
    Param("use_length", p_optional(p_bool), False, "True: the input length has the number of valid classes per row."),
)


def _length(params: Params) -> bool:
    return bool(params.get("use_length"))


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data = merge_shape(ins[0], outs[0], "softmax: data and output")
    if data is None:
        return ins, outs
    axis = normalize_axis(params["axis"], len(data), "softmax: axis")
    if len(ins) == 1:
        return [data], [data]
    lengths = merge_shape((*data[:axis], *data[axis + 1 :]), ins[1], "softmax: data without its axis, and length")
    assert lengths is not None
    data = (*lengths[:axis], data[axis], *lengths[axis:])
    return [data, lengths], [data]


def _infer_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    if params["dtype"] is not None:
        return ins, [merge_dtype(params["dtype"], outs[0], "softmax: dtype and output")]
    data = merge_dtype(ins[0], outs[0], "softmax: data and output")
    return [data, *ins[1:]], [data]


def _scale(params: Params, sign: float) -> float:
    temperature = params.get("temperature")
    if temperature is None:
        return sign
    if temperature <= 0:
        raise ParameterError(f"softmax: temperature={temperature}: expected a positive number")
    return sign / float(temperature)


def _family(name: str, doc: str, *, sign: float = 1.0, log: bool = False) -> None:
    params = _PARAMS

    def forward(ctx: Workspace, p: Params, *arrays: RawArray) -> None:
        *inputs, out = arrays
        rows = as_rows(inputs[0].shape, p["axis"])
        length = inputs[1].reshape(rows[0], rows[2]) if len(inputs) > 1 else None
        softmax(ctx, inputs[0].reshape(rows), out.reshape(rows), scale=_scale(p, sign), log=log, length=length)

    def bare_form(
        params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> Callable[..., object] | None:
        plain = len(inputs) == 1 and inputs[0].dtype == outputs[0].dtype and params.get("temperature") is None
        if not plain or log or sign != 1.0:
            return None
        return softmax_bare(as_rows(inputs[0].shape, params["axis"]), inputs[0].dtype)

    def workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        rows = as_rows(inputs[0].shape, params["axis"])
        return forward_bytes(rows, inputs[0].dtype, outputs[0].dtype, log=log, masked=len(inputs) > 1)

    @workspace_kernel
    def reverse(ctx: Workspace, p: Params, ograd: RawArray, output: RawArray, out: RawArray) -> None:
        rows = as_rows(ograd.shape, p["axis"])
        softmax_backward(
            ctx,
            ograd.reshape(rows),
            output.reshape(rows),
            out.reshape(rows),
            scale=_scale(p, sign),
            log=log,
        )

    def reverse_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        rows = as_rows(inputs[0].shape, params["axis"])
        return backward_bytes(rows, inputs[1].dtype, outputs[0].dtype)

    def gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
        gradient = builder.node(f"_backward_{name}", [builder.ograd(), builder.output(0)])
        return [*gradient, *[None] * (builder.num_inputs - 1)]

    register(
        Op(
            name=name,
            forward=WorkspaceKernel(forward, bare_form),
            infer_shape=_infer_shape,
            infer_dtype=floats_only(name, _infer_dtype),
            params=params,
            inputs=lambda params: ("data", "length") if _length(params) else ("data",),
            positions=("data", "length") if name == "softmax" else None,
            gradient=gradient,
            inplace=UNARY_INPLACE,
            workspace=workspace,
            doc=doc,
        )
    )
    backward(
        name,
        reverse,
        ("ograd", "output"),
        params=params,
        inplace=(InplacePair(0, 0), InplacePair(1, 0)),
        workspace=reverse_workspace,
    )


_family("softmax", "exp(data / temperature), divided by its sum along the axis, in the shape of data.")
_family("softmin", "softmax of the negated data, in the shape of data.", sign=-1.0)
_family("log_softmax", "Logarithm of softmax, in the shape of data.", log=True)

_ACTIVATION = (
    Param("mode", p_enum("channel", "instance"), "instance", "channel: along axis 1; instance: along the last axis."),
)


def _activation_rows(params: Params, shape: Shape) -> Shape:
    if params["mode"] == "channel":
        return as_rows(shape, 1)
    return as_rows(shape, -1)


def _activation_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    new = same_shape(params, ins, outs)
    if new[0][0] is not None:
        mode = params["mode"]
        normalize_axis(int(mode == "channel"), len(new[0][0]), f"SoftmaxActivation: {mode=} needs axis")
    return new


@workspace_kernel
def _activation(ctx: Workspace, p: Params, data: RawArray, out: RawArray) -> None:
    rows = _activation_rows(p, data.shape)
    softmax(ctx, data.reshape(rows), out.reshape(rows))


@workspace_kernel
def _activation_backward(ctx: Workspace, p: Params, ograd: RawArray, output: RawArray, out: RawArray) -> None:
    rows = _activation_rows(p, ograd.shape)
    softmax_backward(ctx, *(array.reshape(rows) for array in (ograd, output, out)))


def _activation_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return forward_bytes(_activation_rows(params, inputs[0].shape), inputs[0].dtype, outputs[0].dtype)


def _activation_backward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return backward_bytes(_activation_rows(params, inputs[0].shape), inputs[1].dtype, outputs[0].dtype)


register(
    Op(
        name="SoftmaxActivation",
        forward=_activation,
        infer_shape=_activation_shape,
        infer_dtype=floats_only("SoftmaxActivation"),
        params=_ACTIVATION,
        gradient=lambda builder: builder.node("_backward_SoftmaxActivation", [builder.ograd(), builder.output(0)]),
        inplace=UNARY_INPLACE,
        workspace=_activation_workspace,
        doc="softmax along the last axis (instance) or along axis 1 (channel), in the shape of data.",
    )
)
backward(
    "SoftmaxActivation",
    _activation_backward,
    ("ograd", "output"),
    params=_ACTIVATION,
    inplace=(InplacePair(0, 0), InplacePair(1, 0)),
    workspace=_activation_backward_workspace,
)
