"""Kinds of steps whose peaks or budgets depend on details: hooks, buffers, shapes, values, the caller's state."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'weftplan[torch]'")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.torch.allocator_hook import hook  # noqa: E402
from tests.torch.models import Decoder  # noqa: E402
from tests.torch.test_budget import fresh  # noqa: E402, F401
from weftplan.errors import BudgetError, PlanError  # noqa: E402
from weftplan.torch import budget, estimate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
Made = tuple[Callable[..., Any], tuple[Any, ...]]


def loss_in_a_buffer() -> Made:
    """A loss whose kernel returns a scalar in a buffer of the input's size."""
    a, b = torch.randn(256, 256, requires_grad=True), torch.randn(256, 256)
    return lambda a, b: F.mse_loss(a * 2, b).backward(), (a, b)


def hook_on_a_gradient() -> Made:
    """A hook that makes tensors of the gradient's size."""
    w = torch.randn(256, 256, requires_grad=True)
    w.register_hook(lambda g: g.clamp(-1, 1) * 0.5)

    def step(w: Any) -> None:
        w.grad = None
        (w * 2).sum().backward()

    return step, (w,)


def update_in_every_fourth_call() -> Made:
    """Gradients that four calls accumulate."""
    model, calls = nn.Linear(256, 256), [0]
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Any) -> None:
        calls[0] += 1
        model(x).square().mean().backward()
        if calls[0] % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step, (torch.randn(32, 256),)


def formula_that_changes() -> Made:
    """RAdam, whose formula changes at the sixth step."""
    return updated(torch.optim.RAdam)


def value_reads_of_pytorch() -> Made:
    """Adafactor, which reads the norm of parameters."""
    return updated(torch.optim.Adafactor)


def updated(kind: Any) -> Made:
    """Return a step of a linear layer with an optimizer."""
    model = nn.Linear(256, 256)
    optimizer = kind(model.parameters())

    def step(x: Any) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, (torch.randn(32, 256),)


def scaled_gradients() -> Made:
    """A gradient scaler, which reads whether a gradient is infinite."""
    model = nn.Linear(256, 256)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")

    def step(x: Any) -> None:
        with torch.autocast("cpu", torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step, (torch.randn(32, 256),)


def closures_of_lbfgs() -> Made:
    """LBFGS, whose history grows for some steps."""
    model = nn.Linear(128, 128)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=5)

    def step(x: Any) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    return step, (torch.randn(64, 128),)


def replaced_tensors() -> Made:
    """Averages whose tensors a step replaces."""
    model = nn.Linear(256, 256)
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}

    def step(x: Any) -> None:
        model(x).sum().backward()
        model.zero_grad()
        with torch.no_grad():
            for name, p in model.named_parameters():
                averages[name] = 0.9 * averages[name] + 0.1 * p

    return step, (torch.randn(32, 256),)


def conjugates() -> Made:
    """Complex products, whose backward pass conjugates."""
    w = torch.randn(128, 128, dtype=torch.cfloat, requires_grad=True)

    def step(x: Any) -> None:
        F.linear(F.linear(x, w), w).abs().sum().backward()
        w.grad = None

    return step, (torch.randn(64, 128, dtype=torch.cfloat),)


def recurrent_layers() -> Made:
    """An LSTM, whose CPU kernel has a workspace, and a GRU."""
    lstm, gru = nn.LSTM(32, 32, num_layers=2, bidirectional=True), nn.GRU(64, 32)

    def step(x: Any) -> None:
        gru(lstm(x)[0])[0].sum().backward()
        lstm.zero_grad()
        gru.zero_grad()

    return step, (torch.randn(20, 4, 32),)


def states_of_checkpoints() -> Made:
    """Checkpoints, which save the generator's state from forward to backward."""
    layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

    def step(x: Any) -> None:
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()
        layers.zero_grad()

    return step, (torch.randn(32, 16),)


