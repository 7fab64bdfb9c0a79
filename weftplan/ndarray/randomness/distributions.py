"""The functions that draw floats, one per row of a table: ``uniform``, ``normal``, ``gamma`` and others.

All take the parameters of their distribution, then the same arguments. ``docs/write_stubs.py`` writes their signatures
for type checkers. The module is stateless; any thread may call it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from weftplan.ndarray.array import NDArray
from weftplan.ndarray.randomness import fills
from weftplan.ndarray.randomness.draws import UNSET, sample
from weftplan.support.keyword_errors import known_keywords


class Parameter(NamedTuple):
    """A number or an array that determines a distribution; ``bounds`` as for :func:`draws.sample`."""

    name: str
    default: int
    bounds: str
    help: str


class Distribution(NamedTuple):
    """A distribution: the function that fills an array, its parameters, and the start of its help."""

    draw: fills.Draw
    summary: str
    parameters: tuple[Parameter, ...]


DISTRIBUTIONS = (
    Distribution(
        fills.uniform,
        "the uniform distribution on [low, high); by default one float32 number, of shape ``(1,)``",
        (
            Parameter("low", 0, "any", "lower bound, which belongs to the range"),
            Parameter("high", 1, "any", "upper bound, which does not"),
        ),
    ),
    Distribution(
        fills.normal,
        "the normal distribution with mean ``loc`` and standard deviation ``scale``",
        (Parameter("loc", 0, "any", "mean"), Parameter("scale", 1, "not negative", "standard deviation, at least 0")),
    ),
    Distribution(
        fills.exponential,
        "the exponential distribution with mean ``scale``",
        (Parameter("scale", 1, "positive", "mean, above 0"),),
    ),
    Distribution(
        fills.gamma,
        "the gamma distribution with shape ``alpha`` and scale ``beta``",
        (
            Parameter("alpha", 1, "positive", "shape of the distribution, above 0"),
            Parameter("beta", 1, "positive", "scale, above 0"),
        ),
    ),
    Distribution(
        fills.poisson,
        "the Poisson distribution with mean ``lam``, as floats",
        (Parameter("lam", 1, "not negative", "mean, at least 0"),),
    ),
    Distribution(
        fills.negative_binomial,
        "the distribution of failures before ``k`` successes of probability ``p``, as floats",
        (
            Parameter("k", 1, "positive", "number of successes, above 0"),
            Parameter("p", 1, "probability", "probability of a success, in (0, 1]"),
        ),
    ),
    Distribution(
        fills.generalized_negative_binomial,
        "the negative binomial distribution with mean ``mu`` and variance mu + alpha mu², as floats",
        (
            Parameter("mu", 1, "not negative", "mean, at least 0"),
            Parameter("alpha", 1, "not negative", "dispersion, at least 0"),
        ),
    ),
)
_HELP = """Draw from {summary}.

The parameters of the distribution may be arrays of one shape; each element then gives a block of ``shape``.

Args:
{parameters}
    shape: dimensions of the result, or of the block for each element of an array of parameters.
    dtype: float16, float32 or float64; None: that of ``out``, else float32.
    ctx: the device of the result; None: the current context.
    out: array that takes the result, instead of a new one.
    name: accepted, no effect.

Raises:
    ParameterError: a parameter is out of bounds, at the next wait.
    DTypeError: not a float dtype.
    ShapeError: ``out`` and ``shape`` disagree, or two arrays of parameters.
"""


def function_of(row: Distribution, module: str) -> Callable[..., NDArray]:
    """Return the public function of a distribution, for ``module``; its signature and help follow from the row."""
    common: dict[str, tuple[str, Any]] = {
        "shape": ("Dims | None", UNSET), "dtype": ("DTypeLike | None", None), "ctx": ("Context | None", None),
        "out": ("NDArray | None", None),
    }  # fmt: skip
    defaults = {key.name: key.default for key in row.parameters}
    order = (*defaults, *common)
    name = row.draw.__name__

    def draws(*args: Any, **kwargs: Any) -> NDArray:
        values: dict[str, Any] = dict(zip(order, args, strict=False))
        if twice := values.keys() & kwargs.keys():
            raise TypeError(f"{name}() got multiple values for argument {min(twice)!r}")
        values.update(kwargs)
        parameters = {key.name: (values.get(key.name, key.default), key.bounds) for key in row.parameters}
        return sample(row.draw, parameters, *[values.get(key, default) for key, (_, default) in common.items()])

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    arguments = [
        *(
            inspect.Parameter(key, kind, default=value, annotation="NDArray | Scalar")
            for key, value in defaults.items()
        ),
        *(inspect.Parameter(key, kind, default=value, annotation=of) for key, (of, value) in common.items()),
        inspect.Parameter("name", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None"),
    ]
    draws.__signature__ = inspect.Signature(arguments, return_annotation="NDArray")  # type: ignore[attr-defined]
    help_lines = "\n".join(f"    {key.name}: {key.help}." for key in row.parameters)
    draws.__doc__ = _HELP.format(summary=row.summary, parameters=help_lines)
    draws.__name__ = draws.__qualname__ = name
    draws.__module__ = module
    return known_keywords()(draws)
