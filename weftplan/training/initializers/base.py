"""Base of initializers: parameter descriptions, dispatch by parameter name, and the registry.

An initializer is called with a description (name and attributes of the parameter) and an array. A variable's own
``__init__`` attribute takes precedence. Otherwise the name decides: ``*_bias``, ``*_beta``, ``*_moving_mean`` become 0,
``*_gamma``, ``*_moving_var`` become 1, and ``*_weight`` receives the initializer's own values. Random values come from
the seeded sequence of :mod:`weftplan.ndarray.random`, one key per parameter, so they depend only on the seed and the
order of calls.

A custom initializer overrides :meth:`Initializer.values`, or MXNet's methods: ``_init_weight(name, arr)``,
``_init_bias``, ``_init_gamma``, ``_init_beta``, ``_init_zero``, ``_init_one``, ``_init_default``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np

from weftplan.errors import ParameterError, did_you_mean
from weftplan.ndarray import NDArray, random
from weftplan.support.array_types import DType
from weftplan.support.keyword_errors import Constructed, shown
from weftplan.support.lazy_import import late_import
from weftplan.training.keyword_checks import construct

Host = np.ndarray[Any, DType]
K = TypeVar("K", bound="type[Initializer]")


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


class Initializer(Constructed):
    """Base of initializers: dispatches by parameter name; a subclass computes the values of a weight."""

    registry: ClassVar[dict[str, type[Initializer]]] = {}

    def __init__(self, **kwargs: object) -> None:
        self._kwargs = {name: _plain(value) for name, value in kwargs.items()}

    def dumps(self) -> str:
        """JSON text of the class alias and parameters, as stored in an ``__init__`` attribute."""
        return json.dumps([type(self).__name__.lower(), self._kwargs])

    def __call__(self, desc: str, arr: NDArray) -> None:
        """Fill ``arr`` for the parameter ``desc`` (an :class:`InitDesc`, or a plain name)."""
        own_initializer = desc.attrs.get("__init__", "") if isinstance(desc, InitDesc) else ""
        if own_initializer:
            rule = create(own_initializer)
            assert isinstance(rule, Initializer)  # it was made by name
            rule._init_weight(desc, arr)
        elif desc.endswith(("weight", "parameters")):
            self._init_weight(desc, arr)
        elif desc.endswith("bias"):
            self._init_bias(desc, arr)
        elif desc.endswith("beta"):
            self._init_beta(desc, arr)
        elif desc.endswith("gamma"):
            self._init_gamma(desc, arr)
        elif desc.endswith(("moving_mean", "running_mean", "moving_inv_var", "moving_avg", "min")):
            self._init_zero(desc, arr)
        elif desc.endswith(("moving_var", "running_var", "max")):
            self._init_one(desc, arr)
        else:
            self._init_default(desc, arr)

    def _init_weight(self, name: str, arr: NDArray) -> None:
        arr[:] = self.values(arr.shape, arr).astype(arr.dtype)

    def _init_zero(self, name: str, arr: NDArray) -> None:
        arr[:] = 0.0

    def _init_one(self, name: str, arr: NDArray) -> None:
        arr[:] = 1.0

    def _init_bias(self, name: str, arr: NDArray) -> None:
        arr[:] = 0.0

    def _init_beta(self, name: str, arr: NDArray) -> None:
        arr[:] = 0.0

    def _init_gamma(self, name: str, arr: NDArray) -> None:
        arr[:] = 1.0

    def _init_default(self, name: str, arr: NDArray) -> None:
        raise ParameterError(
            f"no rule to initialize {str(name)!r} {arr.shape}: names end in weight, bias, gamma, beta, moving_mean or "
            f"moving_var; give the variable init=… or its value in arg_params"
        )

    def values(self, shape: tuple[int, ...], arr: NDArray) -> Host:
        """Values for a weight of ``shape``, float64 or float32, on the host."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        """Return whether ``other`` is of the same class, with the same settings."""
        if not isinstance(other, Initializer):
            return NotImplemented
        return type(self) is type(other) and self._kwargs == other._kwargs

    def __hash__(self) -> int:
        return hash(type(self))  # settings may be lists

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self._kwargs)})"


def generator(arr: NDArray) -> np.random.Generator:
    """NumPy's generator for the next key of the seeded sequence of the array's context."""
    seed, counter = random.next_key(arr.context)
    mask = 2**64 - 1
    return np.random.Generator(np.random.Philox(key=[seed & mask, counter & mask]))


def register(klass: K) -> K:
    """Class decorator: make the class known by its name in lower case."""
    Initializer.registry[klass.__name__.lower()] = klass
    return klass


def alias(*names: str) -> Callable[[K], K]:
    """Class decorator: make the class known by these names, too."""

    def also(klass: K) -> K:
        Initializer.registry.update(dict.fromkeys((name.lower() for name in names), klass))
        return klass

    return also


_ELSEWHERE = {"fusedrnn": "weftplan.rnn"}
"""Initializers registered by a package of a higher layer, imported on first use by name."""
Rule = Callable[[InitDesc, NDArray], None]
"""Anything that fills an array for a parameter: an initializer, or a function."""
RuleLike: TypeAlias = Initializer | Rule | str
"""An initializer, a function of (description, array), or the name or the JSON of an initializer."""


def create(spec: RuleLike, **settings: object) -> Rule:
    """Create an initializer from an initializer, a class alias (``"xavier"``) or JSON of :meth:`Initializer.dumps`.

    A function of (description, array) is returned unchanged.

    Args:
        settings: keyword arguments of the class, if ``spec`` is its alias.

    Raises:
        ParameterError: unknown name or setting, or ``spec`` has another type.

    >>> import weftplan as mx
    >>> mx.init.create('["Constant", {"value": 0.25}]')
    Constant(value=0.25)
    >>> mx.init.create("constant", value=0.25)
    Constant(value=0.25)
    """
    if settings and (not isinstance(spec, str) or spec.lstrip().startswith("[")):
        raise ParameterError(f"an initializer that is made already takes no settings, got {spec!r} and {settings}")
    if isinstance(spec, Initializer) or (callable(spec) and not isinstance(spec, type)):
        rule: Rule = spec
        return rule
    name, kwargs = spec, settings
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
    key = str(name).lower()
    if key in _ELSEWHERE and key not in Initializer.registry:
        late_import(_ELSEWHERE[key])
    klass = Initializer.registry.get(key)
    if klass is None:
        hint = did_you_mean(key, Initializer.registry)
        raise ParameterError(
            f"unknown initializer {name!r}: {hint}known: {', '.join(Initializer.registry)}; @mx.init.register makes "
            f"one of your own known"
        )
    return construct(klass, (), kwargs, "initializer")


def _plain(value: object) -> object:
    """Convert an array to nested lists for JSON; return other values unchanged."""
    if isinstance(value, NDArray):
        value = value.asnumpy()
    return value.tolist() if isinstance(value, np.ndarray) else value
