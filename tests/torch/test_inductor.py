"""Budgets with inductor's fused kernels: measured peaks, gradients, caches and inference."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'weftplan[torch]'")

from tests.torch.models import Convolutions, Decoder, Patches, real_peak  # noqa: E402
from tests.torch.test_budget import fresh  # noqa: E402, F401
from weftplan.errors import BudgetError  # noqa: E402
from weftplan.torch import backend, budget  # noqa: E402
from weftplan.torch.trade_off import planned  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # PyTorch's own
    pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="inductor needs a C++ compiler"),
]
MODELS: dict[str, Callable[[], Any]] = {
    "decoder": lambda: Decoder(depth=2, drop=0.3),
    "convolutions": Convolutions,
    "patches": Patches,
}


class Made:
    """A factory of the model ``name``; its function ``inputs`` returns inputs for the model."""

    def __init__(self, name: str) -> None:
        self.inputs = {"decoder": Decoder, "convolutions": Convolutions, "patches": Patches}[name].inputs
        self.make = MODELS[name]

    def __call__(self) -> Any:
        """Return a new model."""
        return self.make()


@pytest.mark.parametrize("name", MODELS)
def test_real_peaks_stay_within_the_budget(name: str) -> None:
    """At the smallest budget the measured peak is within it, and gradients are close to inductor's."""
    make = Made(name)
    _, plain = real_peak(make, lambda module: torch.compile(module, dynamic=False))
    torch.compiler.reset()
    with pytest.raises(BudgetError, match="the smallest budget that works is") as caught:
        budget(make(), "10KB", inner="inductor")(*make.inputs())
    smallest = caught.value.smallest
    assert smallest is not None
    wrapped = []

    def wrap(module: Any) -> Any:
        wrapped.append(budget(module, smallest, inner="inductor"))
        return wrapped[-1]

    peak, gradients = real_peak(make, wrap)
    assert len(wrapped[-1].plans) == 1
    assert wrapped[-1].plans[0].repeated
    assert peak <= wrapped[-1].plans[0].peak <= smallest
    for g, want in zip(gradients, plain, strict=True):
        torch.testing.assert_close(g, want)


@pytest.mark.parametrize("name", MODELS)
def test_real_peaks_stay_within_plans_without_repetition(name: str) -> None:
    """With a large budget the measured peak is at most the plan's."""
    wrapped = []

    def wrap(module: Any) -> Any:
        wrapped.append(budget(module, "1GB", inner="inductor"))
        return wrapped[-1]

    peak, _ = real_peak(Made(name), wrap)
    assert peak <= wrapped[-1].plans[0].peak


def test_larger_fused_peaks_lead_to_smaller_plans() -> None:
    """If fused kernels need more than the plan, a smaller plan is tried, and the final peak is that of the kernels.

    If no smaller plan exists, a BudgetError names the bytes that are needed.
    """
    from weftplan.torch import fit

    choices, plan = planned(Convolutions(), Convolutions.inputs(), inner="inductor")
    resident, points = plan.resident.total, choices.points
    part = fit.Partition(points[0].peak + resident, inner="inductor", only_plan=True)

    def attempt() -> int:
        torch.compiler.reset()
        with pytest.raises(fit.Planned), fit.plain_errors():
            fit.Budgeted(Convolutions(), part, fullgraph=True)(*Convolutions.inputs())
        return part.plans[-1].peak

    first = attempt()
    assert not part.fits(first - resident + 1000)
    assert part.plans == part.choices == []
    second = attempt()
    assert second <= first - 1000
    assert part.fits(second - resident - 7)
    assert part.plans[0].peak == second - 7
    part = fit.Partition(plan.smallest, inner="inductor", only_plan=True)
    assert attempt() == plan.smallest
    with pytest.raises(BudgetError, match="with the most repetition and fused kernels") as caught:
        part.fits(plan.smallest - resident + 1)
    assert caught.value.smallest == plan.smallest + 1
    assert part.plans == []


def test_steps_of_another_budget_do_not_come_from_a_cache() -> None:
    """A step that inductor has compiled before without a budget is planned nevertheless."""
    model, args = torch.nn.Linear(16, 16), torch.randn(4, 16)
    torch.compile(model, dynamic=False)(args)
    for _ in range(2):
        torch.compiler.reset()
        wrapped = budget(model, "1GB", inner="inductor")
        wrapped(args).sum().backward()
        assert len(wrapped.plans) == 1


def test_inference_is_checked_against_the_budget() -> None:
    """Without gradients a graph within the budget runs, and a larger graph raises a BudgetError."""
    model, args = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU()), (torch.randn(4, 16),)
    with torch.no_grad():
        want = torch.compile(model, dynamic=False)(*args)
        torch.compiler.reset()
        torch.testing.assert_close(torch.compile(model, backend=backend("1GB", inner="inductor"))(*args), want)
        torch.compiler.reset()
        with pytest.raises(BudgetError, match="the smallest budget that works is"):
            budget(model, "1KB", inner="inductor")(*args)
