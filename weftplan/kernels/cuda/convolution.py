"""Convolution and Deconvolution by cuDNN if it is installed and supports the call, else as matrix products by cuBLAS.

The plan reserves the workspace of the chosen cuDNN algorithm, or of one tile of the products. The gradients of image
and weight share a workspace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from weftplan.kernels.cuda.convolution_products import WindowProduct
from weftplan.kernels.cuda.cudnn_algorithms import Algorithm, CudnnProblem, plan, run
from weftplan.ops.core.cuda_source import floats
from weftplan.ops.core.cuda_tuning import tuning, workspace_limit
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.schema import Arrays, OpContext, Params, Shape, SpecLike, aligned
from weftplan.ops.nn.convolution import window

_BYTES = np.dtype(np.uint8)


def _problem(kind: str, params: Params, image: SpecLike, weight: SpecLike, grid: SpecLike) -> CudnnProblem:
    """Return the cuDNN problem for arrays or specs. A single spatial axis becomes the second of two axes."""
    kernel, stride, dilate, pad = window(params, "Convolution")

    def of(operand: SpecLike) -> Shape:
        shape: Shape = tuple(operand.shape)
        return (*shape[:2], 1, shape[2]) if len(kernel) == 1 else shape

    if len(kernel) == 1:
        stride, dilate, pad = (1, *stride), (1, *dilate), (0, *pad)
    return CudnnProblem(kind, of(image), of(weight), of(grid), stride, dilate, pad, np.dtype(image.dtype).name)


Operand = TypeVar("Operand", bound=SpecLike)
"""An array in a call, a spec in a plan."""


class _Parts:
    """The computations of one operator, such as the gradients of image and weight.

    Args:
        parts: for each computation its kind, and the positions of image, weight and grid: 0, 1, … in the inputs, and
            ~0, ~1, … in the outputs. A call skips a computation whose output is not needed.
        bias: position of the bias in the inputs, or of its gradient in the outputs if ``backward``.
        backward: whether this is a gradient operator.
    """

    def __init__(self, parts: Sequence[tuple[str, int, int, int]], bias: int, *, backward: bool) -> None:
        self._parts = parts
        self._bias = bias
        self._backward = backward

    def _computations(
        self, inputs: Sequence[Operand | None], outputs: Sequence[Operand | None]
    ) -> Iterator[tuple[str, tuple[Operand, Operand, Operand]]]:
        for kind, *positions in self._parts:
            image, weight, grid = (inputs[k] if k >= 0 else outputs[~k] for k in positions)
            if image is not None and weight is not None and grid is not None:
                yield kind, (image, weight, grid)

    def _with_bias(self, ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        if params["no_bias"]:
            return
        if not self._backward:
            per_filter = (1, params["num_filter"], *(1 for _ in params["kernel"]))
            ctx.xp.add(outputs[0], inputs[self._bias].reshape(per_filter), out=outputs[0])
        elif outputs[self._bias] is not None:
            axes, wide = (0, *range(2, inputs[0].ndim)), accumulator(inputs[0].dtype)
            ctx.xp.sum(inputs[0], axis=axes, dtype=wide, out=outputs[self._bias], keepdims=False)


class _Products(_Parts):
    """The computations of one operator as matrix products by cuBLAS."""

    def _planned_parts(
        self, params: Params, inputs: Sequence[Operand | None], outputs: Sequence[Operand | None]
    ) -> list[tuple[WindowProduct, tuple[Operand, Operand, Operand]]]:
        parts = []
        for kind, operands in self._computations(inputs, outputs):
            image, weight, grid = operands
            parts.append((WindowProduct(kind, params, image.shape, weight.shape, grid.shape, image.dtype), operands))
        return parts

    def refusal(self, params: Params, inputs: Specs, outputs: Specs) -> str:
        """Return the reason why a call cannot be computed by these products; empty if it can."""
        if params.get("target_shape"):
            return "a target shape may pad the sides differently"
        reasons = [part.refusal for part, _ in self._planned_parts(params, inputs, outputs)]
        return next(filter(None, reasons), "") or str(floats(0)(params, inputs, outputs))

    def workspace(self, params: Params, inputs: Specs, outputs: Specs) -> int:
        """Return the scratch bytes of the part that needs the most."""
        return max((part.nbytes for part, _ in self._planned_parts(params, inputs, outputs)), default=0)

    def kernel(self, ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        """Enqueue the computations whose outputs are needed."""
        planned = self._planned_parts(params, inputs, outputs)
        scratch_bytes = max((part.nbytes for part, _ in planned), default=0)
        dtype = inputs[0].dtype
        scratch = ctx.take((scratch_bytes // dtype.itemsize,), dtype) if scratch_bytes else None
        for part, arrays in planned:
            part.run(ctx.xp, *arrays, scratch)
        self._with_bias(ctx, params, inputs, outputs)


class _Cudnn(_Parts):
    """The computations of one operator by cuDNN."""

    def _problems(
        self, params: Params, inputs: Sequence[Operand | None], outputs: Sequence[Operand | None]
    ) -> list[tuple[CudnnProblem, tuple[Operand, Operand, Operand]]]:
        computations = self._computations(inputs, outputs)
        return [(_problem(kind, params, *operands), operands) for kind, operands in computations]

    def refusal(self, params: Params, inputs: Specs, outputs: Specs) -> str:
        """Return the reason why cuDNN cannot compute a call; empty if it can."""
        if params["cudnn_off"]:
            return "cudnn_off=True"
        if params.get("target_shape"):
            return "a target shape may pad the sides differently"
        data = inputs[0]
        if data.dtype.name not in ("float16", "float32", "float64"):
            return f"cuDNN has no convolutions of {data.dtype}"
        for problem, _ in self._problems(params, inputs, outputs):
            algorithm = plan(problem, tuning(params["cudnn_tune"]), workspace_limit(params))
            if isinstance(algorithm, str):
                return algorithm
        return ""

    def workspace(self, params: Params, inputs: Specs, outputs: Specs) -> int:
        """Return the scratch bytes of the part that needs the most."""
        scratch_bytes = 0
        for problem, _ in self._problems(params, inputs, outputs):
            algorithm = plan(problem, tuning(params["cudnn_tune"]), workspace_limit(params))
            scratch_bytes = max(scratch_bytes, algorithm.workspace if isinstance(algorithm, Algorithm) else 0)
        return aligned(scratch_bytes)

    def kernel(self, ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        """Enqueue the computations whose outputs are needed."""
        xp = ctx.xp
        scratch = ctx.take((ctx.room,), _BYTES) if ctx.room else None
        for problem, arrays in self._problems(params, inputs, outputs):
            run(xp, problem, workspace_limit(params), arrays, scratch)
        self._with_bias(ctx, params, inputs, outputs)


for _name, _parts, _backward in (
    ("Convolution", [("fprop", 0, 1, ~0)], False),
    ("_backward_Convolution", [("dgrad", ~0, 2, 0), ("wgrad", 1, ~1, 0)], True),
    ("Deconvolution", [("dgrad", ~0, 1, 0)], False),
    ("_backward_Deconvolution", [("fprop", 0, 2, ~0), ("wgrad", 0, ~1, 1)], True),
):
    _products = _Products(_parts, 2, backward=_backward)
    _cudnn = _Cudnn(_parts, 2, backward=_backward)
    provide(
        _name,
        Implementation(
            name="cudnn",
            kernel=_cudnn.kernel,
            workspace=_cudnn.workspace,
            refusal=_cudnn.refusal,
            otherwise=Implementation(
                name="cuda", kernel=_products.kernel, workspace=_products.workspace, refusal=_products.refusal
            ),
        ),
        on="gpu",
    )
