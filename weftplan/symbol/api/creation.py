"""Variables, symbols without inputs (zeros, …), functions of symbols or numbers (maximum, …), split_v2."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from weftplan.errors import ParameterError, did_you_mean
from weftplan.ops.core.params import dtype_code, p_dtype, p_shape
from weftplan.support import slots
from weftplan.support.array_types import DTypeLike, ShapeLike
from weftplan.symbol import attribute
from weftplan.symbol.api.functions import function
from weftplan.symbol.arithmetic import binary, is_number
from weftplan.symbol.node import Entry, Node, caller
from weftplan.symbol.symbol import Symbol, single

_KEYWORDS = ("name", "attr", "shape", "lr_mult", "wd_mult", "dtype", "init", "stype")
_STORAGE_TYPES = {"default": 0, "row_sparse": 1, "csr": 2}


class HasDumps(Protocol):
    """An initializer, which a symbol holds as text."""

    def dumps(self) -> str:
        """Return its name and settings as text."""
        ...


def Variable(
    name: str,
    attr: dict[str, str] | None = None,
    shape: ShapeLike | None = None,
    lr_mult: float | None = None,
    wd_mult: float | None = None,
    dtype: DTypeLike | None = None,
    init: str | HasDumps | None = None,
    stype: str | None = None,
    **kwargs: str,
) -> Symbol:
    """Make a symbol for an array that is provided later.

    Args:
        shape: known dimensions, 0 for an unknown one.
        lr_mult: factor of the learning rate for this parameter.
        wd_mult: factor of the weight decay.
        init: an initializer (its ``dumps()`` is stored), or its text.
        stype: storage type; only ``"default"`` can be bound here.
        kwargs: more attributes, named ``__like_this__``.

    Raises:
        TypeError: ``name`` is no text.
        ParameterError: another keyword, or a value that does not parse.

    >>> Variable("weight", shape=(3, 4), lr_mult=2).list_attr()
    {'__shape__': '(3, 4)', '__lr_mult__': '2', 'lr_mult': '2'}
    """
    if not isinstance(name, str):
        raise TypeError(f"Variable expects a name as text, got {type(name).__name__}")
    attrs = attribute.current(attr)
    try:
        if shape is not None:
            attrs["__shape__"] = str(p_shape(shape))
        if dtype is not None:
            attrs["__dtype__"] = str(dtype_code(p_dtype(dtype)))
    except ValueError as error:
        raise ParameterError(f"Variable {name!r}: {error}") from error
    if lr_mult is not None:
        attrs["__lr_mult__"] = str(lr_mult)
    if wd_mult is not None:
        attrs["__wd_mult__"] = str(wd_mult)
    if init is not None:
        attrs["__init__"] = init if isinstance(init, str) else init.dumps()
    if stype is not None:
        if stype not in _STORAGE_TYPES:
            raise ParameterError(f"Variable {name!r}: stype must be one of {', '.join(_STORAGE_TYPES)}, got {stype!r}")
        attrs["__storage_type__"] = str(_STORAGE_TYPES[stype])
    for key, value in kwargs.items():
        if not (key.startswith("__") and key.endswith("__")):
            hint = did_you_mean(key, _KEYWORDS)
            raise ParameterError(
                f"Variable {name!r}: unknown keyword {key!r}; {hint}attributes are named __like_this__"
            )
        attrs[key] = str(value)
    stored = {f"__{key}__" if key in attribute.HIDDEN_KEYS else key: value for key, value in attrs.items()}
    return Symbol([Entry(Node(None, name, attrs=stored, created_at=caller()))])


def zeros(shape: ShapeLike, dtype: DTypeLike | None = None, **kwargs: object) -> Symbol:
    """Return zeros of ``shape``, float32 by default.

    Args:
        shape: dimensions; a number is one dimension.
        dtype: dtype of the result; None: float32.
        **kwargs: ``name`` of the node, and attributes of it.
    """
    return function("_zeros")(shape=shape, dtype=dtype or "float32", **kwargs)


def ones(shape: ShapeLike, dtype: DTypeLike | None = None, **kwargs: object) -> Symbol:
    """Return ones of ``shape``, float32 by default.

    Args:
        shape: dimensions; a number is one dimension.
        dtype: dtype of the result; None: float32.
        **kwargs: ``name`` of the node, and attributes of it.
    """
    return function("_ones")(shape=shape, dtype=dtype or "float32", **kwargs)


def full(shape: ShapeLike, val: float, dtype: DTypeLike | None = None, **kwargs: object) -> Symbol:
    """Return an array of ``shape`` filled with ``val``, float32 by default.

    Args:
        shape: dimensions; a number is one dimension.
        val: value of every element.
        dtype: dtype of the result; None: float32.
        **kwargs: ``name`` of the node, and attributes of it.
    """
    return function("_full")(shape=shape, dtype=dtype or "float32", value=float(val), **kwargs)


def arange(
    start: float,
    stop: float | None = None,
    step: float = 1.0,
    repeat: int = 1,
    infer_range: bool = False,
    name: str | None = None,
    dtype: DTypeLike | None = None,
) -> Symbol:
    """Return numbers from ``start`` up to ``stop`` (exclusive), each ``repeat`` times.

    Args:
        start: first number; the bound, if ``stop`` is None.
        stop: end, which is excluded.
        step: difference of neighbours.
        repeat: how often each number is repeated.
        infer_range: take the length from the nodes that read the result.
        name: name of the node; None: an automatic name.
        dtype: dtype of the result; None: float32.
    """
    return function("_arange")(
        start=start, stop=stop, step=step, repeat=repeat, infer_range=infer_range, name=name, dtype=dtype or "float32"
    )


def split_v2(
    ary: Symbol,
    indices_or_sections: int | Sequence[int],
    axis: int = 0,
    squeeze_axis: bool = False,
    name: str | None = None,
) -> Symbol:
    """Split ``ary`` along ``axis`` into a number of equal sections, or at the given indices.

    Args:
        ary: symbol to split.
        indices_or_sections: number of equal sections, or the indices at which sections begin.
        axis: axis to split.
        squeeze_axis: drop the axis, if each section has length 1.
        name: name of the node; None: an automatic name.

    Raises:
        ParameterError: ``indices_or_sections`` is neither a number nor a sequence of indices.
    """
    if isinstance(indices_or_sections, list | tuple):
        sections, indices = 0, [0, *indices_or_sections]  # a list, since MXNet writes one
    elif isinstance(indices_or_sections, int):
        sections, indices = indices_or_sections, []
    else:
        raise ParameterError(
            f"split_v2: expected the number of sections or a tuple of places, got {type(indices_or_sections).__name__}"
        )
    return function("_split_v2")(
        ary, indices=indices, axis=axis, squeeze_axis=squeeze_axis, sections=sections, name=name
    )


slots.SYMBOL_SPLIT.fill(split_v2)


def linspace(
    start: float, stop: float, num: int, endpoint: bool = True, name: str | None = None, dtype: DTypeLike | None = None
) -> Symbol:
    """Return ``num`` equidistant numbers from ``start`` to ``stop``, which is excluded unless ``endpoint``.

    Args:
        start: first number.
        stop: last number.
        num: how many numbers.
        endpoint: whether ``stop`` belongs to them.
        name: name of the node; None: an automatic name.
        dtype: dtype of the result; None: float32.
    """
    return function("_linspace")(
        start=start, stop=stop, num=num, endpoint=endpoint, name=name, dtype=dtype or "float32"
    )


def eye(N: int, M: int = 0, k: int = 0, dtype: DTypeLike | None = None, **kwargs: object) -> Symbol:
    """Return ``N`` rows and ``M`` columns (0: N), zero except for a diagonal of 1 at offset ``k`` above the main.

    Args:
        N: rows.
        M: columns; 0: N.
        k: offset of the diagonal; above the main diagonal if positive.
        dtype: dtype of the result; None: float32.
        **kwargs: ``name`` of the node, and attributes of it.
    """
    return function("_eye")(N=N, M=M, k=k, dtype=dtype or "float32", **kwargs)


def histogram(a: Symbol, bins: Symbol | int = 10, range: Sequence[float] | None = None, **kwargs: object) -> Symbol:
    """Return counts and edges of a histogram; ``bins`` is a number of equal bins over ``range``, or the edges.

    Args:
        a: numbers of any shape.
        bins: number of bins of equal width, or a symbol of the edges.
        range: (lowest, highest) edge; needed with a number of bins.
        **kwargs: ``name`` of the node, and attributes of it.
    """
    if isinstance(bins, Symbol):
        return function("_histogram")(a, bins, **kwargs)
    if range is None:
        raise ParameterError("histogram: a number of bins needs a range, since a symbol has no values yet")
    return function("_histogram")(a, bin_cnt=bins, range=tuple(range), **kwargs)


def maximum(left: Symbol | float, right: Symbol | float) -> Symbol | float:
    """Return the elementwise maximum of two symbols or of a symbol and a number; for two numbers, a number."""
    return _either("maximum", left, right, max)


def minimum(left: Symbol | float, right: Symbol | float) -> Symbol | float:
    """Return the elementwise minimum of two symbols or of a symbol and a number; for two numbers, a number."""
    return _either("minimum", left, right, min)


def power(base: Symbol | float, exp: Symbol | float) -> Symbol | float:
    """Return ``base ** exp`` for symbols and numbers."""
    return _either("power", base, exp, pow)


def hypot(left: Symbol | float, right: Symbol | float) -> Symbol | float:
    """Return the square root of the sum of both squares, for symbols and numbers."""
    return _either("hypot", left, right, math.hypot)


def modulo(dividend: Symbol | float, divisor: Symbol | float) -> Symbol | float:
    """Return ``dividend % divisor`` for symbols and numbers."""
    return _either("mod", dividend, divisor, lambda a, b: a % b)


def _either(
    kind: str, lhs: Symbol | float, right: Symbol | float, numbers: Callable[[float, float], float]
) -> Symbol | float:
    if not isinstance(lhs, Symbol) and not isinstance(right, Symbol) and is_number(lhs) and is_number(right):
        return numbers(lhs, right)
    sides = [single(side, kind) if isinstance(side, Symbol) else side for side in (lhs, right)]
    node = binary(kind, *sides)
    if node is None:
        raise TypeError(f"{kind} expects symbols or numbers, got {type(lhs).__name__} and {type(right).__name__}")
    return Symbol([Entry(node)])
