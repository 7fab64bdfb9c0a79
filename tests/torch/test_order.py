"""Orders of execution of PyTorch's steps: searched orders need less memory and keep all bits."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'weftplan[torch]'")

from tests.torch.models import Branches, real_peak, real_peak_within, step_of  # noqa: E402
from tests.torch.test_budget import fresh  # noqa: E402, F401
from weftplan.planner.choose_order import ChosenOrder  # noqa: E402
from weftplan.torch import budget, choice  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's own


def test_the_searched_order_lowers_the_peak() -> None:
    """Branches that a step computes side by side run one after the other, with equal gradients and inference."""
    plain, gradients = real_peak(Branches, lambda module: module)
    searched, same, plan = real_peak_within(Branches, "1GB")
    assert searched == plan.peak
    wide = 256 * 64 * 8 * 4
    assert plain - searched > wide
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))
    model = Branches()
    ordered, inputs = budget(model, "1GB"), Branches.inputs()
    for is_training in (True, False):
        with torch.set_grad_enabled(is_training):
            torch.manual_seed(1)
            expected = model(*inputs)
            torch.manual_seed(1)
            assert torch.equal(ordered(*inputs), expected)
    assert all("another order of execution" in " ".join(plan.notes) for plan in ordered.plans)


class RandomStep(torch.nn.Module):
    """Random operations on earlier results: layers, dropout, draws, norms, and a buffer that changes between reads."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.calls = [(rng.randrange(7), rng.randrange(4), rng.random()) for _ in range(14)]
        self.norm, self.drop = torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.3)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(4)])
        self.register_buffer("total", torch.zeros(32))
        self.register_buffer("frozen", torch.randn(32, 256))

    def forward(self, x: Any) -> Any:
        """Return the mean of the last results."""
        values = [x]
        for kind, back, place in self.calls:
            a, other = values[max(len(values) - 1 - back, 0)], values[int(place * len(values))]
            if kind == 0:
                value = self.norm(a)
            elif kind == 1:
                value = self.drop(a)
            elif kind == 2:
                value = self.layers[back](a)
            elif kind == 3:
                value = (a @ self.frozen).tanh() @ self.frozen.t() * 0.05
            elif kind == 4:
                value = a + self.total
                self.total.add_(a.detach().mean(0))
            elif kind == 5:
                value = torch.rand_like(a) * a
            else:
                value = a.sin() + other
            values.append(value)
        return sum(value.mean() for value in values[-4:])

    @staticmethod
    def inputs() -> tuple[Any]:
        """Return random rows."""
        return (torch.randn(64, 32),)


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_orders_keep_all_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients and changed buffers have the bits of the traced order, for every budget."""
    monkeypatch.setattr(choice, "WORTH_AN_ORDER", 1.0)

    def step(most: int | str) -> tuple[list[Any], Any]:
        torch._dynamo.reset()
        kept: list[Any] = []

        def wrap(module: Any) -> Any:
            kept.append(budget(module, most))
            return kept[-1]

        module, run = step_of(lambda: RandomStep(seed), wrap)
        run(), run()
        arrays = [p.grad for p in module.parameters() if p.grad is not None] + list(module.buffers())
        return arrays, kept[-1].plans[0]

    with monkeypatch.context() as patch:
        traced_order = lambda program, *_, **__: ChosenOrder(program.order, 0, proved=False)  # noqa: E731
        patch.setattr(choice, "choose_order", traced_order)
        patch.setattr(choice, "WORTH_AN_ORDER", 0.0)
        expected, traced = step("1GB")
    actual, plan = step("1GB")
    assert plan.plain < traced.plain
    for arrays in (actual, step(plan.smallest)[0], step((plan.smallest + plan.plain) // 2)[0]):
        assert all(torch.equal(a, b) for a, b in zip(arrays, expected, strict=True))
