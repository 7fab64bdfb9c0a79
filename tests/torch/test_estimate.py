"""Predicted peaks of whole training steps, compared with the allocator's."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'weftplan[torch]'")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.torch.allocator_hook import hook  # noqa: E402
from tests.torch.models import Convolutions, Decoder  # noqa: E402
from tests.torch.test_budget import fresh  # noqa: E402, F401
from weftplan.errors import PlanError  # noqa: E402
from weftplan.support import user_cache  # noqa: E402
from weftplan.support.progress import Progress  # noqa: E402
from weftplan.torch import budget, estimate  # noqa: E402
from weftplan.torch.probe import Probes  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


def test_measuring_scratch_is_silent(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's profiler writes lines to standard error; a measurement writes none, and leaves the error stream."""
    monkeypatch.setattr(user_cache, "load", lambda *_: None)
    x = torch.ones(4, 4)
    assert Probes().kernel(torch.ops.aten.mm.default, (x, x), {}).scratch >= 0
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


def step(model: Any, optimizer: Any, args: Any, *, none: bool = True, amp: bool = False, parts: int = 1) -> None:
    """Run a training step with clipping, ``parts`` accumulated passes, and mixed precision if ``amp``.

    ``none`` resets gradients to None instead of zeros.
    """
    optimizer.zero_grad(set_to_none=none)
    for _ in range(parts):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = model(*args)
        (loss / parts).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


CASES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adam": {"optimizer": "adam"},
    "kept gradients": {"none": False},
    "accumulation": {"parts": 2},
    "amp": {"amp": True},
}


def measure_peak(make: Any, how: str, options: dict[str, Any]) -> int:
    """Return the peak of the second step in bytes, as the hook on the allocator counts it."""
    gc.collect()
    before = hook().live
    model = make()
    optimizer, args = OPTIMIZERS[how](model.parameters(), 0.01), make().inputs()
    step(model, optimizer, args, **options)
    gc.collect()
    return hook().live - before + hook().peak(lambda: step(model, optimizer, args, **options))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("make", [Decoder, Convolutions])
def test_peaks_of_whole_steps(make: Any, case: str) -> None:
    """The predicted peak is within 0.01 % of the allocator's, for each optimizer and each option of a step."""
    options = dict(CASES[case])
    how = options.pop("optimizer", "sgd")
    model = make()
    optimizer, args = OPTIMIZERS[how](model.parameters(), 0.01), make.inputs()
    actual = estimate(lambda: step(model, optimizer, args, **options))
    real = measure_peak(make, how, options)
    assert actual.peak == pytest.approx(real, rel=1e-4)
    assert actual.before > 0
    assert sum(actual.parts.values()) == actual.peak


@pytest.mark.parametrize("how", OPTIMIZERS)
def test_optimizers_that_have_stepped(how: str) -> None:
    """An optimizer that has made a step gives the estimate of a new one, and its step counts do not change."""
    model = Decoder()
    optimizer, args = OPTIMIZERS[how](model.parameters(), 0.01), model.inputs()
    new = estimate(step, model, optimizer, args)
    step(model, optimizer, args)
    counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    assert estimate(step, model, optimizer, args).peak == new.peak
    assert counts == [float(state["step"]) for state in optimizer.state.values() if "step" in state]


def test_estimate_changes_nothing() -> None:
    """``estimate`` changes no parameters, gradients, optimizer states, random numbers or counters of the caller."""
    model = Decoder(drop=0.1)
    optimizer, args = torch.optim.Adam(model.parameters()), Decoder.inputs()
    before = [p.clone() for p in model.parameters()]
    state, counter = torch.get_rng_state(), [0]

    def counted() -> None:
        counter[0] += 1
        step(model, optimizer, args)

    estimate(counted)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state
    assert counter == [0]
    assert torch.equal(torch.get_rng_state(), state)


def test_checkpointing_put_into_modules_by_hand() -> None:
    """Functions that were set on modules run on copies, and checkpointing in them lowers the predicted peak."""
    peaks = []
    for wrapped in (False, True):
        model = Decoder(depth=6)
        for block in model.blocks if wrapped else ():
            inner = block.forward
            block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
        optimizer, args = torch.optim.SGD(model.parameters(), 0.01), Decoder.inputs()
        peaks.append(estimate(step, model, optimizer, args).peak)
        assert all(p.grad is None for p in model.parameters())
    assert peaks[1] < 0.8 * peaks[0]


MODEL = torch.nn.Linear(64, 64)


def inner_step(x: Any) -> None:
    """Run a forward and a backward pass of the global ``MODEL``."""
    MODEL(x).sum().backward()


def test_globals_of_functions_are_copied() -> None:
    """A module that a function reaches through a global counts, and its gradients do not change."""
    x = torch.randn(8, 64)
    actual = estimate(lambda: inner_step(x))
    assert actual.parts["parameters"] == 4 * (64 * 64 + 64)
    assert MODEL.weight.grad is None


def test_functions_of_numpy_are_shared() -> None:
    """A step may reach a ufunc, which has no attributes to copy."""
    x, function = torch.randn(8), np.add
    assert estimate(lambda: x * (function is np.add)).peak >= 2 * 4 * 8


def test_values_of_tensors_are_refused_with_the_line() -> None:
    """A step that reads the value of a tensor raises an error that names the line."""

    def looking(model: Any) -> float:
        return model(torch.ones(2, 64)).sum().item()

    with pytest.raises(PlanError, match=r"looks at the value of a tensor .*test_estimate\.py:\d+, in looking"):
        estimate(looking, MODEL)


def test_compiled_steps_are_refused() -> None:
    """A compiled step raises an error, because compiled kernels allocate differently; so does an invalid option."""
    with pytest.raises(PlanError, match="compiled"):
        estimate(torch.compile(inner_step), torch.randn(8, 64))
    with pytest.raises(PlanError, match="workspaces must be"):
        estimate(inner_step, torch.randn(8, 64), workspaces="no")


@pytest.mark.parametrize("predict", [estimate, lambda step, x: budget(step, "1GB")(x)], ids=["estimate", "budget"])
def test_measurements_of_kernels_are_counted_on_the_terminal(
    fresh: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    predict: Any,
) -> None:
    """Each kernel that is measured steps the progress line; the next prediction measures none and shows none."""
    steps: list[int] = []
    monkeypatch.setattr(Progress, "step", lambda self, count=1: steps.append(count))
    model, x = torch.nn.Linear(4, 3), torch.ones(2, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).relu().sum()

    predict(step, x)
    assert len(steps) >= 3
    steps.clear()
    torch.compiler.reset()
    predict(step, x)
    assert steps == []
