"""Budgets with inductor's fused kernels: real peaks, gradients equal to inductor's, caches, inference."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'weftplan[torch]'")

from tests.torch.models import Convolutions, Decoder, real_peak  # noqa: E402
from tests.torch.test_budget import fresh  # noqa: E402, F401
from weftplan.errors import BudgetError  # noqa: E402
from weftplan.torch import backend, budget  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # PyTorch's own
    pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="inductor needs a C++ compiler"),
]
MODELS: dict[str, Callable[[], Any]] = {"decoder": Decoder, "convolutions": Convolutions}


@pytest.mark.parametrize("name", MODELS)
def test_real_peaks_stay_within_the_budget(name: str) -> None:
    """At the smallest budget the allocator's peak is within it, and gradients equal those of inductor without one."""
    make = MODELS[name]
    _, plain = real_peak(make, lambda module: torch.compile(module, dynamic=False))
    torch.compiler.reset()
    with pytest.raises(BudgetError) as caught:
        budget(make(), "10KB", inner="inductor")(*make().inputs())
    smallest = caught.value.smallest
    assert smallest is not None
    wrapped = []

    def wrap(module: Any) -> Any:
        wrapped.append(budget(module, smallest, inner="inductor"))
        return wrapped[-1]

    peak, gradients = real_peak(make, wrap)
    assert wrapped[-1].plans[0].repeated
    assert peak <= smallest
    for g, want in zip(gradients, plain, strict=True):
        torch.testing.assert_close(g, want)


def test_steps_of_another_budget_do_not_come_from_a_cache() -> None:
    """A step that inductor compiled before, without a budget, is planned all the same."""
    model, args = Convolutions(), Convolutions.inputs()
    torch.compile(model, dynamic=False)(*args)
    for _ in range(2):
        torch.compiler.reset()
        wrapped = budget(model, "1GB", inner="inductor")
        wrapped(*args).backward()
        assert len(wrapped.plans) == 1


def test_inference_is_checked_against_the_budget() -> None:
    """Without gradients a graph that fits runs, and another is refused."""
    model, args = Convolutions(), Convolutions.inputs()
    with torch.no_grad():
        want = torch.compile(model, dynamic=False)(*args)
        torch.compiler.reset()
        torch.testing.assert_close(torch.compile(model, backend=backend("1GB", inner="inductor"))(*args), want)
        torch.compiler.reset()
        with pytest.raises(BudgetError, match="the smallest budget that works is"):
            budget(model, "1KB", inner="inductor")(*args)
