"""Input that cannot be planned is refused with the cause, the line and a remedy, or planned with a note."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'weftplan[torch]'")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import weftplan.torch  # noqa: E402
from tests.torch.models import Decoder, real_peak  # noqa: E402
from tests.torch.test_budget import broken, fresh  # noqa: E402, F401
from weftplan.errors import BudgetError, MXNetError, PlanError  # noqa: E402
from weftplan.torch import budget, estimate, fits  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's own


def test_too_small_budgets_name_the_smallest() -> None:
    """The error for a small budget names the smallest budget, which a real step meets; one byte less raises again."""
    with pytest.raises(BudgetError, match="the smallest budget that works is") as caught:
        budget(Decoder(), "10KB")(*Decoder.inputs())
    smallest = caught.value.smallest
    assert smallest is not None
    peak, _ = real_peak(Decoder, lambda module: budget(module, smallest))
    assert peak <= smallest
    torch.compiler.reset()
    with pytest.raises(BudgetError):
        budget(Decoder(), smallest - 1)(*Decoder.inputs())


def test_control_flow_on_data_names_its_line() -> None:
    """A step whose control flow depends on data raises an error that names the line."""
    with pytest.raises(PlanError, match=r"test_budget\.py\", line \d+, in broken") as caught:
        budget(broken, "1GB")(torch.randn(8, requires_grad=True))
    assert "breaks='sum'" in str(caught.value)


MISTAKES: dict[str, tuple[Callable[..., Any], str]] = {
    "the class of an optimizer": (
        lambda loss: budget(loss, "1GB", optimizer=torch.optim.AdamW),
        r"optimizer= takes an optimizer such as .*, got the class AdamW",
    ),
    "the same for a card": (
        lambda loss: fits(loss, torch.ones(2, 4), card="8GB", optimizer=torch.optim.AdamW),
        r"got the class AdamW",
    ),
    "a misspelt option": (
        lambda loss: budget(loss, "1GB", optimiser=None),
        r"'optimiser': did you mean 'optimizer'\?",
    ),
    "the same for a card's": (
        lambda loss: fits(loss, torch.ones(2, 4), card="8GB", optimiser=None),
        r"fits has no argument 'optimiser': did you mean 'optimizer'\?",
    ),
    "backward inside": (
        lambda loss: budget(lambda x: loss(x).backward(), "1GB")(torch.ones(2, 4)),
        r"return the loss, and write step\(\.\.\.\)\.backward\(\)",
    ),
    "a result in place of a function": (
        lambda loss: fits(loss(torch.ones(2, 4)), card="8GB"),
        r"expected a function or a module as the step, got Tensor",
    ),
}
"""Mistakes of a first hour, each with the sentence that it gets."""


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_a_first_hour_get_a_sentence(name: str) -> None:
    """Each mistake raises one of weftplan's errors, whose text names the mistake and the remedy."""
    call, sentence = MISTAKES[name]
    model = torch.nn.Linear(4, 1)
    with pytest.raises(MXNetError, match=sentence):
        call(lambda x: model(x).sum())


