"""``weftplan plan``: figures, budgets and exit codes, the largest batch, comparison, files, bad input."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import weftplan as mx
from weftplan import models
from weftplan.cli import main
from weftplan.device.amounts import amount
from weftplan.errors import BudgetError
from weftplan.planner import MemoryPlan, validate
from weftplan.planner.batch import largest_batch


def plan(*args: object) -> Result:
    """Run the command; an exception that is no message fails the test."""
    return CliRunner().invoke(main, ["plan", *map(str, args)], catch_exceptions=False)


def figures(*args: object) -> dict[str, Any]:
    """Return the command's JSON."""
    result = plan(*args, "--json")
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_a_built_in_network_has_usual_shapes() -> None:
    """The figures of the command are those of the call."""
    actual = figures("lenet", "--batch", 64)
    expected = models.get("lenet").plan(models.input_shapes("lenet", 64))
    assert actual["peak"] == expected.peak
    assert actual["lower_bound"] == expected.lower_bound
    assert actual["total"] == expected.total == actual["peak"] + sum(actual["external"].values())
    assert actual["per_device"] == {"cpu(0)": expected.peak}
    assert [item["name"] for item in actual["alive_at_peak"][:3]] == [b.name for b in expected.alive_at_peak(3)]


def test_parameters_only_by_default() -> None:
    """Training with Module has no gradients of data and labels."""
    actual, every = (figures("mlp", *more) for more in ((), ("--input-grads",)))
    inputs = 4 * (32 * 784 + 32)
    assert every["external"]["gradients"] - actual["external"]["gradients"] == inputs
    assert figures("mlp", "--inference")["external"]["gradients"] == 0


@pytest.mark.parametrize("packed", [False, True])
def test_a_symbol_file(tmp_path: Path, packed: bool) -> None:
    """A saved symbol gives the plan of the built-in network; gzipped files are read too."""
    text = models.get("lenet").tojson()
    path = tmp_path / ("net-symbol.json.gz" if packed else "net-symbol.json")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    actual = figures(path, "--shape", "data=32,1,28,28")
    built_in = figures("lenet")
    assert {k: v for k, v in actual.items() if k != "model"} == {k: v for k, v in built_in.items() if k != "model"}


def test_a_damaged_symbol_file_is_named(tmp_path: Path) -> None:
    """An error inside a symbol file begins with the file's name."""
    path = tmp_path / "torn-symbol.json"
    path.write_text(models.get("lenet").tojson()[:200])
    result = plan(path, "--shape", "data=32,1,28,28")
    assert result.exit_code != 0
    assert f"{path}: not valid JSON" in " ".join(result.output.split())


def test_text_for_people() -> None:
    """The text has the peak, its parts, and the memory outside the plan; the first line is the answer."""
    result = plan("lenet", "--optimizer", "adam")
    assert result.exit_code == 0
    actual = figures("lenet", "--optimizer", "adam")
    assert f"{actual['peak']:,}" in result.stdout
    assert f"{actual['external']['optimizer_states']:,}" in result.stdout
    for item in actual["alive_at_peak"][:5]:
        assert f"{item['nbytes']:,}" in result.stdout
        assert item["name"] in result.stdout
    assert "CUDA context" in result.stdout
    first = result.stdout.splitlines()[0]
    assert first.startswith("training lenet, batch 32, float32: ")
    assert f"{actual['total'] / 2**20:.2f} MiB in all (planned peak " in first
    assert "not counted" not in first
    assert "optimizer not counted: --optimizer adam)" in plan("lenet").stdout.splitlines()[0]


def test_a_budget_that_cannot_be_met_exits_with_1_and_names_one_that_works() -> None:
    """The number in the message works; one byte less does not."""
    refused = plan("lenet", "--budget", "1MB")
    assert refused.exit_code == 1
    smallest = int(re.search(r"smallest budget found that works is (\d+)", refused.output).group(1))  # type: ignore[union-attr]
    assert figures("lenet", "--budget", smallest)["total"] <= smallest
    assert plan("lenet", "--budget", smallest - 1).exit_code == 1


def test_a_budget_is_met_by_recomputation() -> None:
    """A note states the cost; an explicit policy is kept, even if it does not fit."""
    plain = figures("resnet", "--batch", 32)
    budget = int(plain["total"] * 0.95)
    actual = figures("resnet", "--batch", 32, "--budget", budget)
    assert actual["total"] <= budget < plain["total"]
    assert any("run twice" in note for note in actual["notes"])
    refused = plan("resnet", "--batch", 32, "--budget", budget, "--recompute", "off")
    assert refused.exit_code == 1
    assert f"the smallest budget that works is {plain['total']}" in refused.output


