"""``weftplan plan``: figures, budgets, exit codes, the largest batch, comparison, files, and bad input."""

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
    """Run ``weftplan plan`` and return click's result; an unexpected exception fails the test."""
    return CliRunner().invoke(main, ["plan", *map(str, args)], catch_exceptions=False)


def plan_json(*args: object) -> dict[str, Any]:
    """Run ``weftplan plan --json``, check that it succeeds, and return its figures."""
    result = plan(*args, "--json")
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_a_built_in_network_has_usual_shapes() -> None:
    """The command's figures equal those of ``Symbol.plan`` with the network's usual shapes."""
    actual = plan_json("lenet", "--batch", 64)
    expected = models.get("lenet").plan(models.input_shapes("lenet", 64))
    assert actual["peak"] == expected.peak
    assert actual["lower_bound"] == expected.lower_bound
    assert actual["total"] == expected.total == actual["peak"] + sum(actual["external"].values())
    assert actual["per_device"] == {"cpu(0)": expected.peak}
    assert [item["name"] for item in actual["alive_at_peak"][:3]] == [b.name for b in expected.alive_at_peak(3)]


def test_parameters_only_by_default() -> None:
    """By default only parameters have gradients; --input-grads adds the inputs, --inference has none."""
    actual, every = (plan_json("mlp", *more) for more in ((), ("--input-grads",)))
    inputs = 4 * (32 * 784 + 32)
    assert every["external"]["gradients"] - actual["external"]["gradients"] == inputs
    assert plan_json("mlp", "--inference")["external"]["gradients"] == 0


@pytest.mark.parametrize("packed", [False, True])
def test_a_symbol_file(tmp_path: Path, packed: bool) -> None:
    """A symbol file, also gzipped, gives the plan of the built-in network."""
    text = models.get("lenet").tojson()
    path = tmp_path / ("net-symbol.json.gz" if packed else "net-symbol.json")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    actual = plan_json(path, "--shape", "data=32,1,28,28")
    built_in = plan_json("lenet")
    assert {k: v for k, v in actual.items() if k != "model"} == {k: v for k, v in built_in.items() if k != "model"}


def test_a_damaged_symbol_file_is_named(tmp_path: Path) -> None:
    """The error for a damaged symbol file begins with its name."""
    path = tmp_path / "torn-symbol.json"
    path.write_text(models.get("lenet").tojson()[:200])
    result = plan(path, "--shape", "data=32,1,28,28")
    assert result.exit_code != 0
    assert f"{path}: not valid JSON" in " ".join(result.output.split())


def test_text_for_people() -> None:
    """The text has the figures of the JSON; its first line has the total."""
    result = plan("lenet", "--optimizer", "adam")
    assert result.exit_code == 0
    actual = plan_json("lenet", "--optimizer", "adam")
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
    """The error names the smallest budget that works; one byte less gives exit code 1 again."""
    refused = plan("lenet", "--budget", "1MB")
    assert refused.exit_code == 1
    smallest = int(re.search(r"smallest budget found that works is (\d+)", refused.output).group(1))  # type: ignore[union-attr]
    assert plan_json("lenet", "--budget", smallest)["total"] <= smallest
    assert plan("lenet", "--budget", smallest - 1).exit_code == 1


def test_a_budget_is_met_by_recomputation() -> None:
    """A budget is met by recomputation, whose cost is noted; with --recompute off it is refused."""
    plain = plan_json("resnet", "--batch", 32)
    budget = int(plain["total"] * 0.95)
    actual = plan_json("resnet", "--batch", 32, "--budget", budget)
    assert actual["total"] <= budget < plain["total"]
    assert any("run twice" in note for note in actual["notes"])
    refused = plan("resnet", "--batch", 32, "--budget", budget, "--recompute", "off")
    assert refused.exit_code == 1
    assert f"the smallest budget that works is {plain['total']}" in refused.output


