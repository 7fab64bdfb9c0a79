"""A fused block of a batch norm, a depthwise convolution and a second batch norm, and the block's fused gradient.

A relu follows the first batch norm, and may follow the second. Channels are independent, so a compiled kernel
(``kernels/compiled/depthwise/block.py``) computes all three layers of one channel while it is in the cache. It never
writes the first relu's result, which the backward pass recomputes from the data, and gradients between the layers stay
in the cache. NumPy's kernels run one after another, with scratch for the results between them. Both have the bits of
the unfused nodes. Only the planner adds nodes of these operators (``planner/symbolic/passes/fuse_depthwise.py``), after
gradients exist and sizes are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from weftplan.ops.core import registry
from weftplan.ops.core.registry import register_planner_op
from weftplan.ops.core.rules import pass_dtype, pass_shape
from weftplan.ops.core.schema import Arrays, InplacePair, Op, OpContext, Param, Params, TensorSpec, aligned
from weftplan.ops.fusion import relu as joined
from weftplan.ops.fusion.normalize import normalized
from weftplan.support.array_types import RawArray

NAME = "BatchNorm+depthwise+BatchNorm"
BEFORE, LAYER, BEHIND, RELU = "before", "layer", "behind", "relu"
"""Names of the parameters: those of the first batch norm, of the convolution and of the second batch norm, and whether
a relu follows."""
_CONVOLUTION = registry.get("Convolution")
_CONVOLUTION_GRADIENT = registry.get("_backward_Convolution")


def norm_gradient(relu: bool) -> Op:
    """Return the gradient operator of a batch norm, or with ``relu`` of a batch norm fused with a relu."""
    name = "_backward_BatchNorm"
    return joined.GRADIENTS[name] if relu else registry.get(name)


def norm(relu: bool) -> Op:
    """Return the operator of a batch norm, or with ``relu`` of a batch norm fused with a relu."""
    return joined.norm_of(joined.RELU * relu)


def _of_norm(relu: bool, ograd: Any, data: Any, vectors: Sequence[Any]) -> list[Any]:
    """Return the inputs of :func:`norm_gradient`; ``vectors``: gamma, beta, mean, and 1 / sqrt(variance + eps)."""
    gamma, beta, *statistics = vectors
    return [ograd, data, gamma, *((beta,) if relu else ()), *statistics]


def _scratch(ctx: OpContext, nbytes: int) -> RawArray | None:
    return ctx.take((nbytes,), "uint8") if nbytes else None


def _run(ctx: OpContext, op: Op, params: Params, inputs: Arrays, outputs: Arrays, *, scratch: RawArray | None) -> None:
    """Run ``op``, an operator of the block, in ``scratch``, which all operators of the block share."""
    context = OpContext(ctx.xp, is_train=ctx.is_train, recompute=ctx.recompute, workspace=scratch)
    op.forward(context, params, inputs, outputs)


def _spec(array: RawArray) -> TensorSpec:
    return TensorSpec(array.shape, array.dtype)


def memory_of_inner(ctx: OpContext, data: RawArray, outputs: Arrays) -> RawArray:
    """Return memory for the convolution's result.

    It is the output ``inner`` if that is wanted, else the block's output if that is wanted, else new memory.
    """
    out, inner = outputs[:2]
    return out if inner is None and out is not None else ctx.memory_of(outputs, 1, data.dtype)


def _forward_nbytes(params: Params, inputs: Sequence[TensorSpec], inner: TensorSpec) -> int:
    data, gamma, beta, mean, var, weight, *second = inputs
    return max(
        norm(True).workspace_bytes(params[BEFORE], [data, gamma, beta, mean, var], [data, beta, beta]),
        _CONVOLUTION.workspace_bytes(params[LAYER], [data, weight], [inner]),
        norm(params[RELU]).workspace_bytes(params[BEHIND], [inner, *second], [inner, second[1], second[1]]),
    )


def _forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    data, weight, beta = inputs[0], inputs[5], inputs[2]
    out, _, *statistics = outputs
    inner = memory_of_inner(ctx, inputs[0], outputs)
    between = ctx.take(data.shape, data.dtype)
    # An ignored gamma, which counts as 1, is None; its spec is that of beta.
    specs = [_spec(beta if array is None else array) for array in inputs]
    specs[6] = _spec(inputs[7])
    scratch = _scratch(ctx, _forward_nbytes(params, specs, _spec(inner)))
    _run(ctx, norm(True), params[BEFORE], inputs[:5], [between, *statistics[:2]], scratch=scratch)
    _run(ctx, _CONVOLUTION, params[LAYER], [between, weight], [inner], scratch=scratch)
    _run(ctx, norm(params[RELU]), params[BEHIND], [inner, *inputs[6:]], [out, *statistics[2:]], scratch=scratch)


def _forward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return aligned(inputs[0].nbytes) + aligned(_forward_nbytes(params, inputs, outputs[1]))


def _backward_nbytes(params: Params, inputs: Sequence[TensorSpec]) -> int:
    ograd, inner, data, weight, *vectors = inputs
    leading, trailing = vectors[:4], vectors[4:]
    relu = params[RELU]
    return max(
        norm_gradient(relu).workspace_bytes(params[BEHIND], _of_norm(relu, ograd, inner, trailing), [inner]),
        _CONVOLUTION_GRADIENT.workspace_bytes(params[LAYER], [inner, data, weight], [data, weight]),
        norm_gradient(True).workspace_bytes(params[BEFORE], _of_norm(True, data, data, leading), [data]),
    )


def _backward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    ograd, inner, data, weight, *vectors = inputs
    leading, trailing = vectors[:4], vectors[4:]
    _, *of_first, wgrad, second_ggrad, second_bgrad = outputs
    dgrad = ctx.memory_of(outputs, 0, data.dtype)
    relu = params[RELU]
    between, igrad = ctx.take(data.shape, data.dtype), ctx.take(inner.shape, inner.dtype)
    scale, shift = (ctx.take(leading[1].shape, data.dtype) for _ in range(2))
    specs = [_spec(leading[1] if array is None else array) for array in inputs]
    scratch = _scratch(ctx, _backward_nbytes(params, specs))
    norm_inputs = _of_norm(relu, ograd, inner, trailing)
    _run(ctx, norm_gradient(relu), params[BEHIND], norm_inputs, [igrad, second_ggrad, second_bgrad], scratch=scratch)
    fixed = params[BEFORE]["fix_gamma"]
    normalized(ctx.xp, data, leading, between, scale, shift, fixed=fixed, relu=True)
    _run(ctx, _CONVOLUTION_GRADIENT, params[LAYER], [igrad, between, weight], [dgrad, wgrad], scratch=scratch)
    _run(
        ctx,
        norm_gradient(True),
        params[BEFORE],
        _of_norm(True, dgrad, data, leading),
        [dgrad, *of_first],
        scratch=scratch,
    )


def _backward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    vector = TensorSpec(inputs[5].shape, inputs[2].dtype)
    arrays = (inputs[2], inputs[1], vector, vector)
    return sum(aligned(spec.nbytes) for spec in arrays) + aligned(_backward_nbytes(params, inputs))


def _fixed(*of: tuple[str, int]) -> Callable[[Params], tuple[int, ...]]:
    return lambda params: tuple(position for name, position in of if params[name]["fix_gamma"])


def _ignored_backward(params: Params) -> tuple[int, ...]:
    ignored: tuple[int, ...] = _fixed((BEFORE, 4), (BEHIND, 8))(params)
    return ignored if params[RELU] else (*ignored, 9)


def _refuse(value: RawArray) -> NoReturn:
    raise ValueError(f"only the planner makes nodes of {NAME!r}, got {value!r}")


_PARAMS = (
    Param(BEFORE, _refuse, doc="Parameters of the batch norm before the convolution."),
    Param(LAYER, _refuse, doc="Parameters of the convolution."),
    Param(BEHIND, _refuse, doc="Parameters of the batch norm behind it."),
    Param(RELU, _refuse, doc="Whether there is a relu behind that."),
)
BLOCK = register_planner_op(
    Op(
        name=NAME,
        forward=_forward,
        infer_shape=pass_shape,
        infer_dtype=pass_dtype,
        params=_PARAMS,
        inputs=("data", "gamma", "beta", "moving_mean", "moving_var", "weight", "inner_gamma", "inner_beta",
                "inner_moving_mean", "inner_moving_var"),
        aux=(3, 4, 8, 9),
        outputs=("output", "inner", "mean", "var", "inner_mean", "inner_var"),
        visible_outputs=1,
        ignored_inputs=_fixed((BEFORE, 1), (BEHIND, 6)),
        workspace=_forward_workspace,
        needs_training=lambda params: not all(params[name]["use_global_stats"] for name in (BEFORE, BEHIND)),
        doc="A batch norm, a relu, a depthwise convolution and another batch norm, one channel after the other.",
    )
)  # fmt: skip
BLOCK_GRADIENT = register_planner_op(
    Op(
        name=f"_backward_{NAME}",
        forward=_backward,
        infer_shape=pass_shape,
        infer_dtype=pass_dtype,
        params=_PARAMS,
        inputs=("ograd", "inner", "data", "weight", "gamma", "beta", "mean", "var", "inner_gamma", "inner_beta",
                "inner_mean", "inner_var"),
        outputs=("data_grad", "gamma_grad", "beta_grad", "weight_grad", "inner_gamma_grad", "inner_beta_grad"),
        inplace=(InplacePair(0, 0), InplacePair(1, 0)),
        ignored_inputs=_ignored_backward,
        workspace=_backward_workspace,
        doc="The gradients of such a block.",
    )
)  # fmt: skip