@pytest.mark.parametrize("recompute", ["off", "budget"])
def test_the_largest_batch(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fits and the next one does not; with recomputation it is larger."""
    monkeypatch.setenv("WEFTPLAN_KERNELS", "numpy")  # the same scratch on every machine
    arguments = ("lenet", "--recompute", recompute, "--budget", "6MB")
    actual = figures(*arguments, "--batch-max")
    batch = actual["batch_max"]
    assert actual["total"] <= 6_000_000
    assert plan(*arguments, "--batch", batch).exit_code == 0
    assert plan(*arguments, "--batch", batch + 1).exit_code == 1
    if recompute == "budget":
        assert batch > figures("lenet", "--budget", "6MB", "--batch-max")["batch_max"]


def test_the_largest_batch_of_a_file(tmp_path: Path) -> None:
    """The batch is the first dimension of the first shape, wherever another begins with it."""
    path = tmp_path / "net.json"
    path.write_text(models.get("mlp").tojson())
    shapes = ("--shape", "data=8,784", "--shape", "softmax_label=8")
    batch = figures(path, *shapes, "--budget", "2MB", "--batch-max")["batch_max"]
    assert figures(path, "--shape", f"data={batch},784", "--shape", f"softmax_label={batch}")["total"] <= 2_000_000
    assert figures(path, "--shape", f"data={batch + 1},784")["total"] > 2_000_000


def test_micro_batches_for_a_budget() -> None:
    """A batch that does not fit is cut into the fewest equal pieces that do; fit allocates what was planned."""
    actual = figures("lenet", "--batch", 48, "--budget", "6MB", "--batch-max")
    pieces = actual["micro_batches"]
    assert pieces > 1
    assert actual["micro_batch"] * pieces == 48
    assert actual["total"] <= 6_000_000
    fewer = max(count for count in range(1, pieces) if 48 % count == 0)
    written = plan("lenet", "--batch", 48, "--budget", "6MB", "--batch-max").output
    assert f"fit(…, micro_batches={pieces})" in " ".join(written.split())
    rng = np.random.default_rng(0)
    data = mx.io.NDArrayIter(rng.random((48, 1, 28, 28)), rng.integers(0, 10, 48), batch_size=48)
    module = mx.mod.Module(models.get("lenet"))
    module.fit(data, num_epoch=1, kvstore=None, micro_batches=pieces)
    assert module.group.executors[0].memory_plan.counted == actual["total"] <= 6_000_000
    bound = mx.mod.Module(models.get("lenet"))
    bound.bind([("data", (48 // fewer, 1, 28, 28))], [("softmax_label", (48 // fewer,))], grad_req="add")
    assert bound.group.executors[0].memory_plan.counted > 6_000_000
    assert figures("lenet", "--batch", 8, "--budget", "60MB", "--batch-max")["micro_batches"] == 1


def test_not_even_one_sample() -> None:
    """The message states the need of one sample."""
    refused = plan("mlp", "--budget", "1KB", "--batch-max")
    assert refused.exit_code == 1
    assert f"smallest budget that works is {figures('mlp', '--batch', 1)['total']}" in refused.output


@pytest.mark.parametrize("budget", [107, 108, 1000, 12345, 10**9])
def test_the_search_is_exact_and_short(budget: int) -> None:
    """Straight lines, steps and curves: the result is the largest that fits, in few plans."""
    for total in (lambda b: 100 + 7 * b, lambda b: 100 + 7 * b + 50 * (b // 16), lambda b: 100 + 7 * b + b * b // 9):
        asked: list[int] = []

        def counted(batch: int, total: Any = total, asked: list[int] = asked) -> int:
            asked.append(batch)
            actual: int = total(batch)
            return actual

        batch, nbytes = largest_batch(counted, budget)
        assert nbytes == total(batch) <= budget
        assert batch == 1 << 24 or total(batch + 1) > budget
        assert len(asked) <= 30


@pytest.mark.parametrize("budget", [5_000, 54_321, 10**6, 10**7])
def test_nearly_straight_lines_take_few_plans(budget: int) -> None:
    """Plans of real networks may cost seconds each: with steps of an alignment the search asks for at most eight."""
    asked: list[int] = []

    def total(batch: int) -> int:
        asked.append(batch)
        return 100 + 64 * (700 * batch // 64 + 1)

    batch, _ = largest_batch(total, budget)
    assert total(batch) <= budget < total(batch + 1)
    assert len(asked) - 2 <= 8


def test_a_cliff_does_not_stall_the_search() -> None:
    """Where straight lines are useless, halving ends the search."""
    asked: list[int] = []

    def total(batch: int) -> int:
        asked.append(batch)
        return batch if batch < 123_456 else 10**12 + batch

    assert largest_batch(total, 10**11)[0] == 123_455
    assert len(asked) <= 75


def test_the_search_refuses() -> None:
    """One sample too large: the number that works is in the error."""
    with pytest.raises(BudgetError, match="not even a batch of 1") as refused:
        largest_batch(lambda batch: 10 * batch, 9)
    assert refused.value.smallest == 10


def test_compare_lists_every_strategy_and_policy() -> None:
    """One row each; sharing needs less than none."""
    result = plan("lenet", "--compare")
    assert result.exit_code == 0
    peaks = {}
    for name in ("none", "match_range", "arena", "auto"):
        row = re.search(rf"strategy {name} +([\d.]+) ", result.stdout)
        assert row is not None
        peaks[name] = float(row.group(1))
    assert peaks["auto"] == min(peaks.values()) < peaks["none"]
    for policy in ("mxnet", "echo", "sqrt", "cheap"):
        assert f"recompute {policy}" in result.stdout
    assert "budget 75% of it" in result.stdout
    assert "recompute" not in plan("lenet", "--inference", "--compare").stdout
    rows = figures("mlp", "--compare")["compare"]
    assert {row["plan"]: row.get("total") for row in rows}["strategy auto"] == figures("mlp")["total"]
    assert all("more_time" in row or "error" in row for row in rows)


def test_the_curve_trades_time_for_memory() -> None:
    """From the fastest plan to the smallest: memory falls, time does not; bars are drawn for people."""
    points = figures("resnet", "--batch", 8, "--curve")["curve"]
    totals, times = ([point[name] for point in points] for name in ("total", "more_time"))
    assert len(points) >= 3
    assert totals == sorted(totals, reverse=True)
    assert times == sorted(times)
    assert times[0] == 0.0 < times[-1]
    assert "████" in plan("resnet", "--batch", 8, "--curve").stdout


def test_the_page_has_what_is_printed_beside_the_plan(tmp_path: Path) -> None:
    """With --curve and --compare the page has the rows of both, as they are printed; without them it has none."""
    page = tmp_path / "page.html"
    printed = plan("mlp", "--curve", "--compare", "--html", page).stdout
    text = page.read_text()
    compared, curve = re.findall(r"<pre>(.*?)</pre>", text, re.DOTALL)
    assert all(f"recompute {policy}" in compared for policy in ("mxnet", "sqrt"))
    for line in curve.splitlines():
        assert line in printed
    assert "█" in curve
    plan("mlp", "--html", page)
    assert "<pre>" not in page.read_text()


def test_devices() -> None:
    """On a device with memory of its own results wait on the host under a budget; several add what they hold."""
    plain = figures("resnet", "--batch", 16, "--device", "sim0")
    assert plain["per_device"] == {"sim(0)": plain["peak"]}
    tight = figures("resnet", "--batch", 16, "--device", "sim0", "--budget", plain["total"] * 3 // 4)
    assert any("wait on the host" in note for note in tight["notes"])
    two = figures("resnet", "--batch", 16, "--device", "cpu0,cpu1", "--optimizer", "adam")
    assert {"other_devices", "kvstore_stored", "kvstore_merged", "host_copies", "optimizer_states"} <= set(
        two["external"]
    )
    assert two["total"] == two["peak"] + sum(two["external"].values())
    contexts = [mx.cpu(0), mx.cpu(1)]
    expected = models.get("resnet").plan(models.input_shapes("resnet", 16), context=contexts, optimizer="adam")
    assert two["total"] == expected.total


def test_a_share_of_the_memory() -> None:
    """A budget in percent is one of the device's memory."""
    assert figures("lenet", "--device", "sim0", "--budget", "100%")["total"] <= 4 << 30
    refused = plan("lenet", "--device", "sim0", "--budget", "0.001%")
    assert refused.exit_code == 1
    assert f"the budget is {int((4 << 30) * 0.00001):,} bytes" in refused.output
    assert plan("lenet", "--budget", "120%").exit_code == 2


def test_files(tmp_path: Path) -> None:
    """Page, picture and plan; stdout stays JSON."""
    page, picture, saved = (tmp_path / name for name in ("plan.html", "plan.svg", "plan.json"))
    result = plan("lenet", "--html", page, "--picture", picture, "--save", saved, "--json")
    assert result.exit_code == 0
    peak = json.loads(result.stdout)["peak"]
    assert "<!doctype html>" in page.read_text()
    assert "<svg" in picture.read_text()
    actual = MemoryPlan.from_json(saved.read_text())
    validate(actual)
    assert actual.peak == peak


def test_options_reach_the_planner() -> None:
    """Strategy, order, dtype and scratch."""
    assert figures("lenet", "--strategy", "match_range")["strategy"] == "match_range"
    assert figures("mlp", "--dtype", "float16")["external"]["arguments"] * 2 == figures("mlp")["external"]["arguments"]
    assert figures("lenet", "--no-workspaces")["workspaces"] is False
    assert figures("lenet", "--order", "best")["peak"] <= figures("lenet", "--order", "given")["peak"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["lenett"], 2, "and no built-in network 'lenett'; did you mean 'lenet'"),
        (["mlp", "--shape", "data"], 2, "expected NAME=DIMS such as data=32,3,224,224; got 'data'"),
        (["mlp", "--shape", "data=a,b"], 2, "expected NAME=DIMS"),
        (["mlp", "--shape", "data=8,784", "--shape", "data=9,784"], 2, "'data' is given twice"),
        (["mlp", "--shape", "dota=8,784"], 1, "'dota', which is no argument of the symbol"),
        (["mlp", "--shape", "data=-8,784"], 1, "dimensions must be positive"),
        (["mlp", "--shape", "data=0,784"], 1, "cannot be inferred"),
        (["mlp", "--budget", "much"], 2, "expected a number of bytes such as 2GB"),
        (["mlp", "--batch-max"], 2, "--batch-max needs --budget"),
        (["mlp", "--batch-max", "--budget", "1GB", "--batch", "3", "--inference"], 2, "leave out --inference"),
        (["mlp", "--recompute", "budget"], 2, "--recompute budget needs --budget"),
        (["mlp", "--inference", "--optimizer", "adam"], 2, "leave out --inference"),
        (["mlp", "--optimizer", "adamm"], 1, "did you mean 'adam'"),
        (["mlp", "--dtype", "float17"], 1, "float17"),
        (["mlp", "--dtype", "dota=float16"], 2, "'dota' is no argument of the network; did you mean 'data'?"),
        (["mlp", "--dtype", "zzz=float16"], 2, "it has: data, fc1_weight"),
        (
            ["mlp", "--html", "/nowhere/at/all.html"],
            1,
            "cannot write /nowhere/at/all.html: there is no folder /nowhere/at; create it, or give another name\n",
        ),
        (["mlp", "--picture", "plan.xyz"], 1, "cannot write plan.xyz"),
    ],
)
def test_bad_input(arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Usage errors exit with 2, networks that cannot be planned with 1; both are one message, never a traceback."""
    monkeypatch.chdir(tmp_path)
    result = plan(*arguments)
    assert result.exit_code == code, result.output
    # click wraps long messages.
    assert message.strip() in " ".join(result.output.split())
    assert not message.endswith("\n") or result.output.endswith(message)


def test_a_built_in_network_is_nobodys_line() -> None:
    """A shape that does not fit is blamed on its operator, not on a line of the library that runs the command."""
    result = plan("resnet50", "--shape", "data=32,3,224")
    assert result.exit_code == 1
    assert "node 'convolution0'" in result.output
    assert "created at" not in result.output


def test_a_saved_plan_is_no_network(tmp_path: Path) -> None:
    """What --save wrote is told from a symbol file."""
    saved = tmp_path / "plan.json"
    assert plan("mlp", "--save", saved).exit_code == 0
    result = plan(saved)
    assert result.exit_code == 1
    assert "holds a plan, as --save writes it" in result.output


@pytest.mark.parametrize("damage", ["truncated", "binary", "cyclic", "unknown operator", "needs shapes"])
def test_bad_files(damage: str, tmp_path: Path) -> None:
    """Whatever a file holds, the answer is a message that names the problem, and exit code 1."""
    text = models.get("mlp").tojson()
    if damage == "cyclic":
        document = json.loads(text)
        relu = next(k for k, node in enumerate(document["nodes"]) if node["name"] == "relu1")
        document["nodes"][relu]["inputs"] = [[relu + 3, 0, 0]]
        text = json.dumps(document)
    content = {
        "truncated": text[: len(text) // 2].encode(),
        "binary": b"\xff\xfe\x00" * 50,
        "cyclic": text.encode(),
        "unknown operator": text.replace('"FullyConnected"', '"FullyConected"').encode(),
        "needs shapes": text.encode(),
    }[damage]
    path = tmp_path / "net.json"
    path.write_bytes(content)
    shape = () if damage == "needs shapes" else ("--shape", "data=4,784")
    result = plan(path, *shape)
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert len(result.output) > 40


def test_kernels_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--kernels` says which kernel computes the nodes that have several, and why; so do the figures as JSON."""
    monkeypatch.setenv("WEFTPLAN_KERNELS", "numpy")
    result = plan("lenet", "--kernels")
    assert result.exit_code == 0, result.output
    table = result.output.partition("kernels (nodes")[2]
    rows = [line for line in table.splitlines() if "Convolution" in line]
    assert len(rows) == 2
    assert all("numpy (chosen by the user)" in row for row in rows)
    assert set(figures("lenet", "--kernels")["kernels"].values()) == {"numpy (chosen by the user)"}


def test_onnx_file_of_another_batch(tmp_path: Path) -> None:
    """Initial states in a file have the batch of the export; the message says so, and not which weight to reshape."""
    pytest.importorskip("onnx")
    cell = mx.rnn.FusedRNNCell(8, mode="lstm", prefix="r_")
    steps = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=20, output_dim=6, name="embed")
    outputs, _ = cell.unroll(12, mx.sym.SwapAxis(steps, dim1=0, dim2=1), layout="TNC", merge_outputs=True)
    module = mx.mod.Module(mx.sym.FullyConnected(outputs, num_hidden=3, name="fc"), label_names=None)
    module.bind([("data", (4, 12))], for_training=False)
    module.init_params(mx.init.Xavier())
    path = tmp_path / "rnn.onnx"
    module.save_checkpoint(tmp_path / "rnn", 0)
    created = CliRunner().invoke(main, ["convert", str(tmp_path / "rnn"), "0", str(path), "--shape", "data=4,12"])
    assert created.exit_code == 0, created.output
    result = CliRunner().invoke(main, ["plan", str(path), "--inference", "--shape", "data=64,12"])
    assert result.exit_code == 1
    assert "rnn.onnx was exported for data=4,12, and values in it have sizes that follow" in " ".join(
        result.output.split()
    )
    assert "--shape" not in result.output