@pytest.mark.parametrize("recompute", ["off", "budget"])
def test_the_largest_batch(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """--batch-max finds the largest batch that fits, which is larger with recomputation."""
    monkeypatch.setenv("WEFTPLAN_KERNELS", "numpy")  # so that scratch memory is the same on every machine
    arguments = ("lenet", "--recompute", recompute, "--budget", "6MB")
    actual = plan_json(*arguments, "--batch-max")
    batch = actual["batch_max"]
    assert actual["total"] <= 6_000_000
    assert plan(*arguments, "--batch", batch).exit_code == 0
    assert plan(*arguments, "--batch", batch + 1).exit_code == 1
    if recompute == "budget":
        assert batch > plan_json("lenet", "--budget", "6MB", "--batch-max")["batch_max"]


def test_the_largest_batch_of_a_file(tmp_path: Path) -> None:
    """The batch size is the first dimension of the first shape, and of each other shape that begins with it."""
    path = tmp_path / "net.json"
    path.write_text(models.get("mlp").tojson())
    shapes = ("--shape", "data=8,784", "--shape", "softmax_label=8")
    batch = plan_json(path, *shapes, "--budget", "2MB", "--batch-max")["batch_max"]
    assert plan_json(path, "--shape", f"data={batch},784", "--shape", f"softmax_label={batch}")["total"] <= 2_000_000
    assert plan_json(path, "--shape", f"data={batch + 1},784")["total"] > 2_000_000


def test_micro_batches_for_a_budget() -> None:
    """A batch that does not fit is split into the fewest equal micro-batches that do; ``fit`` agrees."""
    actual = plan_json("lenet", "--batch", 48, "--budget", "6MB", "--batch-max")
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
    assert plan_json("lenet", "--batch", 8, "--budget", "60MB", "--batch-max")["micro_batches"] == 1


def test_not_even_one_sample() -> None:
    """If a single sample does not fit, the error states the bytes that a single sample needs."""
    refused = plan("mlp", "--budget", "1KB", "--batch-max")
    assert refused.exit_code == 1
    assert f"smallest budget that works is {plan_json('mlp', '--batch', 1)['total']}" in refused.output


@pytest.mark.parametrize("budget", [107, 108, 1000, 12345, 10**9])
def test_the_search_is_exact_and_short(budget: int) -> None:
    """For linear, stepped and quadratic sizes the search finds the largest batch that fits, within 30 plans."""
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
    """For a linear size rounded to an alignment the search needs at most eight plans, which may take seconds each."""
    asked: list[int] = []

    def total(batch: int) -> int:
        asked.append(batch)
        return 100 + 64 * (700 * batch // 64 + 1)

    batch, _ = largest_batch(total, budget)
    assert total(batch) <= budget < total(batch + 1)
    assert len(asked) - 2 <= 8


def test_a_cliff_does_not_stall_the_search() -> None:
    """If the size jumps, which makes extrapolation useless, bisection ends the search within 75 plans."""
    asked: list[int] = []

    def total(batch: int) -> int:
        asked.append(batch)
        return batch if batch < 123_456 else 10**12 + batch

    assert largest_batch(total, 10**11)[0] == 123_455
    assert len(asked) <= 75


def test_the_search_refuses() -> None:
    """If a single sample is too large, the error has the attribute ``smallest``, the bytes that a sample needs."""
    with pytest.raises(BudgetError, match="not even a batch of 1") as refused:
        largest_batch(lambda batch: 10 * batch, 9)
    assert refused.value.smallest == 10


def test_compare_lists_every_strategy_and_policy() -> None:
    """--compare lists each strategy and recomputation policy; the automatic strategy has the smallest peak."""
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
    rows = plan_json("mlp", "--compare")["compare"]
    assert {row["plan"]: row.get("total") for row in rows}["strategy auto"] == plan_json("mlp")["total"]
    assert all("more_time" in row or "error" in row for row in rows)


def test_the_curve_trades_time_for_memory() -> None:
    """--curve lists plans from the fastest to the smallest; memory falls as time rises."""
    points = plan_json("resnet", "--batch", 8, "--curve")["curve"]
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
    """Under a budget a device with its own memory may offload to the host; several devices add external memory."""
    plain = plan_json("resnet", "--batch", 16, "--device", "sim0")
    assert plain["per_device"] == {"sim(0)": plain["peak"]}
    tight = plan_json("resnet", "--batch", 16, "--device", "sim0", "--budget", plain["total"] * 3 // 4)
    assert any("wait on the host" in note for note in tight["notes"])
    two = plan_json("resnet", "--batch", 16, "--device", "cpu0,cpu1", "--optimizer", "adam")
    assert {"other_devices", "kvstore_stored", "kvstore_merged", "host_copies", "optimizer_states"} <= set(
        two["external"]
    )
    assert two["total"] == two["peak"] + sum(two["external"].values())
    contexts = [mx.cpu(0), mx.cpu(1)]
    expected = models.get("resnet").plan(models.input_shapes("resnet", 16), context=contexts, optimizer="adam")
    assert two["total"] == expected.total


def test_a_share_of_the_memory() -> None:
    """A budget in percent refers to the device's memory; more than 100% is a usage error."""
    assert plan_json("lenet", "--device", "sim0", "--budget", "100%")["total"] <= 4 << 30
    refused = plan("lenet", "--device", "sim0", "--budget", "0.001%")
    assert refused.exit_code == 1
    assert f"the budget is {int((4 << 30) * 0.00001):,} bytes" in refused.output
    assert plan("lenet", "--budget", "120%").exit_code == 2


def test_files(tmp_path: Path) -> None:
    """--html, --picture and --save write files, and stdout is still JSON."""
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
    """Strategy, dtype, workspaces and order change the plan."""
    assert plan_json("lenet", "--strategy", "match_range")["strategy"] == "match_range"
    assert (
        plan_json("mlp", "--dtype", "float16")["external"]["arguments"] * 2 == plan_json("mlp")["external"]["arguments"]
    )
    assert plan_json("lenet", "--no-workspaces")["workspaces"] is False
    assert plan_json("lenet", "--order", "best")["peak"] <= plan_json("lenet", "--order", "given")["peak"]


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
        (["mlp", "--picture", "plan.xyz"], 2, "expected a name that ends in .svg, .png, .pdf, got plan.xyz"),
    ],
)
def test_bad_input(arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Usage errors exit with 2, failed plans with 1, both with one message."""
    monkeypatch.chdir(tmp_path)
    result = plan(*arguments)
    assert result.exit_code == code, result.output
    # click wraps long messages.
    assert message.strip() in " ".join(result.output.split())
    assert not message.endswith("\n") or result.output.endswith(message)


def test_error_without_source_line() -> None:
    """An error in a built-in network names its node and no source line."""
    result = plan("resnet50", "--shape", "data=32,3,224")
    assert result.exit_code == 1
    assert "node 'convolution0'" in result.output
    assert "created at" not in result.output


def test_a_saved_plan_is_no_network(tmp_path: Path) -> None:
    """A file written by --save is recognized as a plan and refused as a network."""
    saved = tmp_path / "plan.json"
    assert plan("mlp", "--save", saved).exit_code == 0
    result = plan(saved)
    assert result.exit_code == 1
    assert "holds a plan, as --save writes it" in result.output


@pytest.mark.parametrize("damage", ["truncated", "binary", "cyclic", "unknown operator", "needs shapes"])
def test_bad_files(damage: str, tmp_path: Path) -> None:
    """A damaged or incomplete symbol file gives exit code 1 and a message."""
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
    """--kernels lists the chosen kernel and the reason, in text and JSON."""
    monkeypatch.setenv("WEFTPLAN_KERNELS", "numpy")
    result = plan("lenet", "--kernels")
    assert result.exit_code == 0, result.output
    table = result.output.partition("kernels (nodes")[2]
    rows = [line for line in table.splitlines() if "Convolution" in line]
    assert len(rows) == 2
    assert all("numpy (chosen by the user)" in row for row in rows)
    assert set(plan_json("lenet", "--kernels")["kernels"].values()) == {"numpy (chosen by the user)"}


def test_onnx_file_of_another_batch(tmp_path: Path) -> None:
    """An ONNX file with initial states for another batch size gives an error with the exported shape."""
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
    """If a plan fits the budget, the output states the bytes to spare and any modelled cost of recomputation."""
    lines = plan("lenet", "--optimizer", "adam", "--budget", "8GB").output.splitlines()
    total = plan_json("lenet", "--optimizer", "adam")["total"]
    assert lines[1].startswith("fits the budget of 7.45 GiB (8,000,000,000 bytes): ")
    assert lines[1].endswith(f"{amount(8_000_000_000 - total)} to spare")
    small = ("resnet", "--batch", 4)
    tight = plan(*small, "--budget", plan_json(*small)["total"] * 19 // 20)
    assert " more modelled time" in " ".join(tight.output.splitlines()[1:3])


@pytest.mark.parametrize(("batch", "helps"), [(64, True), (1, False)])
def test_advice_on_a_smaller_batch_only_if_it_helps(batch: int, helps: bool) -> None:
    """A smaller batch is recommended only if parameters, gradients and states alone fit the budget."""
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
    """With --torch, options that the step decides are usage errors, before the program is imported."""
    refused = plan("--torch", "nowhere:step", *options)
    assert refused.exit_code == 2
    assert f"{options[0]} does not go with --torch" in refused.output


def test_a_card_without_a_unit() -> None:
    """--card with a bare number is a usage error; the message gives an example with a unit."""
    refused = plan("mlp", "--card", "8")
    assert refused.exit_code == 2
    assert "such as 8GB" in " ".join(refused.output.split())
