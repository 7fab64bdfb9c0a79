"""Curves of budgets and times, their pictures, and the command."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'weftplan[torch]'")

from tests.torch.models import Decoder  # noqa: E402
from tests.torch.test_budget import fresh  # noqa: E402, F401
from weftplan.cli import main  # noqa: E402
from weftplan.cli.plan.torch_step import laid_out  # noqa: E402
from weftplan.torch import curve  # noqa: E402
from weftplan.torch.trade_off import ROWS, planned  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def test_curves_are_strict_and_drawn(tmp_path: Path) -> None:
    """Along a curve budgets fall and times rise, each file format is written, and the step is not run."""
    model = Decoder()
    actual = curve(model, *Decoder.inputs())
    budgets = [point.budget for point in actual.points]
    assert budgets == sorted(set(budgets), reverse=True)
    assert [point.time for point in actual.points] == sorted(point.time for point in actual.points)
    assert actual.points[0].time == 1.0
    assert model.head.weight.grad is None
    for name, start in {"a.svg": "<svg", "a.html": "<!doctype html>", "a.txt": "the graph of"}.items():
        actual.save(tmp_path / name)
        assert (tmp_path / name).read_text().startswith(start)
    page = actual.page()
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page
    assert "measured" not in page  # neither a legend of dots nor an empty column
    assert len(re.findall("<tr>", page)) - 1 == min(len(budgets), ROWS)


def test_measured_points() -> None:
    """With ``measure=True`` at least two points have measured times, and gradients do not change."""
    model = Decoder(depth=1)
    actual = curve(model, *Decoder.inputs(), measure=True)
    real = [point.measured for point in actual.points if point.measured is not None]
    assert len(real) >= 2
    assert all(value > 0.0 for value in real)
    assert model.head.weight.grad is None
    assert actual.page().count("<circle") == len(real) + 1  # with the one of the legend
    assert "<th class=n>measured time</th>" in actual.page()


def test_plans_have_a_layout() -> None:
    """The layout of a plan in one arena has the plan's peak as its lower bound."""
    choices, plan = planned(Decoder(), Decoder.inputs())
    layout = laid_out(choices, plan)
    assert layout.lower_bound + plan.resident.total == plan.peak
    assert layout.total >= plan.peak


STEP = """
import torch
from tests.torch.models import Decoder

def step():
    torch.manual_seed(0)
    model = Decoder()
    return model, model.inputs(), torch.optim.SGD(model.parameters(), 0.1)

def wrong():
    return 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with a training step, importable from the working directory."""
    (tmp_path / "some_step.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "some_step", raising=False)
    return "some_step"


def run(*args: str) -> Any:
    """Run ``weftplan plan --torch`` with these arguments and return its result."""
    return CliRunner().invoke(main, ["plan", "--torch", *args])


def test_the_command_plans_a_step(module: str, tmp_path: Path) -> None:
    """``weftplan plan --torch`` prints the peak, writes the page and the curve, and refuses too small budgets."""
    page = tmp_path / "page.html"
    actual = run(f"{module}:step", "--html", str(page), "--curve")
    assert actual.exit_code == 0, actual.output
    assert "alive at the peak" in actual.output
    (line,) = re.findall(r".* bytes +0\.0 % more modelled time", actual.output)
    assert line in page.read_text()
    assert page.read_text().startswith("<!doctype html>")
    facts = json.loads(run(f"{module}:step", "--json", "--quiet").output)
    assert f"peak of {facts['peak']:,} bytes is the lower bound and the resident bytes" in page.read_text()
    shown = re.search("results and scratch ([^;]*);", actual.output)
    assert shown is not None
    assert f"At most {shown[1]} are in use" in page.read_text()
    assert facts["smallest"] < facts["peak"] == facts["plain"]
    fitted = json.loads(run(f"{module}:step", "--budget", str(facts["smallest"]), "--json").output)
    assert fitted["peak"] == facts["smallest"]
    assert fitted["repeated"]
    refused = run(f"{module}:step", "--budget", "1KB")
    assert refused.exit_code == 1
    assert "the smallest budget that works is" in str(refused.output) + str(refused.exception)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("some_step", "expected package.module:function"),
        ("no_such:step", "no module"),
        ("some_step:wrong", "must return"),
    ],
)
def test_command_refuses_invalid_steps(module: str, name: str, message: str) -> None:
    """A name without a function, an unknown module, and a function with another result exit with status 2."""
    actual = run(name)
    assert actual.exit_code == 2
    assert message in actual.output


def test_attention_and_functions_have_their_time() -> None:
    """The time of the CPU's fused attention grows with the square of the length; a function costs its elements."""
    from weftplan.torch.seconds import modelled

    aten = torch.ops.aten
    seconds = []
    for length in (512, 2048):
        q = torch.empty(1, 8, length, 64)
        results = q, q[..., 0]
        seconds.append(modelled(aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q), {}, results))
    assert seconds[1] > 8 * seconds[0]
    x = torch.empty(1 << 20)
    assert modelled(aten.gelu.default, (x,), {}, x) >= modelled(aten.relu.default, (x,), {}, x)
