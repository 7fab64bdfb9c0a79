"""``mx.sym.<Operator>``: one function per registered operator and alias, and the namespaces of operators.

Functions are made on first use; this file owns the table of those made so far. It relies on the operator registry for
signatures and documentation. A namespace (``mx.sym.random``, ``.linalg``, ``.contrib``, ``.image``, ``._internal``)
looks up its operators on access and stores none. The functions of ``random`` have their own signatures: the parameters
of a distribution are numbers or symbols, and each element of a symbol gives a block of ``shape``. Any thread may use
this file; two threads that look up the same new function concurrently may get two equal functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from weftplan.errors import DTypeError, ParameterError, UnknownOperatorError, did_you_mean
from weftplan.ops.core import registry
from weftplan.ops.core.registry import by_position, order_advice
from weftplan.ops.core.schema import Op
from weftplan.ops.core.signatures import document, signature
from weftplan.support import slots
from weftplan.support.array_types import DTypeLike, ShapeLike
from weftplan.symbol import attribute, name
from weftplan.symbol.compose import apply
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.symbol import Symbol, single

EXTRA = ("name", "attr", "out")
"""Arguments that every operator on symbols accepts after its parameters; ``out`` must be None."""
_made: dict[tuple[str, str], tuple[Op, Callable[..., Symbol]]] = {}


def function(op_name: str, hint: str = "") -> Callable[..., Symbol]:
    """Return the function of an operator or alias; automatic names follow ``hint``, by default its name, as in MXNet.

    Raises:
        UnknownOperatorError: no such operator; the message lists near names.
    """
    op = registry.get(op_name)
    key = (op_name, hint or op_name)
    cached = _made.get(key)
    if cached is None or cached[0] is not op:
        cached = _made[key] = (op, _make(op, *key))
    return cached[1]


def _make(op: Op, spelling: str, hint: str) -> Callable[..., Symbol]:
    hint = hint.lower()
    declared = {param.name for param in op.params}

    def call(*args: object, **kwargs: Any) -> Symbol:
        inputs, ordered = by_position(op, args, kwargs, EXTRA)
        kwargs.update(ordered)
        node_name = kwargs.pop("name", None)
        attr = kwargs.pop("attr", None)
        if kwargs.pop("out", None) is not None:
            raise ParameterError(f"operator {op.name}: out= is for arrays; the planner places a symbol's outputs")
        what = f"operator {op.name}"
        for i, value in enumerate(inputs):
            if value is not None and not isinstance(value, Symbol):
                raise _no_symbol(op, f"input {i}", value)
        positional: list[Entry | None] = [
            None if value is None else single(value, f"{what}: input {i}") for i, value in enumerate(inputs)
        ]
        keyword: dict[str, Entry] = {}
        params: dict[str, Any] = {}
        for key, value in kwargs.items():
            if isinstance(value, Symbol):
                keyword[key] = single(value, f"{what}: {key}")
            elif key in declared:
                params[key] = value
            elif value is None:
                continue  # an input to be made
            elif key in _input_names(op, kwargs):
                raise _no_symbol(op, f"input {key!r}", value)
            else:
                params[key] = value
        # The scope's attributes win over keywords of the same name, as in MXNet.
        params.update(attribute.current(attr))
        node = apply(op, name.current().get(node_name, hint), positional, keyword, params)
        return visible(node)

    call.__name__ = call.__qualname__ = spelling
    call.__doc__ = document(op)
    call.__signature__ = signature(op, "Symbol", EXTRA)  # type: ignore[attr-defined]
    return call


def visible(node: Node) -> Symbol:
    """Return a symbol of a node's visible outputs."""
    return Symbol(Entry(node, i) for i in range(node.num_visible_outputs))


def _input_names(op: Op, kwargs: Mapping[str, object]) -> tuple[str, ...]:
    """Return the input names for the parameters in ``kwargs``; no names if these do not parse."""
    if isinstance(op.inputs, tuple):
        return op.inputs
    declared = {param.name for param in op.params}
    try:
        return op.input_names(registry.parse_params(op, {k: v for k, v in kwargs.items() if k in declared}))
    except ParameterError:
        return ()


def _no_symbol(op: Op, which: str, value: object) -> DTypeError:
    """Return the error for an array or a number passed as an input."""
    advice = order_advice(op)
    if hasattr(value, "shape"):
        advice = f"use mx.nd.{op.name} for arrays, or give mx.sym.Variable(...) and bind the array to it"
    return DTypeError(f"operator {op.name}: {which} must be a Symbol, got {type(value).__name__}; {advice}")


