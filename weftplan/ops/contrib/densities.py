"""random_pdf_*: densities of samples, or their logarithms, with gradients for samples and parameters.

Each element of the parameters belongs to a block of samples, as drawn by ``_sample_*``: the samples' shape begins with
the parameters' shape. For a Dirichlet distribution the last axis of both is the vector. As in MXNet 1.9.1, samples
outside the support are not detected (a uniform density ignores the sample), and samples of discrete distributions have
a gradient of 0.

All values are computed in float64, a few thousand elements at a time, so that no temporary grows with the samples. Sums
have a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.params import p_bool
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, floats_only, grad, merge_shape
from weftplan.ops.core.schema import Kernel, Op, Param, Params, Shape, ShapeRule, SpecLike
from weftplan.ops.elementwise.special import digamma_of, gammaln_of
from weftplan.support.array_types import ArrayModule, RawArray

_AT_ONCE = 4096
"""Number of elements computed at a time."""
_DOUBLE = np.dtype(np.float64)
_IS_LOG = Param("is_log", p_bool, False, "the logarithms of the densities")


@dataclass(frozen=True, slots=True)
class _Density:
    """The formulas of one distribution, for float64 arrays of samples and parameters that broadcast."""

    parameters: tuple[str, ...]
    log: Callable[..., Any]
    """``log(xp, x, *parameters)``: logarithms of the densities."""
    slopes: Callable[..., tuple[Any, ...]]
    """``slopes(xp, x, *parameters)``: derivatives of the logarithms for the sample (None: zeros) and for each
    parameter."""


def _negative_binomial_log(xp: ArrayModule, x: RawArray, k: RawArray, p: RawArray) -> RawArray:
    binomial = gammaln_of(xp, x + k) - gammaln_of(xp, x + 1) - gammaln_of(xp, k)
    density: RawArray = binomial + k * xp.log(p) + x * xp.log(1 - p)
    return density


def _negative_binomial_slopes(
    xp: ArrayModule, x: RawArray, k: RawArray, p: RawArray
) -> tuple[None, RawArray, RawArray]:
    return None, digamma_of(xp, x + k) - digamma_of(xp, k) + xp.log(p), k / p - x / (1 - p)


def _generalized_slopes(xp: ArrayModule, x: RawArray, mu: RawArray, alpha: RawArray) -> tuple[None, RawArray, RawArray]:
    k, p = 1 / alpha, 1 / (mu * alpha + 1)
    _, by_k, by_p = _negative_binomial_slopes(xp, x, k, p)
    return None, -by_p * alpha * p**2, -by_k * k**2 - by_p * mu * p**2


def _normal_slopes(xp: ArrayModule, x: RawArray, mu: RawArray, sigma: RawArray) -> tuple[RawArray, ...]:
    scaled = (x - mu) / sigma
    return -scaled / sigma, scaled / sigma, (scaled**2 - 1) / sigma


_DENSITIES = {
    "uniform": _Density(
        ("low", "high"),
        lambda xp, x, low, high: -xp.log(high - low) + 0 * x,
        lambda xp, x, low, high: (None, 1 / (high - low), -1 / (high - low)),
    ),
    "normal": _Density(
        ("mu", "sigma"),
        lambda xp, x, mu, sigma: -0.5 * ((x - mu) / sigma) ** 2 - xp.log(sigma) - 0.5 * math.log(2 * math.pi),
        _normal_slopes,
    ),
    # beta is a rate, although it is a scale in ``_sample_gamma``, as in MXNet.
    "gamma": _Density(
        ("alpha", "beta"),
        lambda xp, x, a, beta: a * xp.log(beta) + (a - 1) * xp.log(x) - beta * x - gammaln_of(xp, a),
        lambda xp, x, a, beta: ((a - 1) / x - beta, xp.log(beta) + xp.log(x) - digamma_of(xp, a), a / beta - x),
    ),
    "exponential": _Density(("lam",), lambda xp, x, lam: xp.log(lam) - lam * x, lambda xp, x, lam: (-lam, 1 / lam - x)),
    "poisson": _Density(
        ("lam",),
        lambda xp, x, lam: x * xp.log(lam) - lam - gammaln_of(xp, x + 1),
        lambda xp, x, lam: (None, x / lam - 1),
    ),
    "negative_binomial": _Density(("k", "p"), _negative_binomial_log, _negative_binomial_slopes),
    "generalized_negative_binomial": _Density(
        ("mu", "alpha"),
        lambda xp, x, mu, alpha: _negative_binomial_log(xp, x, 1 / alpha, 1 / (mu * alpha + 1)),
        _generalized_slopes,
    ),
}


def _tiles(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Yield (rows, columns) of the blocks of a matrix: several whole rows, or a part of one row."""
    step = max(1, _AT_ONCE // columns)
    for row in range(0, rows, step):
        for column in range(0, columns, _AT_ONCE):
            yield slice(row, row + step), slice(column, column + _AT_ONCE)


def _wide(values: RawArray) -> RawArray:
    return values.astype(_DOUBLE)


def _forward(density: _Density) -> Callable[..., None]:
    @kernel
    def compute(xp: ArrayModule, p: Params, *arrays: RawArray) -> None:
        *inputs, out = arrays
        rows = inputs[1].size
        samples, out = inputs[0].reshape(rows, -1), out.reshape(rows, -1)
        values = [value.reshape(rows, 1) for value in inputs[1:]]
        for row, column in _tiles(*samples.shape):
            densities = density.log(xp, _wide(samples[row, column]), *(_wide(value[row]) for value in values))
            out[row, column] = densities if p["is_log"] else xp.exp(densities)

    return compute


def _sums(parameters: Sequence[SpecLike]) -> ScratchSpecs:
    """Return the scratch for the parameters' gradients: a float64 array of each parameter's shape."""
    return [(spec.shape, _DOUBLE) for spec in parameters]


def _backward(density: _Density) -> Callable[..., None]:
    count = len(density.parameters)

    @kernel(scratch=lambda p, ograd, sample, *arrays: _sums(arrays[:count]))
    def compute(xp: ArrayModule, p: Params, ograd: RawArray, sample: RawArray, *arrays: Any) -> None:
        rows, out, outputs = arrays[0].size, arrays[count], arrays[count + 1 : -count]
        ograds, samples = ograd.reshape(rows, -1), sample.reshape(rows, -1)
        values = [value.reshape(rows, 1) for value in arrays[:count]]
        sums = [total.reshape(rows, 1) for total in arrays[-count:]]
        for total in sums:
            total.fill(0)
        for row, column in _tiles(*samples.shape):
            x, at = _wide(samples[row, column]), [_wide(value[row]) for value in values]
            scale = _wide(ograds[row, column])
            if not p["is_log"]:
                scale *= xp.exp(density.log(xp, x, *at))
            slopes = density.slopes(xp, x, *at)
            if out is not None:
                out.reshape(rows, -1)[row, column] = 0 if slopes[0] is None else scale * slopes[0]
            for total, slope in zip(sums, slopes[1:], strict=True):
                total[row] += (scale * slope).sum(axis=1, keepdims=True)
        for total, target in zip(sums, outputs, strict=True):
            if target is not None:
                target.reshape(rows, 1)[...] = total

    return compute


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


def _dirichlet_log(xp: ArrayModule, x: RawArray, alpha: RawArray) -> RawArray:
    norm = gammaln_of(xp, alpha.sum(axis=-1)) - gammaln_of(xp, alpha).sum(axis=-1)
    density: RawArray = ((alpha - 1) * xp.log(x)).sum(axis=-1) + norm
    return density


@kernel
def _dirichlet(xp: ArrayModule, p: Params, sample: RawArray, parameter: RawArray, out: RawArray) -> None:
    samples, alpha = _dirichlet_parts(sample, parameter)
    out = out.reshape(samples.shape[:2])
    for row, column in _dirichlet_tiles(samples.shape):
        densities = _dirichlet_log(xp, _wide(samples[row, column]), _wide(alpha[row]))
        out[row, column] = densities if p["is_log"] else xp.exp(densities)


@kernel(scratch=lambda p, ograd, sample, parameter, *outputs: _sums([parameter]))
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
        x, at = _wide(samples[row, column]), _wide(alpha[row])
        scale = _wide(ograds[row, column])
        if not p["is_log"]:
            scale *= xp.exp(_dirichlet_log(xp, x, at))
        if out is not None:
            out.reshape(samples.shape)[row, column] = scale[..., None] * ((at - 1) / x)
        norm = digamma_of(xp, at.sum(axis=-1, keepdims=True)) - digamma_of(xp, at)
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


for _name, _density in _DENSITIES.items():
    _register(
        _name,
        _density.parameters,
        _forward(_density),
        _backward(_density),
        _shape(f"random_pdf_{_name}", len(_density.parameters)),
    )
_register("dirichlet", ("alpha",), _dirichlet, _dirichlet_backward, _dirichlet_shape)
