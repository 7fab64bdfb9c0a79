"""Error messages of symbols: wrong inputs, similar names and long lists."""

from __future__ import annotations

import pytest

from weftplan import ndarray as nd
from weftplan import symbol as sym
from weftplan.errors import DTypeError, ParameterError, UnknownOperatorError


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda a, x: sym.FullyConnected(data=x, num_hidden=3),
            "input 'data' must be a Symbol, got NDArray; use mx.nd.",
        ),
        (lambda a, x: sym.FullyConnected(x, num_hidden=3), "input 0 must be a Symbol, got NDArray"),
        (
            lambda a, x: sym.FullyConnected(a, 3.0, num_hidden=3),
            "input 1 must be a Symbol, got float; the order by position is data, weight, bias",
        ),
        (
            lambda a, x: sym.FullyConnected(a, weight=x.asnumpy(), num_hidden=3),
            "'weight' must be a Symbol, got ndarray",
        ),
        (lambda a, x: sym.elemwise_add(a, 1), "elemwise_add: input 1 must be a Symbol, got int"),
        (lambda a, x: sym.Concat(a, x), "Concat: input 1 must be a Symbol, got NDArray"),
        (lambda a, x: sym.Concat(1, a), "Concat: input 0 must be a Symbol, got int"),
    ],
)
def test_arrays_and_numbers_are_no_inputs(call, words) -> None:
    """An array or a number as an input raises an error that names the input."""
    with pytest.raises(DTypeError, match=words):
        call(sym.Variable("a"), nd.zeros((2, 2)))


def test_parameters_given_twice_or_too_often() -> None:
    """Parameters that are given twice, or too many by position, raise errors that name the parameters."""
    a = sym.Variable("a")
    with pytest.raises(ParameterError, match="clip: parameter 'a_min' is given twice"):
        sym.clip(a, 0, a_min=1)
    with pytest.raises(
        ParameterError, match="clip: 7 arguments by position, it takes 6 at most: data, a_min, a_max, n"
    ):
        sym.clip(a, 0, 1, "name", None, None, 2)
    with pytest.raises(DTypeError, match=r"Concat: input 1 must be a Symbol, got int; .* parameters by name"):
        sym.Concat(a, 1, dim=0)


def test_inputs_given_as_none_are_missing() -> None:
    """None as an input counts as missing, as in MXNet."""
    a = sym.Variable("a")
    assert sym.FullyConnected(a, bias=None, num_hidden=3, name="f").list_arguments() == ["a", "f_weight", "f_bias"]
    without = sym.FullyConnected(a, bias=None, no_bias=True, num_hidden=3, name="f")
    assert without.list_arguments() == ["a", "f_weight"]


def test_similar_names_are_public_names() -> None:
    """Errors suggest similar operators and functions, but no backward operators."""
    with pytest.raises(UnknownOperatorError) as caught:
        sym.FullyConected  # noqa: B018
    assert "_backward" not in str(caught.value)
    with pytest.raises(UnknownOperatorError, match="'Varable'; did you mean 'Variable'"):
        sym.Varable  # noqa: B018
    with pytest.raises(UnknownOperatorError, match=r"mx\.sym\.random has no operator 'unform'; did you mean 'uniform'"):
        sym.random.unform  # noqa: B018
    with pytest.raises(UnknownOperatorError, match=r"'qqqqqqq'$"):
        sym.qqqqqqq  # noqa: B018
    with pytest.raises(UnknownOperatorError, match="absent on purpose: every array is dense"):
        sym.sparse  # noqa: B018


def test_long_lists_of_names_are_cut() -> None:
    """Errors about many names list eight of them and the most similar one."""
    net = sym.Variable("data")
    for i in range(40):
        net = sym.FullyConnected(net, num_hidden=2, name=f"fc{i}")
    with pytest.raises(ParameterError, match=r"'fc33_wieght'; did you mean 'fc33_weight'\?.*'fc3_weight', … 73 more\]"):
        net.infer_shape(fc33_wieght=(2, 2))
    with pytest.raises(ParameterError, match=r"'fc33_wieght'; did you mean 'fc33_weight'\?.*… 73 more\]"):
        net(fc33_wieght=net)
    with pytest.raises(ParameterError, match=r"'fc33_otput'; did you mean 'fc33_output'\?.*… 113 more\]"):
        net.get_internals()["fc33_otput"]
    many = sym.add_n(*(sym.Variable(f"v{i}") for i in range(20)))
    with pytest.warns(UserWarning, match=r"shapes cannot be inferred; unknown: v0: \(\), .*, v7: \(\), … 12 more"):
        assert many.infer_shape() == (None, None, None)
