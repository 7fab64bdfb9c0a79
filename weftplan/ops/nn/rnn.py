"""RNN: multi-layer recurrent networks in one or both directions (lstm, gru, rnn_relu, rnn_tanh).

The forward pass writes the gates of every step to a hidden output, ``reserve``, and the dropout masks between layers to
another hidden output, ``mask``. Outside training neither is wanted, and scratch has the gates of a few steps at a time.

Sequence lengths have cuDNN's meaning: outputs are 0 after the end of a sequence, and the reverse direction starts at
the sequence's last step. MXNet 1.9.1 does so on GPUs, but ignores lengths on a CPU. A projection has a gradient on any
device, unlike in MXNet on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from weftplan.errors import DTypeError, ShapeError
from weftplan.ops.core import tiling
from weftplan.ops.core.forms import context_kernel
from weftplan.ops.core.kernels import BOOL
from weftplan.ops.core.params import p_bool, p_enum, p_float, p_int, p_optional, p_range
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, backward, is_known, merge_dim, merge_dtype, merge_shape, take_bytes
from weftplan.ops.core.schema import (
    DType,
    EntryRef,
    GradientBuilder,
    InplacePair,
    Op,
    OpContext,
    Param,
    Params,
    Shape,
    TensorSpec,
    Workspace,
)
from weftplan.ops.nn.rnn_layout import RnnLayout, layout
from weftplan.ops.nn.rnn_passes import BackwardPass, ForwardPass, backward_scratch, forward_scratch
from weftplan.support.array_types import ArrayModule, Generator, RawArray

_MASK = np.dtype(np.uint8)
_DRAW = np.dtype(np.float32)


def _p_positive(value: object) -> int:
    number = p_int(value)
    if number < 1:
        raise ValueError("expected at least 1")
    return number


def _p_fraction(value: object) -> float:
    p = p_float(value)
    if not 0 <= p < 1:
        raise ValueError("expected a number from 0 to below 1")
    return p


def _p_no_clip(value: object) -> None:
    if p_optional(p_float)(value) is not None:
        raise ValueError("expected None: states are not clipped (MXNet 1.9.1 clips them with cuDNN only)")


_PARAMS = (
    Param("state_size", _p_positive, doc="Size of the state of each layer."),
    Param("num_layers", p_range(1, 1024), doc="Number of layers."),
    Param("bidirectional", p_bool, False, "True: each layer runs in both directions and concatenates the outputs."),
    Param("mode", p_enum("rnn_relu", "rnn_tanh", "lstm", "gru"), doc="Type of the cell."),
    Param("p", _p_fraction, 0.0, "Probability that an element between two layers is dropped in training."),
    Param("state_outputs", p_bool, False, "True: the last states (and cells) are outputs, too."),
    Param("projection_size", p_optional(_p_positive), None, "lstm: the state is a projection of this size."),
    Param("lstm_state_clip_min", _p_no_clip, None, "None: no clipping."),
    Param("lstm_state_clip_max", _p_no_clip, None, "None: no clipping."),
    Param("lstm_state_clip_nan", p_bool, False, "Accepted, no effect without clipping."),
    Param("use_sequence_length", p_bool, False, "True: the input sequence_length has each sample's number of steps."),
)


def _inputs(params: Params) -> tuple[str, ...]:
    cell = ("state_cell",) if params["mode"] == "lstm" else ()
    return ("data", "parameters", "state", *cell, *(("sequence_length",) if params["use_sequence_length"] else ()))


def _num_states(params: Params) -> int:
    return 2 if params["mode"] == "lstm" else 1


def _visible(params: Params) -> int:
    return 1 + _num_states(params) if params["state_outputs"] else 1


def _drops(params: Params) -> bool:
    return bool(params["p"] > 0 and params["num_layers"] > 1)


def _outputs(params: Params) -> tuple[str, ...]:
    names = ("output", "state_output", "statecell_output")[: _visible(params)]
    return (*names, "reserve", *(("mask",) if _drops(params) else ()))


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    if params["projection_size"] is not None and params["mode"] != "lstm":
        raise ShapeError(f"RNN: projection_size needs mode lstm, got {params['mode']}")
    visible, states = _visible(params), _num_states(params)
    units = params["projection_size"] or params["state_size"]
    directions = 2 if params["bidirectional"] else 1
    out = merge_shape(outs[0], (0, 0, directions * units), "RNN: output (steps, batch, directions · units)")
    data = merge_shape(ins[0], (0, 0, 0), "RNN: data (steps, batch, inputs)")
    assert data is not None
    assert out is not None
    steps = merge_dim(data[0], out[0], "RNN: steps of data and output")
    batch = merge_dim(data[1], out[1], "RNN: batch of data and output")
    for shape in (*ins[2 : 2 + states], *outs[1:visible]):
        if shape is not None and len(shape) == 3:
            batch = merge_dim(batch, shape[1], "RNN: batch of data and states")
    if params["use_sequence_length"] and ins[-1] is not None and len(ins[-1]) == 1:
        batch = merge_dim(batch, ins[-1][0], "RNN: batch of data and sequence_length")
    depth = params["num_layers"] * directions
    state_shapes: Shapes = [(depth, batch, size) for size in (units, params["state_size"])[:states]]
    new_outs: Shapes = [(steps, batch, directions * units)]
    for k, state in enumerate(state_shapes):
        state = merge_shape(ins[2 + k], state, f"RNN: {_inputs(params)[2 + k]} (layers · directions, batch, size)")
        state_shapes[k] = state
        if visible > 1:
            new_outs.append(merge_shape(outs[1 + k], state, f"RNN: {_outputs(params)[1 + k]}"))
    data = (steps, batch, data[2])
    vector, reserve, mask = ins[1], outs[visible], None
    if data[2] != 0:
        plan = layout(params, data)
        vector = merge_shape(vector, (plan.num_parameters(),), f"RNN: parameters for data {data}")
    if is_known(data):
        reserve = merge_shape(reserve, (layout(params, data).reserve_size(),), "RNN: reserve")
        mask = (params["num_layers"] - 1, steps, batch, directions * units)
    new_outs += [reserve, mask] if _drops(params) else [reserve]
    lengths: Shapes = [merge_shape(ins[-1], (batch,), "RNN: sequence_length")] if params["use_sequence_length"] else []
    return [data, vector, *state_shapes, *lengths], new_outs


def _infer_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    count = 2 + _num_states(params)
    common: DType | None = None
    for position, dtype in enumerate((*ins[:count], *outs[: _visible(params) + 1])):
        common = merge_dtype(common, dtype, f"RNN: tensor {position} against those before it")
    if common is not None and common.kind != "f":
        raise DTypeError(f"RNN expects floats, got {common}: cast its data to float32 first (Cast, astype)")
    lengths: DTypes = [ins[-1] or common] if params["use_sequence_length"] else []
    new_outs: DTypes = [common] * (_visible(params) + 1)
    return [*[common] * count, *lengths], [*new_outs, _MASK] if _drops(params) else new_outs


def _dropping(ctx: OpContext, params: Params) -> bool:
    return ctx.is_train and _drops(params)


def _between_buffers(plan: RnnLayout, dtype: DType) -> list[tuple[Shape, DType]]:
    return [(plan.wide, dtype)] * min(plan.layers - 1, 2)


def _active_scratch(plan: RnnLayout) -> list[tuple[Shape, DType]]:
    if not plan.lengths:
        return []
    return [((plan.steps, plan.batch, 1), BOOL), ((plan.steps, 1), np.dtype(np.float64))]


def _active(ctx: Workspace, plan: RnnLayout, lengths: RawArray | None) -> RawArray | None:
    """Return a bool array (steps, batch, 1), False after the end of a sample; None without sequence lengths."""
    if not plan.lengths:
        return None
    active, numbers = (ctx.take(*spec) for spec in _active_scratch(plan))
    numbers[:, 0] = ctx.xp.arange(plan.steps)
    ctx.xp.less(numbers, lengths, out=active[:, :, 0])
    return active


def _side(wide: RawArray, direction: int, units: int) -> RawArray:
    """Return the view of ``wide`` (steps, batch, directions · units) that ``direction`` writes."""
    return wide[:, :, direction * units : (direction + 1) * units]


def _drop_scratch(params: Params, plan: RnnLayout) -> list[tuple[Shape, DType]]:
    size = min(math.prod(plan.wide), tiling.block())
    return [((size,), _DRAW), ((size,), _MASK)] if _drops(params) else []


def _drop(
    xp: ArrayModule,
    params: Params,
    generator: Generator,
    scratch: Sequence[RawArray],
    source: RawArray,
    mask: RawArray | None,
    out: RawArray,
) -> None:
    """Compute ``out`` = dropout of ``source``; ``mask``, unless None, gets 1 for kept and 0 for dropped elements."""
    draws, buffer = scratch
    for start in range(0, source.size, tiling.block()):
        part = slice(start, min(start + tiling.block(), source.size))
        keep = buffer[: part.stop - start] if mask is None else mask.reshape(-1)[part]
        numbers = draws[: keep.size]
        generator.random(numbers.shape, dtype=_DRAW, out=numbers)
        xp.greater_equal(numbers, params["p"], out=keep)
        _masked(xp, params, source.reshape(-1)[part], keep, out.reshape(-1)[part])


def _masked(xp: ArrayModule, params: Params, source: RawArray, keep: RawArray, out: RawArray) -> None:
    xp.multiply(source, keep, out=out)
    xp.multiply(out, 1.0 / (1.0 - params["p"]), out=out)


@context_kernel
def _forward(ctx: OpContext, params: Params, *arrays: RawArray) -> None:
    xp = ctx.xp
    count = len(_inputs(params))
    inputs, outputs = arrays[:count], arrays[count:]
    x, vector, state = inputs[:3]
    cell = inputs[3] if params["mode"] == "lstm" else None
    plan = layout(params, x.shape)
    visible = _visible(params)
    out, reserve = outputs[0], outputs[visible]
    mask = outputs[visible + 1] if _drops(params) else None
    saved = None if reserve is None else plan.saved(reserve)
    stored = None if reserve is None else plan.between(reserve)
    buffers = [ctx.take(*spec) for spec in _between_buffers(plan, x.dtype)]
    active = _active(ctx, plan, inputs[-1])
    sweep = ForwardPass(ctx, plan, x.dtype)
    scratch = [ctx.take(*spec) for spec in _drop_scratch(params, plan)]
    dropping = _dropping(ctx, params)
    generator: Any = ctx.generator() if dropping else None
    weights = plan.weights(vector)
    for layer in range(plan.layers):
        is_last = layer == plan.layers - 1
        target = out if is_last else buffers[layer % 2] if stored is None else stored[layer]
        for direction in range(plan.directions):
            k = layer * plan.directions + direction
            side = None if target is None else _side(target, direction, plan.units)
            sweep.run(
                x,
                weights[k],
                state[k],
                None if cell is None else cell[k],
                side,
                None if saved is None else saved[k],
                direction == 1,
                active,
            )
            for output, last_state in zip(outputs[1:visible], (sweep.state, sweep.cell), strict=False):
                if output is not None:
                    xp.copyto(output[k], last_state)
        if is_last:
            break
        x = target
        if dropping:
            x = buffers[layer % 2]
            _drop(xp, params, generator, scratch, target, None if mask is None else mask[layer], x)
    if mask is not None and not dropping:
        mask.fill(1)


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    plan, dtype = layout(params, inputs[0].shape), inputs[0].dtype
    return take_bytes(
        *_between_buffers(plan, dtype),
        *_active_scratch(plan),
        *forward_scratch(plan, dtype),
        *_drop_scratch(params, plan),
    )


def _backward_inputs(params: Params) -> tuple[str, ...]:
    ograds = ("ograd", "ograd_state", "ograd_cell")[: _visible(params)]
    return (*ograds, *_inputs(params), "output", "reserve", *(("mask",) if _drops(params) else ()))


def _backward_grads(params: Params) -> tuple[int, ...]:
    return tuple(range(2 + _num_states(params)))


def _gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    params = builder.params
    visible, count = _visible(params), len(_outputs(params))
    gradients = builder.node(
        "_backward_RNN",
        [
            *(builder.ograd(k) for k in range(visible)),
            *(builder.input(k) for k in range(builder.num_inputs)),
            builder.output(0),
            *(builder.output(k) for k in range(visible, count)),
        ],
    )
    return [*gradients, *[None] * (builder.num_inputs - len(gradients))]


def _dropped_buffer(params: Params, plan: RnnLayout, dtype: DType) -> list[tuple[Shape, DType]]:
    return [(plan.wide, dtype)] if _drops(params) else []


@context_kernel
def _backward(ctx: OpContext, params: Params, *arrays: RawArray) -> None:
    xp = ctx.xp
    names = _backward_inputs(params)
    named, outputs = dict(zip(names, arrays, strict=False)), arrays[len(names) :]
    data, state, cell = named["data"], named["state"], named.get("state_cell")
    plan = layout(params, data.shape)
    dtype = data.dtype
    buffers = [ctx.take(*spec) for spec in _between_buffers(plan, dtype)]
    dropped = [ctx.take(*spec) for spec in _dropped_buffer(params, plan, dtype)]
    active = _active(ctx, plan, named.get("sequence_length"))
    sweep = BackwardPass(ctx, plan, dtype)
    dropping = _dropping(ctx, params)
    layers = [*plan.between(named["reserve"]), named["output"]]
    saved = plan.saved(named["reserve"])
    weights = plan.weights(named["parameters"])
    d_weights = None if outputs[1] is None else plan.weights(outputs[1])
    d_out = named["ograd"]
    for layer in range(plan.layers - 1, -1, -1):
        x = data
        if layer:
            x = layers[layer - 1]
            if dropping:
                _masked(xp, params, x, named["mask"][layer - 1], dropped[0])
                x = dropped[0]
        d_x = buffers[layer % 2 if plan.layers > 2 else 0] if layer else outputs[0]
        for direction in range(plan.directions):
            k = layer * plan.directions + direction
            states = saved[k].states if plan.lengths else _side(layers[layer], direction, plan.units)
            start = (state[k], None if cell is None else cell[k])
            d_last = tuple(None if g is None else g[k] for g in (named.get("ograd_state"), named.get("ograd_cell")))
            sweep.run(
                weights[k],
                saved[k],
                states,
                start,
                _side(d_out, direction, plan.units),
                (d_last[0], d_last[1]),
                None if d_weights is None else d_weights[k],
                direction == 1,
                active,
            )
            for target, gradient in zip(outputs[2:], (sweep.d_state, sweep.d_cell), strict=False):
                if target is not None:
                    xp.copyto(target[k], gradient)
            if d_x is not None:
                sweep.input_gradient(weights[k], d_x, direction == 1)
            if d_weights is not None:
                sweep.weight_gradients(d_weights[k], x, saved[k], states, state[k], direction == 1)
        if layer and dropping:
            _masked(xp, params, d_x, named["mask"][layer - 1], d_x)
        d_out = d_x


def _backward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    data = inputs[_visible(params)]
    plan, dtype = layout(params, data.shape), data.dtype
    return take_bytes(
        *_between_buffers(plan, dtype),
        *_dropped_buffer(params, plan, dtype),
        *_active_scratch(plan),
        *backward_scratch(plan, dtype),
    )


def _inplace(params: Params) -> tuple[InplacePair, ...]:
    """Return the pairs of initial and last states that may share memory.

    They may because each layer and direction reads its initial state before it writes its last state.
    """
    return tuple(InplacePair(2 + k, 1 + k) for k in range(_num_states(params))) if params["state_outputs"] else ()


register(
    Op(
        name="RNN",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=_infer_dtype,
        params=_PARAMS,
        inputs=_inputs,
        positions=("data", "parameters", "state", "state_cell", "sequence_length"),
        outputs=_outputs,
        visible_outputs=_visible,
        gradient=_gradient,
        inplace=_inplace,
        workspace=_workspace,
        random=True,
        needs_training=_drops,
        doc="Recurrent layers over data (steps, batch, inputs): (steps, batch, directions · units). parameters is one "
        "vector of all weights and biases, in cuDNN's order.",
    )
)
backward(
    "RNN",
    _backward,
    _backward_inputs,
    grad_inputs=_backward_grads,
    params=_PARAMS,
    workspace=_backward_workspace,
)
