"""Invalid shapes, dtypes and options: each error message names the value, the expected form and the remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weftplan import symbol as sym
from weftplan.errors import ConfigError, DTypeError, PlanError, ShapeError
from weftplan.planner import PlanOptions, plan_symbol
from weftplan.planner.strategies import registered


def _dense() -> Any:
    """Return a fully connected layer ``fc`` with 4 outputs."""
    return sym.FullyConnected(sym.Variable("data"), num_hidden=4, name="fc")


def test_unknown_shape_names_argument_and_operator() -> None:
    """An unknown shape raises an error that names the argument and the operator that needs the shape."""
    with pytest.raises(ShapeError, match=r"shape of argument 'data' is unknown .* FullyConnected \('fc'\) needs it"):
        plan_symbol(_dense(), {})


def test_unknown_dimension() -> None:
    """A dimension of 0, which means unknown, raises an error if it cannot be inferred."""
    with pytest.raises(ShapeError, match=r"shape of argument 'data' is \(\?, 3\)"):
        plan_symbol(_dense(), {"data": (0, 3)})


@pytest.mark.parametrize("shape", [(-1, 3), (2, -3)])
def test_negative_dimension(shape: tuple[int, ...]) -> None:
    """A negative dimension raises an error that names the argument."""
    with pytest.raises(ShapeError, match=r"shape of 'data' is .*: dimensions must be positive"):
        plan_symbol(_dense(), {"data": shape})


@pytest.mark.parametrize("shape", ["2,3", 5, (2.5, 3), (True, 2)])
def test_malformed_shape(shape: Any) -> None:
    """A shape that is no tuple of integers raises an error."""
    with pytest.raises(ShapeError, match="shape of 'data' must be a tuple of integers"):
        plan_symbol(_dense(), {"data": shape})


def test_conflicting_shapes_name_the_operator() -> None:
    """The sum of arrays of shapes (2, 3) and (2, 4) raises an error that names the operator and both shapes."""
    net = sym.elemwise_add(sym.Variable("a"), sym.Variable("b"), name="sum")
    with pytest.raises(ShapeError, match=r"elemwise_add.*'sum'.*\(2, 3\).*\(2, 4\)"):
        plan_symbol(net, {"a": (2, 3), "b": (2, 4)})


def test_conflicting_dtypes() -> None:
    """The sum of float32 and float64 arrays raises an error that names both dtypes."""
    net = sym.elemwise_add(sym.Variable("a"), sym.Variable("b"), name="sum")
    with pytest.raises(DTypeError, match=r"float32.*float64"):
        plan_symbol(net, {"a": (2,), "b": (2,)}, {"a": "float32", "b": "float64"})


def test_more_than_two_to_the_31_elements_are_counted_right() -> None:
    """2^33 elements of 4 bytes give a peak of 2^35 bytes, without 32-bit overflow."""
    planned = plan_symbol(sym.exp(sym.Variable("x")), {"x": (1 << 20, 1 << 13)}, grad_req="write")
    assert planned.memory.lower_bound == 1 << 35
    assert planned.memory.peak == 1 << 35


def test_sizes_that_overflow() -> None:
    """2^62 elements of 4 bytes, which overflow 64-bit sizes, raise an error that names the largest entry."""
    with pytest.raises(ShapeError, match=r"more than 2\^63 - 1; the largest entry is"):
        plan_symbol(sym.exp(sym.Variable("x")), {"x": (1 << 31, 1 << 31)})


def test_two_variables_of_one_name() -> None:
    """Two variables with one name raise an error, because arrays are assigned by name."""
    net = sym.Variable("x") + sym.Variable("x")
    with pytest.raises(PlanError, match="two different variables are called 'x'"):
        plan_symbol(net, {"x": (2,)})


def test_no_outputs() -> None:
    """A symbol without outputs raises an error."""
    with pytest.raises(PlanError, match="nothing to plan"):
        plan_symbol([], {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "best"}, f"strategy must be one of {', '.join(registered())}; got 'best'"),
        ({"match_range": -1}, "match_range must be an integer >= 0; got -1"),
        ({"match_range": True}, "match_range must be an integer"),
        ({"num_temp": 0}, "num_temp must be an integer >= 1"),
        ({"sizes": "4"}, "sizes must be one of true, mxnet"),
        ({"compat": "torch"}, "compat must be one of none, mxnet, paddle, paddle_pir"),
        ({"alignment": 48}, "alignment must be a power of two"),
        ({"alignment": 4}, "alignment must be a power of two from 8 on"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    """An invalid option raises an error that lists the legal values."""
    with pytest.raises(PlanError, match=message):
        PlanOptions(**options)


def test_options_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options are read from the environment at each call; arguments override them; invalid values raise an error."""
    monkeypatch.setenv("MXNET_EXEC_MATCH_RANGE", "4")
    monkeypatch.setenv("MXNET_EXEC_ENABLE_INPLACE", "0")
    monkeypatch.setenv("NNVM_EXEC_NUM_TEMP", "3")
    options = PlanOptions.from_environment(num_temp=2)
    assert (options.match_range, options.enable_inplace, options.num_temp) == (4, False, 2)
    monkeypatch.setenv("MXNET_EXEC_MATCH_RANGE", "-3")
    with pytest.raises(ConfigError, match="MXNET_EXEC_MATCH_RANGE"):
        PlanOptions.from_environment()
    monkeypatch.delenv("MXNET_EXEC_MATCH_RANGE")
    with pytest.raises(PlanError, match="unknown plan option"):
        PlanOptions.from_environment(colour=1)


@pytest.mark.shows("MXNET_EXEC_MATCH_RANGE", "MXNET_EXEC_ENABLE_INPLACE")
def test_the_environment_changes_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """``MXNET_EXEC_MATCH_RANGE=0`` disables sharing, and ``MXNET_EXEC_ENABLE_INPLACE=false`` in-place computation."""
    net = sym.Variable("x")
    for k in range(4):
        net = sym.FullyConnected(sym.tanh(net), num_hidden=16, name=f"fc{k}")
    peaks = [plan_symbol(net, {"x": (16, 16)}).memory.peak]
    monkeypatch.setenv("MXNET_EXEC_MATCH_RANGE", "0")
    peaks.append(plan_symbol(net, {"x": (16, 16)}).memory.peak)
    monkeypatch.setenv("MXNET_EXEC_ENABLE_INPLACE", "false")
    peaks.append(plan_symbol(net, {"x": (16, 16)}).memory.peak)
    assert peaks[0] < peaks[1] < peaks[2]


def test_nothing_is_changed_by_a_failed_plan() -> None:
    """After an error the same symbol can be planned."""
    net = _dense()
    with pytest.raises(ShapeError):
        plan_symbol(net, {}, grad_req="write")
    planned = plan_symbol(net, {"data": (2, 3)}, {"data": np.float32}, grad_req="write")
    assert planned.shapes[planned.outputs[0]] == (2, 4)
