"""Initializers: fill a parameter by rule, as ``mx.init``.

An initializer is called with a description (name and attributes of the parameter) and an array. A variable's own
``__init__`` attribute wins; otherwise the name decides: ``*_bias``, ``*_beta``, ``*_moving_mean`` become 0,
``*_gamma``, ``*_moving_var`` become 1, and ``*_weight`` is what the initializer is for. Random values come from the
seeded sequence of :mod:`weftplan.ndarray.random`, one key per parameter, so they depend on seed and order of calls
only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from weftplan.errors import ParameterError, did_you_mean
from weftplan.ndarray import NDArray, random
from weftplan.training.settings import construct

Host = np.ndarray[Any, np.dtype[Any]]


class InitDesc(str):
    """A parameter's name with its attributes (``__init__`` among them)."""

    attrs: dict[str, str]
    global_init: Initializer | None

    def __new__(
        cls, name: str, attrs: Mapping[str, str] | None = None, global_init: Initializer | None = None
    ) -> InitDesc:
        desc = super().__new__(cls, name)
        desc.attrs = dict(attrs or {})
        desc.global_init = global_init
        return desc


class Initializer:
    """Base: chooses by name; a subclass says what a weight gets."""

    registry: ClassVar[dict[str, type[Initializer]]] = {}

    def __init__(self, **kwargs: Any) -> None:
        self._kwargs = kwargs

    def dumps(self) -> str:
        """JSON text of the class alias and parameters, as stored in an ``__init__`` attribute."""
        return json.dumps([type(self).__name__.lower(), self._kwargs])

    def __call__(self, desc: str, arr: NDArray) -> None:
        """Fill ``arr`` for the parameter ``desc`` (an :class:`InitDesc`, or a plain name)."""
        own = desc.attrs.get("__init__", "") if isinstance(desc, InitDesc) else ""
        if own:
            create(own)._fill(arr)
        elif desc.endswith(("weight", "parameters")):
            self._fill(arr)
        elif desc.endswith(("bias", "beta", "moving_mean", "running_mean", "moving_inv_var", "moving_avg", "min")):
            arr[:] = 0.0
        elif desc.endswith(("gamma", "moving_var", "running_var", "max")):
            arr[:] = 1.0
        else:
            self._default(desc, arr)

    def _default(self, desc: str, arr: NDArray) -> None:
        raise ParameterError(
            f"no rule to initialize {str(desc)!r} {arr.shape}: names end in weight, bias, gamma, beta, moving_mean or "
            f"moving_var; give the variable init=… or its value in arg_params"
        )

    def _fill(self, arr: NDArray) -> None:
        arr[:] = self.values(arr.shape, arr).astype(arr.dtype)

    def values(self, shape: tuple[int, ...], arr: NDArray) -> Host:
        """Values for a weight of ``shape``, float64 or float32, on the host."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self._kwargs.items())})"


def _generator(arr: NDArray) -> np.random.Generator:
    seed, counter = random.next_key(arr.context)
    mask = 2**64 - 1
    return np.random.Generator(np.random.Philox(key=[seed & mask, counter & mask]))


def register(klass: type[Initializer]) -> type[Initializer]:
    """Class decorator: make the class known by its name in lower case."""
    Initializer.registry[klass.__name__.lower()] = klass
    return klass


@register
class Zero(Initializer):
    """All zeros, whatever the name."""

    def _default(self, desc: str, arr: NDArray) -> None:
        self._fill(arr)

    def values(self, shape: tuple[int, ...], arr: NDArray) -> Host:
        return np.zeros(shape)


@register
class One(Zero):
    """All ones, whatever the name has no rule for."""

    def values(self, shape: tuple[int, ...], arr: NDArray) -> Host:
        return np.ones(shape)


@register
class Constant(Zero):
    """One value everywhere."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__(value=value)
        self.value = value

    def values(self, shape: tuple[int, ...], arr: NDArray) -> Host:
        return np.full(shape, self.value)


@register
class Uniform(Initializer):
    """Uniform in [-scale, scale)."""

    def __init__(self, scale: float = 0.07) -> None:
        super().__init__(scale=scale)
        self.scale = scale

    def values(self, shape: tuple[int, ...], arr: NDArray) -> Host:
        return _generator(arr).uniform(-self.scale, self.scale, shape)


@register
class Normal(Initializer):
    """Normal with mean 0 and standard deviation ``sigma``."""

    def __init__(self, sigma: float = 0.01) -> None:
        super().__init__(sigma=sigma)
        self.sigma = sigma

    def values(self, shape: tuple[int, ...], arr: NDArray) -> Host:
        return _generator(arr).normal(0.0, self.sigma, shape)


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
        generator = _generator(arr)
        if self.rnd_type == "uniform":
            return generator.uniform(-scale, scale, shape)
        return generator.normal(0.0, scale, shape)


@register
class MSRAPrelu(Xavier):
    """For layers before a (leaky) relu of that slope (He et al., 2015): gaussian, variance 2 / ((1 + slope²) fan)."""

    def __init__(self, factor_type: str = "avg", slope: float = 0.25) -> None:
        super().__init__("gaussian", factor_type, 2.0 / (1 + slope**2))
        self._kwargs = {"factor_type": factor_type, "slope": slope}


_ALIASES = {"zeros": "zero", "ones": "one", "gaussian": "normal"}


def create(spec: Any) -> Initializer:
    """An initializer from itself, a class alias (``"xavier"``) or the JSON text of :meth:`Initializer.dumps`.

    >>> create('["Constant", {"value": 0.25}]')
    Constant(value=0.25)
    """
    if isinstance(spec, Initializer):
        return spec
    name, kwargs = spec, {}
    if not isinstance(spec, str):
        raise ParameterError(f"an initializer is an object of mx.init or a name such as 'xavier', got {spec!r}")
    if spec.lstrip().startswith("["):
        try:
            name, kwargs = json.loads(spec)
            kwargs = dict(kwargs)
        except (ValueError, TypeError) as error:
            raise ParameterError(
                f'an initializer as JSON reads ["name", {{"setting": value}}], got {spec!r}: {error}'
            ) from error
    key = _ALIASES.get(str(name).lower(), str(name).lower())
    klass = Initializer.registry.get(key)
    if klass is None:
        hint = did_you_mean(key, Initializer.registry)
        raise ParameterError(f"unknown initializer {name!r}: {hint}known: {', '.join(Initializer.registry)}")
    return construct(klass, kwargs, "initializer")