def test_a_budget_that_fits_is_said_to_fit() -> None:
    """The second line has the bytes to spare and the price of recomputation."""
    lines = plan("lenet", "--optimizer", "adam", "--budget", "8GB").output.splitlines()
    total = figures("lenet", "--optimizer", "adam")["total"]
    assert lines[1].startswith("fits the budget of 7.45 GiB (8,000,000,000 bytes): ")
    assert lines[1].endswith(f"{amount(8_000_000_000 - total)} to spare")
    small = ("resnet", "--batch", 4)
    tight = plan(*small, "--budget", figures(*small)["total"] * 19 // 20)
    assert " more modelled time" in " ".join(tight.output.splitlines()[1:3])


@pytest.mark.parametrize(("batch", "helps"), [(64, True), (1, False)])
def test_advice_on_a_smaller_batch_only_if_it_helps(batch: int, helps: bool) -> None:
    """If parameters, gradients and states alone exceed the budget, no batch is suggested."""
    budget = 9_000_000 if helps else 2_000_000
    refused = plan("lenet", "--optimizer", "adam", "--batch", batch, "--budget", budget)
    assert refused.exit_code == 1
    words = " ".join(refused.output.split())
    assert ("--batch-max" in words) == helps
    assert ("smaller batch" in words) == helps
    assert ("no batch fits" in words) != helps


@pytest.mark.parametrize(
    "options", [("--batch", 4), ("--optimizer", "adam"), ("--device", "gpu0"), ("--recompute", "sqrt"), ("--compare",)]
)
def test_options_that_a_torch_step_decides(options: tuple[object, ...]) -> None:
    """They are refused instead of ignored, before any module is imported."""
    refused = plan("--torch", "nowhere:step", *options)
    assert refused.exit_code == 2
    assert f"{options[0]} does not go with --torch" in refused.output


def test_a_card_without_a_unit() -> None:
    """A bare number is bytes; the message says how to write gigabytes."""
    refused = plan("mlp", "--card", "8")
    assert refused.exit_code == 2
    assert "such as 8GB" in " ".join(refused.output.split())
