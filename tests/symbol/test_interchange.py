"""Files exchanged with MXNet 1.9.1, which ``tests/golden/interchange.py`` wrote: equal texts and outputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from weftplan import models
from weftplan import symbol as sym

FOLDER = Path(__file__).parent.parent / "golden" / "interchange"
CASES = sorted(path.name.removesuffix("-0000.params") for path in FOLDER.glob("*.params"))
OURS = ("lenet", "resnet", "mlp")
Interpreter = Callable[..., list[np.ndarray]]


def without_rows(text: str) -> dict[str, Any]:
    """Return the parsed file without ``node_row_ptr``, because MXNet counts other hidden outputs there.

    These are an additional output of max pooling, in builds with oneDNN, and missing outputs of RNN.
    """
    data: dict[str, Any] = json.loads(text)
    del data["node_row_ptr"]
    return data


def stored_arrays(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of MXNet's ``.params`` file, by names without ``arg:`` and ``aux:``."""
    from weftplan import ndarray

    return {key[4:]: array.asnumpy() for key, array in ndarray.load(str(FOLDER / f"{name}-0000.params")).items()}


def stored_outputs(name: str) -> list[np.ndarray]:
    """Return the outputs that MXNet computed."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return [file[f"output{i}"] for i in range(len(file.files))]


@pytest.mark.parametrize("name", CASES)
def test_same_construction_same_text(name: str, interchange_cases: ModuleType, mx: Any) -> None:
    """A symbol that is built here has the JSON text that MXNet wrote."""
    ours = interchange_cases.CASES[name][0](mx).tojson()
    theirs = (FOLDER / f"{name}-symbol.json").read_text()
    if "Pooling" in ours or "RNN" in ours:
        assert without_rows(ours) == without_rows(theirs)
    else:
        assert ours == theirs


@pytest.mark.parametrize("name", CASES)
def test_their_file_runs_here(name: str, interpret: Interpreter) -> None:
    """MXNet's symbol and parameters give MXNet's outputs within 1e-5."""
    outputs = interpret(sym.load(FOLDER / f"{name}-symbol.json"), stored_arrays(name))
    expected = stored_outputs(name)
    assert len(outputs) == len(expected)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OURS)
def test_our_file_ran_there(name: str, interpret: Interpreter, interchange_cases: ModuleType) -> None:
    """Our symbol has the text that MXNet loaded, and our outputs are MXNet's within 1e-5."""
    symbol = models.digits(name)
    assert symbol.tojson() == (FOLDER / f"ours-{name}-symbol.json").read_text()
    expected = stored_outputs(f"ours-{name}")
    assert 0.01 < expected[0].max() < 0.99, "a saturated output would prove nothing"
    arguments, _, states = symbol.infer_shape(**interchange_cases.OURS[name])
    names = (*symbol.list_arguments(), *symbol.list_auxiliary_states())
    arrays = {n: interchange_cases.values(n, s) for n, s in zip(names, (*arguments, *states), strict=True)}
    outputs = interpret(symbol, arrays)
    assert len(outputs) == len(expected)
    for ours, theirs in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_reading_and_writing_changes_nothing(name: str) -> None:
    """Loading and saving a file of MXNet gives the same text."""
    theirs = (FOLDER / f"{name}-symbol.json").read_text()
    ours = sym.load_json(theirs).tojson()
    if "Pooling" in ours or "RNN" in ours:
        assert without_rows(ours) == without_rows(theirs)
    else:
        assert ours == theirs
