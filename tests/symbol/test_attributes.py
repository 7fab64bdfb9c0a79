"""Attributes of symbols: scopes, hidden names, variables, and changes."""

from __future__ import annotations

import pytest

import weftplan as mx
from weftplan import symbol as sym
from weftplan.errors import ParameterError


def test_scope_reaches_nodes_and_their_variables() -> None:
    """A node that is created in a scope gets the scope's attributes, and so do its automatic variables."""
    with sym.AttrScope(ctx_group="dev1", __data__="great"):
        x = sym.FullyConnected(sym.Variable("data"), num_hidden=2, name="fc")
    for name in ("data", "fc", "fc_weight", "fc_bias"):
        assert x.attr_dict()[name]["ctx_group"] == x.attr_dict()[name]["__ctx_group__"] == "dev1"
    assert x.attr("ctx_group") == x.attr("__ctx_group__") == "dev1"
    assert x.attr_dict()["fc_weight"]["num_hidden"] == "2"
    assert sym.Variable("out").list_attr() == {}


def test_nested_scopes() -> None:
    """The inner scope wins, and a scope that is entered a second time has no attributes of its first outer scopes."""
    inner = sym.AttrScope(a="2")
    with sym.AttrScope(__a__="1", __b__="1"), sym.AttrScope(__a__="3"):
        assert sym.Variable("x").list_attr() == {"__a__": "3", "__b__": "1"}
        with inner:
            pass
    with inner:
        assert sym.Variable("y").list_attr() == {"a": "2"}
    with pytest.raises(ParameterError, match="'a' must be text, got int 1"):
        sym.AttrScope(a=1)


def test_variable_attributes() -> None:
    """Each keyword of ``Variable`` becomes an attribute, and the caller's dictionary is unchanged.

    Unknown keywords and invalid values raise errors.
    """
    inputs = {"__mine__": "1"}
    x = sym.Variable("x", attr=inputs, shape=(2, 0), lr_mult=2.0, wd_mult=0, dtype="float16", init="zeros")
    assert x.list_attr() == {
        "__mine__": "1", "__shape__": "(2, 0)", "__lr_mult__": "2.0", "lr_mult": "2.0", "__wd_mult__": "0",
        "wd_mult": "0", "__dtype__": "2", "__init__": "zeros",
    }  # fmt: skip
    assert inputs == {"__mine__": "1"}
    assert sym.var("v", __ok__="yes", stype="default").list_attr() == {"__ok__": "yes", "__storage_type__": "0"}
    with pytest.raises(ParameterError, match="unknown keyword 'shap'"):
        sym.Variable("x", shap=(1,))
    with pytest.raises(TypeError, match="name as text"):
        sym.Variable(3)
    with pytest.raises(ParameterError, match=r"'x'.*integer"):
        sym.Variable("x", shape="(a,)")


def test_hidden_names_on_operators() -> None:
    """``lr_mult`` is stored as ``__lr_mult__``; ``weight_lr_mult`` raises an error that states the remedy."""
    x = sym.FullyConnected(sym.Variable("d"), num_hidden=1, name="fc", lr_mult="0.1")
    assert x.list_attr() == {"num_hidden": "1", "__lr_mult__": "0.1", "lr_mult": "0.1"}
    with pytest.raises(ParameterError, match=r"weight=Variable\('weight', lr_mult=...\)"):
        sym.FullyConnected(sym.Variable("d"), num_hidden=1, weight_lr_mult="0.1")


def test_special_keys() -> None:
    """``attr`` knows ``name`` and ``op_name``, returns None for unknown keys, and groups have no attributes."""
    a = sym.Variable("a")
    x = sym.exp(a, name="e")
    assert [x.attr("name"), x.attr("op_name"), a.attr("op_name"), x.attr("nope")] == ["e", "exp", "null", None]
    group = sym.Group([a, x])
    assert group.attr("name") is None
    assert group.list_attr() == {}
    with pytest.raises(DeprecationWarning):
        x.list_attr(recursive=True)


def test_set_attr_parses_again() -> None:
    """``_set_attr`` changes a parameter and the shapes that follow from it; an invalid value changes nothing."""
    x = sym.FullyConnected(sym.Variable("d"), num_hidden=1, name="fc")
    x._set_attr(num_hidden="5", lr_mult="2")
    assert x.infer_shape(d=(1, 2))[1] == [(1, 5)]
    assert x.attr("__lr_mult__") == "2"
    with pytest.raises(ParameterError):
        x._set_attr(num_hidden="x")
    assert x.attr("num_hidden") == "5"
    with pytest.raises(ParameterError, match="must be text"):
        x._set_attr(num_hidden=5)
    with pytest.raises(ParameterError, match="one node only"):
        sym.Group([x, x + 1])._set_attr(a="1")


def test_equal_parameters_are_shared_but_not_confused() -> None:
    """Nodes with equal attributes share parsed parameters; changing one node does not change the other."""
    a = sym.Variable("a")
    x, y = (sym.FullyConnected(a, num_hidden=3) for _ in range(2))
    assert x.entries[0].node.params is y.entries[0].node.params
    x._set_attr(num_hidden="4")
    assert y.entries[0].node.params["num_hidden"] == 3


def test_get_of_a_scope() -> None:
    """``AttrScope.get`` returns the scope's attributes, overridden by the given attributes, as in MXNet."""
    scope = sym.AttrScope(a="1", b="2")
    assert scope.get(None) == {"a": "1", "b": "2"}
    assert scope.get({"b": "3"}) == {"a": "1", "b": "3"}
    with pytest.raises(ParameterError, match="must be text"):
        scope.get({"b": 3})  # type: ignore[dict-item]


def test_module_names_of_mxnet() -> None:
    """``mx.attribute``, ``mx.base`` and ``mx.visualization`` exist, as in MXNet."""
    assert mx.attribute.AttrScope is mx.AttrScope
    assert mx.base.MXNetError is mx.MXNetError
    assert mx.visualization is mx.viz
