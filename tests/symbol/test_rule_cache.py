"""The rule cache: which rules run once per process, and which run each time."""

from dataclasses import replace
from typing import Any

import pytest

import weftplan as mx
from weftplan.errors import ShapeError
from weftplan.ops.core import registry, rule_cache
from weftplan.ops.core.rule_cache import Settled

OP = registry.get("Activation")


class Question:
    """A cached rule that returns how often it has run."""

    def __init__(self) -> None:
        self.settled = Settled[int]()
        self.asked = 0

    def __call__(self, op: Any = OP, params: Any = None, facts: Any = ((2, 3),)) -> int:
        def ask() -> int:
            self.asked += 1
            return self.asked

        return self.settled.answer(op, {"act_type": "relu"} if params is None else params, facts, ask)


def test_equal_calls_are_asked_once() -> None:
    """A rule runs once for equal parameters and facts, also if they are other objects."""
    question = Question()
    assert [question(), question(params={"act_type": "relu"}, facts=[(2, 3)])] == [1, 1]
    assert [question(params={"act_type": "tanh"}), question(facts=((2, 4),)), question()] == [2, 3, 1]


def test_order_of_parameters_counts() -> None:
    """Parameters in another order are another key of the cache."""
    question = Question()
    first, second = {"a": True, "b": False}, {"b": True, "a": False}
    assert [question(params=first), question(params=second), question(params=first)] == [1, 2, 1]
    x = mx.sym.Variable("x")
    for name, shape in (("transpose_a", (3, 3)), ("transpose_b", (2, 2))):
        assert mx.sym.dot(x, x, **{name: True}).infer_shape(x=(2, 3))[1] == [shape]


def test_another_operator_with_the_name_runs() -> None:
    """The rule of another operator with the same name runs."""
    question = Question()
    assert [question(), question(op=replace(OP, doc="other")), question(op=OP)] == [1, 2, 3]


@pytest.mark.parametrize("how", [{"op": replace(OP, single=True)}, {"params": {"act_type": [1]}}], ids=["own", "list"])
def test_rules_that_run_each_time(how: dict[str, Any]) -> None:
    """Rules of custom operators, and rules with parameters that cannot be hashed, run each time."""
    question = Question()
    assert [question(**how), question(**how)] == [1, 2]


def test_oldest_results_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the cache is full, the oldest result is dropped."""
    monkeypatch.setattr(rule_cache, "MAX_ENTRIES", 2)
    question = Question()
    assert [question(facts=(k,)) for k in (1, 2, 3)] == [1, 2, 3]
    assert [question(facts=(k,)) for k in (3, 2, 1)] == [3, 2, 4]


def test_an_error_names_the_node_that_has_it() -> None:
    """An error is not cached: each call raises it with the name of the current node."""
    for name in ("first", "second"):
        net = mx.sym.FullyConnected(mx.sym.Variable("x"), mx.sym.Variable("w", shape=(2, 9)), num_hidden=2, name=name)
        with pytest.raises(ShapeError, match=f"node '{name}'"):
            net.infer_shape(x=(4, 3))
