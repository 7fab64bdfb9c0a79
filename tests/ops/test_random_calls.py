"""Random operator calls (``tests/golden/random_cases.py``): near their float64 results, and true to the contract."""

import importlib.util
import pathlib

import numpy as np
import pytest

from tests.support.ops_harness import check_contract, differentiate, prepare
from tests.support.together import together

TESTS = pathlib.Path(__file__).resolve().parents[1]
TOLERANCE = {"float16": 3e-2, "float32": 2e-4, "float64": 1e-12}
STEPS = ("Cast", "mod", "norm", "power", "round", "rint", "fix", "trunc", "floor", "ceil", "arg", "topk", "sort")
"""Parts of operator names whose results change by steps when inputs are rounded."""


def _module(folder, name):
    spec = importlib.util.spec_from_file_location(f"trial_{name}", TESTS / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cases, inputs = _module("golden", "random_cases"), _module("golden", "inputs")


def _evaluate(case, arrays):
    """Return the visible outputs, and in training the gradients of float inputs."""
    call = prepare(case["op"], arrays, case["params"], is_train=case["is_train"])
    results = list(call())[: call.op.num_visible_outputs(call.params)]
    if case.get("grad", True) and case["is_train"]:
        heads = [np.full(s.shape, 0.5).astype(s.dtype) for s in call.out_specs]
        with np.errstate(all="ignore"):
            actual = differentiate(call, heads)[0]
        results += [g for g, x in zip(actual, arrays, strict=True) if x.dtype.kind == "f"]
    return results


@together(by=lambda seed: f"{seed // 60 * 60} and on")
@pytest.mark.parametrize("seed", range(300))
def test_random_call(seed):
    """Results are close to those in float64, and the call meets the kernel contract.

    Dimensions are 1 to 17; dtypes are random.
    """
    case = cases.random_case(seed)
    arrays = inputs.case_inputs(case)
    narrow = _evaluate(case, [x.copy() for x in arrays])
    if not any(name in case["op"] for name in STEPS) and any(x.dtype.kind == "f" for x in arrays):
        exact = _evaluate(case, [x.astype(np.float64) if x.dtype.kind == "f" else x for x in arrays])
        tolerance = max(TOLERANCE.get(str(x.dtype), 0) for x in arrays)
        for got, want in zip(narrow, exact, strict=True):
            scale = max(1.0, float(np.abs(want[np.isfinite(want)].astype(float)).max(initial=0.0)))
            np.testing.assert_allclose(
                got.astype(float), want.astype(float), rtol=tolerance, atol=tolerance * scale, err_msg=str(case)
            )
    if case["is_train"]:
        check_contract(case["op"], arrays, case["params"])


def test_the_trial_sees_differences():
    """The comparison with MXNet detects a wrong value, a wrong dtype, NaN, and a missing gradient."""
    trial = _module("stress", "operators_against_mxnet")
    case = {"inputs": [{"dtype": "float32"}]}
    theirs = {"out0": np.ones(3, np.float32), "grad0": np.ones(3, np.float32)}
    assert trial.difference(case, dict(theirs), theirs) is None
    assert "differs by 0.01" in trial.difference(case, {**theirs, "out0": np.float32([1, 1.01, 1])}, theirs)
    assert "float64" in trial.difference(case, {**theirs, "grad0": np.ones(3)}, theirs)
    assert "missing" in trial.difference(case, {"out0": theirs["out0"]}, theirs)
    assert "differs" in trial.difference(case, {**theirs, "out0": np.float32([1, np.nan, 1])}, theirs)
