"""Parameter parsers: accepted spellings in symbol files and calls, and errors for bad values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftplan.errors import ParameterError
from weftplan.ops.core import params, registry
from weftplan.ops.core.params import (
    DTYPE_CODES,
    dtype_code,
    format_value,
    p_bool,
    p_dtype,
    p_enum,
    p_float,
    p_int,
    p_optional,
    p_shape,
    p_tuple,
)


@pytest.mark.parametrize(
    ("parser", "value", "expected"),
    [
        (p_int, " 12 ", 12),
        (p_int, "3L", 3),
        (p_int, np.int64(4), 4),
        (p_float, "1e-05", 1e-5),
        (p_float, "inf", float("inf")),
        (p_float, np.float32(0.5), 0.5),
        (p_bool, "true", True),
        (p_bool, "False", False),
        (p_bool, np.bool_(True), True),
        (p_bool, "0", False),
        (p_shape, "(3, 3)", (3, 3)),
        (p_shape, "[3,3]", (3, 3)),
        (p_shape, "(3,)", (3,)),
        (p_shape, "3", (3,)),
        (p_shape, "()", ()),
        (p_shape, "(2L, 3L)", (2, 3)),
        (p_shape, [1, np.int32(2)], (1, 2)),
        (p_shape, np.array([4, 5]), (4, 5)),
        (p_shape, 7, (7,)),
        (p_optional(p_shape), "None", None),
        (p_optional(p_shape), None, None),
        (p_optional(p_int), "-1", -1),
        (p_tuple(p_optional(p_int)), "(None, -2)", (None, -2)),
        (p_tuple(p_float), "(0.5, 1)", (0.5, 1.0)),
        (p_enum("max", "avg"), "avg", "avg"),
        (p_dtype, "float64", np.dtype("float64")),
        (p_dtype, np.float16, np.dtype("float16")),
        (p_dtype, 4, np.dtype("int32")),
        (p_dtype, "3", np.dtype("uint8")),
    ],
)
def test_accepted(parser, value, expected):
    """Each spelling gives the canonical value, of the canonical type."""
    parsed = parser(value)
    assert parsed == expected
    assert type(parsed) is type(expected)


@pytest.mark.parametrize(
    ("parser", "value", "message"),
    [
        (p_int, "1.5", "integer"),
        (p_int, True, "not a boolean"),
        (p_int, 1.0, "integer"),
        (p_int, None, "integer"),
        (p_float, "fast", "number"),
        (p_float, None, "number"),
        (p_bool, "yes", "True or False"),
        (p_bool, 2, "True or False"),
        (p_shape, "(3, 3", "closing bracket"),
        (p_shape, "(3,, 3)", "an item is missing"),
        (p_shape, "(3, x)", "item 1 .'x'.: expected an integer"),
        (p_shape, None, "expected an integer"),
        (p_enum("max", "avg"), "mean", "one of max, avg"),
        (p_dtype, "float31", "one of float32"),
        (p_dtype, 99, "99 is not one of MXNet's numbers"),
        (p_dtype, "complex64", "one of float32"),
        (p_dtype, "a", "one of float32"),
        (p_dtype, "|a5", "one of float32"),
        (p_dtype, None, "one of float32"),
    ],
)
def test_refused(parser, value, message):
    """The error for a bad value states the expected form."""
    with pytest.raises(ValueError, match=message):
        parser(value)


@given(st.lists(st.integers(-10, 10**6), max_size=5).map(tuple))
def test_shape_text_round_trip(shape):
    """The text of a shape parses to the same shape, in MXNet's and in compact spelling."""
    assert p_shape(format_value(shape)) == shape
    assert p_shape(str(list(shape)).replace(" ", "")) == shape


@given(st.floats(allow_nan=False))
def test_float_text_round_trip(value):
    """The text of a float parses to an equal float."""
    assert p_float(format_value(value)) == value


def test_dtype_codes_round_trip():
    """Every MXNet dtype code gives a dtype, and the dtype gives the code."""
    for code in DTYPE_CODES:
        assert dtype_code(p_dtype(code)) == code
        assert p_dtype(format_value(p_dtype(code))) == p_dtype(code)
    with pytest.raises(ValueError, match="complex64 has no number"):
        dtype_code("complex64")


def test_defaults_survive_their_text():
    """Every default of every operator, written as text and parsed again, is unchanged.

    Symbol files can therefore store it.
    """
    for name in registry.names(aliases=False):
        for param in registry.get(name).params:
            if param.default is not registry.REQUIRED:
                assert param.parse(format_value(param.default)) == param.default, (name, param.name)


def test_every_operator_is_documented():
    """Each operator has a documentation sentence, and each parameter a description."""
    for name in registry.names(aliases=False):
        op = registry.get(name)
        assert op.doc.endswith("."), name
        assert all(param.doc for param in op.params), name


def test_error_names_operator_and_parameter():
    """Errors of parse_params name the operator, node, parameter and expected form.

    For a misspelt parameter they suggest a similar name.
    """
    op = registry.get("clip")
    with pytest.raises(ParameterError, match=r"operator clip \('c0'\): parameter a_min='low': expected a number"):
        registry.parse_params(op, {"a_min": "low", "a_max": 1}, node="c0")
    with pytest.raises(ParameterError, match="required parameter 'a_max' is missing"):
        registry.parse_params(op, {"a_min": 0})
    with pytest.raises(ParameterError, match="unknown parameter 'a_mix'; did you mean 'a_min'"):
        registry.parse_params(op, {"a_mix": 0, "a_max": 1})


def test_format_of_types():
    """format_value writes types, NumPy numbers and lists as MXNet's parsers read them."""
    assert format_value(np.float32) == "float32"
    assert format_value(np.int64(3)) == "3"
    assert format_value([1, None]) == "(1, None)"
    assert params.p_str(5) == "5"
