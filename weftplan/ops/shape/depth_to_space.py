"""depth_to_space and space_to_depth: blocks of pixels to channels, and back.

Each operator copies between two views with six axes. Each is the gradient of the other.
"""

from __future__ import annotations

from collections.abc import Callable

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import kernel
from weftplan.ops.core.params import p_int
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, grad, merge_shape, same_dtype
from weftplan.ops.core.schema import Kernel, Op, Param, Params, Shape, ShapeRule
from weftplan.support.array_types import ArrayModule, RawArray


def _p_block(value: object) -> int:
    number = p_int(value)
    if number < 1:
        raise ValueError("expected at least 1")
    return number


_BLOCK = (Param("block_size", _p_block, doc="side of a block"),)


def _deep(shape: Shape, block: int, name: str) -> Shape:
    """Return the shape that space_to_depth gives to data of ``shape``."""
    batch, channels, height, width = shape
    if height % block or width % block:
        raise ShapeError(f"{name}: height and width of {shape} must be multiples of block_size={block}")
    return batch, channels * block * block, height // block, width // block


def _wide(shape: Shape, block: int, name: str) -> Shape:
    """Return the shape that depth_to_space gives to data of ``shape``."""
    batch, channels, height, width = shape
    if channels % (block * block):
        raise ShapeError(
            f"{name}: channels of {shape} must be a multiple of {block * block}, block_size={block} squared"
        )
    return batch, channels // (block * block), height * block, width * block


def _infer(name: str, forth: Callable[..., Shape], inverse: Callable[..., Shape]) -> ShapeRule:
    def infer(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
        source, out, block = ins[0], outs[0], params["block_size"]
        for shape in (source, out):
            if shape is not None and len(shape) != 4:
                raise ShapeError(f"{name}: expected 4 dimensions (batch, channels, height, width), got {shape}")
        if source is not None:
            out = merge_shape(out, forth(source, block, name), f"output of {name} of {source}")
        if out is not None:
            source = merge_shape(source, inverse(out, block, name), f"input of {name} to {out}")
        return [source], [out]

    return infer


def _kernel(*, to_space: bool) -> Kernel:
    @kernel
    def compute(xp: ArrayModule, p: Params, data: RawArray, out: RawArray) -> None:
        block = p["block_size"]
        deep, wide = (data, out) if to_space else (out, data)
        batch, channels, height, width = wide.shape
        blocks = wide.reshape(batch, channels, height // block, block, width // block, block).transpose(
            0, 3, 5, 1, 2, 4
        )
        layers = deep.reshape(blocks.shape)
        if to_space:
            xp.copyto(blocks, layers)
        else:
            xp.copyto(layers, blocks)

    return compute


for _name, _other, _forth, _inverse, _doc in (
    ("depth_to_space", "space_to_depth", _wide, _deep, "Groups of channels become blocks of a larger image."),
    ("space_to_depth", "depth_to_space", _deep, _wide, "Blocks of the image become channels of a smaller one."),
):
    register(
        Op(
            name=_name,
            forward=_kernel(to_space=_forth is _wide),
            infer_shape=_infer(_name, _forth, _inverse),
            infer_dtype=same_dtype,
            params=_BLOCK,
            gradient=grad(_other, "g0"),
            doc=_doc,
        )
    )
