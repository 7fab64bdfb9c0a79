"""Python operators of ``Symbol``: ``+ - * / % **``, comparisons, ``-x``, ``abs``.

Each selects the graph operator for two symbols, or for a symbol and a number. This module keeps no state; any thread
may use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from weftplan.errors import ParameterError
from weftplan.symbol import operators
from weftplan.symbol.node import Entry


class Arithmetic:
    """A mixin of Python operators: they make new nodes, comparisons give 0 or 1, and those that need data raise."""

    __slots__ = ()
    entries: list[Entry]
    __array_ufunc__ = None
    """NumPy scalars and arrays leave ``2 + x`` to the symbol, instead of reading it as a sequence of sequences."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        raise NotImplementedError

    def _single(self) -> Entry:
        """Return the only entry; raise ParameterError for a group."""
        if len(self.entries) != 1:
            raise ParameterError(
                f"an arithmetic operator expects one output, {self!r} has {len(self.entries)}; pick one by index"
            )
        return self.entries[0]

    def _binary(self, kind: str, other: Any, *, swapped: bool = False) -> Self:
        mine = self._single()
        theirs = other._single() if isinstance(other, Arithmetic) else other
        node = operators.binary(kind, theirs, mine) if swapped else operators.binary(kind, mine, theirs)
        return NotImplemented if node is None else type(self)([Entry(node)])

    def __add__(self, other: Any) -> Self:
        return self._binary("add", other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Self:
        return self._binary("sub", other)

    def __rsub__(self, other: Any) -> Self:
        return self._binary("sub", other, swapped=True)

    def __mul__(self, other: Any) -> Self:
        return self._binary("mul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Self:
        return self._binary("truediv", other)

    def __rtruediv__(self, other: Any) -> Self:
        return self._binary("truediv", other, swapped=True)

    def __mod__(self, other: Any) -> Self:
        return self._binary("mod", other)

    def __rmod__(self, other: Any) -> Self:
        return self._binary("mod", other, swapped=True)

    def __pow__(self, other: Any) -> Self:
        return self._binary("pow", other)

    def __rpow__(self, other: Any) -> Self:
        return self._binary("pow", other, swapped=True)

    def __eq__(self, other: object) -> Self:  # type: ignore[override]
        return self._binary("eq", other)

    def __ne__(self, other: object) -> Self:  # type: ignore[override]
        return self._binary("ne", other)

    def __gt__(self, other: Any) -> Self:
        return self._binary("gt", other)

    def __ge__(self, other: Any) -> Self:
        return self._binary("ge", other)

    def __lt__(self, other: Any) -> Self:
        return self._binary("lt", other)

    def __le__(self, other: Any) -> Self:
        return self._binary("le", other)

    def __neg__(self) -> Self:
        return type(self)([Entry(operators.negative(self._single()))])

    def __abs__(self) -> Self:
        return type(self)([Entry(operators.absolute(self._single()))])

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise operators.no_truth_value()

    def __iadd__(self, other: Any) -> Self:
        raise operators.no_inplace("+")

    def __isub__(self, other: Any) -> Self:
        raise operators.no_inplace("-")

    def __imul__(self, other: Any) -> Self:
        raise operators.no_inplace("*")

    def __itruediv__(self, other: Any) -> Self:
        raise operators.no_inplace("/")
