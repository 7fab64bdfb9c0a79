"""Composition of symbols: inputs, automatic variables, names, groups and structure."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from weftplan import symbol as sym
from weftplan.errors import NotImplementedForSymbol, ParameterError, UnknownOperatorError
from weftplan.symbol import Symbol


def net() -> Symbol:
    """Return data -> fc1 -> relu -> fc2."""
    x = sym.FullyConnected(sym.Variable("data"), num_hidden=8, name="fc1")
    x = sym.Activation(x, act_type="relu", name="relu1")
    return sym.FullyConnected(x, num_hidden=2, name="fc2")


def test_missing_inputs_become_variables() -> None:
    """Missing weights and biases become variables, listed in depth-first order."""
    assert net().list_arguments() == ["data", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]
    assert net().list_outputs() == ["fc2_output"]
    assert net().list_auxiliary_states() == []


def test_inputs_by_position_and_by_name() -> None:
    """Inputs may be given by position or by keyword, and ``no_bias`` removes the bias."""
    a, w = sym.Variable("a"), sym.Variable("w")
    one = sym.FullyConnected(a, w, num_hidden=2, no_bias=True, name="x")
    two = sym.FullyConnected(weight=w, data=a, num_hidden=2, no_bias=True, name="x")
    assert one.list_arguments() == ["a", "w"]
    assert one.tojson() == two.tojson()


def test_auxiliary_states_are_not_arguments() -> None:
    """The moving statistics of BatchNorm are auxiliary states, and one of its three outputs is visible."""
    x = sym.BatchNorm(sym.Variable("data"), name="bn")
    assert x.list_arguments() == ["data", "bn_gamma", "bn_beta"]
    assert x.list_auxiliary_states() == ["bn_moving_mean", "bn_moving_var"]
    assert x.list_inputs() == ["data", "bn_gamma", "bn_beta", "bn_moving_mean", "bn_moving_var"]
    assert x.list_outputs() == ["bn_output"]
    assert x.attr_dict()["bn_moving_var"]["__init__"] == '["one", {}]'
    assert "bn_gamma" not in x.attr_dict()


def test_a_state_must_be_a_variable() -> None:
    """An auxiliary state that is no variable raises an error, because the operator writes to it."""
    with pytest.raises(ParameterError, match=r"moving_mean.*must be a variable"):
        sym.BatchNorm(sym.Variable("x"), moving_mean=sym.Variable("y") + 1)


def test_versions_count_writers() -> None:
    """Two BatchNorms that share a moving mean write its versions 1 and 2."""
    mean = sym.Variable("mean")
    x = sym.BatchNorm(sym.Variable("x"), moving_mean=mean, name="one")
    y = sym.BatchNorm(x, moving_mean=mean, name="two")
    assert [node.inputs[3].version for node in sym.topological_order(y.entries) if node.op] == [1, 2]


def test_input_errors_name_operator_and_inputs() -> None:
    """Too many, unknown and duplicate inputs raise errors with the operator and its inputs."""
    a = sym.Variable("a")
    with pytest.raises(ParameterError, match=r"Activation .*takes 1 input\(s\) \['data'\], got 2|by position"):
        sym.Activation(a, a, act_type="relu")
    with pytest.raises(ParameterError, match="no input is called 'weigth'; did you mean 'weight'"):
        sym.FullyConnected(a, weigth=a, num_hidden=1)
    with pytest.raises(ParameterError, match="'data' is given twice"):
        sym.FullyConnected(a, data=a, num_hidden=1)
    with pytest.raises(ParameterError, match="expected one output"):
        sym.exp(sym.Group([a, a]))


def test_parameters_are_parsed_at_creation() -> None:
    """Unknown, missing and malformed parameters raise errors when the node is created."""
    a = sym.Variable("a")
    with pytest.raises(ParameterError, match=r"FullyConnected.*'num_hiden'; did you mean 'num_hidden'"):
        sym.FullyConnected(a, num_hiden=3)
    with pytest.raises(ParameterError, match=r"FullyConnected.*'num_hidden' is missing"):
        sym.FullyConnected(a)
    with pytest.raises(ParameterError, match="act_type"):
        sym.Activation(a, act_type="reluu")


def test_parameters_by_position_follow_the_inputs() -> None:
    """Parameters may follow the inputs by position, and the method gives the node of the function."""
    a = sym.Variable("a")
    x = sym.clip(a, 0, 1, name="c")
    assert x.list_attr() == {"a_min": "0", "a_max": "1"}
    assert a.clip(0, 1, name="c").tojson() == x.tojson()
    assert a.reshape((2, 3)).list_attr() == {"shape": "(2, 3)"}
    assert sym.slice_axis(a, 0, 1, None).list_attr() == {"axis": "0", "begin": "1", "end": "None"}


def test_unknown_operator_lists_near_names() -> None:
    """An unknown operator of the module raises an error with a similar name; operators are listed by ``dir``."""
    with pytest.raises(UnknownOperatorError, match=r"'FullyConected'.*did you mean 'FullyConnected'"):
        sym.FullyConected  # noqa: B018
    with pytest.raises(AttributeError, match="no_such_thing"):
        sym.Variable("a").no_such_thing  # noqa: B018
    assert "FullyConnected" in dir(sym)
    assert "reshape" in dir(sym.Variable("a"))


def test_automatic_names_follow_the_spelling() -> None:
    """Automatic names count separately for each spelling of an operator."""
    a = sym.Variable("a")
    names = [
        sym.exp(a).name,
        sym.exp(a).name,
        sym.Concat(a, a).name,
        sym.concat(a, a).name,
        sym.cast(a, dtype="float16").name,
    ]
    assert names == ["exp0", "exp1", "concat0", "concat1", "cast0"]
    assert [(a + a).name, (a + 1).name, (2**a).name, (a > a).name] == [
        "_plus0",
        "_plusscalar0",
        "_rpower_scalar0",
        "_greater0",
    ]
    assert (sym.pow(2, a).name, sym.linalg.gemm2(a, a).name) == ("_rpowerscalar0", "gemm20")
    outputs = [sym.split(a, num_outputs=1), sym.make_loss(a), sym.sort(a), sym.topk(a, k=2, ret_typ="both")]
    assert [x.list_outputs() for x in outputs] == [
        ["split0_output0"],
        ["make_loss0_loss"],
        ["sort0_output0"],
        ["topk0_output0", "topk0_output1"],
    ]


def test_prefix_and_threads() -> None:
    """``Prefix`` is added to every name inside it, and automatic names of a new thread start from 0."""
    a = sym.Variable("a")
    with sym.Prefix("p_"):
        assert [sym.exp(a).name, sym.exp(a, name="n").name] == ["p_exp0", "p_n"]
    sym.exp(a)
    names: list[str | None] = []
    thread = threading.Thread(target=lambda: names.append(sym.exp(a).name))
    thread.start()
    thread.join()
    assert names == ["exp0"]


def test_indexing_and_iteration() -> None:
    """Outputs are selected by number, name or slice; wrong numbers and names raise errors."""
    x = sym.SliceChannel(sym.Variable("a"), num_outputs=3, name="s")
    assert len(x) == x.num_outputs == 3
    assert [part.list_outputs() for part in x] == [["s_output0"], ["s_output1"], ["s_output2"]]
    assert x["s_output1"].list_outputs() == x[1].list_outputs() == ["s_output1"]
    assert x[1:].list_outputs() == ["s_output1", "s_output2"]
    assert x[1].attr("_value_index") == "1"
    with pytest.raises(IndexError, match="output 3"):
        x[3]
    with pytest.raises(ValueError, match="did you mean 'fc_output'"):
        sym.FullyConnected(sym.Variable("data"), num_hidden=2, name="fc").get_internals()["fc"]
    with pytest.raises(ValueError, match="no output is called 'nope'"):
        x["nope"]
    with pytest.raises(ValueError, match="2 outputs are called"):
        sym.Group([x[0], x[0]])["s_output0"]


def test_group() -> None:
    """A group has all outputs and no name; an empty list, or one with other values than symbols, raises an error."""
    a, b = sym.Variable("a"), sym.Variable("b")
    x = sym.Group([a + b, b])
    assert x.list_outputs() == ["_plus0_output", "b"]
    assert x.name is None
    assert repr(x) == "<Symbol group [_plus0, b]>"
    for bad in ([], [a, 1]):
        with pytest.raises(TypeError, match="non-empty list of symbols"):
            sym.Group(bad)


def test_internals_and_children() -> None:
    """``get_internals`` has all visible outputs in order, and ``get_children`` the inputs of the heads."""
    x = net()
    internals = x.get_internals()
    assert internals.list_outputs() == [
        "data", "fc1_weight", "fc1_bias", "fc1_output", "relu1_output", "fc2_weight", "fc2_bias", "fc2_output",
    ]  # fmt: skip
    assert internals["relu1_output"].list_arguments() == ["data", "fc1_weight", "fc1_bias"]
    children = x.get_children()
    assert children is not None
    assert children.list_outputs() == ["relu1_output", "fc2_weight", "fc2_bias"]
    assert sym.Variable("a").get_children() is None


def test_composing_symbols_replaces_variables() -> None:
    r"""``net(data=other)`` returns a copy with ``other`` in place of the variable; both symbols are unchanged.

        data -> fc1 -> relu -> fc2        z -> exp -\
                                           (data) -> fc1 -> relu -> fc2
    """
    x, second = net(), sym.exp(sym.Variable("z"))
    y = x(data=second)
    assert y.list_arguments() == ["z", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]
    assert x.list_arguments()[0] == "data"
    assert x(second).tojson() == y.tojson()
    assert sym.Variable("v")(v=second).list_arguments() == ["z"]
    with pytest.raises(TypeError, match="by position or by name"):
        x(second, fc1_weight=second)
    with pytest.raises(ParameterError, match="no variable is called 'dta'; did you mean 'data'"):
        x(dta=second)
    with pytest.raises(TypeError, match="expected a Symbol, got int"):
        x(data=3)


def test_composing_renames_the_copy() -> None:
    """``net(data=other, name="q")`` names the copy's first head; a variable that replaces another keeps its name."""
    x = net()
    assert x(data=sym.Variable("z"), name="q").list_outputs() == ["q_output"]
    assert x.list_outputs() == ["fc2_output"]
    two = sym.Group([sym.Variable("a") + 1, sym.Variable("b") * 2])
    assert two(a=sym.Variable("c"), name="q").list_outputs() == ["q_output", "_mulscalar0_output"]
    z = sym.Variable("z")
    assert sym.Variable("a")(a=z, name="q").list_outputs() == ["z"]
    assert z.name == "z"


