"""Training steps of PyTorch within a budget: measured peaks, equal gradients and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'weftplan[torch]'")

from tests.torch.models import Convolutions, Decoder, Halves, real_peak, real_peak_within, step_of  # noqa: E402
from weftplan.errors import BudgetError  # noqa: E402
from weftplan.torch import backend, budget, partition  # noqa: E402
from weftplan.torch.private import FakeTensorMode  # noqa: E402
from weftplan.torch.private_compile import aot_autograd, eager  # noqa: E402
from weftplan.torch.probe import Probes  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's own
MODELS: dict[str, Callable[[], Any]] = {"decoder": Decoder, "convolutions": Convolutions}


@pytest.fixture(autouse=True)
def fresh(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test an empty cache of measurements, an empty compiler cache and one thread."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


def budget_wrapper(most: int | str, **options: Any) -> Callable[[Any], Any]:
    """Return a function that wraps a module in a budget of ``most`` bytes."""
    return lambda module: budget(module, most, **options)


@pytest.mark.parametrize("name", MODELS)
def test_real_peaks_are_the_plans(name: str) -> None:
    """For several budgets down to the smallest, the measured peak is exactly the plan's, and gradients are equal.

    Smaller budgets take more time.
    """
    make = MODELS[name]
    _, plain = real_peak(make, lambda module: module)
    model = make()
    loose = budget(model, "1GB")
    loose(*model.inputs())
    plan = loose.plans[0]
    assert plan.smallest < plan.plain
    times = []
    for most in (plan.plain, (plan.plain + plan.smallest) // 2, plan.smallest):
        peak, gradients, chosen = real_peak_within(make, most)
        assert peak == chosen.peak <= most
        assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))
        times.append(chosen.more_time)
    assert times == sorted(times)
    assert times[0] == 0.0 < times[2]


def test_copies_of_views_count_whole_storages() -> None:
    """``aten.copy`` on a view copies the storage under it; the plan counts that, and its peak is the measured one."""
    with FakeTensorMode():
        rows = torch.empty(64, 128)[1:2]
        (nbytes,) = Probes().kernel(torch.ops.aten.copy.default, (rows, rows), {}).results
    assert nbytes == 64 * 128 * 4
    peak, _, plan = real_peak_within(Halves, "1GB")
    assert peak == plan.peak


def test_repeated_dropout_draws_the_same_numbers() -> None:
    """Random operators that are repeated draw the numbers of their first run, so gradients have equal bits."""
    make = lambda: Decoder(drop=0.3)  # noqa: E731
    module, run = step_of(make, lambda module: module)
    run()
    plain = [p.grad.clone() for p in module.parameters()]
    after = torch.get_rng_state()
    loose = budget(make(), "1GB")
    loose(*Decoder.inputs())
    module, run = step_of(make, budget_wrapper(loose.plans[0].smallest))
    wrapped = []
    module, run = step_of(make, lambda module: wrapped.append(budget(module, loose.plans[0].smallest)) or wrapped[0])
    run()
    assert any("dropout" in name or "bernoulli" in name for name in wrapped[0].plans[0].repeated)
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), plain, strict=True))
    assert torch.equal(torch.get_rng_state(), after)


def test_optimizer_states_and_kept_gradients_count() -> None:
    """The peak includes future states of Adam, gradients that exist before the step, and ``other`` bytes."""
    model = Decoder()
    params = sum(p.numel() * 4 for p in model.parameters())
    peaks = {}
    for name, options in {
        "plain": {},
        "adam": {"optimizer": torch.optim.Adam(model.parameters())},
        "kept": {"keep_gradients": True},
        "other": {"other": 1000},
    }.items():
        torch._dynamo.reset()
        wrapped = budget(model, "1GB", **options)
        wrapped(*Decoder.inputs())
        peaks[name] = wrapped.plans[0].peak
    steps = 4 * len(list(model.parameters()))
    assert peaks["adam"] == peaks["plain"] + 2 * params + steps
    assert peaks["kept"] == peaks["plain"] + params
    assert peaks["other"] == peaks["plain"] + 1000
    assert "other 1000 B" in str(wrapped.plans[0]), "the sum of what is resident shows all its parts"


def test_the_update_alone_can_exceed_a_budget() -> None:
    """If the optimizer's update alone needs more than the budget, an error says so."""
    model = torch.nn.Linear(512, 512)
    states = torch.optim.Adam(model.parameters(), foreach=True)
    with pytest.raises(BudgetError, match="the step of Adam alone needs"):
        budget(lambda x: model(x).sum(), 4 << 20, optimizer=states)(torch.randn(2, 512))