def wrapped_optimizer() -> Made:
    """An optimizer in an object that passes calls on, as those of the library accelerate."""

    class Wrapper(torch.optim.Optimizer):  # type: ignore[misc]
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        param_groups = property(lambda self: self.inner.param_groups)
        state = property(lambda self: self.inner.state)

        def step(self, closure: Any = None) -> None:
            self.inner.step(closure)

    model = nn.Linear(256, 256)
    optimizer = Wrapper(torch.optim.AdamW(model.parameters()))

    def step(x: Any) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.inner.zero_grad()

    return step, (torch.randn(32, 256),)


def grouped_products() -> Made:
    """Products of groups of rows in float32, as of routed experts."""
    weights, ends = torch.randn(3, 64, 64, requires_grad=True), torch.tensor([10, 20, 32], dtype=torch.int32)

    def step(x: Any) -> None:
        torch.nn.functional.grouped_mm(x, weights, offs=ends).square().mean().backward()
        weights.grad = None

    return step, (torch.randn(32, 64),)


KINDS = [
    wrapped_optimizer,
    grouped_products,
    recurrent_layers,
    states_of_checkpoints,
    loss_in_a_buffer,
    hook_on_a_gradient,
    update_in_every_fourth_call,
    formula_that_changes,
    value_reads_of_pytorch,
    scaled_gradients,
    closures_of_lbfgs,
    replaced_tensors,
    conjugates,
]


@pytest.mark.parametrize("make", KINDS)
def test_estimates_equal_real_peaks(make: Callable[[], Made]) -> None:
    """The estimate is the allocator's peak in a late step, but for 0.1 % of numbers that autograd saves."""
    torch.manual_seed(0)
    actual = estimate(*(lambda made: (made[0], *made[1]))(make())).peak
    before = hook().live
    step, args = make()
    for _ in range(2 if make is closures_of_lbfgs else 7):  # which converges after some steps
        step(*args)
    resident = hook().live - before
    assert actual == pytest.approx(hook().peak(step, *args) + resident, rel=0.001)


BUFFER = torch.zeros(4)
data = [torch.zeros(65536)]
"""A global with the name of an attribute."""


def test_the_callers_objects_do_not_change() -> None:
    """Global tensors, lists that hooks fill, and Python's random state keep their values."""
    model, outputs = nn.Linear(4, 4), list[Any]()
    model.register_forward_hook(lambda *facts: outputs.append(facts[2]))

    def step(x: Any) -> None:
        BUFFER.add_(1)
        random.random()
        (model(x) * BUFFER).sum().backward()

    state = random.getstate()
    estimate(step, torch.randn(2, 4))
    assert BUFFER.tolist() == [0.0] * 4
    assert not outputs
    assert random.getstate() == state


def test_globals_are_found_by_loads_not_by_attributes() -> None:
    """A global that has the name of an attribute does not count."""
    model = nn.Linear(4, 4)

    def step(x: Any) -> None:
        model(x).sum().backward()
        assert model.weight.data is not None

    assert estimate(step, torch.randn(2, 4)).before < data[0].nbytes


def test_skipped_frames_are_refused() -> None:
    """A loop that reads values is skipped by PyTorch; the call raises instead of running without a plan."""
    layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])

    def loss(x: Any) -> Any:
        for layer in layers:
            x = layer(x)
            if torch.isnan(x).any():
                raise ValueError
        return x.sum()

    with pytest.raises(PlanError, match="outside every plan"):
        budget(loss, "1GB", breaks="sum")(torch.randn(8, 64))
    with torch.compiler.set_stance("force_eager"), pytest.raises(PlanError, match="outside every plan"):
        budget(lambda x: layers[0](x).sum(), "1GB")(torch.randn(8, 64))


def test_more_shapes_than_allowed_are_refused() -> None:
    """Every set of shapes up to the option has a plan, beyond eight too; the next one is refused with advice."""
    model = nn.Linear(8, 8)
    step = budget(lambda x: model(x).sum(), "1GB", shapes=10)
    for length in range(2, 12):
        step(torch.randn(length, 8))
    assert len(step.plans) == 10
    with pytest.raises(PlanError, match="pad the inputs"):
        step(torch.randn(20, 8))


def test_gradient_hooks_are_refused_in_budgets() -> None:
    """A hook on a parameter's gradient runs outside the plan, so a call raises."""
    model = nn.Linear(8, 8)
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(PlanError, match="hook on its gradient"):
        budget(lambda x: model(x).sum(), "1GB")(torch.randn(2, 8))


