"""Each extension that CONTRIBUTING.md shows passes the contract and the tests that its section names.

The guide's operator is added to a copy of the repository, since generated files have to include it. pytest loads the
other examples as plug-ins, so that the contract suites find them.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weftplan.ops.core import registry

ROOT = Path(__file__).parents[2]
SECTIONS = {
    title: re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for title, text in re.findall(
        r"^## (Add an? .*?)\n(.*?)(?=^## |\Z)", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
}
PLUGINS = {
    "Add an engine type": (["tests/contract/test_engine_order.py"], "EnginePerKind", ""),
    "Add a planner strategy": (["tests/contract/test_planner.py"], "first_fit and lenet", ""),
    "Add an allocator": (["tests/contract/test_storage.py"], "Pages", ""),
    "Add a kvstore": (["tests/contract/test_kvstore.py"], "countingstore", ""),
    "Add an optimizer": (["tests/training/test_optimizers.py"], "test_every_kind and heavy", ""),
    "Add a data iterator": (
        ["tests/contract/test_iterators.py"],
        "squares",
        "from tests.contract.iterators import ITERATORS\n\nITERATORS['squares'] = lambda folder: Squares()\n",
    ),
}
"""{section: (test files for its example, expression that selects tests, code that the section asks to add)}."""
OPERATOR_TESTS = [
    "tests/ops/test_twice.py",
    "tests/ops/test_operator_table.py",
    "tests/ops/test_tensor_contract.py::test_every_operator_has_a_case",
    "tests/ops/test_kernel_forms.py",
    "tests/ops/test_params.py",
    "tests/repository/test_generated_files.py",
    "tests/repository/test_stubs.py",
]


def run(*command: str, root: Path, path: str = "") -> None:
    """Run Python in ``root``, with the package and tests there, and check that it succeeds.

    ``path`` is added to PYTHONPATH.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(root), path)))}
    done = subprocess.run([sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


def pytest_in(root: Path, *arguments: str, path: str = "") -> None:
    """Run pytest in ``root`` and check that it succeeds; it fails if no test is selected."""
    run("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments, root=root, path=path)


def copy_with_operator(folder: Path) -> Path:
    """Return a copy of the repository with the guide's operator ``twice`` and refreshed generated files."""
    if registry.contains("twice"):
        pytest.skip("the guide's operator has been added here, and the other tests judge it")
    operator, test = SECTIONS["Add an operator"]
    skipped = shutil.ignore_patterns(
        ".git", ".venv", ".*_cache", "__pycache__", "build", "dist", "*.egg-info", "shared"
    )
    root = Path(shutil.copytree(ROOT, folder / "copy", symlinks=True, ignore=skipped))
    (root / "weftplan/ops/twice.py").write_text('"""Doubling."""\n\n' + operator, encoding="utf-8")
    (root / "tests/ops/test_twice.py").write_text('"""Doubling."""\n\n' + test, encoding="utf-8")
    run("docs/refresh.py", root=root)
    return root


def test_every_section_has_an_example():
    """The sections with examples are exactly those that this file tests."""
    assert {title for title, blocks in SECTIONS.items() if blocks} == {
        *PLUGINS,
        "Add an operator",
        "Add an activation",
        "Add a fusion",
        "Add a metric",
    }


def test_operator_passes_the_paperwork(tmp_path):
    """The guide's operator passes its own test and the tests of tables, cases, stubs and pages."""
    pytest_in(copy_with_operator(tmp_path), *OPERATOR_TESTS)


@pytest.mark.stress
@pytest.mark.timeout(3600)
def test_operator_passes_all_tests_of_operators_and_the_repository(tmp_path):
    """With the guide's operator, all tests of operators and of the repository pass, except this file."""
    pytest_in(
        copy_with_operator(tmp_path),
        "tests/ops",
        "tests/repository",
        "--ignore",
        "tests/repository/test_contributing.py",
    )


def test_metric_runs(tmp_path):
    """The guide's metric example runs without a warning."""
    (tmp_path / "example.py").write_text("\n".join(SECTIONS["Add a metric"]), encoding="utf-8")
    run("-W", "error", str(tmp_path / "example.py"), root=ROOT)


ACTIVATION_CHECK = """
from tests.contract.devices import place
from tests.cuda_on_host import build
from tests.cuda_on_host.kernels import on_host

assert module.score(batches, "mse")[0][1] < 0.02
curve = mx.sym.bent(mx.sym.bent(mx.sym.Variable("data")) * 2.0)


def values(context):
    executor = curve.simple_bind(context, grad_req="write", data=(5, 7))
    executor.arg_dict["data"][:] = np.linspace(-2, 2, 35).reshape(5, 7)
    executor.forward(is_train=True)
    executor.backward([mx.nd.ones((5, 7), ctx=context)])
    return [array.asnumpy() for array in (executor.outputs[0], executor.grad_dict["data"])]


expected = values(mx.cpu())
with place("standin", kind="NaiveEngine") as context:
    for mine, theirs in zip(values(context(0)), expected, strict=True):
        assert mine.tobytes() == theirs.tobytes()
if not build.missing():
    with place("standin", kind="NaiveEngine") as context, on_host((0, 1)) as host:
        for mine, theirs in zip(values(context(0)), expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6)
        assert any(kernel == "pointwise" for _, kernel in host.executed)
"""
"""Appended to the guide's activation: it has learned; a stand-in GPU and generated CUDA code give the CPU's values."""


def test_activation_trains_everywhere(tmp_path):
    """The guide's activation takes under ten lines from row to trained network, on each kind of device."""
    (example,) = SECTIONS["Add an activation"]
    statements = [node for node in ast.parse(example).body if not isinstance(node, ast.Import | ast.ImportFrom)]
    assert statements[-1].end_lineno - statements[0].lineno + 1 < 10
    (tmp_path / "example.py").write_text(example + ACTIVATION_CHECK, encoding="utf-8")
    run(str(tmp_path / "example.py"), root=ROOT)


@pytest.mark.parametrize("title", PLUGINS)
def test_example_passes_its_contract(title, tmp_path):
    """The tests selected for a plug-in example exist and pass."""
    suites, chosen, line = PLUGINS[title]
    (tmp_path / "example_plugin.py").write_text("\n".join([*SECTIONS[title], line]), encoding="utf-8")
    pytest_in(ROOT, "-p", "example_plugin", *suites, "-k", chosen, path=str(tmp_path))