def broken(x: Any) -> Any:
    """Compute a sum with control flow that depends on data."""
    y = (x * x).sin()
    if y.sum() > 0:
        return (y * 2).exp().sum()
    return y.exp().sum()


def test_broken_graphs_share_the_budget() -> None:
    """With ``breaks="sum"`` a step of two graphs runs, and the second plan counts the bytes that the first saves."""
    x = torch.full((64,), 0.5, requires_grad=True)
    wrapped = budget(broken, "1MB", breaks="sum")
    wrapped(x).backward()
    want = x.grad.clone()
    first, second = wrapped.plans
    assert second.resident.other == first.saved > 0
    assert "test_budget.py, line" in first.name
    x.grad = None
    broken(x).backward()
    assert torch.equal(x.grad, want)


def test_inference_is_checked_against_the_budget() -> None:
    """Without gradients a graph within the budget runs unchanged, and a larger graph raises a BudgetError."""
    model, args = Decoder(), Decoder.inputs()
    with torch.no_grad():
        wrapped = budget(model, "1GB")
        assert torch.equal(wrapped(*args), model(*args))
        assert "nothing can be repeated" in wrapped.plans[0].notes[-1]
        torch._dynamo.reset()
        with pytest.raises(BudgetError):
            budget(model, wrapped.plans[0].peak - 1)(*args)


class Counting(torch.nn.Module):
    """Layers that add a buffer, which the forward pass changes afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(4)])
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x: Any) -> Any:
        """Return the sum of the last layer's results, and add 1 to the buffer."""
        for layer in self.layers:
            x = torch.sin(layer(x) + self.scale)
        self.scale.add_(1.0)
        return x.sum()


def test_readers_of_changed_buffers_are_not_repeated() -> None:
    """At the smallest budget, gradients are computed with the buffer's value before the change."""
    x, plain = torch.randn(64, 32), Counting()
    plain(x).backward()
    loose = budget(Counting(), "1GB")
    loose(x)
    torch._dynamo.reset()
    model = Counting()
    model.load_state_dict({**plain.state_dict(), "scale": torch.ones(32)})
    wrapped = budget(model, loose.plans[0].smallest)
    wrapped(x).backward()
    assert wrapped.plans[0].repeated
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert torch.equal(model.scale, plain.scale)


def test_other_shapes_are_planned_again() -> None:
    """Another batch size and a step without gradients have separate plans."""
    wrapped = budget(Decoder(), "1GB")
    x, y = Decoder.inputs()
    wrapped(x, y).backward()
    wrapped(x[:2], y[:2]).backward()
    with torch.no_grad():
        wrapped(x, y)
    first, second, third = wrapped.plans
    assert first.peak > second.peak
    assert third.repeated == []


def test_unmeasured_operators_are_listed() -> None:
    """With ``workspaces="cached"`` and an empty cache, plans list the operators whose workspaces are not counted."""
    wrapped = budget(Convolutions(), "1GB", workspaces="cached")
    wrapped(*Convolutions.inputs())
    plan = wrapped.plans[0]
    assert "aten.convolution_backward.default" in plan.unseen
    assert "not counted until measured" in str(plan)
    torch._dynamo.reset()
    measured = budget(Convolutions(), "1GB")
    measured(*Convolutions.inputs())
    assert not measured.plans[0].unseen
    assert measured.plans[0].plain > plan.plain


@pytest.mark.parametrize("seconds", ["model", "measure"])
def test_seconds_are_measured_or_modelled(seconds: str) -> None:
    """With modelled and with measured times, a plan near the smallest budget runs and takes more time."""
    wrapped = budget(Convolutions(), "1GB", seconds=seconds)
    wrapped(*Convolutions.inputs())
    torch._dynamo.reset()
    smallest = wrapped.plans[0].smallest
    second = budget(Convolutions(), smallest + (smallest >> 4), seconds=seconds)
    second(*Convolutions.inputs()).backward()
    assert second.plans[0].more_time > 0.0


def test_backends_and_partitions() -> None:
    """``backend`` works with ``torch.compile``, and ``partition`` with a backend of the caller; gradients are equal."""
    model, args = Decoder(), Decoder.inputs()
    model(*args).backward()
    want = [p.grad.clone() for p in model.parameters()]
    part = partition("1GB")
    own = aot_autograd(fw_compiler=eager, bw_compiler=eager, partition_fn=part)
    for chosen in (backend("1GB"), own):
        torch._dynamo.reset()
        model.zero_grad()
        torch.compile(model, backend=chosen)(*args).backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), want, strict=True))
    assert part.plans[0].peak < 1 << 30
