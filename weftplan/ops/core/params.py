"""Parsers of operator parameters, which turn text or Python values into canonical values.

A parser accepts any object and returns the canonical value, or raises ``ValueError`` that names the expected values;
:func:`weftplan.ops.core.registry.parse_params` adds the operator and the parameter. All parsed values are hashable, and
parsing the text that :func:`format_value` returns gives the same value.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from weftplan.ops.core.floats import dtype_of
from weftplan.support.array_types import DType, DTypeLike

Parser = Callable[[Any], Any]
_MEANINGS: dict[Parser, str] = {}
"""For each parser, the type annotation of the values that it accepts."""


def meaning(parser: Parser) -> str:
    """Return the type annotation, as text, of the values that a parser accepts.

    >>> meaning(p_int), meaning(p_optional(p_enum("max", "avg"))), meaning(p_tuple(p_float)), meaning(len)
    ('int', "Literal['max', 'avg'] | None", 'float | Sequence[float]', 'Any')
    """
    return _MEANINGS.get(parser, "Any")


def _means(parser: Parser, text: str) -> Parser:
    _MEANINGS[parser] = text
    return parser


DTYPE_CODES: dict[int, str] = {
    0: "float32",
    1: "float64",
    2: "float16",
    3: "uint8",
    4: "int32",
    5: "int8",
    6: "int64",
    7: "bool",
    8: "int16",
    9: "uint16",
    10: "uint32",
    11: "uint64",
    12: "bfloat16",
}
"""MXNet 1.9.1's numbers of dtypes, which files and ``__dtype__`` attributes contain."""

_CODE_OF = {name: code for code, name in DTYPE_CODES.items()}
_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
"""Short names of dtypes in other libraries, for hints in errors."""
_TRUE = frozenset({"true", "1"})
_FALSE = frozenset({"false", "0"})
_NONE = frozenset({"none", ""})


def from_text(value: Any) -> Any:
    """Return the number, tuple or truth value that a text names, as in an attribute of an operator; else ``value``.

    >>> from_text("(2, 3)"), from_text("0.5"), from_text((2, 3)), from_text("same")
    ((2, 3), 0.5, (2, 3), 'same')
    """
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value.strip())
    except (ValueError, SyntaxError):
        return value


def dtype_code(dtype: DTypeLike) -> int:
    """Return MXNet's number of ``dtype``.

    Raises:
        ValueError: MXNet has no number for it.

    >>> dtype_code("float16")
    2
    """
    name = dtype_of(dtype).name
    if name not in _CODE_OF:
        raise ValueError(f"dtype {name} has no number: expected one of {', '.join(_CODE_OF)}")
    return _CODE_OF[name]


def p_int(value: Any) -> int:
    """Return an integer, from an integer or its decimal text.

    >>> p_int("-3"), p_int(7)
    (-3, 7)
    """
    if isinstance(value, str):
        text = value.strip()
        if text[-1:] == "L":  # files written by Python 2 contain 3L
            text = text[:-1]
        try:
            return int(text)
        except ValueError:
            raise ValueError("expected an integer") from None
    if isinstance(value, bool | np.bool_):
        raise ValueError("expected an integer, not a boolean")
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError("expected an integer") from None


def p_range(least: int, greatest: int) -> Parser:
    """Return a parser of integers from ``least`` to ``greatest``.

    >>> p_range(1, 3)("3")
    3
    """

    def parse(value: object) -> int:
        number = p_int(value)
        if not least <= number <= greatest:
            raise ValueError(f"expected at least {least}" if number < least else f"expected at most {greatest:,}")
        return number

    return _means(parse, "int")


p_inputs = p_range(1, 1 << 20)
"""The parser of a number of inputs. It has a limit, because names of inputs are made from the number. A symbol file is
checked more strictly, since it contains the inputs themselves."""
MAX_OUTPUTS = 1 << 16
p_outputs = p_range(1, MAX_OUTPUTS)
"""The parser of a node's number of outputs. No file contains the outputs themselves, so only this limit bounds them."""


def p_float(value: Any) -> float:
    """Return a float, from any real number or its text, which may end in C's ``f``.

    >>> p_float("1e-3f"), p_float(2)
    (0.001, 2.0)
    """
    if isinstance(value, str) and value[-1:] == "f" and value[-2:-1].isdecimal():
        value = value[:-1]
    if isinstance(value, bool | np.bool_) or value is None:
        raise ValueError("expected a number")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError("expected a number") from None


def p_bool(value: object) -> bool:
    """Return a boolean, from True, False, 1 or 0, or from their text in any case.

    >>> p_bool("True"), p_bool(0)
    (True, False)
    """
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError("expected True or False")


def p_str(value: object) -> str:
    """Return ``value`` as text.

    >>> p_str("cpu(0)")
    'cpu(0)'
    """
    return str(value)