def test_composing_a_state() -> None:
    """Only a variable may replace an auxiliary state, and its version then counts the writer."""
    norm = sym.BatchNorm(sym.Variable("x"), name="bn")
    mean = sym.Variable("mean")
    result = norm(bn_moving_mean=mean)
    assert result.list_auxiliary_states() == ["mean", "bn_moving_var"]
    assert result.list_arguments() == ["x", "bn_gamma", "bn_beta"]
    assert [entry.version for entry in result.entries[0].node.inputs] == [0, 0, 0, 1, 2]
    assert [entry.version for entry in norm.entries[0].node.inputs] == [0, 0, 0, 1, 1]
    assert [entry.version for entry in norm.get_internals().entries] == [0, 0, 0, 1, 1, 0]
    with pytest.raises(ParameterError, match="writes to its input 'moving_mean', so it must be a variable"):
        norm(bn_moving_mean=sym.Variable("mean") + 1)


def test_numpy_numbers_on_either_side() -> None:
    """NumPy scalars work as operands on both sides and keep their digits; NumPy arrays raise an error."""
    a = sym.Variable("a")
    for result, op, text in (
        (np.float32(1.1) + a, "_plus_scalar", "1.1"),
        (a * np.float32(1.1), "_mul_scalar", "1.1"),
        (np.int64(3) - a, "_rminus_scalar", "3"),
        (np.float64(2.5) ** a, "_rpower_scalar", "2.5"),
        (np.float32(3) > a, "_lesser_scalar", "3.0"),
        (np.float32(3) == a, "_equal_scalar", "3.0"),
    ):
        assert (result.attr("op_name"), result.attr("scalar")) == (op, text)
    for wrong in (lambda: np.ones(3) + a, lambda: a * np.ones(3), lambda: np.array(3.0) - a):
        with pytest.raises(TypeError):
            wrong()


