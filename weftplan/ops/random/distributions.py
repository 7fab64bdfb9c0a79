"""Random operators whose generators do not write in place: distributions, integers, shuffles and classes.

The parameters of ``_random_*`` and ``_random_*_like`` are numbers; the output of the latter has its input's shape. The
parameters of ``_sample_*`` are arrays, and a block of the output is drawn for each of their elements. Numbers are drawn
a few thousand at a time, so that no temporary grows with the output. As in MXNet, invalid parameters are reported when
the kernel runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from weftplan.errors import ParameterError
from weftplan.ops.core.forms import context_kernel, kernel
from weftplan.ops.core.params import p_bool, p_dtype, p_float, p_int, p_optional, p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    DTypes,
    Shapes,
    backward,
    merge_dtype,
    merge_shape,
    same_dtype,
    same_shape,
    zero_gradient,
)
from weftplan.ops.core.schema import EntryRef, GradientBuilder, Op, OpContext, Param, Params, Shape
from weftplan.ops.creation.filling import FLOAT32, declared_shape, placed
from weftplan.support.array_types import ArrayModule, DType, Generator, RawArray

_AT_ONCE = 4096
"""Number of elements drawn at a time."""

Draw = Callable[..., Any]
"""``draw(generator, xp, count, *parameters)``: ``count`` numbers; parameters are numbers or arrays of ``count``."""


def _uniform(g: Generator, xp: ArrayModule, n: int, low: RawArray | float, high: RawArray | float) -> RawArray:
    return g.random(n) * (high - low) + low


def _normal(g: Generator, xp: ArrayModule, n: int, mu: RawArray | float, sigma: RawArray | float) -> RawArray:
    return g.standard_normal(n) * sigma + mu


def _gamma(g: Generator, xp: ArrayModule, n: int, alpha: RawArray | float, beta: RawArray | float) -> RawArray:
    return g.standard_gamma(alpha, n) * beta


def _exponential(g: Generator, xp: ArrayModule, n: int, lam: RawArray | float) -> RawArray:
    return g.standard_exponential(n) / lam


def _poisson(g: Generator, xp: ArrayModule, n: int, lam: RawArray | float) -> RawArray:
    return g.poisson(lam, n)


def _negative_binomial(g: Generator, xp: ArrayModule, n: int, k: RawArray | float, p: RawArray | float) -> RawArray:
    """Draw Poisson numbers whose means are gamma distributed."""
    return g.poisson(g.standard_gamma(k, n) * ((1 - p) / p))


def _generalized(g: Generator, xp: ArrayModule, n: int, mu: RawArray | float, alpha: RawArray | float) -> RawArray:
    """Draw negative binomial numbers of mean ``mu`` and dispersion ``alpha``; Poisson numbers if ``alpha`` is 0."""
    spread = xp.maximum(alpha, 1e-300)
    means = g.standard_gamma(1 / spread, n) * (mu * alpha)
    numbers: RawArray = g.poisson(xp.where(xp.asarray(alpha) == 0, mu, means))
    return numbers


class _Kind:
    """One distribution: its draw function, the bounds of the array parameters, the defaults of the scalar ones."""

    def __init__(self, draw: Draw, bounds: Mapping[str, str], defaults: Mapping[str, float]) -> None:
        self.draw = draw
        self.bounds = bounds
        self.defaults = defaults


_BOUNDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "any": ("a number", lambda value: value == value),
    "positive": ("above 0", lambda value: value > 0),
    "not negative": ("at least 0", lambda value: value >= 0),
    "probability": ("above 0 and at most 1", lambda value: (value > 0) & (value <= 1)),
}
_KINDS = {
    "uniform": _Kind(_uniform, {"low": "any", "high": "any"}, {"low": 0.0, "high": 1.0}),
    "normal": _Kind(_normal, {"mu": "any", "sigma": "not negative"}, {"loc": 0.0, "scale": 1.0}),
    "gamma": _Kind(_gamma, {"alpha": "positive", "beta": "positive"}, {"alpha": 1.0, "beta": 1.0}),
    "exponential": _Kind(_exponential, {"lam": "positive"}, {"lam": 1.0}),
    "poisson": _Kind(_poisson, {"lam": "not negative"}, {"lam": 1.0}),
    "negative_binomial": _Kind(_negative_binomial, {"k": "positive", "p": "probability"}, {"k": 1.0, "p": 1.0}),
    "generalized_negative_binomial": _Kind(
        _generalized, {"mu": "not negative", "alpha": "not negative"}, {"mu": 1.0, "alpha": 1.0}
    ),
}


def _check(name: str, kind: _Kind, values: Sequence[Any]) -> None:
    """Raise ParameterError if a parameter, or an element of it, is out of bounds."""
    for key, value in zip(kind.bounds, values, strict=True):
        words, fits = _BOUNDS[kind.bounds[key]]
        if not bool(np.all(np.asarray(fits(value).get() if hasattr(value, "get") else fits(value)))):
            raise ParameterError(f"{name}: {key} must be {words}")
    if "low" in kind.bounds and not bool(
        (values[0] <= values[1]) if np.ndim(values[0]) == 0 else (values[0] <= values[1]).all()
    ):
        raise ParameterError(f"{name}: low must not be above high")


def _float(value: object) -> DType:
    dtype = p_optional(p_dtype)(value)
    return FLOAT32 if dtype is None else dtype


def _drawn_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    return [], [merge_dtype(outs[0], params["dtype"], "output and the parameter dtype")]


def _fill(ctx: OpContext, out: RawArray, draw: Callable[[Generator, int, int], RawArray]) -> None:
    """Fill ``out`` with ``draw(generator, start, count)``, a few thousand elements at a time."""
    generator, flat = ctx.generator(), out.reshape(-1)
    for start in range(0, flat.size, _AT_ONCE):
        count = min(_AT_ONCE, flat.size - start)
        flat[start : start + count] = draw(generator, start, count)


def _of_numbers(name: str, kind: _Kind) -> Callable[..., None]:
    @context_kernel
    def compute(ctx: OpContext, p: Params, *arrays: RawArray | None) -> None:
        out = arrays[-1]
        values = [p[key] for key in kind.defaults]
        _check(name, kind, values)
        if out is not None:
            _fill(ctx, out, lambda g, start, count: kind.draw(g, ctx.xp, count, *values))

    return compute


def _of_arrays(name: str, kind: _Kind) -> Callable[..., None]:
    @context_kernel
    def compute(ctx: OpContext, p: Params, *arrays: RawArray) -> None:
        *inputs, out = arrays
        flat = [value.reshape(-1) for value in inputs]
        _check(name, kind, flat)
        xp, inner = ctx.xp, out.size // flat[0].size

        def draw(generator: Generator, start: int, count: int) -> RawArray:
            rows = xp.arange(start, start + count) // inner
            numbers: RawArray = kind.draw(generator, xp, count, *(value[rows].astype(np.float64) for value in flat))
            return numbers

        _fill(ctx, out, draw)

    return compute


def _sample_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    merged: Shape | None = None
    for shape in ins:
        merged = merge_shape(merged, shape, "arrays of parameters")
    out = None if merged is None else (*merged, *(params["shape"] or ()))
    return [merged] * len(ins), [merge_shape(outs[0], out, "output of a sample")]


def _sample_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    common = next((dtype for dtype in ins if dtype is not None), None)
    result = params["dtype"] if params["dtype"] is not None else common
    return [dtype if dtype is not None else common for dtype in ins], [merge_dtype(outs[0], result, "output and dtype")]


_SHAPE = Param("shape", p_optional(p_shape), None, "shape; None: as the users of the output need")

for _name, _kind in _KINDS.items():
    _numbers = tuple(Param(key, p_float, default, "parameter") for key, default in _kind.defaults.items())
    if _name not in ("uniform", "normal"):  # weftplan.ops.random.draws registers these two
        register(
            Op(
                name=f"_random_{_name}",
                forward=_of_numbers(f"_random_{_name}", _kind),
                infer_shape=declared_shape,
                infer_dtype=_drawn_dtype,
                params=(*_numbers, _SHAPE, *placed(Param("dtype", _float, FLOAT32, "dtype; None: float32"))),
                inputs=(),
                gradient=zero_gradient,
                random=True,
                aliases=(f"random_{_name}",),
                doc=f"Random numbers of the distribution {_name.replace('_', ' ')}.",
            )
        )
    register(
        Op(
            name=f"_random_{_name}_like",
            forward=_of_numbers(f"_random_{_name}_like", _kind),
            infer_shape=same_shape,
            infer_dtype=same_dtype,
            params=_numbers,
            gradient=zero_gradient,
            ignored_inputs=(0,),
            random=True,
            doc=f"Random numbers ({_name.replace('_', ' ')}) of the shape and dtype of data.",
        )
    )
    register(
        Op(
            name=f"_sample_{_name}",
            forward=_of_arrays(f"_sample_{_name}", _kind),
            infer_shape=_sample_shape,
            infer_dtype=_sample_dtype,
            params=(
                Param("shape", p_optional(p_shape), None, "shape that each element of the parameters gives"),
                Param("dtype", p_optional(p_dtype), None, "dtype; None: that of the parameters"),
            ),
            inputs=tuple(_kind.bounds),
            gradient=zero_gradient,
            random=True,
            aliases=(f"sample_{_name}",),
            doc=f"Random numbers ({_name.replace('_', ' ')}): a block of shape for each element of the parameters.",
        )
    )


# ------------------------------------------------------------------------------------------------------ integers, order


@context_kernel
def _integers(ctx: OpContext, p: Params, out: RawArray | None) -> None:
    low, high = p["low"], p["high"]
    if not low < high:
        raise ParameterError(f"_random_randint: expected low < high, got low={low} and high={high}")
    if out is not None:
        _fill(ctx, out, lambda g, start, count: g.integers(low, high, count, dtype=np.int64))


def _integer(value: object) -> DType:
    dtype = p_optional(p_dtype)(value)
    if dtype is not None and dtype.kind not in "iu":
        raise ValueError("expected an integer dtype or None")
    return np.dtype(np.int32) if dtype is None else dtype


register(
    Op(
        name="_random_randint",
        forward=_integers,
        infer_shape=declared_shape,
        infer_dtype=_drawn_dtype,
        params=(
            Param("low", p_int, doc="least value"),
            Param("high", p_int, doc="end, not included"),
            _SHAPE,
            *placed(Param("dtype", _integer, np.dtype(np.int32), "dtype; None: int32")),
        ),
        inputs=(),
        gradient=zero_gradient,
        random=True,
        aliases=("random_randint",),
        doc="Random integers in [low, high).",
    )
)


@context_kernel
def _shuffle(ctx: OpContext, p: Params, data: RawArray, out: RawArray) -> None:
    # The order is drawn on the host, so that it is the same on every device.
    order = OpContext(np, random_key=ctx.random_key).generator().permutation(data.shape[0])
    for row, source in enumerate(order.tolist()):
        out[row] = data[source]


register(
    Op(
        name="_shuffle",
        forward=_shuffle,
        infer_shape=same_shape,
        infer_dtype=same_dtype,
        gradient=zero_gradient,
        random=True,
        aliases=("shuffle",),
        doc="The rows of data in random order.",
    )
)


def _classes_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    if ins[0] is None:
        return ins, outs
    out = (*ins[0][:-1], *(params["shape"] or ())) or (1,)
    return ins, [merge_shape(classes, out, "output of _sample_multinomial") for classes in outs]


def _classes_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    dtypes = [merge_dtype(outs[0], params["dtype"], "output and dtype")]
    return ins, dtypes if len(outs) == 1 else [*dtypes, ins[0]]


@context_kernel
def _classes(ctx: OpContext, p: Params, data: RawArray, *outputs: RawArray | None) -> None:
    xp, generator = ctx.xp, ctx.generator()
    table = data.reshape(-1, data.shape[-1])
    flat = [None if out is None else out.reshape(len(table), -1) for out in outputs]
    inner = math.prod(p["shape"] or ())
    for row in range(len(table)):
        bound = xp.cumsum(table[row].astype(np.float64))
        for start in range(0, inner, _AT_ONCE):
            cut = slice(start, min(start + _AT_ONCE, inner))
            points = generator.random(cut.stop - start) * bound[-1]
            index = xp.minimum(xp.searchsorted(bound, points, side="right"), table.shape[1] - 1)
            if flat[0] is not None:
                flat[0][row, cut] = index
            if len(flat) > 1 and flat[1] is not None:
                flat[1][row, cut] = xp.log(table[row][index])


def _classes_gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    """Return the gradient of the logarithms, 1 / probability of the drawn class; None without ``get_prob``."""
    if not builder.params["get_prob"]:
        return [None]
    drawn = [builder.ograd(1), builder.input(0), builder.output(0)]
    return builder.node("_backward_sample_multinomial", drawn, {})


@kernel
def _backward_classes(xp: ArrayModule, p: Params, g: RawArray, data: RawArray, drawn: RawArray, out: RawArray) -> None:
    width = data.shape[-1]
    out, table = out.reshape(-1, width), data.reshape(-1, width)
    out.fill(0)
    for row, (slopes, index) in enumerate(zip(g.reshape(len(out), -1), drawn.reshape(len(out), -1), strict=True)):
        xp.add.at(out[row], index.astype(np.int64), slopes)
        xp.divide(out[row], table[row], out=out[row])
        out[row][table[row] == 0] = 0


register(
    Op(
        name="_sample_multinomial",
        forward=_classes,
        infer_shape=_classes_shape,
        infer_dtype=_classes_dtype,
        params=(
            Param("shape", p_optional(p_shape), None, "numbers drawn for each distribution"),
            Param("get_prob", p_bool, False, "also the logarithm of the probability of each"),
            Param("dtype", p_dtype, np.dtype(np.int32), "dtype of the indices"),
        ),
        outputs=lambda params: ("output0", "output1") if params["get_prob"] else ("output",),
        gradient=_classes_gradient,
        random=True,
        aliases=("sample_multinomial",),
        doc="Indices drawn with the probabilities in the last axis of data.",
    )
)
backward("_sample_multinomial", _backward_classes, ("ograd", "data", "drawn"))
