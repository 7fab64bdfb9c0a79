"""Initializers of ``mx.init``: constants, random distributions, Xavier, and dispatch by pattern.

Random values come from ``mx.random``, so they depend on its seed and the order of the calls. An initializer stores only
its settings and may be used for many networks.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from weftplan import ndarray as nd
from weftplan.errors import ParameterError, ShapeError
from weftplan.ndarray import NDArray
from weftplan.support.lazy_import import late_import
from weftplan.support.package_log import log
from weftplan.training.initializers.base import (
    Host,
    InitDesc,
    Initializer,
    Rule,
    RuleLike,
    alias,
    create,
    generator,
    register,
)


def __getattr__(name: str) -> object:
    """Import ``FusedRNN`` lazily; it is defined with the recurrent cells whose parameters it fills."""
    if name != "FusedRNN":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    late_import("weftplan.rnn")
    return Initializer.registry["fusedrnn"]


__all__ = [
    "Bilinear",
    "Constant",
    "InitDesc",
    "Initializer",
    "LSTMBias",
    "Load",
    "MSRAPrelu",
    "Mixed",
    "Normal",
    "One",
    "Orthogonal",
    "Rule",
    "Uniform",
    "Xavier",
    "Zero",
    "alias",
    "create",
    "register",
]


@alias("zeros")
@register
class Zero(Initializer):
    """Zeros for weights; a name without a rule is refused, as by every initializer."""

    def values(self, shape: tuple[int, ...], arr: NDArray) -> Host:
        return np.zeros(shape)


@alias("ones")
@register
class One(Zero):
    """Ones for weights; a name without a rule is refused."""

    def values(self, shape: tuple[int, ...], arr: NDArray) -> Host:
        return np.ones(shape)


@register
class Constant(Zero):
    """One value for all elements of weights, or values of their shape; a name without a rule is refused."""

    def __init__(self, value: ArrayLike = 0.0) -> None:
        super().__init__(value=value)
        self.value = self._kwargs["value"]

    def values(self, shape: tuple[int, ...], arr: NDArray) -> Host:
        return np.full(shape, self.value)


@register
class Uniform(Initializer):
    """Uniform in [-scale, scale)."""

    def __init__(self, scale: float = 0.07) -> None:
        super().__init__(scale=scale)
        self.scale = scale

    def values(self, shape: tuple[int, ...], arr: NDArray) -> Host:
        return generator(arr).uniform(-self.scale, self.scale, shape)


@alias("gaussian")
@register
class Normal(Initializer):
    """Normal with mean 0 and standard deviation ``sigma``."""

    def __init__(self, sigma: float = 0.01) -> None:
        super().__init__(sigma=sigma)
        self.sigma = sigma

    def values(self, shape: tuple[int, ...], arr: NDArray) -> Host:
        return generator(arr).normal(0.0, self.sigma, shape)


@register
class Xavier(Initializer):
    """Scaled by fan-in and fan-out (Glorot and Bengio, 2010).

    The scale is ``sqrt(magnitude / factor)`` with ``factor`` = fan-in, fan-out or their mean (``factor_type`` in, out,
    avg); ``rnd_type`` uniform draws from [-scale, scale), gaussian has it as the standard deviation.
    """

    def __init__(self, rnd_type: str = "uniform", factor_type: str = "avg", magnitude: float = 3) -> None:
        if rnd_type not in ("uniform", "gaussian"):
            raise ParameterError(f"Xavier: rnd_type must be 'uniform' or 'gaussian', got {rnd_type!r}")
        if factor_type not in ("avg", "in", "out"):
            raise ParameterError(f"Xavier: factor_type must be 'avg', 'in' or 'out', got {factor_type!r}")
        super().__init__(rnd_type=rnd_type, factor_type=factor_type, magnitude=magnitude)
        self.rnd_type = rnd_type
        self.factor_type = factor_type
        self.magnitude = float(magnitude)

    def values(self, shape: tuple[int, ...], arr: NDArray) -> Host:
        if len(shape) < 2:
            raise ParameterError(f"Xavier needs a weight of at least 2 dimensions, got shape {shape}")
        area = math.prod(shape[2:])
        fan_in, fan_out = shape[1] * area, shape[0] * area
        factor = {"avg": (fan_in + fan_out) / 2.0, "in": fan_in, "out": fan_out}[self.factor_type]
        scale = math.sqrt(self.magnitude / factor)
        draw = generator(arr)
        if self.rnd_type == "uniform":
            return draw.uniform(-scale, scale, shape)
        return draw.normal(0.0, scale, shape)


@register
class MSRAPrelu(Xavier):
    """Normal with variance 2 / ((1 + slope²) fan), for layers before a leaky ReLU of this slope (He et al., 2015)."""

    def __init__(self, factor_type: str = "avg", slope: float = 0.25) -> None:
        super().__init__("gaussian", factor_type, 2.0 / (1 + slope**2))
        self._kwargs = {"factor_type": factor_type, "slope": slope}


@register
class Orthogonal(Initializer):
    """Rows or columns that are orthogonal, times ``scale`` (Saxe, McClelland and Ganguli, 2013).

    The weight is treated as a matrix (first dimension, product of the others). ``rand_type`` is the distribution of the
    random matrix that is orthogonalized: uniform or normal.
    """

    def __init__(self, scale: float = 1.414, rand_type: str = "uniform") -> None:
        if rand_type not in ("uniform", "normal"):
            raise ParameterError(f"Orthogonal: rand_type must be 'uniform' or 'normal', got {rand_type!r}")
        super().__init__(scale=scale, rand_type=rand_type)
        self.scale = scale
        self.rand_type = rand_type

    def values(self, shape: tuple[int, ...], arr: NDArray) -> Host:
        if not shape:
            raise ParameterError("Orthogonal needs a weight of at least 1 dimension, got a scalar")
        matrix = (shape[0], math.prod(shape[1:]))
        draw = generator(arr)
        drawn = draw.uniform(-1.0, 1.0, matrix) if self.rand_type == "uniform" else draw.normal(0.0, 1.0, matrix)
        lhs_vectors, _, right = np.linalg.svd(drawn, full_matrices=False)
        basis: Host = lhs_vectors if lhs_vectors.shape == matrix else right
        return self.scale * basis.reshape(shape)


@register
class Bilinear(Initializer):
    """The kernel of a Deconvolution that enlarges images by bilinear interpolation; the same for every channel."""

    def values(self, shape: tuple[int, ...], arr: NDArray) -> Host:
        if len(shape) != 4:
            raise ParameterError(f"Bilinear needs a weight of 4 dimensions, got shape {shape}")
        half = math.ceil(shape[3] / 2.0)
        centre = (2 * half - 1 - half % 2) / (2.0 * half)
        rows, columns = (1 - np.abs(np.arange(n) / half - centre) for n in shape[2:])
        return np.broadcast_to(np.outer(rows, columns), shape)


@register
class LSTMBias(Initializer):
    """Biases of the four LSTM gates (input, forget, cell, output): ``forget_bias`` for forget, 0 for the others."""

    def __init__(self, forget_bias: float = 1.0) -> None:
        super().__init__(forget_bias=forget_bias)
        self.forget_bias = forget_bias

    def values(self, shape: tuple[int, ...], arr: NDArray) -> Host:
        if not shape or shape[0] % 4:
            raise ParameterError(f"LSTMBias needs the biases of four gates of one size, got shape {shape}")
        hidden = shape[0] // 4
        biases = np.zeros(shape)
        biases[hidden : 2 * hidden] = self.forget_bias
        return biases


class Mixed(Initializer):
    """Dispatch by name: the first initializer whose pattern, a regular expression, matches the start of the name.

    Raises:
        ParameterError: the numbers of patterns and initializers differ; when called, no pattern matches the name.

    >>> rule = Mixed([".*bias", ".*"], [Zero(), Uniform(0.1)])
    """

    def __init__(self, patterns: Sequence[str], initializers: Sequence[RuleLike]) -> None:
        super().__init__()
        if isinstance(patterns, str) or len(patterns) != len(initializers):
            raise ParameterError(f"Mixed needs an initializer a pattern, got {patterns!r} and {initializers!r}")
        self.map = [(re.compile(p), create(rule)) for p, rule in zip(patterns, initializers, strict=True)]

    def __call__(self, name: str, arr: NDArray) -> None:
        for pattern, rule in self.map:
            if pattern.match(name):
                rule(name if isinstance(name, InitDesc) else InitDesc(name), arr)
                return
        tried = [pattern.pattern for pattern, _ in self.map]
        raise ParameterError(f"{str(name)!r} matches none of {tried}; add '.*' with what the others get")


class Load(Initializer):
    """Given values by name, regardless of attributes; ``default_init`` for all other names.

    Args:
        param: values by name, or a parameter file; ``arg:`` and ``aux:`` before a name are dropped.
        default_init: an initializer, or None: a name without a value is an error.

    Raises:
        ParameterError: a file without names; when called, no value and no ``default_init``.
        ShapeError: when called, the value has another shape.
    """

    def __init__(
        self,
        param: str | os.PathLike[str] | Mapping[str, NDArray],
        default_init: RuleLike | None = None,
        verbose: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(param, (str, os.PathLike)):
            loaded = nd.load(os.fspath(param))
            if not isinstance(loaded, dict):
                raise ParameterError(f"Load: {os.fspath(param)} holds a list of arrays without names")
            param = loaded
        self.param = {name[4:] if name.startswith(("arg:", "aux:")) else name: v for name, v in param.items()}
        self.default_init = None if default_init is None else create(default_init)
        self.verbose = verbose

    def __call__(self, name: str, arr: NDArray) -> None:
        value = self.param.get(str(name))
        if value is not None:
            if tuple(value.shape) != tuple(arr.shape):
                raise ShapeError(f"Load: {str(name)!r} has shape {arr.shape}, the value given for it {value.shape}")
            arr[:] = value
        elif self.default_init is not None:
            self.default_init(name if isinstance(name, InitDesc) else InitDesc(name), arr)
        else:
            raise ParameterError(f"Load: no value is given for {str(name)!r}, and no default_init")
        if self.verbose:
            log.info("Initialized %s by %s", name, "loading" if value is not None else "default")