def p_tuple(item: Parser) -> Parser:
    """Return a parser of tuples of ``item``, from a sequence, a single item, or text with or without brackets.

    >>> p_tuple(p_float)("[1, 0.5]"), p_tuple(p_optional(p_int))("(None, 2)")
    ((1.0, 0.5), (None, 2))
    """

    def parse(value: object) -> tuple[object, ...]:
        if isinstance(value, str):
            text = value.strip()
            if text[:1] in ("(", "["):
                if text[-1:] != (")" if text[0] == "(" else "]"):
                    raise ValueError("expected a tuple such as (3, 3): the closing bracket is missing")
                text = text[1:-1]
            parts = [part.strip() for part in text.split(",")]
            if parts[-1] == "":  # "" and the trailing comma of "(3,)"
                parts.pop()
            if "" in parts:
                raise ValueError("expected a tuple such as (3, 3): an item is missing")
            return tuple(_items(item, parts))
        if isinstance(value, tuple | list | np.ndarray):
            return tuple(_items(item, value))
        return tuple(_items(item, [value]))

    return _means(parse, f"{meaning(item)} | Sequence[{meaning(item)}]")


def _items(item: Parser, values: Iterable[object]) -> list[object]:
    parsed = []
    for position, value in enumerate(values):
        try:
            parsed.append(item(value))
        except ValueError as error:
            raise ValueError(f"item {position} ({value!r}): {error}") from None
    return parsed


def p_shape(value: object) -> tuple[int, ...]:
    """Return a tuple of integers.

    >>> p_shape("(3, 3)"), p_shape("[3,3]"), p_shape("(3,)"), p_shape("3"), p_shape(4), p_shape([1, -1])
    ((3, 3), (3, 3), (3,), (3,), (4,), (1, -1))
    """
    if type(value) is tuple and all(type(dim) is int for dim in value):
        return value
    parsed: tuple[int, ...] = _int_tuple(value)
    return parsed


def p_optional(parser: Parser) -> Parser:
    """Return a parser like ``parser`` that also accepts None; the texts ``"None"`` and ``""`` give None.

    >>> p_optional(p_int)("None"), p_optional(p_int)("4")
    (None, 4)
    """

    def parse(value: object) -> object:
        if value is None or (isinstance(value, str) and value.strip().lower() in _NONE):
            return None
        return parser(value)

    return _means(parse, f"{meaning(parser)} | None")


def p_enum(*choices: str) -> Parser:
    """Return a parser that accepts exactly the texts ``choices``.

    >>> p_enum("max", "avg")("avg")
    'avg'
    """
    allowed = frozenset(choices)

    def parse(value: object) -> str:
        text = str(value)
        if text not in allowed:
            raise ValueError(f"expected one of {', '.join(choices)}")
        return text

    return _means(parse, f"Literal[{', '.join(map(repr, choices))}]")


def p_dtype(value: object) -> DType:
    """Return a dtype, from a NumPy dtype, type or name, or MXNet's number of it.

    >>> p_dtype("float16"), p_dtype(0), p_dtype("6"), p_dtype(np.uint8)
    (dtype('float16'), dtype('float32'), dtype('int64'), dtype('uint8'))
    """
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        if int(value) not in DTYPE_CODES:
            raise ValueError(
                f"expected a dtype: {int(value)} is not one of MXNet's numbers 0 to {max(_CODE_OF.values())}"
            )
        value = DTYPE_CODES[int(value)]
    spec: Any = value  # dtype_of raises TypeError for other values
    try:
        dtype: np.dtype[Any] | None = dtype_of(spec) if value is not None else None
    except TypeError as error:
        if value == "bfloat16":
            raise ValueError(str(error)) from None
        dtype = None
    if dtype is None or dtype.name not in _CODE_OF:
        near = _SHORT.get(value) if isinstance(value, str) else None
        hint = f"did you mean {near!r}? " if near else ""
        raise ValueError(f"{hint}expected a dtype: one of {', '.join(_CODE_OF)}")
    return dtype


def format_value(value: object) -> str:
    """Return the text of a parsed value, in the form of symbol files.

    >>> format_value((3, 3)), format_value(True), format_value(None), format_value(np.dtype("int8"))
    ('(3, 3)', 'True', 'None', 'int8')
    """
    if isinstance(value, np.dtype):
        return str(value.name)
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, type) and issubclass(value, np.generic):
        return np.dtype(value).name
    if isinstance(value, tuple):
        inner = ", ".join(format_value(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, np.generic):
        value = value.item()
    return str(value)


_MEANINGS.update(
    {
        p_int: "int",
        p_float: "float",
        p_bool: "bool | int",
        p_str: "str",
        p_shape: "int | Sequence[int]",
        p_dtype: "str | type | np.dtype[Any]",
    }
)
_int_tuple = p_tuple(p_int)