def test_what_symbols_refuse() -> None:
    """Symbols have no truth value, no ``+=`` and no methods that need data; ``%=`` and ``**=`` work, as in MXNet."""
    a = sym.Variable("a")
    with pytest.raises(NotImplementedForSymbol, match="no truth value"):
        bool(a)
    with pytest.raises(NotImplementedForSymbol, match=r"x = x \+ y"):
        a += 1
    a %= 3  # as in MXNet, these operators create a new symbol
    a **= 2
    assert (a.name, a.list_arguments()) == ("_powerscalar0", ["a"])
    for name in ("asnumpy", "asscalar", "wait_to_read", "copy", "as_in_context", "detach", "backward"):
        with pytest.raises(NotImplementedForSymbol, match=name):
            getattr(sym.Variable("b"), name)()
    with pytest.raises(TypeError):
        sym.Variable("b") + "text"


def test_created_at_is_the_callers_line() -> None:
    """Nodes of operators and variables have the line of the caller."""
    for x in (sym.Variable("a"), sym.exp(sym.Variable("a")), sym.Variable("a") + 1):
        assert (x.entries[0].node.created_at or "").startswith(__file__ + ":")


def test_creation_functions() -> None:
    """``zeros``, ``ones``, ``full`` and ``arange`` have no inputs; ``maximum`` of two numbers is a number."""
    assert sym.zeros((2, 3)).list_attr() == {"shape": "(2, 3)", "dtype": "float32"}
    assert sym.full((2,), 3, dtype="int32").list_attr() == {"shape": "(2,)", "dtype": "int32", "value": "3.0"}
    assert sym.arange(0, 5, 1.5).infer_shape()[1] == [(4,)]
    assert sym.ones((4, 1)).infer_shape()[1] == [(4, 1)]
    assert sym.maximum(2, 3) == 3
    with pytest.raises(TypeError, match="symbols or numbers"):
        sym.maximum("a", 1)


