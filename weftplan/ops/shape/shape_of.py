"""shape_array and size_array: the shape of a tensor, and its number of elements, as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftplan.ops.core.forms import kernel
from weftplan.ops.core.kernels import INDEX
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, merge_dtype, merge_shape, zero_gradient
from weftplan.ops.core.schema import Op, Params, Shape
from weftplan.support.array_types import ArrayModule, RawArray


def _int64(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    return ins, [merge_dtype(outs[0], INDEX, "output of a shape or size, which is int64")]


def _operator(name: str, length: Callable[[Shape], int], values: Callable[[RawArray], Sequence[int]], doc: str) -> None:
    def infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
        if ins[0] is None:
            return ins, outs
        return ins, [merge_shape(outs[0], (length(ins[0]),), f"output of {name} of {ins[0]}")]

    @kernel
    def compute(xp: ArrayModule, p: Params, data: RawArray, out: RawArray) -> None:
        for position, value in enumerate(values(data)):
            out[position] = value

    register(
        Op(
            name=name,
            forward=compute,
            infer_shape=infer_shape,
            infer_dtype=_int64,
            gradient=zero_gradient,
            doc=doc,
        )
    )


_operator("shape_array", len, lambda data: data.shape, "The dimensions of data, int64.")
_operator("size_array", lambda shape: 1, lambda data: [data.size], "The number of elements of data, int64.")
