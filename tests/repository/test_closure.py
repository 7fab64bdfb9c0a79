"""An import loads only the modules that its room needs, and an operator is imported when it is first asked for."""

import importlib.util
import json
import subprocess
import sys

import pytest

LIMITS = {
    "weftplan": 19,
    "weftplan.engine": 52,
    "weftplan.tasks": 69,
    "weftplan.storage": 47,
    "weftplan.planner": 64,
    "weftplan.symbol": 52,
    "weftplan.ndarray": 131,
    "weftplan.kvstore": 148,
}
"""Most modules of the package that an import may load, itself included. Numbers may only fall."""
PYTORCH = 90
"""Most modules of the package that all names of ``weftplan.torch`` may load."""

IMPORTED = """
import json, sys
before = {*sys.modules}
exec(sys.argv[1])
names = {*sys.modules} - before
own = sorted(name for name in names if name.partition(".")[0] == "weftplan")
heads = {name.partition(".")[0] for name in names} - {"weftplan", *sys.stdlib_module_names}
others = sorted(name for name in heads if name != "cython_runtime" and not name.startswith("_"))
print(json.dumps([own, others]))
"""


def loaded(code: str) -> tuple[list[str], list[str]]:
    """Return the modules of the package, and the packages from outside, that ``code`` loads in a fresh process."""
    run = [sys.executable, "-c", IMPORTED, code]
    own, others = json.loads(subprocess.run(run, capture_output=True, text=True, check=True, timeout=200).stdout)
    return own, others


def families(modules: list[str]) -> list[str]:
    """Return the modules that belong to a family of operators or to their kernels."""
    rooms = ("weftplan.ops.", "weftplan.kernels.")
    return [name for name in modules if name.startswith(rooms) and not name.startswith("weftplan.ops.core")]


@pytest.mark.parametrize("name", LIMITS)
def test_an_import_loads_few_modules(name: str):
    """An import loads at most the listed number of modules, NumPy alone from outside, and no family of operators.

    Arrays load the shape rules of ``reshape``, which register no operator.
    """
    own, others = loaded(f"import {name}")
    assert len(own) <= LIMITS[name], f"import {name} loads more modules than before: {own}"
    assert set(others) <= {"numpy"}
    assert set(families(own)) <= {"weftplan.ops.shape", "weftplan.ops.shape.reshape_codes"}


def test_pytorch_loads_no_operator():
    """All names of ``weftplan.torch`` load the planner's core: no family of operators, no arrays, no command line."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs PyTorch")
    own, others = loaded("import weftplan.torch as t; [getattr(t, name) for name in t.__all__]")
    assert len(own) <= PYTORCH, own
    assert families(own) == []
    assert not {"llvmlite", "click"}.intersection(others)


def test_an_operator_loads_its_own_family():
    """The first use of a name imports the operator's module; lists of names and misspelt names import none."""
    own, _ = loaded(
        "import weftplan as mx\n"
        "assert 'Convolution' in dir(mx.sym) and hasattr(mx.sym, 'LRN') and not hasattr(mx.nd, 'Convolutio')\n"
        "mx.sym.relu(mx.sym.Variable('x'))"
    )
    assert {"weftplan.ops.elementwise.unary", "weftplan.ops.nn.lrn"} <= set(own)
    assert [name for name in families(own) if ".nn." in name] == ["weftplan.ops.nn.lrn"]


def test_more_modules_are_noticed():
    """The count includes modules that an import loads indirectly, and names packages from outside."""
    own, others = loaded("import weftplan.cli")
    assert len(own) > LIMITS["weftplan"]
    assert families(loaded("import weftplan.ops.nn.lrn")[0]) == ["weftplan.ops.nn", "weftplan.ops.nn.lrn"]
    assert "threadpoolctl" in loaded("import threadpoolctl, weftplan")[1]
    assert "weftplan" not in others
