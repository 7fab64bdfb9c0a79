"""Inputs of the golden cases, generated from seeds, for the generator (MXNet's Python) and the tests.

The module needs only NumPy, and only ``RandomState``, whose numbers are bit-identical since NumPy 1.17.
"""

import importlib.util
import pathlib
import zlib

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
DATA = HERE / "data"


def load_cases():
    """Return {file stem: {case name: case}} of every ``cases_*.py`` in this folder."""
    by_name = {}
    for path in sorted(HERE.glob("cases_*.py")):
        spec = importlib.util.spec_from_file_location(f"golden_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        named = {}
        for case in module.CASES:
            name = case_name(case)
            if name in named:
                raise ValueError(f"{path.name}: two cases are called {name!r}; give one a 'name'")
            named[name] = case
        by_name[path.stem] = named
    return by_name


def case_name(case):
    """Return the case's own name, or a name of its operator, parameters, shapes and mode."""
    if "name" in case:
        return case["name"]
    params = ",".join(f"{key}={value}" for key, value in sorted(case.get("params", {}).items()))
    shapes = ";".join(_describe(spec) for spec in case.get("inputs", ()))
    mode = "train" if case.get("is_train", True) else "infer"
    return f"{case['op']}({params})[{shapes}]{mode}"


def _describe(spec):
    if isinstance(spec, dict):
        return "x".join(map(str, np.shape(spec["value"]) if "value" in spec else spec["shape"])) + spec.get("dtype", "")
    return "x".join(map(str, spec))


def case_text(case):
    """Return the whole case as text, stored with its results so that a changed case is detected."""
    return repr(sorted(case.items()))


def make_input(spec, seed):
    """Return the array of one input.

    ``spec`` is a shape (float32, uniform in [-1, 1)), or a dictionary with either ``value`` (nested list) or ``shape``,
    and optionally ``dtype``, ``low``, ``high``, ``distinct`` (no two elements are closer than the range divided by the
    number of elements).
    """
    if not isinstance(spec, dict):
        spec = {"shape": spec}
    dtype = spec.get("dtype", "float32")
    if "value" in spec:
        return np.array(spec["value"], dtype)
    low, high = spec.get("low", -1.0), spec.get("high", 1.0)
    random = np.random.RandomState(seed)
    shape = tuple(spec["shape"])
    if spec.get("distinct"):
        size = int(np.prod(shape))
        return (low + (high - low) * (random.permutation(size) + 0.5) / size).reshape(shape).astype(dtype)
    if np.dtype(dtype).kind in "iub":
        return random.randint(int(low), int(high), shape).astype(dtype)
    return random.uniform(low, high, shape).astype(dtype)


def _seed(text):
    return zlib.crc32(text.encode())


def case_inputs(case):
    """Return all input arrays of a case."""
    name = case_name(case)
    return [make_input(spec, _seed(f"{name}#{k}")) for k, spec in enumerate(case.get("inputs", ()))]


def case_ograd(case, index, shape, dtype):
    """Return the incoming gradient of visible output ``index``."""
    return np.random.RandomState(_seed(f"{case_name(case)}@{index}")).uniform(-1, 1, shape).astype(dtype)
