"""Forecasts for cards: verdicts, the two figures, what differs on a card, and the command with its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'weftplan[torch]'")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from tests.torch.models import Decoder  # noqa: E402
from weftplan.cli import main  # noqa: E402
from weftplan.errors import PlanError  # noqa: E402
from weftplan.torch import fits, on_card  # noqa: E402
from weftplan.torch.card_rules import FUNCTIONS, ROWS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
MIB = 1 << 20


def perceptron(device: str = "cpu") -> tuple[Any, Any, Any]:
    """Return a loss function, its input and an optimizer."""
    with torch.device(device):
        model, x = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)), torch.empty(512, 1024)
    return lambda x: model(x).square().mean(), x, torch.optim.AdamW(model.parameters())


def test_figures_are_ordered_and_parts_add_up() -> None:
    """The survival limit is at most the reserve, and the parts sum to the reserve without workspaces."""
    loss, x, optimizer = perceptron()
    answer = fits(loss, x, card="RTX 4090", optimizer=optimizer)
    assert answer.fits is True
    assert answer.survives[0] <= answer.reserved[0] == sum(answer.parts.values())
    assert answer.parts["parameters"] == 4 * 2 * (1024 * 1024 + 1024)
    assert answer.parts["optimizer"] == 2 * answer.parts["parameters"]
    assert str(answer).startswith("fits: needs")


def test_meta_models_and_whole_steps_give_the_same_figures() -> None:
    """A model on meta, a model with memory, and a step that differentiates and updates itself have one forecast."""
    loss, x, optimizer = perceptron()

    def step(x: Any) -> None:
        optimizer.zero_grad()
        loss(x).backward()
        optimizer.step()

    meta_loss, meta_x, meta_optimizer = perceptron("meta")
    answers = [
        fits(loss, x, card="24GB", optimizer=optimizer),
        fits(step, x, card="24GB"),
        fits(meta_loss, meta_x, card="24GB", optimizer=meta_optimizer),
    ]
    assert len({answer.reserved for answer in answers}) == 1


def test_a_step_that_does_not_fit_names_batch_and_budget() -> None:
    """On a card that is too small the answer has the largest batch that fits and a budget."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)])
    x = torch.empty(65536, 256)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    answer = fits(lambda x: model(x).sum(), x, card="1.7GB", optimizer=optimizer)
    assert answer.fits is not True
    assert answer.largest_batch is not None
    smaller = fits(lambda x: model(x).sum(), torch.empty(answer.largest_batch, 256), card="1.7GB", optimizer=optimizer)
    assert smaller.fits is True
    assert any("budget" in line for line in answer.advice)


def test_the_largest_batch_does_not_depend_on_the_batch_asked() -> None:
    """Two batches that do not fit have one answer, of which the next larger batch in the list does not fit."""
    answers = []
    for asked in (40_000, 100_000):
        with torch.device("meta"):
            model, x = nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)]), torch.empty(asked, 256)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        answers.append(fits(lambda x, model=model: model(x).sum(), x, card="1.9GB", optimizer=optimizer).largest_batch)
    assert answers[0] == answers[1] > 0


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda x: f"{x.sum():.3f}", "NumPy or to text"),
        (lambda x: x.detach().numpy(), "NumPy or to text"),
        ((lambda rows: lambda x: next(rows))(t for t in [1]), "generators"),
        (lambda x: F.embedding(x.long(), torch.ones(9, 4).requires_grad_(), sparse=True).sum(), "sparse tensor"),
        (lambda x: x.cuda().sum().item(), "loss.item"),
    ],
)
def test_mistakes_in_a_step_have_a_sentence(step: Any, message: str) -> None:
    """Values that go to NumPy or text, generators and sparse gradients are named with the way round."""
    with pytest.raises(PlanError, match=message):
        fits(step, torch.ones(4, requires_grad=True), card="24GB")


def test_dropout_saves_bytes_and_attention_no_scores() -> None:
    """On a card dropout saves one byte for each element, and attention with dropout saves no matrix of scores."""
    x = torch.empty(4096, 1024, requires_grad=True)
    plain = fits(lambda x: (x * 2).sum(), x, card="24GB").parts["activations"]
    dropped = fits(lambda x: F.dropout(x * 2).sum(), x, card="24GB").parts["activations"]
    assert dropped - plain <= 4096 * 1024 * 6
    q = torch.empty(1, 8, 2048, 64, requires_grad=True)
    answer = fits(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum(), q, card="24GB")
    assert answer.parts["activations"] < 8 * 2048 * 2048 * 4


