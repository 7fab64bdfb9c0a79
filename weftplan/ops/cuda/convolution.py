"""Convolution and Deconvolution through cuDNN, where it is installed; else they are products by cuBLAS.

The workspace of a plan is what the chosen algorithm asks for. Gradients of image and weight share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weftplan.ops.cuda.cudnn_graphs import Algorithm, Problem, plan, run
from weftplan.ops.cuda.tuning import tuning
from weftplan.ops.implementations import Implementation, Specs, provide
from weftplan.ops.kernels import accumulator
from weftplan.ops.nn.convolution import window
from weftplan.ops.schema import Arrays, OpContext, Params, Shape, aligned

_BYTES = np.dtype(np.uint8)


def _problem(kind: str, params: Params, image: Any, weight: Any, grid: Any) -> Problem:
    """Of arrays or specs; one spatial axis becomes the second of two."""
    kernel, stride, dilate, pad = window(params, "Convolution")

    def of(thing: Any) -> Shape:
        shape: Shape = tuple(thing.shape)
        return (*shape[:2], 1, shape[2]) if len(kernel) == 1 else shape

    if len(kernel) == 1:
        stride, dilate, pad = (1, *stride), (1, *dilate), (0, *pad)
    return Problem(kind, of(image), of(weight), of(grid), stride, dilate, pad, np.dtype(image.dtype).name)


class _Convolution:
    """What an operator computes through cuDNN: (kind, its image, weight and grid among inputs, then outputs).

    Positions from 0 on are inputs, ~0, ~1, … are outputs; a part whose output nobody wants is left out.
    """

    def __init__(self, parts: Sequence[tuple[str, int, int, int]], bias: int | None, backward: bool) -> None:
        self._parts = parts
        self._bias = bias
        self._backward = backward

    def _problems(self, params: Params, inputs: Any, outputs: Any) -> list[tuple[Problem, tuple[Any, Any, Any]]]:
        made = []
        for kind, *positions in self._parts:
            image, weight, grid = (inputs[k] if k >= 0 else outputs[~k] for k in positions)
            if image is not None and weight is not None and grid is not None:
                made.append((_problem(kind, params, image, weight, grid), (image, weight, grid)))
        return made

    def refusal(self, params: Params, inputs: Specs, outputs: Specs) -> str:
        """Why cuDNN cannot compute a call; empty when it can."""
        if params["cudnn_off"]:
            return "cudnn_off=True"
        if params.get("target_shape"):
            return "a target shape may pad the sides differently"
        data = inputs[0]
        if data.dtype.name not in ("float16", "float32", "float64"):
            return f"cuDNN has no convolutions of {data.dtype}"
        for problem, _ in self._problems(params, inputs, outputs):
            found = plan(problem, tuning(params["cudnn_tune"]), params["workspace"] << 20)
            if isinstance(found, str):
                return found
        return ""

    def workspace(self, params: Params, inputs: Specs, outputs: Specs) -> int:
        """Bytes of scratch of the most demanding part."""
        most = 0
        for problem, _ in self._problems(params, inputs, outputs):
            found = plan(problem, tuning(params["cudnn_tune"]), params["workspace"] << 20)
            most = max(most, found.workspace if isinstance(found, Algorithm) else 0)
        return aligned(most)

    def kernel(self, ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        """Enqueue the parts whose output is wanted."""
        xp = ctx.xp
        scratch = ctx.take((ctx.room,), _BYTES) if ctx.room else None
        for problem, arrays in self._problems(params, inputs, outputs):
            run(xp, problem, params["workspace"] << 20, arrays, scratch)
        if params["no_bias"] or self._bias is None:
            return
        if not self._backward:
            per_filter = (1, params["num_filter"], *(1 for _ in params["kernel"]))
            xp.add(outputs[0], inputs[self._bias].reshape(per_filter), out=outputs[0])
        elif outputs[self._bias] is not None:
            axes = (0, *range(2, inputs[0].ndim))
            xp.sum(inputs[0], axis=axes, dtype=accumulator(inputs[0].dtype), out=outputs[self._bias], keepdims=False)


for _name, _made in (
    ("Convolution", _Convolution([("fprop", 0, 1, ~0)], 2, backward=False)),
    ("_backward_Convolution", _Convolution([("dgrad", ~0, 2, 0), ("wgrad", 1, ~1, 0)], 2, backward=True)),
    ("Deconvolution", _Convolution([("dgrad", ~0, 1, 0)], 2, backward=False)),
    ("_backward_Deconvolution", _Convolution([("fprop", 0, 2, ~0), ("wgrad", 0, ~1, 1)], 2, backward=True)),
):
    provide(
        _name,
        Implementation(name="cudnn", kernel=_made.kernel, workspace=_made.workspace, refusal=_made.refusal),
        on="gpu",
    )
