"""Every golden case gives the results of MXNet 1.9.1 (see ``tests/golden/README.md``)."""

import collections
import functools
import importlib.util
import pathlib
import sys

import numpy as np
import pytest

from tests.support.ops_harness import differentiate, prepare
from tests.support.together import together
from weftplan.ops.core import registry
from weftplan.ops.core.formula_kernel import FormulaKernel

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"


def _inputs_module():
    name = "golden_inputs"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, GOLDEN / "inputs.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


inputs = _inputs_module()
CASES = inputs.load_cases()
_FILES = {stem: np.load(inputs.DATA / f"{stem}.npz") for stem in CASES if (inputs.DATA / f"{stem}.npz").exists()}


@pytest.mark.parametrize("stem", CASES)
def test_every_case_is_stored(stem):
    """Each golden file stores exactly the current cases of its list."""
    assert stem in _FILES, f"run tests/golden/generate.py {stem}"
    stored = _FILES[stem]
    texts = {key[: -len("/case")]: str(stored[key]) for key in stored.files if key.endswith("/case")}
    assert texts == {name: inputs.case_text(case) for name, case in CASES[stem].items()}


@functools.cache
def parts(stem):
    """Return, by case name, the parts that a golden file stores: text, outputs, gradients and states."""
    actual = collections.defaultdict(list)
    for key in _FILES[stem].files:
        name, what = key.rsplit("/", 1)
        actual[name].append(what)
    return actual


def _close(case, actual, expected, what):
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    scale = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0))) if expected.size else 1.0
    np.testing.assert_allclose(
        actual.astype(np.float64),
        expected.astype(np.float64),
        rtol=case.get("rtol", 1e-5),
        atol=case.get("atol", 1e-5) * scale,
        err_msg=what,
    )


@together(by=lambda stem: stem)
@pytest.mark.parametrize(("stem", "name"), [(stem, name) for stem, cases in CASES.items() for name in cases])
def test_as_mxnet(stem, name):
    """Outputs, gradients and auxiliary states equal MXNet's."""
    case = CASES[stem][name]
    stored = {what: _FILES[stem][f"{name}/{what}"] for what in parts(stem)[name]}
    call = prepare(case["op"], inputs.case_inputs(case), case.get("params"), is_train=case.get("is_train", True))
    outputs = call()
    visible = call.op.num_visible_outputs(call.params)
    assert visible == sum(key.startswith("out") for key in stored)
    for k in range(visible):
        _close(case, outputs[k], stored[f"out{k}"], f"output {k}")
    wanted = [key for key in stored if key.startswith("grad")]
    if wanted:
        ograds = [inputs.case_ograd(case, k, s.shape, s.dtype) for k, s in enumerate(call.out_specs[:visible])]
        ograds += [np.zeros(s.shape, s.dtype) for s in call.out_specs[visible:]]
        actual, _ = differentiate(call, ograds)
        for key in wanted:
            _close(case, actual[int(key[4:])], stored[key], key)
    for key in stored:
        if key.startswith("aux"):
            _close(case, call.inputs[int(key[3:])], stored[key], key)


def test_every_row_has_a_case():
    """Every operator of MXNet that is a formula has a golden case, except those of its NumPy interface."""
    cases = {registry.get(case["op"]).name for named in CASES.values() for case in named.values()}
    rows = [op for op in map(registry.get, registry.names(aliases=False)) if isinstance(op.forward, FormulaKernel)]
    own = {op.name for op in rows if op.in_mxnet and op.backward_of is None and not op.name.startswith("_np")}
    # MXNet's users cannot call the first, its second changes the gradient, and the others are Python functions there.
    tests = {f"_contrib_is{name}" for name in ("nan", "inf", "finite")}
    assert own - cases == {"_grad_add", "_adamw_update", *tests}
