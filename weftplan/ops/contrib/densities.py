"""random_pdf_*: densities of samples, or their logarithms, with gradients for samples and parameters.

Each element of the parameters belongs to a block of samples, as drawn by ``_sample_*``: the samples' shape begins with
the parameters' shape. For a Dirichlet distribution the last axis of both is the vector. As in MXNet 1.9.1, samples
outside the support are not detected (a uniform density ignores the sample), and samples of discrete distributions have
a gradient of 0.

All values are computed in float64, a few thousand elements at a time, so that no scratch grows with the samples. Sums
have a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from weftplan.errors import ShapeError
from weftplan.ops.core.expression import Expr, Parameters, cast, f
from weftplan.ops.core.forms import kernel
from weftplan.ops.core.formula_kernel import FormulaKernel
from weftplan.ops.core.gradient_kernel import GradientKernel
from weftplan.ops.core.params import p_bool
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, floats_only, grad, merge_shape
from weftplan.ops.core.schema import Kernel, Op, Param, Params, Shape, ShapeRule
from weftplan.ops.elementwise.special import digamma, gammaln
from weftplan.support.array_types import ArrayModule, RawArray

_AT_ONCE = 4096
"""Number of elements computed at a time."""
_DOUBLE = np.dtype(np.float64)
_IS_LOG = Param("is_log", p_bool, False, "the logarithms of the densities")

Density = tuple[Any, ...]
"""The logarithm of a density and its derivatives: for the sample, 0 if samples are whole, and for each parameter."""


def _normal(x: Expr, mu: Expr, sigma: Expr) -> Density:
    scaled = (x - mu) / sigma
    slope = scaled / sigma
    square = scaled.square()
    log = square * -0.5 - f.log(sigma) - 0.5 * math.log(2 * math.pi)
    return log, -slope, slope, (square - 1) / sigma


def _gamma(x: Expr, a: Expr, beta: Expr) -> Density:
    # beta is a rate, although it is a scale in ``_sample_gamma``, as in MXNet.
    log_x, log_beta = f.log(x), f.log(beta)
    log = a * log_beta + (a - 1) * log_x - beta * x - gammaln(a)
    return log, (a - 1) / x - beta, log_beta + log_x - digamma(a), a / beta - x


def _negative_binomial(x: Expr, k: Expr, p: Expr) -> Density:
    log_p = f.log(p)
    log = gammaln(x + k) - gammaln(x + 1) - gammaln(k) + k * log_p + x * f.log(1 - p)
    return log, 0, digamma(x + k) - digamma(k) + log_p, k / p - x / (1 - p)


def _generalized_negative_binomial(x: Expr, mu: Expr, alpha: Expr) -> Density:
    k, p = 1 / alpha, 1 / (mu * alpha + 1)
    log, _, by_k, by_p = _negative_binomial(x, k, p)
    return log, 0, -by_p * alpha * p.square(), -by_k * k.square() - by_p * mu * p.square()


_DENSITIES: dict[str, tuple[tuple[str, ...], Callable[..., Density]]] = {
    "uniform": (
        ("low", "high"),
        lambda x, low, high: (-f.log(high - low) + 0 * x, 0, 1 / (high - low), -1 / (high - low)),
    ),
    "normal": (("mu", "sigma"), _normal),
    "gamma": (("alpha", "beta"), _gamma),
    "exponential": (("lam",), lambda x, lam: (f.log(lam) - lam * x, -lam, 1 / lam - x)),
    "poisson": (("lam",), lambda x, lam: (x * f.log(lam) - lam - gammaln(x + 1), 0, x / lam - 1)),
    "negative_binomial": (("k", "p"), _negative_binomial),
    "generalized_negative_binomial": (("mu", "alpha"), _generalized_negative_binomial),
}
"""By distribution: the names of the parameters, and the density as a formula of a sample and the parameters."""


def _kernels(density: Callable[..., Density], count: int) -> tuple[Kernel, Kernel]:
    """Return the kernels of a density of ``count`` parameters and of its gradients."""

    def forward(p: Parameters, *inputs: Expr) -> Expr:
        log: Expr = density(*[cast(one, _DOUBLE) for one in inputs])[0]
        return log if p.is_log else f.exp(log, kind=_DOUBLE)  # rounded in a copy, which takes less time

    def reverse(p: Parameters, ograd: Expr, *inputs: Expr) -> tuple[object, ...]:
        scale, *values = [cast(one, _DOUBLE) for one in (ograd, *inputs)]
        log, *slopes = density(*values)
        if not p.is_log:
            scale = scale * f.exp(log)
        return tuple([scale * slope if isinstance(slope, Expr) else slope for slope in slopes])

    options: dict[str, Any] = {
        "overlaps": (),
        "choices": {"is_log": lambda params: params["is_log"]},
        "base": _DOUBLE,
        "align": lambda full, shape: (*shape, *(1,) * (len(full) - len(shape))),
        "limit": lambda size: _AT_ONCE,
    }
    together = (tuple(range(1 + count)),)
    return (
        FormulaKernel(forward, 1 + count, numbers=range(1, 1 + count), **options),
        GradientKernel(reverse, 2 + count, numbers=range(2, 2 + count), groups=together, sums=True, **options),
    )


def _shape(name: str, count: int) -> Callable[[Params, Shapes, Shapes], tuple[Shapes, Shapes]]:
    """Return a shape rule: samples and output have one shape, which begins with that of the ``count`` parameters."""

    def rule(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
        samples = merge_shape(ins[0], outs[0], f"{name}: samples and output")
        merged: Shape | None = None
        for shape in ins[1:]:
            merged = merge_shape(merged, shape, f"{name}: arrays of parameters")
        if samples is not None and merged is not None:
            if len(merged) > len(samples):
                raise ShapeError(f"{name}: parameters of shape {merged} need samples of a shape that begins with it, "
                                 f"got {samples}")  # fmt: skip
            full_shape = merge_shape(samples, (*merged, *samples[len(merged) :]), f"{name}: samples of each parameter")
            assert full_shape is not None
            samples, merged = full_shape, full_shape[: len(merged)]
        return [samples, *[merged] * count], [samples]

    return rule


# ------------------------------------------------------------------------------------------------------------ Dirichlet


def _dirichlet_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    samples, alpha = ins
    if samples is not None and alpha is not None:
        if len(alpha) > len(samples) or not alpha:
            raise ShapeError(f"random_pdf_dirichlet: alpha of shape {alpha} does not fit samples of shape {samples}")
        inner = samples[len(alpha) - 1 : -1]
        full_shape = merge_shape(
            samples, (*alpha[:-1], *inner, alpha[-1]), "random_pdf_dirichlet: samples of each alpha"
        )
        assert full_shape is not None
        samples, alpha = full_shape, (*full_shape[: len(alpha) - 1], full_shape[-1])
    out = outs[0] if samples is None else merge_shape(samples[:-1] or (1,), outs[0], "random_pdf_dirichlet: output")
    return [samples, alpha], [out]


def _dirichlet_parts(samples: RawArray, alpha: RawArray) -> tuple[RawArray, RawArray]:
    """Return ``samples`` reshaped to (rows, columns, k) and ``alpha`` to (rows, 1, k)."""
    length = alpha.shape[-1]
    return samples.reshape(alpha.size // length, -1, length), alpha.reshape(-1, 1, length)


def _dirichlet_tiles(shape: Shape) -> Iterator[tuple[slice, slice]]:
    """Yield (row, columns) of blocks of vectors in an array of ``shape`` (rows, columns, length)."""
    rows, columns, length = shape
    step = max(1, _AT_ONCE // length)
    for row in range(rows):
        for column in range(0, columns, step):
            yield slice(row, row + 1), slice(column, column + step)


_gammaln, _digamma = (FormulaKernel(lambda p, x, function=function: function(x)) for function in (gammaln, digamma))


def _of(kernel: FormulaKernel, xp: ArrayModule, x: RawArray) -> RawArray:
    """Return the formula's values of a small float64 array."""
    out: RawArray = xp.empty(x.shape, _DOUBLE)
    kernel.function(xp, [_DOUBLE], _DOUBLE)(x, out)
    return out