slots.SYMBOL_OPERATOR.fill(function)


Numbers = float | Symbol


def _draw(
    name: str, params: dict[str, object], shape: ShapeLike | None, dtype: DTypeLike | None, kwargs: dict[str, object]
) -> Symbol:
    """Apply ``_sample_<name>`` to symbols or ``_random_<name>`` to numbers."""
    symbols = [isinstance(value, Symbol) for value in params.values()]
    if any(symbols) and not all(symbols):
        raise DTypeError(f"random.{name}: {', '.join(params)} must all be symbols, or all numbers")
    options = {key: value for key, value in kwargs.items() if value is not None}
    if dtype is not None and dtype != "None":
        options["dtype"] = dtype
    if shape is not None and shape != ():
        options["shape"] = shape
    if all(symbols):
        return function(f"_sample_{name}")(*params.values(), **options)
    return function(f"_random_{name}")(**params, **options)


def uniform(
    low: Numbers = 0,
    high: Numbers = 1,
    shape: ShapeLike | None = None,
    dtype: DTypeLike | None = None,
    **kwargs: object,
) -> Symbol:
    """Return draws from the uniform distribution on [low, high)."""
    return _draw("uniform", {"low": low, "high": high}, shape, dtype, kwargs)


def normal(
    loc: Numbers = 0,
    scale: Numbers = 1,
    shape: ShapeLike | None = None,
    dtype: DTypeLike | None = None,
    **kwargs: object,
) -> Symbol:
    """Return draws from the normal distribution with mean ``loc`` and standard deviation ``scale``."""
    return _draw("normal", {"loc": loc, "scale": scale}, shape, dtype, kwargs)


def randn(
    *shape: int, loc: Numbers = 0, scale: Numbers = 1, dtype: DTypeLike | None = None, **kwargs: object
) -> Symbol:
    """Return draws as :func:`normal` does; positional arguments give the shape, or it is that of a symbol ``data``."""
    if isinstance(kwargs.get("data"), Symbol):
        options = {key: value for key, value in kwargs.items() if value is not None}
        drawn = function("_random_normal_like")(loc=loc, scale=scale, **options)
        return drawn if dtype is None else function("Cast")(drawn, dtype=dtype)
    return normal(loc, scale, shape, dtype, **kwargs)


def gamma(
    alpha: Numbers = 1,
    beta: Numbers = 1,
    shape: ShapeLike | None = None,
    dtype: DTypeLike | None = None,
    **kwargs: object,
) -> Symbol:
    """Return draws from the gamma distribution with shape ``alpha`` and scale ``beta``."""
    return _draw("gamma", {"alpha": alpha, "beta": beta}, shape, dtype, kwargs)


def exponential(
    scale: Numbers = 1, shape: ShapeLike | None = None, dtype: DTypeLike | None = None, **kwargs: object
) -> Symbol:
    """Return draws from the exponential distribution with mean ``scale``, or with the rate ``lam`` if it is given."""
    rate = kwargs.pop("lam", None)
    return _draw("exponential", {"lam": 1.0 / scale if rate is None else rate}, shape, dtype, kwargs)


def poisson(
    lam: Numbers = 1, shape: ShapeLike | None = None, dtype: DTypeLike | None = None, **kwargs: object
) -> Symbol:
    """Return draws from the Poisson distribution with mean ``lam``, as floats."""
    return _draw("poisson", {"lam": lam}, shape, dtype, kwargs)


def negative_binomial(
    k: Numbers = 1, p: Numbers = 1, shape: ShapeLike | None = None, dtype: DTypeLike | None = None, **kwargs: object
) -> Symbol:
    """Return random numbers of failures before ``k`` successes of probability ``p``, as floats."""
    return _draw("negative_binomial", {"k": k, "p": p}, shape, dtype, kwargs)


def generalized_negative_binomial(
    mu: Numbers = 1,
    alpha: Numbers = 1,
    shape: ShapeLike | None = None,
    dtype: DTypeLike | None = None,
    **kwargs: object,
) -> Symbol:
    """Return draws from the negative binomial distribution with mean ``mu`` and variance mu + alpha mu², as floats."""
    return _draw("generalized_negative_binomial", {"mu": mu, "alpha": alpha}, shape, dtype, kwargs)


def randint(
    low: int, high: int, shape: ShapeLike | None = None, dtype: DTypeLike | None = None, **kwargs: object
) -> Symbol:
    """Return integers drawn uniformly from ``low`` to below ``high``."""
    return _draw("randint", {"low": low, "high": high}, shape, dtype, kwargs)


