"""Error messages: one traceback, question marks for unknown dimensions, and hints about shapes and variables."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

import weftplan as mx
from weftplan import config, models
from weftplan.cli import main
from weftplan.default_settings import TABLE
from weftplan.errors import BudgetError, ConfigWarning, MXNetError


def network() -> Any:
    """Return a network with a convolution, whose input must have four dimensions."""
    data = mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=4, name="conv")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(data, num_hidden=3, name="fc"), name="softmax")


MISTAKES: dict[str, Callable[[], object]] = {
    "simple_bind": lambda: network().simple_bind(mx.cpu(), data=(3, 4)),
    "plan": lambda: network().plan(data=(3, 4)),
    "infer_shape": lambda: network().infer_shape(data=(3, 4)),
    "no shape": lambda: network().simple_bind(mx.cpu()),
    "parameter": lambda: mx.sym.Convolution(mx.sym.Variable("x"), kernel="a", num_filter=3),
    "arrays": lambda: mx.nd.dot(mx.nd.ones((2, 3)), mx.nd.ones((4, 4))),
    "budget": lambda: network().plan(data=(2, 1, 8, 8), budget=10),
    "several devices": lambda: models.get("mlp").plan(data=(4, 784), context=[mx.cpu(0), mx.cpu(1)], budget=10),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_one_traceback(name: str) -> None:
    """An error that repeats the message of its cause shows one traceback."""
    with pytest.raises(MXNetError) as caught:
        MISTAKES[name]()
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1


def test_traceback_of_a_user_rule_is_shown() -> None:
    """``own`` returns None for the package's own error and keeps another exception, whose traceback is shown."""
    from weftplan.errors import own

    assert own(BudgetError("ours")) is None
    theirs = KeyError("theirs")
    assert own(theirs) is theirs


def test_unknown_dimensions_are_question_marks() -> None:
    """An error shows unknown dimensions as question marks."""
    with pytest.raises(MXNetError, match=r"shapes \(\?, \?, \?, \?\) and \(3, 4\) differ in rank"):
        network().plan(data=(3, 4))
    with pytest.raises(MXNetError, match=r"shape of argument 'data' is \(\?, 3, 8, 8\)"):
        network().plan(data=(0, 3, 8, 8))


@pytest.mark.parametrize(("name", "advice"), [("lenet", "--shape data=N,C,H,W"), ("mlp", "--shape data=N,FEATURES")])
def test_command_spells_out_the_shape_option(name: str, advice: str, tmp_path: Any) -> None:
    """For a symbol file without shapes the error gives an example of --shape."""
    path = tmp_path / "net-symbol.json"
    models.get(name).save(path)
    result = CliRunner().invoke(main, ["plan", str(path)])
    assert result.exit_code == 1
    assert f"type for example {advice}" in " ".join(result.output.split())


def test_a_variable_without_effect_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that has no effect yet warns if it is set to a value."""
    known = next(variable for variable in TABLE if variable.default is False)
    variable = dataclasses.replace(known, name="MXNET_PLANNED_FOR_LATER", effect="no effect yet", aliases=())
    monkeypatch.setattr(config, "TABLE", (*TABLE, variable))
    monkeypatch.setattr(config, "strangers", list)
    name = variable.name
    monkeypatch.setenv(name, "")
    config.check_environment()
    monkeypatch.setenv(name, "1")
    with pytest.warns(ConfigWarning, match=f"{name} is set, but it has no effect yet"):
        config.check_environment()
