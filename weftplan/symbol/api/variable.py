"""Variables: the leaves of a graph.

Relies on the attribute scope that is open in the calling thread; keeps no state.
"""

from __future__ import annotations

from typing import Protocol

from weftplan.errors import ParameterError, did_you_mean
from weftplan.ops.core.params import dtype_code, p_dtype, p_shape
from weftplan.support.array_types import DTypeLike, ShapeLike
from weftplan.symbol import attribute
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.provenance import caller
from weftplan.symbol.symbol import Symbol

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
