"""Whole training steps of many kinds: the estimate is what a hook on the allocator counts in the third step."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'weftplan[torch]'")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from tests.torch.allocator_hook import hook  # noqa: E402
from tests.torch.models import Convolutions, Decoder  # noqa: E402
from tests.torch.test_budget import fresh  # noqa: E402, F401
from weftplan.torch import estimate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
Made = tuple[Callable[..., Any], tuple[Any, ...]]
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Adadelta": ("Adadelta", {}),
    "Adagrad": ("Adagrad", {}),
    "Adamax": ("Adamax", {}),
    "AdamW, foreach": ("AdamW", {"foreach": True}),
    "AdamW, fused": ("AdamW", {"fused": True}),
    "AMSGrad": ("Adam", {"amsgrad": True}),
    "ASGD": ("ASGD", {}),
    "NAdam": ("NAdam", {}),
    "RAdam": ("RAdam", {}),
    "RMSprop, centred": ("RMSprop", {"centered": True, "momentum": 0.9}),
    "Rprop": ("Rprop", {}),
    "SGD, momentum": ("SGD", {"momentum": 0.9, "nesterov": True}),
}


def updated(name: str) -> Made:
    """Return a step of a perceptron with an optimizer."""
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64))
    kind, options = OPTIMIZERS[name]
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3, **options)

    def step(x: Any) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, (torch.randn(32, 128),)


class SmallStates(torch.optim.Optimizer):  # type: ignore[misc]
    """Adam with its first moments in eight bits."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all parameters."""
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["moment"] = torch.zeros_like(p, dtype=torch.int8)
                state["scale"] = torch.ones(())
            moment = state["moment"].float() * state["scale"] * 0.9 + 0.1 * p.grad
            p.sub_(moment, alpha=1e-3)
            state["scale"] = moment.abs().amax() / 127
            state["moment"] = (moment / state["scale"]).round().to(torch.int8)


def own_optimizer() -> Made:
    """An optimizer of the caller's."""
    model = nn.Linear(256, 256)
    optimizer = SmallStates(model.parameters())

    def step(x: Any) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, (torch.randn(32, 256),)


def graph_network() -> Made:
    """Messages along edges, summed by index."""
    edges = torch.randint(0, 200, (2, 1000))
    first, second = nn.Linear(32, 64), nn.Linear(64, 8)

    def step(x: Any) -> None:
        h = first(x)
        h = torch.zeros(200, 64).index_add_(0, edges[1], h[edges[0]]).relu()
        F.cross_entropy(second(h), torch.arange(200) % 8).backward()
        first.zero_grad()
        second.zero_grad()

    return step, (torch.randn(200, 32),)


def mixed_precision() -> Made:
    """Autocast to bfloat16 with clipping and accumulation."""
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(ids: Any, target: Any) -> None:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(ids, target)
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, Decoder.inputs()


def averaged_weights() -> Made:
    """An exponential average of the weights, updated in place."""
    model = Convolutions()
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(x: Any, y: Any) -> None:
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, q in zip(average.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 0.1)

    return step, Convolutions.inputs()


def two_losses() -> Made:
    """Two losses with label smoothing, and two clippings."""
    body, heads = nn.Linear(64, 128), nn.ModuleList([nn.Linear(128, 10), nn.Linear(128, 64)])
    parameters = [*body.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters)

    def step(x: Any, y: Any) -> None:
        h = body(x).tanh()
        loss = F.cross_entropy(heads[0](h), y, label_smoothing=0.1)
        (loss + F.smooth_l1_loss(heads[1](h), x)).backward()
        nn.utils.clip_grad_value_(parameters, 0.5)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, (torch.randn(64, 64), torch.randint(0, 10, (64,)))


def adversaries() -> Made:
    """A generator and a discriminator, each with an optimizer."""
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))
    judge = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    making, judging = (torch.optim.Adam(m.parameters()) for m in (generator, judge))

    def step(real: Any, noise: Any) -> None:
        one, zero = torch.ones(64, 1), torch.zeros(64, 1)
        fake = generator(noise)
        judging.zero_grad()
        loss = F.binary_cross_entropy_with_logits(judge(real), one)
        (loss + F.binary_cross_entropy_with_logits(judge(fake.detach()), zero)).backward()
        judging.step()
        making.zero_grad()
        F.binary_cross_entropy_with_logits(judge(fake), one).backward()
        making.step()

    return step, (torch.randn(64, 64), torch.randn(64, 16))


def diffusion() -> Made:
    """A U-Net with a skip connection that predicts noise."""
    down, up, out = nn.Conv2d(3, 16, 3, 2, 1), nn.ConvTranspose2d(16, 16, 2, 2), nn.Conv2d(19, 3, 3, 1, 1)
    parts = nn.ModuleList([down, up, out])
    optimizer = torch.optim.AdamW(parts.parameters())

    def step(x: Any) -> None:
        noise = torch.randn_like(x)
        h = F.silu(down(x + noise))
        F.mse_loss(out(torch.cat((up(h), x), 1)), noise).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, (torch.randn(4, 3, 32, 32),)


def gradients_of_gradients() -> Made:
    """A penalty on the gradient of the input."""
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))

    def step(x: Any) -> None:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        model.zero_grad()

    return step, (torch.randn(64, 64),)


def value_reads() -> Made:
    """Functions of PyTorch that read values for checks, and a loader."""
    model = nn.Linear(64, 64)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 64)), batch_size=8)

    def step(x: Any) -> None:
        y = model(x)
        F.gaussian_nll_loss(y, x, torch.ones_like(x)).backward()
        for (batch,) in loader:
            model(batch).sum().backward()
        model.zero_grad()

    return step, (torch.randn(64, 64),)


STEPS: dict[str, Callable[[], Made]] = {
    f.__name__: f
    for f in (
        own_optimizer,
        graph_network,
        mixed_precision,
        averaged_weights,
        two_losses,
        adversaries,
        diffusion,
        gradients_of_gradients,
        value_reads,
    )
}


def check(make: Callable[[], Made]) -> None:
    """Compare the estimate of a step with the hook's count in the third step, but for numbers that autograd saves."""
    torch.manual_seed(0)
    gc.collect()
    before = hook().live
    step, args = make()
    for _ in range(8):  # some optimizers change their formula at the sixth step
        step(*args)
    gc.collect()
    real = hook().live - before + hook().peak(step, *args)
    assert estimate(step, *args).peak == pytest.approx(real, rel=0.001)


@pytest.mark.parametrize("name", STEPS)
def test_estimates_of_steps(name: str) -> None:
    """The estimate of each kind of step is within 0.1 % of the allocator's peak."""
    check(STEPS[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_estimates_with_optimizers(name: str) -> None:
    """The estimate with each optimizer of PyTorch is within 0.1 % of the allocator's peak."""
    check(lambda: updated(name))


def test_buckets_of_replicas_count(tmp_path: Any) -> None:
    """A step of DistributedDataParallel in one process has its buckets, with and without views of gradients."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        for views in (False, True):

            def make(views: bool = views) -> Made:
                model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256), gradient_as_bucket_view=views)
                optimizer = torch.optim.SGD(model.parameters(), 0.1)

                def step(x: Any) -> None:
                    model(x).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()

                return step, (torch.randn(32, 256),)

            check(make)
    finally:
        torch.distributed.destroy_process_group()