@pytest.fixture
def halve() -> Any:
    """A custom operator without a fake kernel."""

    @torch.library.custom_op("weftplan_tests::halve", mutates_args=())
    def halve(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    return halve


def test_operators_without_fake_kernels_are_named(halve: Any) -> None:
    """A custom operator without a fake kernel raises an error that names it and the function to register one."""
    with pytest.raises(PlanError, match=r"weftplan_tests(.|\n)*halve\.register_fake"):
        budget(lambda x: halve(x).sum(), "1GB")(torch.randn(4, requires_grad=True))
    with pytest.raises(PlanError, match=r"test_bad_input\.py:\d+, in .*weftplan_tests::halve.*register_fake"):
        estimate(lambda x: halve(x).sum(), torch.randn(4, requires_grad=True))


def test_operators_with_fake_kernels_are_planned(halve: Any) -> None:
    """A custom operator with a fake kernel is planned, computes right gradients, and is listed as not counted."""
    halve.register_fake(torch.empty_like)
    halve.register_autograd(lambda ctx, grad: grad / 2)
    x = torch.randn(64, requires_grad=True)
    wrapped = budget(lambda x: halve(x).sin().sum(), "1GB")
    wrapped(x).backward()
    assert torch.equal(x.grad, (x / 2).cos() / 2)
    assert "weftplan_tests.halve.default" in wrapped.plans[0].unseen
    assert "weftplan_tests.halve.default" in estimate(lambda x: halve(x).sum().backward(), x).unseen


@pytest.mark.parametrize("where", ["inputs", "all"])
def test_other_devices_are_named(where: str) -> None:
    """Inputs on another device than the module, and tensors on ``meta``, raise an error that names the devices."""
    model, args = Decoder(), tuple(x.to("meta") for x in Decoder.inputs())
    message = "cpu and meta" if where == "inputs" else "tensors are on meta"
    with pytest.raises(PlanError, match=message):
        budget(model.to("meta") if where == "all" else model, "1GB")(*args)


def test_operands_on_another_device_are_named() -> None:
    """A step with tensors on two devices raises an error that names both, in ``budget`` and in ``estimate``."""
    x, y = torch.ones(4, requires_grad=True), torch.ones(4, device="meta", requires_grad=True)
    with pytest.raises(PlanError, match="tensors are on cpu and meta"):
        budget(lambda x, y: ((x * 2).sum(), (y * 2).sum()), "1GB")(x, y)
    with pytest.raises(PlanError, match=r"test_bad_input\.py:\d+, in .*two devices, cpu and meta|two devices, meta"):
        estimate(lambda: x * y)


def test_double_backward_is_refused() -> None:
    """A gradient of gradients raises an error."""
    model, args = torch.nn.Linear(4, 4), torch.randn(2, 4)
    loss = budget(lambda x: model(x).sin().sum(), "1GB")(args)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        sum(g.square().sum() for g in gradients).backward()


def test_checkpointed_modules_are_planned_with_a_note() -> None:
    """The budget overrides ``torch.utils.checkpoint``, the plan has a note about it, and gradients are equal."""
    plain, model = Decoder(), Decoder()
    model.load_state_dict(plain.state_dict())
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    wrapped, args = budget(model, "1GB"), Decoder.inputs()
    plain(*args).backward()
    wrapped(*args).backward()
    assert "marked by torch.utils.checkpoint; the budget decides instead" in wrapped.plans[0].notes[0]
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_compiled_parts_are_planned_as_written() -> None:
    """A compiled module inside another module is planned like the module before compilation."""
    plans = []
    for compiled in (False, True):
        torch.compiler.reset()
        model = Decoder()
        if compiled:
            model.blocks[1] = torch.compile(model.blocks[1])
        wrapped = budget(model, "1GB")
        wrapped(*Decoder.inputs()).backward()
        plans.append(wrapped.plans[0])
    assert plans[0].peak == plans[1].peak
    assert plans[0].smallest == plans[1].smallest


def test_bad_arguments_are_refused() -> None:
    """Compiled modules, invalid options and sizes, and arguments that cannot be called raise a PlanError."""
    model = Decoder()
    with pytest.raises(PlanError, match="compiled already"):
        budget(torch.compile(model), "1GB")
    with pytest.raises(PlanError, match="compiled already"):
        budget(budget(model, "1GB"), "1GB")
    with pytest.raises(PlanError, match="expected a module or a function, got int"):
        budget(3, "1GB")  # type: ignore[arg-type]
    for size in ("lots", "120%", 0, -1):
        with pytest.raises(PlanError):
            budget(model, size)
    for name in ("seconds", "workspaces", "breaks", "inner"):
        with pytest.raises(PlanError, match=f"{name} must be '.*', got 'no'"):
            budget(model, "1GB", **{name: "no"})


def test_percentages_are_of_the_devices_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget in percent is a share of the GPU's memory on a GPU, and of the machine's memory on a CPU."""

    class Card:
        total_memory = 1000

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card())
    part = weftplan.torch.partition("25%")
    assert part.limit(torch.device("cuda", 0)) == 250
    assert part.limit(torch.device("cpu")) > 1000


def test_an_untested_version_warns_at_import() -> None:
    """The import warns of a version of PyTorch that was not tested, and of no other."""
    script = "import torch; torch.__version__ = {!r}; import weftplan.torch; weftplan.torch.budget"
    for version, warns in (("3.0.1", True), ("2.13.7+cpu", False)):
        done = subprocess.run(
            [sys.executable, "-W", "always::UserWarning", "-c", script.format(version)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert (f"this is {version}" in done.stderr) == warns


PARAMETERS = {
    "extract_modules": (
        "joint_module saved_values saved_sym_nodes saved_opaque_nodes num_fwd_outputs static_lifetime_input_nodes "
        "ignore_must_be_in_fw_bw omit_aot_autograd_runtime"
    ),
    "classify_nodes": "joint_module static_lifetime_input_indices num_fwd_outputs",
    "default_partition": (
        "joint_module _joint_inputs num_fwd_outputs static_lifetime_input_indices static_lifetime_input_nodes"
    ),
    "is_tangent": "node",
    "aot_autograd": "kwargs",
    "profiler_enabled": "",
    "without_modes": "",
    "CustomPartitionerFn.__call__": "self gm joint_inputs kwargs",
    "FakeTensorMode.__init__": ("self allow_fallback_kernels allow_non_fake_inputs shape_env static_shapes export"),
    "TorchDispatchMode.__torch_dispatch__": "self func types args kwargs",
}
"""The parameters, in order, of PyTorch's private functions that ``private.py`` imports."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_private_functions_have_the_known_parameters(name: str) -> None:
    """Each private function of PyTorch that is used has the expected parameters."""
    import inspect
    from operator import attrgetter

    from weftplan.torch import private, private_compile

    owner = private if hasattr(private, name.partition(".")[0]) else private_compile
    try:
        known = list(inspect.signature(attrgetter(name)(owner)).parameters)
    except ValueError:  # a function in C, which has no signature to compare
        known = []
    assert known == PARAMETERS[name].split()


def test_private_names_are_in_two_files() -> None:
    """Only ``private.py`` and ``private_compile.py`` use names that PyTorch marks as private."""
    import re

    folder = Path(weftplan.torch.__file__).parent
    private = re.compile(
        r"torch(\.\w+)*\._[a-z]\w*|from torch[\w.]*\._\w+|\b(?:_cdata|kineto_results|_is_view|_schema)\b"
    )
    offences = [
        f"{path.name}: {match[0]}"
        for path in sorted(folder.glob("*.py"))
        if path.name not in ("private.py", "private_compile.py")
        for match in private.finditer(path.read_text())
        if match[0] != "torch._functorch"  # the option for a solver, in a docstring
    ]
    assert offences == []
