"""Operator namespaces: ``mx.sym.random``, ``.linalg``, ``.contrib``, ``.image``, ``._internal``.

A namespace looks up its operators on access and stores none. Any thread may use it.
"""

from __future__ import annotations

from collections.abc import Callable

from weftplan.errors import UnknownOperatorError, did_you_mean
from weftplan.ops.core import registry
from weftplan.symbol.api.distributions import FUNCTIONS, rand_zipfian
from weftplan.symbol.api.functions import function
from weftplan.symbol.symbol import Symbol

_EAGER = "or run the step on arrays with mx.nd.contrib.{}, which has no gradient"
LOOPS = {
    "foreach": "a graph has no loops; unroll it with a loop in Python (mx.sym.SliceChannel gives the rows, "
    "mx.sym.stack joins outputs; mx.rnn cells have unroll), " + _EAGER.format("foreach"),
    "while_loop": "a graph has no loops; unroll it with a loop in Python over as many steps as there may be, with "
    "mx.sym.where to keep what is done, " + _EAGER.format("while_loop"),
    "cond": "a graph has no branches; compute both and choose with mx.sym.where, " + _EAGER.format("cond"),
}
"""MXNet's operators with subgraphs, and their replacements."""


class Namespace:
    """A namespace of operators whose registered names are one of ``prefixes`` followed by the attribute name.

    With ``short``, automatic node names omit the prefix.

    >>> Namespace("linalg", "_linalg_").nope
    Traceback (most recent call last):
    weftplan.errors.UnknownOperatorError: mx.sym.linalg has no operator 'nope'
    """

    def __init__(self, name: str, *prefixes: str, short: bool = False) -> None:
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
