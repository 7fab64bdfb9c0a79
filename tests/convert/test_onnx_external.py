"""ONNX models whose values are in other files, and models that are planned by sizes alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install 'weftplan[convert]'")

from weftplan.cli import main  # noqa: E402
from weftplan.convert.onnx_in import OnnxFile, import_model  # noqa: E402
from weftplan.convert.onnx_plan import plan_onnx  # noqa: E402
from weftplan.errors import FormatError, ShapeError  # noqa: E402
from weftplan.planner.options import PlanOptions  # noqa: E402

W = np.arange(600, dtype=np.float32).reshape(20, 30)


def model_of(nodes: list[Any], values: dict[str, Any], shape: Any = (2, 20), domain: str = "") -> Any:
    """Return a model of ``nodes`` from x to y, with ``values`` as initializers."""
    helper = onnx.helper
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, shape)],
        [helper.make_tensor_value_info("y", 1, None)],
        [onnx.numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    sets = [helper.make_opsetid("", 18), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=sets, ir_version=8)


@pytest.fixture
def saved_model(tmp_path: Path) -> Path:
    """Save a matrix product whose weight is in a separate file; return the model's path."""
    model = model_of([onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": W})
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    return path


def change(path: Path, **facts: str) -> None:
    """Change the location entries of the model's weight, such as offset or length."""
    model = onnx.load(path, load_external_data=False)
    tensor = model.graph.initializer[0]
    known = {entry.key: entry.value for entry in tensor.external_data} | facts
    del tensor.external_data[:]
    for key, value in known.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    path.write_bytes(model.SerializeToString())


def test_values_of_other_files_are_read(saved_model: Path) -> None:
    """The weight is read from the other file, at its offset."""
    assert np.array_equal(import_model(saved_model)[1]["w"].asnumpy(), W.T)
    content = (saved_model.parent / "m.data").read_bytes()
    (saved_model.parent / "m.data").write_bytes(b"\0" * 64 + content)
    change(saved_model, offset="64")
    assert np.array_equal(import_model(saved_model)[1]["w"].asnumpy(), W.T)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"location": "../m.data"}, "outside the model's folder"),
        ({"location": "/etc/passwd"}, "outside the model's folder"),
        ({"location": ""}, "outside the model's folder"),
        ({"location": "link"}, "outside the model's folder"),
        ({"location": "gone"}, "which is missing"),
        ({"location": "."}, "which is missing"),
        ({"offset": "8"}, "copy the whole file"),
        ({"offset": "-8"}, "copy the whole file"),
        ({"length": "100"}, "has 100 bytes"),
        ({"offset": "many"}, "many"),
    ],
)
def test_other_files_are_refused(saved_model: Path, facts: dict[str, str], message: str) -> None:
    """A file outside the model's folder, also by a link, a missing file and a wrong range raise a FormatError."""
    outside = saved_model.parent.parent / f"outside-{saved_model.parent.name}"
    outside.write_bytes(W.tobytes())
    os.symlink(outside, saved_model.parent / "link")
    change(saved_model, **facts)
    with pytest.raises(FormatError, match=message) as caught:
        import_model(saved_model)
    assert "m.onnx" in str(caught.value)


def test_repeated_ranges_are_refused(saved_model: Path) -> None:
    """Values that refer to the same range again and again raise a FormatError before they are loaded."""
    model = onnx.load(saved_model, load_external_data=False)
    for k in range(3):
        model.graph.initializer.add().CopyFrom(model.graph.initializer[0])
        model.graph.initializer[-1].name = f"w{k}"
    saved_model.write_bytes(model.SerializeToString())
    with pytest.raises(FormatError, match=r"its values take 9,600 bytes"):
        import_model(saved_model)


def model_with_unknown_operators(**more: Any) -> Any:
    """Return a model with an operator that cannot be run, and an operator that no library knows."""
    nodes = [
        onnx.helper.make_node("Celu", ["x"], ["a"]),
        onnx.helper.make_node("Secret", ["a"], ["b"], domain="own"),
        onnx.helper.make_node("Relu", ["b"], ["c"]),
        onnx.helper.make_node("Add", ["a", "c"], ["y"]),
    ]
    return model_of(nodes, {}, (2, 16), domain="own", **more)


def test_operators_that_are_not_run_are_planned_by_sizes(tmp_path: Path) -> None:
    """Operators that cannot be run are planned by inferred or given sizes and listed; missing sizes raise an error."""
    path = tmp_path / "m.onnx"
    onnx.save(model_with_unknown_operators(), path)
    with pytest.raises(ShapeError, match=r"the sizes of \d results are not known: b"):
        plan_onnx(OnnxFile(path))
    options = PlanOptions(alignment=8)
    plan = plan_onnx(OnnxFile(path), {"b": (2, 16), "c": (2, 16), "y": (2, 16)}, options=options)
    assert plan.peak == 3 * 2 * 16 * 4
    assert "Celu (1), Secret (1)" in plan.notes[-1]
    assert plan.external_bytes == {"arguments": 2 * 16 * 4}


def test_the_command_plans_by_sizes(tmp_path: Path) -> None:
    """``weftplan plan --inference`` plans by sizes alone; without the option the error recommends it."""
    path = tmp_path / "m.onnx"
    onnx.save(model_of([onnx.helper.make_node("Celu", ["x"], ["y"])], {}), path)
    actual = CliRunner().invoke(main, ["plan", str(path), "--inference"])
    assert actual.exit_code == 0, actual.output
    assert "by sizes alone" in actual.output
    assert "Celu (1)" in actual.output
    facts = json.loads(CliRunner().invoke(main, ["plan", str(path), "--inference", "--json"]).output)
    assert facts["model"] == str(path)
    refused = CliRunner().invoke(main, ["plan", str(path)])
    assert refused.exit_code == 1
    assert "--inference plans the file by sizes alone" in refused.output
    for option in (("--compare",), ("--budget", "1GB"), ("--batch", "4")):
        refused = CliRunner().invoke(main, ["plan", str(path), "--inference", "--quiet", *option])
        assert refused.exit_code == 2
        assert f"{option[0]} does not go with a file that is planned by sizes alone" in refused.output