def multinomial(
    data: Symbol, shape: ShapeLike | None = None, get_prob: bool = True, dtype: DTypeLike = "int32", **kwargs: object
) -> Symbol:
    """Return the indices drawn with the probabilities in the last axis of ``data``; with ``get_prob`` also their
    logarithms."""
    options = {} if shape in (None, ()) else {"shape": shape}
    return function("_sample_multinomial")(data, get_prob=get_prob, dtype=dtype, **options, **kwargs)


def shuffle(data: Symbol, **kwargs: object) -> Symbol:
    """Return ``data`` with its rows in random order."""
    return function("_shuffle")(data, **kwargs)


def rand_zipfian(true_classes: Symbol, num_sampled: int, range_max: int) -> tuple[Symbol, Symbol, Symbol]:
    """Draw ``num_sampled`` of ``range_max`` classes with replacement: ``mx.sym.contrib.rand_zipfian``.

    Class ``k`` has the probability log((k + 2) / (k + 1)) / log(range_max + 1).

    Returns:
        (drawn classes in int64, expected count of each of ``true_classes`` among them, expected count of each drawn
        class), the counts in float64.
    """
    log_range = math.log(range_max + 1)
    drawn = uniform(0, log_range, shape=(num_sampled,), dtype="float64")
    classes = (function("exp")(drawn) - 1).astype("int64") % range_max

    def expected(classes: Symbol) -> Symbol:
        wide = classes.astype("float64")
        counts: Symbol = function("log")((wide + 2.0) / (wide + 1.0)) / log_range * num_sampled
        return counts

    return classes, expected(true_classes), expected(classes)


FUNCTIONS: dict[str, Callable[..., Symbol]] = {
    one.__name__: one
    for one in (
        uniform, normal, randn, gamma, exponential, poisson, negative_binomial, generalized_negative_binomial,
        randint, multinomial, shuffle,
    )
}  # fmt: skip
"""Functions of ``mx.sym.random`` with their own signatures; its ``*_like`` are operators."""


_EAGER = "or run the step on arrays with mx.nd.contrib.{}, which has no gradient"
LOOPS = {
    "foreach": "a graph has no loops; unroll it with a loop in Python (mx.sym.SliceChannel gives the rows, "
    "mx.sym.stack joins outputs; mx.rnn cells have unroll), " + _EAGER.format("foreach"),
    "while_loop": "a graph has no loops; unroll it with a loop in Python over as many steps as there may be, with "
    "mx.sym.where to keep what is done, " + _EAGER.format("while_loop"),
    "cond": "a graph has no branches; compute both and choose with mx.sym.where, " + _EAGER.format("cond"),
}
"""MXNet's operators with subgraphs, which do not exist here -> advice for the error message."""


class Namespace(ModuleType):
    """A namespace of operators whose registered names are one of ``prefixes`` followed by the attribute name.

    With ``short``, automatic node names omit the prefix. It is a module, so that ``import mxnet.symbol.contrib`` works.

    >>> Namespace("linalg", "_linalg_").nope
    Traceback (most recent call last):
    weftplan.errors.UnknownOperatorError: mx.sym.linalg has no operator 'nope'
    """

    def __init__(self, name: str, *prefixes: str, short: bool = False) -> None:
        super().__init__(f"weftplan.symbol.{name}", type(self).__doc__)
        self._name = name
        self._short = short
        self._prefixes = prefixes

    def __getattr__(self, name: str) -> Callable[..., Symbol]:
        if not name.startswith("__"):
            for prefix in self._prefixes:
                if registry.contains(prefix + name):
                    return function(prefix + name, name if self._short else "")
        if self._name == "contrib" and name in LOOPS:
            raise UnknownOperatorError(f"mx.sym.contrib.{name} is absent on purpose: {LOOPS[name]}")
        near = "" if name.startswith("__") else did_you_mean(name, self.__dir__())
        raise UnknownOperatorError(f"mx.sym.{self._name} has no operator {name!r}" + (near and f"; {near.rstrip()}"))

    def __dir__(self) -> list[str]:
        return sorted(n.removeprefix(p) for n in registry.names() for p in self._prefixes if n.startswith(p))


random = Namespace("random", "_random_", "_sample_", "random_", "sample_")
vars(random).update(FUNCTIONS)
linalg = Namespace("linalg", "linalg_", "_linalg_", short=True)
contrib = Namespace("contrib", "_contrib_", "contrib_", short=True)
image = Namespace("image", "_image_", short=True)
vars(contrib)["rand_zipfian"] = rand_zipfian
internal = Namespace("_internal", "")
