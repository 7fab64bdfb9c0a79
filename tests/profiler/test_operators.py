"""The profiler's operator names: operators called on arrays, and operators written in Python."""

from __future__ import annotations

import json

import pytest

import weftplan as mx
from weftplan import engine, profiler
from weftplan.compat import custom_operators


def test_calls_are_counted_by_operator(driver):
    """Arithmetic with arrays and numbers, also in place, is counted under the operators' names."""
    profiler.set_state("run")
    a = mx.nd.ones((10, 10))
    b = mx.nd.sqrt(a)
    a = a + 1
    a = 1 + a
    a += 2
    b = a - b
    b -= a
    b = 1 - b
    b = b < 3
    mx.nd.waitall()
    counts = {name: row["Count"] for name, row in json.loads(profiler.dumps(format="json"))["Time"]["operator"].items()}
    expected = {"sqrt": 1, "_plus_scalar": 3, "broadcast_sub": 2, "_rminus_scalar": 1, "_lesser_scalar": 1}
    assert {name: counts.get(name) for name in expected} == expected
    assert sum(counts.values()) == 1 + sum(expected.values()), counts


class TestOperatorsInPython:
    """The time of an operator written in Python, divided into Python code and operator calls."""

    @pytest.fixture(autouse=True)
    def kinds(self, monkeypatch: pytest.MonkeyPatch):
        """Register two operators, ``add`` and ``twice``; the second calls the first."""
        monkeypatch.setattr(custom_operators, "_props", {})

        class Add(mx.operator.CustomOp):
            def forward(self, is_train, req, in_data, out_data, aux):
                self.assign(out_data[0], req[0], in_data[0] + 1)

            def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
                self.assign(in_grad[0], req[0], out_grad[0])

        class Twice(Add):
            def forward(self, is_train, req, in_data, out_data, aux):
                once = mx.nd.Custom(in_data[0] + 0, op_type="add")
                self.assign(out_data[0], req[0], once + once)

        for word, kind in (("add", Add), ("twice", Twice)):

            class Property(mx.operator.CustomOpProp):
                computing = kind

                def create_operator(self, ctx, in_shapes, in_dtypes):
                    return self.computing()

            mx.operator.register(word)(Property)

    def rows(self) -> dict[str, int]:
        """Return the counts of the domain ``Custom Operator``, by name."""
        times = json.loads(profiler.dumps(format="json"))["Time"]
        return {name: row["Count"] for name, row in times.get("Custom Operator", {}).items()}

    def test_forward_and_backward(self, driver):
        """Each call of user code, and each operation that it pushes, is a span of the operator or of its backward."""
        executor = mx.sym.Custom(mx.sym.Variable("x"), op_type="add").simple_bind(mx.cpu(), x=(3,))
        profiler.set_state("run")
        executor.forward(is_train=True)
        executor.backward([mx.nd.ones((3,))])
        engine.get().wait_for_all()
        profiler.set_state("stop")
        assert self.rows() == {
            "add::pure_python": 1, "add::_plus_scalar": 1, "add::copy": 1,
            "_backward_add::pure_python": 1, "_backward_add::copy": 1,
        }  # fmt: skip

    def test_an_operator_that_calls_another(self, driver):
        """The calls of an inner operator are counted under its own name; for the outer operator it is one call."""
        profiler.set_state("run")
        mx.nd.Custom(mx.nd.ones((2,)), op_type="twice").wait_to_read()
        profiler.set_state("stop")
        actual = self.rows()
        assert actual["add::_plus_scalar"] == actual["twice::Custom"] == actual["twice::broadcast_add"] == 1
        assert actual["twice::_plus_scalar"] == 1
        assert "add::broadcast_add" not in actual

    def test_nothing_without_a_profile(self, driver):
        """Outside a recording nothing is recorded."""
        x = mx.nd.ones((2,))
        mx.nd.Custom(x, op_type="add").wait_to_read()
        profiler.set_state("run")
        profiler.set_state("stop")
        mx.nd.Custom(x, op_type="add").wait_to_read()
        assert self.rows() == {}

    def test_a_failure_ends_the_record(self, driver):
        """If user code raises an error, its time until then is recorded, and later operations are the caller's."""

        class Failing(mx.operator.CustomOp):
            def forward(self, is_train, req, in_data, out_data, aux):
                raise ValueError("broken")

        class Property(mx.operator.CustomOpProp):
            def create_operator(self, ctx, in_shapes, in_dtypes):
                return Failing()

        mx.operator.register("failing")(Property)

        class Looking(mx.operator.CustomOp):
            def forward(self, is_train, req, in_data, out_data, aux):
                with pytest.raises(ValueError, match="broken"):
                    mx.nd.Custom(in_data[0] + 0, op_type="failing").wait_to_read()
                self.assign(out_data[0], req[0], in_data[0] * 2)

        class Outer(mx.operator.CustomOpProp):
            def create_operator(self, ctx, in_shapes, in_dtypes):
                return Looking()

        mx.operator.register("looking")(Outer)
        profiler.set_state("run")
        mx.nd.Custom(mx.nd.ones((2,)), op_type="looking").wait_to_read()
        profiler.set_state("stop")
        assert self.rows()["failing::pure_python"] == 1
        assert self.rows()["looking::_mul_scalar"] == 1
