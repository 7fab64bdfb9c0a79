"""``mx.nd.contrib`` functions built from several operators: AdamW steps, rand_zipfian, boolean_mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from weftplan.device.context import Context, current_context
from weftplan.errors import ParameterError, ShapeError
from weftplan.ndarray import random
from weftplan.ndarray.array import NDArray
from weftplan.ndarray.creation import full
from weftplan.ndarray.operators import NAMESPACES, function
from weftplan.ops.core.params import from_text
from weftplan.support.array_types import Scalar


def _factor(rescale_grad: Scalar | NDArray, context: Context) -> NDArray:
    """Return ``rescale_grad``, a number or an array of one element, as an array on a device."""
    if isinstance(rescale_grad, NDArray):
        return rescale_grad.as_in_context(context)
    factor: NDArray = full((1,), rescale_grad, ctx=context)
    return factor


def adamw_update(
    weight: NDArray, grad: NDArray, mean: NDArray, var: NDArray, rescale_grad: Scalar | NDArray, lr: float, eta: float,
    beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8, wd: float = 0.0, clip_gradient: float = -1.0,
    out: NDArray | None = None, name: str | None = None,
) -> NDArray:  # fmt: skip
    """Do one step of AdamW (operator ``_adamw_update``); ``rescale_grad`` is a number or an array of one element."""
    arrays = (weight, grad, mean, var, _factor(rescale_grad, weight.context))
    updated: NDArray = function("_adamw_update")(
        *arrays, lr=lr, eta=eta, beta1=beta1, beta2=beta2, epsilon=epsilon, wd=wd, clip_gradient=clip_gradient, out=out
    )
    return updated


def mp_adamw_update(
    weight: NDArray, grad: NDArray, mean: NDArray, var: NDArray, weight32: NDArray, rescale_grad: Scalar | NDArray,
    lr: float, eta: float, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8, wd: float = 0.0,
    clip_gradient: float = -1.0, out: NDArray | None = None, name: str | None = None,
) -> NDArray:  # fmt: skip
    """Do :func:`adamw_update` on a float32 copy of the weight."""
    arrays = (weight, grad, mean, var, weight32, _factor(rescale_grad, weight.context))
    updated: NDArray = function("_mp_adamw_update")(
        *arrays, lr=lr, eta=eta, beta1=beta1, beta2=beta2, epsilon=epsilon, wd=wd, clip_gradient=clip_gradient, out=out
    )
    return updated


def _each_array(
    name: str, arrays: Sequence[Sequence[NDArray]], rescale_grad: Scalar | NDArray,
    out: NDArray | Sequence[NDArray] | None, size: int, rates: dict[str, Sequence[float]], options: dict[str, object],
) -> list[NDArray]:  # fmt: skip
    """Do the step ``name`` for each weight, with its own rates."""
    count = size or len(arrays[0])
    targets = [None] * count if out is None else [out] if isinstance(out, NDArray) else list(out)
    lengths = [len(values_list) for values_list in (*arrays, *rates.values(), targets)]
    if any(length != count for length in lengths):
        raise ParameterError(
            f"{name}: expected lists of {count} items, one for each weight; arrays, lrs, wds, etas and outputs have "
            f"{lengths}"
        )
    step: Any = adamw_update if name == "multi_adamw_update" else mp_adamw_update
    results = []
    for k, (target, *operands) in enumerate(zip(targets, *arrays, strict=True)):
        step_rates = {key: values[k] for key, values in rates.items()}
        results.append(step(*operands, rescale_grad, out=target, **step_rates, **options))
    return results


def multi_adamw_update(
    weights: Sequence[NDArray], grads: Sequence[NDArray], mean: Sequence[NDArray], var: Sequence[NDArray],
    rescale_grad: Scalar | NDArray, lrs: Sequence[float], wds: Sequence[float], etas: Sequence[float],
    out: NDArray | Sequence[NDArray] | None = None, name: str | None = None, size: int = 0, **options: object,
) -> list[NDArray]:  # fmt: skip
    """Do :func:`adamw_update` for several weights, each with its own rates and as its own operation.

    Raises:
        ParameterError: the lists have different lengths. No weight is updated then.
    """
    rates = {"lr": lrs, "wd": wds, "eta": etas}
    return _each_array("multi_adamw_update", (weights, grads, mean, var), rescale_grad, out, size, rates, options)


def multi_mp_adamw_update(
    weights: Sequence[NDArray], grads: Sequence[NDArray], mean: Sequence[NDArray], var: Sequence[NDArray],
    weights32: Sequence[NDArray], rescale_grad: Scalar | NDArray, lrs: Sequence[float], wds: Sequence[float],
    etas: Sequence[float], out: NDArray | Sequence[NDArray] | None = None, name: str | None = None, size: int = 0,
    **options: object,
) -> list[NDArray]:  # fmt: skip
    """Do :func:`mp_adamw_update` for several weights; raises as :func:`multi_adamw_update`."""
    rates = {"lr": lrs, "wd": wds, "eta": etas}
    arrays = (weights, grads, mean, var, weights32)
    return _each_array("multi_mp_adamw_update", arrays, rescale_grad, out, size, rates, options)


def rand_zipfian(
    true_classes: NDArray, num_sampled: int, range_max: int, ctx: Context | None = None
) -> tuple[NDArray, NDArray, NDArray]:
    """Draw ``num_sampled`` of ``range_max`` classes with replacement.

    Class ``k`` has the probability log((k + 2) / (k + 1)) / log(range_max + 1).

    Returns:
        (drawn classes in int64, expected count of each of ``true_classes`` among them, expected count of each drawn
        class), the counts in float64.
    """
    ctx = ctx or current_context()
    log_range = math.log(range_max + 1)
    drawn = random.uniform(0, log_range, shape=(num_sampled,), dtype="float64", ctx=ctx)
    classes = (drawn.exp() - 1).astype("int64") % range_max

    def expected(classes: NDArray) -> NDArray:
        wide = classes.astype("float64")
        return ((wide + 2.0) / (wide + 1.0)).log() / log_range * num_sampled

    return classes, expected(true_classes.as_in_context(ctx)), expected(classes)


def boolean_mask(
    data: NDArray, index: NDArray, axis: int = 0, out: NDArray | None = None, name: str | None = None
) -> NDArray:
    """Return the rows of ``data`` whose ``index`` is not 0; wait for ``index``, since the result's shape depends on it.

    There is no symbol version, since shapes of a graph are known before it runs; ``mx.sym.where`` zeroes rows instead.

    Raises:
        ParameterError: an axis other than 0, as in MXNet.
        ShapeError: not one number for each row.

    >>> import weftplan as mx
    >>> mx.nd.contrib.boolean_mask(mx.nd.array([[1, 2], [3, 4]]), mx.nd.array([0, 1])).asnumpy().tolist()
    [[3.0, 4.0]]
    """
    if from_text(axis) != 0:
        raise ParameterError(f"boolean_mask: axis={axis}, only 0 is supported: transpose the array (swapaxes) first")
    if index.shape != data.shape[:1]:
        raise ShapeError(
            f"boolean_mask: index has shape {index.shape}, expected one number for each row of {data.shape}"
        )
    rows: NDArray = data[index.asnumpy() != 0]
    return rows if out is None else rows.copyto(out)


FUNCTIONS = (adamw_update, mp_adamw_update, multi_adamw_update, multi_mp_adamw_update, rand_zipfian, boolean_mask)
vars(NAMESPACES["contrib"]).update({one.__name__: one for one in FUNCTIONS})