def test_split_v2() -> None:
    """``split_v2`` cuts at positions or into equal sections, with the names and shapes of MXNet 1.9.1."""
    x = sym.Variable("x")
    pieces = sym.split_v2(x, (1, 3), axis=1, name="cut")
    assert pieces.list_outputs() == ["cut_output0", "cut_output1", "cut_output2"]
    assert pieces.infer_shape(x=(2, 4))[1] == [(2, 1), (2, 2), (2, 1)]
    assert sym.split_v2(x, 2, squeeze_axis=True).infer_shape(x=(2, 4))[1] == [(4,), (4,)]
    assert x.split_v2((1, 3), axis=1, name="cut").tojson() == pieces.tojson()
    assert x.split_v2(2, squeeze_axis=True).infer_shape(x=(2, 4))[1] == [(4,), (4,)]
    with pytest.raises(ParameterError, match=r"split_v2.*got float"):
        sym.split_v2(x, 2.5)


def test_none_for_an_omitted_input():
    """None after the last input is accepted, as in MXNet."""
    data, weight = sym.Variable("data"), sym.Variable("w")
    result = sym.FullyConnected(data, weight, None, num_hidden=2, no_bias=True, name="fc")
    assert result.list_arguments() == ["data", "w"]
    with pytest.raises(ParameterError, match=r"takes 2 input\(s\)"):
        sym.FullyConnected(data, weight, sym.Variable("b"), num_hidden=2, no_bias=True)


@pytest.mark.parametrize(
    ("node", "outputs"),
    [
        (lambda x: sym.CTCLoss(x, name="n"), ["n_output0"]),
        (lambda x: sym.contrib.box_nms(x, name="n"), ["n_output0"]),
        (lambda x: sym.contrib.bipartite_matching(x, threshold=0.5, name="n"), ["n_output0", "n_output1"]),
        (lambda x: sym.contrib.quantize(x, name="n"), ["n_output0", "n_output1", "n_output2"]),
        (lambda x: sym.contrib.quantize_v2(x, name="n"), ["n_output0", "n_output1", "n_output2"]),
        (lambda x: sym.linalg.gelqf(x, name="n"), ["n_output0", "n_output1"]),
        (lambda x: sym.linalg.syevd(x, name="n"), ["n_output0", "n_output1"]),
        (lambda x: sym.topk(x, ret_typ="both", name="n"), ["n_output0", "n_output1"]),
        (lambda x: sym.BatchNorm(x, output_mean_var=True, name="n"), ["n_output", "n_mean", "n_var"]),
        (lambda x: sym.L2Normalization(x, name="n"), ["n_output"]),
    ],
)
def test_names_of_several_outputs(node, outputs):
    """Outputs have the names of MXNet 1.9.1, also if only the first output is visible."""
    assert node(sym.Variable("x")).list_outputs() == outputs