def _dirichlet_log(xp: ArrayModule, x: RawArray, alpha: RawArray) -> RawArray:
    norm = _of(_gammaln, xp, alpha.sum(axis=-1)) - _of(_gammaln, xp, alpha).sum(axis=-1)
    density: RawArray = ((alpha - 1) * xp.log(x)).sum(axis=-1) + norm
    return density


@kernel
def _dirichlet(xp: ArrayModule, p: Params, sample: RawArray, parameter: RawArray, out: RawArray) -> None:
    samples, alpha = _dirichlet_parts(sample, parameter)
    out = out.reshape(samples.shape[:2])
    for row, column in _dirichlet_tiles(samples.shape):
        densities = _dirichlet_log(xp, samples[row, column].astype(_DOUBLE), alpha[row].astype(_DOUBLE))
        out[row, column] = densities if p["is_log"] else xp.exp(densities)


@kernel(scratch=lambda p, ograd, sample, parameter, *outputs: [(parameter.shape, _DOUBLE)])
def _dirichlet_backward(
    xp: ArrayModule,
    p: Params,
    ograd: RawArray,
    sample: RawArray,
    parameter: RawArray,
    out: RawArray | None,
    d_alpha: RawArray | None,
    total: RawArray,
) -> None:
    samples, alpha = _dirichlet_parts(sample, parameter)
    ograds = ograd.reshape(samples.shape[:2])
    total = total.reshape(alpha.shape)
    total.fill(0)
    for row, column in _dirichlet_tiles(samples.shape):
        x, at = samples[row, column].astype(_DOUBLE), alpha[row].astype(_DOUBLE)
        scale = ograds[row, column].astype(_DOUBLE)
        if not p["is_log"]:
            scale *= xp.exp(_dirichlet_log(xp, x, at))
        if out is not None:
            out.reshape(samples.shape)[row, column] = scale[..., None] * ((at - 1) / x)
        norm = _of(_digamma, xp, at.sum(axis=-1, keepdims=True)) - _of(_digamma, xp, at)
        total[row] += (scale[..., None] * (xp.log(x) + norm)).sum(axis=1, keepdims=True)
    if d_alpha is not None:
        d_alpha.reshape(alpha.shape)[...] = total


def _register(name: str, parameters: tuple[str, ...], forward: Kernel, reverse: Kernel, rule: ShapeRule) -> None:
    uses = ("g0", *(f"x{k}" for k in range(1 + len(parameters))))
    register(
        Op(
            name=f"_random_pdf_{name}",
            forward=forward,
            infer_shape=rule,
            infer_dtype=floats_only(f"random_pdf_{name}"),
            params=(_IS_LOG,),
            inputs=("sample", *parameters),
            gradient=grad(f"_backward_random_pdf_{name}", *uses),
            aliases=(f"random_pdf_{name}",),
            doc=f"Densities of samples ({name.replace('_', ' ')}): a block of them for each element of the parameters.",
        )
    )
    backward(
        f"_random_pdf_{name}",
        reverse,
        ("ograd", "sample", *parameters),
        grad_inputs=tuple(range(1 + len(parameters))),
        params=(_IS_LOG,),
    )


for _name, (_parameters, _density) in _DENSITIES.items():
    _count = len(_parameters)
    _register(_name, _parameters, *_kernels(_density, _count), _shape(f"random_pdf_{_name}", _count))
_register("dirichlet", ("alpha",), _dirichlet, _dirichlet_backward, _dirichlet_shape)