def test_autocast_of_a_card_is_translated() -> None:
    """Under ``autocast("cuda")`` products are computed in the lower dtype and softmax in float32."""
    layer = nn.Linear(64, 64)

    def checked(x: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            y = layer(x)
            if y.dtype is not torch.bfloat16 or F.softmax(y, -1).dtype is not torch.float32:
                raise ValueError("not translated")
        return y.sum()

    assert fits(checked, torch.empty(8, 64), card="24GB").fits


def test_the_table_can_be_extended() -> None:
    """A decorated function replaces a function of PyTorch in forecasts, and its row has a source."""

    def larger(x: Any) -> Any:
        return torch.cat([x, x]).square()

    try:
        on_card(torch.relu, what="relu of twice the size", source="this test")(larger)
        x = torch.empty(1 << 20, requires_grad=True)
        assert fits(lambda x: torch.relu(x).sum(), x, card="24GB").parts["activations"] >= 16 * MIB
    finally:
        FUNCTIONS.pop(torch.relu, None)
        ROWS[:] = [row for row in ROWS if row.source != "this test"]
    assert all(row.what and row.source for row in ROWS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"card": "RTX 409"}, "did you mean 'RTX 4090'"),
        ({"card": "200MB"}, "the CUDA context alone takes"),
        ({"card": 24}, "a name or a size as text"),
        ({"card": "24GB", "conf": "expandable:True"}, "'expandable' is unknown: did you mean 'expandable_segments'"),
        ({"card": "24GB", "conf": "max_split_size_mb:x"}, "expected max_split_size_mb above 20"),
        ({"card": "24GB", "optimizer": torch.optim.AdamW}, "got the class AdamW"),
    ],
)
def test_bad_input_is_refused(options: dict[str, Any], message: str) -> None:
    """Unknown cards and settings, and cards smaller than the context, are refused in one sentence."""
    with pytest.raises(PlanError, match=message):
        fits(lambda x: x.sum(), torch.empty(4, requires_grad=True), **options)


def test_steps_without_a_backward_pass_are_refused() -> None:
    """A step that differentiates nothing is refused; so is one that reads values."""
    with pytest.raises(PlanError, match="no backward pass"):
        fits(lambda x: x * 2, torch.empty(4), card="24GB")
    with pytest.raises(PlanError, match="looks at the value"):
        fits(lambda x: x * x.sum().item(), torch.empty(4, requires_grad=True), card="24GB")


PROGRAM = """
import torch
from torch import nn
def step():
    model = nn.Linear(512, 512)
    return lambda x: model(x).sum(), (torch.empty(8, 512),), torch.optim.Adam(model.parameters())
def large():
    with torch.device("meta"):
        model = nn.Linear(65536, 65536)
    return lambda x: model(x).sum(), (torch.empty(8, 65536, device="meta"),), torch.optim.Adam(model.parameters())
def failing():
    def loss(x):
        raise KeyError("no such layer")
    return loss, (torch.empty(4),)
"""


def test_exit_codes_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command exits with 0 if the step fits, 1 if not, and 2 with one sentence if it cannot be said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(PROGRAM)
    run = CliRunner().invoke
    assert run(main, ["fits", "own.py:step", "--card", "RTX 4090"]).exit_code == 0
    done = run(main, ["fits", "own.py:large", "--card", "RTX 4090", "--json"])
    assert (done.exit_code, json.loads(done.stdout)["fits"]) == (1, False)
    assert run(main, ["plan", "--torch", "own.py:step", "--card", "RTX 4090"]).exit_code == 0
    for arguments in (
        ["own.py:failing", "--card", "24GB"],
        ["own.py:step", "--card", "RTX 409"],
        ["no.py:x", "--card", "8GB"],
    ):
        done = run(main, ["fits", *arguments])
        assert done.exit_code == 2
        assert "cannot be said" in done.output or "cannot" in done.output


def test_import_is_light() -> None:
    """``estimate`` and ``fits`` import at most 60 of our modules, and neither llvmlite nor dynamo."""
    script = (
        "import sys, torch; from weftplan.torch import estimate, fits; "
        "print(sum(m.startswith('weftplan') for m in sys.modules), 'llvmlite' in sys.modules, "
        "'torch._dynamo.eval_frame' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    count, *heavy = done.stdout.split()
    assert int(count) <= 60
    assert heavy == ["False", "False"]


def test_small_decoders_fit_in_a_reserve_of_few_segments() -> None:
    """A tiny model reserves the workspaces and whole segments, more than its tensors."""
    model = Decoder()
    answer = fits(model, *Decoder.inputs(), card="8GB")
    assert answer.parts["allocator"] > 0
    assert answer.reserved[0] % (2 * MIB) == 0