@torch.compiler.disable
def unplanned(x: Any) -> Any:
    """Return a function of ``x`` that keeps ten tensors of its size for the backward pass, in no graph."""
    for _ in range(5):
        x = torch.sin(x) * torch.cos(x)
    return x


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_part_outside_every_plan_is_refused(inner: str) -> None:
    """The first call compares what it keeps with its plans; without the unplanned part the same step runs."""
    model, x = nn.Linear(64, 64), torch.randn(128, 64)
    whole = budget(lambda x: model(torch.relu(model(x))).sum(), "1MB", breaks="sum", inner=inner)
    whole(x).backward()
    step = budget(lambda x: model(unplanned(torch.relu(model(x)))).sum(), "300kB", breaks="sum", inner=inner)
    for _ in range(2):
        with pytest.raises(PlanError, match=r"keeps 5\d\d,\d{3} bytes for its backward pass, its plans \d\d,\d{3}"):
            step(x)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_scratch_that_depends_on_values_is_compared_with_the_plan(inner: str) -> None:
    """The backward pass of the largest rows of bags takes more scratch for other rows than for those of the plan."""
    bags, rows = nn.EmbeddingBag(1000, 64, mode="max"), torch.randint(1, 1000, (64, 64))

    def loss(rows: Any) -> Any:
        return bags(rows).sum()

    enough = budget(loss, "1GB", inner=inner)
    enough(rows).backward()
    torch.compiler.reset()
    step = budget(loss, enough.plans[0].peak, inner=inner)
    with pytest.raises(BudgetError, match=r"embedding_bag_backward.* with these values.* pass other="):
        step(rows).backward()


def test_the_graph_of_an_input_is_not_the_steps_own() -> None:
    """Tensors that the caller's own layers keep before the step do not count."""
    before, model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 64)
    x = torch.randn(128, 64)
    step = budget(lambda x: model(x).sum(), "1MB")
    step(before(before(x))).backward()
    assert before[0].weight.grad is not None


def test_inputs_may_be_views_of_one_tensor() -> None:
    """Two arguments that share a storage are both saved for the backward pass, and gradients equal those without."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x, y = torch.randn(2, 4, 8)

    def loss(x: Any, y: Any) -> Any:
        return F.mse_loss(model(x), y) + (model(y) * x).sum()

    loss(x, y).backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    step = budget(loss, "1MB")
    step(x, y).backward()
    tight = budget(loss, step.plans[0].smallest)
    model.zero_grad()
    tight(x, y).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def test_the_smallest_budget_of_an_error_works() -> None:
    """The error of a budget that the optimizer's step exceeds names a budget that the whole step keeps."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(512, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(BudgetError, match="smallest budget that works is") as caught:
        budget(lambda x: model(x).sum(), "1kB", optimizer=optimizer)(x)
    smallest = caught.value.smallest
    assert smallest is not None
    with pytest.raises(BudgetError, match=f"smallest budget that works is {smallest}"):
        budget(lambda x: model(x).sum(), smallest - 1, optimizer=optimizer)(x)
    budget(lambda x: model(x).sum(), smallest, optimizer=optimizer)(x).backward()


def test_unread_parameters_count() -> None:
    """Parameters that the graph does not read count in the plan."""
    model = nn.Linear(8, 8)
    model.unused = nn.Linear(100, 100)
    step = budget(model, "1GB")
    step(torch.randn(2, 8))
    assert step.plans[0].resident.inputs >= sum(p.nbytes for p in model.parameters())


def test_a_budgeted_module_is_a_module() -> None:
    """The result has the module's parameters, state and modes, and can be copied and pickled."""
    model = Decoder()
    step = budget(model, "1GB")
    assert list(step.state_dict()) == list(model.state_dict())
    assert [id(p) for p in step.parameters()] == [id(p) for p in model.parameters()]
    step.eval()
    assert not model.training
    for copied in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert torch.equal(copied.head.weight, model.head.weight)
        copied(*Decoder.inputs())
