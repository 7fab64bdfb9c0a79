"""``FLAGS_check_nan_inf``: the first result that is not finite raises an error with its node."""

from __future__ import annotations

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import MXNetError


def network() -> mx.sym.Symbol:
    """Return log(2 x) * 3."""
    return mx.sym.log(mx.sym.Variable("x") * 2, name="logarithm") * 3


@pytest.mark.shows("FLAGS_check_nan_inf")
@pytest.mark.parametrize(("value", "words"), [(-1.0, "NaN"), (0.0, "infinite")])
def test_first_wrong_result_is_named(monkeypatch: pytest.MonkeyPatch, value: float, words: str) -> None:
    """With the flag, forward raises an error that names the first result that is not finite; the next run works."""
    data = mx.nd.array([1.0, value, value])
    executor = network().simple_bind(mx.cpu(), x=(3,))
    assert not np.isfinite(executor.forward(x=data)[0].asnumpy()).all()
    monkeypatch.setenv("FLAGS_check_nan_inf", "1")
    executor = network().simple_bind(mx.cpu(), x=(3,))
    with pytest.raises(MXNetError, match=rf"logarithm_output: 2 of 3 elements are not finite \({words}\)"):
        executor.forward(is_train=True, x=data)
    np.testing.assert_allclose(executor.forward(is_train=True, x=mx.nd.ones(3))[0].asnumpy(), 3 * np.log(2), rtol=1e-6)


def test_gradients_are_checked_and_monitors_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the flag, a gradient that is not finite raises an error, and a monitor still sees all results."""
    monkeypatch.setenv("FLAGS_check_nan_inf", "1")
    executor = mx.sym.sqrt(mx.sym.Variable("x"), name="root").simple_bind(mx.cpu(), x=(2,))
    seen: list[str] = []
    executor.set_monitor_callback(lambda name, array: seen.append(name))
    executor.forward(is_train=True, x=mx.nd.array([4.0, 0.0]))
    assert seen == ["root_output"]
    with pytest.raises(MXNetError, match="1 of 2 elements are not finite"):
        executor.backward(mx.nd.ones(2))
