"""Multi-head attention on interleaved projections, as in GluonNLP's transformers, and div_sqrt_dim.

Self-attention has one input (steps, batch, heads · 3 · units), in which the query, key and value of each head are
contiguous. Attention between two sequences has the queries in one input (steps, batch, heads · units), the keys and
values in another input (steps, batch, heads · 2 · units). The attention weights have shape (batch · heads, query
steps, key steps). Kernels multiply views of these tensors, so that nothing is transposed or copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import ArrayKernel, kernel, workspace_kernel
from weftplan.ops.core.params import p_int
from weftplan.ops.core.products import multiply
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    UNARY_INPLACE,
    Shapes,
    backward,
    floats_only,
    grad,
    merge_dim,
    merge_shape,
    normalize_axis,
    same_shape,
)
from weftplan.ops.core.schema import Op, Param, Params, Shape, ShapeRule, Workspace
from weftplan.support.array_types import ArrayModule, RawArray


def _heads(value: object) -> int:
    heads = p_int(value)
    if heads < 1:
        raise ValueError("expected at least 1")
    return heads


_HEADS = (Param("heads", _heads, doc="number of attention heads"),)


def _part(x: RawArray, heads: int, parts: int, part: int) -> RawArray:
    """Return a view (batch, heads, steps, units) of tensor ``part`` of the ``parts`` tensors interleaved in ``x``."""
    steps, batch, width = x.shape
    units = width // (heads * parts)
    return x.reshape(steps, batch, heads, parts, units)[:, :, :, part].transpose(1, 2, 0, 3)


def _spread(attention: RawArray, heads: int) -> RawArray:
    """Return a view (batch, heads, queries, keys) of ``attention`` (batch · heads, queries, keys)."""
    return attention.reshape(-1, heads, *attention.shape[1:])


def _width(name: str, shape: Shape, heads: int, parts: int) -> Shape:
    if shape[2] % (heads * parts):
        raise ShapeError(
            f"{name}: expected a last dimension that is a multiple of {parts} · heads={heads}, got shape {shape}"
        )
    return shape


def _sequence(shape: Shape | None, name: str, what: str) -> Shape:
    merged = merge_shape((0, 0, 0), shape, f"{name}: {what} (steps, batch, width)")
    assert merged is not None
    return merged


def _batch(name: str, attention: Shape, batch: int, heads: int) -> tuple[int, int]:
    """Return (batch, batch · heads), after merging ``batch`` (0: unknown) with the batch of the shape ``attention``."""
    if attention[0] % heads:
        raise ShapeError(f"{name}: attention {attention} should begin with a multiple of heads={heads}")
    batch = merge_dim(batch, attention[0] // heads, f"{name}: batch of the sequence, and of attention {attention}")
    return batch, batch * heads


def _product(
    name: str, parts: Sequence[int], params: Params, sequences: list[Shape], attention: Shape | None
) -> tuple[list[Shape], Shape]:
    """Return the completed shapes of the sequences and of attention; each completes the others.

    ``sequences`` has the shape of the queries (or output) and that of the keys (or values), or one shape if a single
    tensor interleaves all. ``parts`` has the number of tensors that each sequence interleaves.
    """
    heads = params["heads"]
    scores = merge_shape((0, 0, 0), attention, f"{name}: attention (batch · heads, queries, keys)")
    assert scores is not None
    queried, keyed = sequences[0], sequences[-1]
    batch = merge_dim(queried[1], keyed[1], f"{name}: batches of {queried} and {keyed}")
    batch, rows = _batch(name, scores, batch, heads)
    queries = merge_dim(queried[0], scores[1], f"{name}: queries of {queried} and of attention {scores}")
    keys = merge_dim(keyed[0], scores[2], f"{name}: keys of {keyed} and of attention {scores}")
    if len(sequences) == 1:
        queries = keys = merge_dim(queries, keys, f"{name}: both sides of attention {scores}")
    for sequence, count in zip(sequences, parts, strict=False):
        _width(name, sequence, heads, count)
    units = 0
    if len(sequences) == 2:
        units = merge_dim(
            queried[2] // parts[0], keyed[2] // parts[1], f"{name}: widths a part of {queried} and {keyed}"
        )
    widths = [units * parts[k] or sequence[2] for k, sequence in enumerate(sequences)]
    steps = [queries, keys][: len(sequences)]
    merged: list[Shape] = [(step, batch, width) for step, width in zip(steps, widths, strict=True)]
    return merged, (rows, queries, keys)


def _score_shape(name: str, parts: tuple[int, ...]) -> ShapeRule:
    """Return the shape rule of an operator that computes attention from one or two inputs.

    ``parts`` has, for each input, the number of tensors that it interleaves.
    """

    def infer(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
        sequences = [_sequence(shape, name, "input") for shape in ins]
        merged, attention = _product(name, parts, params, sequences, outs[0])
        return [*merged], [attention]

    return infer


def _value_shape(name: str, parts: int, same: bool) -> ShapeRule:
    """Return the shape rule of an operator that weights values by attention.

    ``parts``: number of tensors that the values' input interleaves. ``same``: the queries are of the same sequence.
    """

    def infer(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
        heads = params["heads"]
        values, out = _sequence(ins[0], name, "input"), _sequence(outs[0], name, "output")
        (out, values), attention = _product(name, (1, parts, 1), params, [out, values], ins[1])
        if same:
            steps = merge_dim(out[0], values[0], f"{name}: steps of input and output")
            out, values = (steps, *out[1:]), (steps, *values[1:])
            attention = (attention[0], steps, steps)
        _width(name, out, heads, 1)
        return [values, attention], [out]

    return infer


# ------------------------------------------------------------------------------------------------------------- kernels


def _scores(ctx: Workspace, heads: int, queries: RawArray, keys: RawArray, out: RawArray) -> None:
    """Compute ``out`` = queries · keysᵀ / sqrt(units), from views (batch, heads, steps, units)."""
    target = _spread(out, heads)
    multiply(ctx.xp, queries, keys.swapaxes(-1, -2), target)
    ctx.xp.multiply(out, 1.0 / math.sqrt(queries.shape[-1]), out=out)


def _scores_gradient(
    ctx: Workspace, g: RawArray, queries: RawArray, keys: RawArray, d_queries: RawArray | None, d_keys: RawArray | None
) -> None:
    xp, scale = ctx.xp, 1.0 / math.sqrt(queries.shape[-1])
    if d_queries is not None:
        multiply(xp, g, keys, d_queries)
        xp.multiply(d_queries, scale, out=d_queries)
    if d_keys is not None:
        multiply(xp, g.swapaxes(-1, -2), queries, d_keys)
        xp.multiply(d_keys, scale, out=d_keys)


@workspace_kernel
def _selfatt_qk(ctx: Workspace, p: Params, queries_keys_values: RawArray, out: RawArray) -> None:
    heads = p["heads"]
    _scores(ctx, heads, _part(queries_keys_values, heads, 3, 0), _part(queries_keys_values, heads, 3, 1), out)


@workspace_kernel
def _backward_selfatt_qk(ctx: Workspace, p: Params, g: RawArray, x: RawArray, out: RawArray) -> None:
    heads = p["heads"]
    queries, keys, _ = (_part(x, heads, 3, k) for k in range(3))
    d_queries, d_keys, d_values = (_part(out, heads, 3, k) for k in range(3))
    _scores_gradient(ctx, _spread(g, heads), queries, keys, d_queries, d_keys)
    d_values[...] = 0


@workspace_kernel
def _encdec_qk(ctx: Workspace, p: Params, queries: RawArray, keys_values: RawArray, out: RawArray) -> None:
    heads = p["heads"]
    _scores(ctx, heads, _part(queries, heads, 1, 0), _part(keys_values, heads, 2, 0), out)


@workspace_kernel
def _backward_encdec_qk(
    ctx: Workspace,
    p: Params,
    g: RawArray,
    queries: RawArray,
    keys_values: RawArray,
    d_queries: RawArray | None,
    d_keys_values: RawArray | None,
) -> None:
    heads = p["heads"]
    d_queries = None if d_queries is None else _part(d_queries, heads, 1, 0)
    d_keys = None if d_keys_values is None else _part(d_keys_values, heads, 2, 0)
    queries, keys = _part(queries, heads, 1, 0), _part(keys_values, heads, 2, 0)
    _scores_gradient(ctx, _spread(g, heads), queries, keys, d_queries, d_keys)
    if d_keys_values is not None:
        _part(d_keys_values, heads, 2, 1)[...] = 0


def _weighted(parts: int) -> ArrayKernel:
    """Return a kernel that weights the values, the last of ``parts`` interleaved tensors, by attention."""

    @kernel
    def compute(xp: ArrayModule, p: Params, keys_values: RawArray, attention: RawArray, out: RawArray) -> None:
        heads = p["heads"]
        values, attention = _part(keys_values, heads, parts, parts - 1), _spread(attention, heads)
        multiply(xp, attention, values, _part(out, heads, 1, 0))

    return compute


def _backward_weighted(parts: int) -> ArrayKernel:
    @kernel
    def compute(
        xp: ArrayModule,
        p: Params,
        g: RawArray,
        sequence: RawArray,
        attention: RawArray,
        d_queries_keys_values: RawArray | None,
        d_attention: RawArray | None,
    ) -> None:
        heads = p["heads"]
        g = _part(g, heads, 1, 0)
        if d_queries_keys_values is not None:
            for part in range(parts - 1):
                _part(d_queries_keys_values, heads, parts, part)[...] = 0
            target = _part(d_queries_keys_values, heads, parts, parts - 1)
            multiply(xp, _spread(attention, heads).swapaxes(-1, -2), g, target)
        if d_attention is not None:
            values = _part(sequence, heads, parts, parts - 1)
            multiply(xp, g, values.swapaxes(-1, -2), _spread(d_attention, heads))

    return compute


# ----------------------------------------------------------------------------------------------------------- operators

_QKV, _KV = "queries_keys_values", "keys_values"
_SELFATT, _ENCDEC = "_contrib_interleaved_matmul_selfatt", "_contrib_interleaved_matmul_encdec"
for _name, _inputs, _rule, _kernel, _gradient_kernel, _doc in (
    (
        f"{_SELFATT}_qk",
        (_QKV,),
        _score_shape("interleaved_matmul_selfatt_qk", (3,)),
        _selfatt_qk,
        _backward_selfatt_qk,
        "queries · keysᵀ / sqrt(units) for each head of self-attention: (batch · heads, steps, steps).",
    ),
    (
        f"{_ENCDEC}_qk",
        ("queries", _KV),
        _score_shape("interleaved_matmul_encdec_qk", (1, 2)),
        _encdec_qk,
        _backward_encdec_qk,
        "queries · keysᵀ / sqrt(units) for each head, with keys of another sequence: "
        "(batch · heads, query steps, key steps).",
    ),
    (
        f"{_SELFATT}_valatt",
        (_QKV, "attention"),
        _value_shape("interleaved_matmul_selfatt_valatt", 3, same=True),
        _weighted(3),
        _backward_weighted(3),
        "The values of self-attention weighted by attention (batch · heads, steps, steps): "
        "(steps, batch, heads · units).",
    ),
    (
        f"{_ENCDEC}_valatt",
        (_KV, "attention"),
        _value_shape("interleaved_matmul_encdec_valatt", 2, same=False),
        _weighted(2),
        _backward_weighted(2),
        "The values of another sequence weighted by attention (batch · heads, query steps, key steps): "
        "(query steps, batch, heads · units).",
    ),
):
    register(
        Op(
            name=_name,
            forward=_kernel,
            infer_shape=_rule,
            infer_dtype=floats_only(_name.removeprefix("_contrib_")),
            params=_HEADS,
            inputs=_inputs,
            gradient=grad(f"_backward_{_name.lstrip('_')}", "g0", *(f"x{k}" for k in range(len(_inputs)))),
            doc=_doc,
        )
    )
    backward(
        _name,
        _gradient_kernel,
        ("ograd", *_inputs),
        grad_inputs=tuple(range(len(_inputs))),
        params=_HEADS,
    )


def _div_sqrt_dim_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    new = same_shape(params, ins, outs)
    if new[0][0] is not None:
        normalize_axis(-1, len(new[0][0]), "div_sqrt_dim: axis")
    return new


@kernel
def _div_sqrt_dim(xp: ArrayModule, p: Params, data: RawArray, out: RawArray) -> None:
    xp.multiply(data, 1.0 / math.sqrt(data.shape[-1]), out=out)


register(
    Op(
        name="_contrib_div_sqrt_dim",
        forward=_div_sqrt_dim,
        infer_shape=_div_sqrt_dim_shape,
        infer_dtype=floats_only("div_sqrt_dim"),
        gradient=grad("_contrib_div_sqrt_dim", "g0"),
        inplace=UNARY_INPLACE,
        doc="data / sqrt(the size of its last dimension), in the shape of data.",
    )
)
