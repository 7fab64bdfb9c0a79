"""Training runs, schedules, iterators, metrics and initializers give the results of MXNet 1.9.1."""

import fnmatch
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import weftplan as mx

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def load_cases(name):
    """Return a module of cases that was also run with MXNet."""
    spec = importlib.util.spec_from_file_location(name, GOLDEN / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cases, sequences = load_cases("training_cases"), load_cases("sequence_cases")


@pytest.fixture(scope="module")
def stored():
    """Return MXNet's results as {key: array}."""
    with np.load(GOLDEN / "data" / "training.npz") as archive:
        return dict(archive)


def arrays_under(stored, prefix):
    """Return the arrays whose keys start with ``prefix``, without the prefix."""
    by_name = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
    assert by_name, prefix
    return by_name


@pytest.mark.parametrize("name", cases.RUNS)
def test_whole_training_runs(stored, name):
    """Sixteen steps of ``fit`` give MXNet's losses, metrics, parameters and predictions within 1e-4."""
    want = arrays_under(stored, f"train/{name}/")
    got = cases.train(mx, *cases.RUNS[name])
    assert set(got) == set(want)
    assert len(got["losses"]) == 16
    assert got["losses"][-1] < got["losses"][0]
    for key, value in want.items():
        np.testing.assert_allclose(got[key], value, rtol=1e-4, atol=1e-4, err_msg=f"{name}: {key}")


@pytest.mark.parametrize(
    "what", ["schedules", "iterators", "metrics", "shaped", "steps", "orders", "nests", "late_rates", "scalars"]
)
def test_exact_parts(stored, what):
    """Schedules, batches, metrics, initial shapes and optimizer steps equal MXNet's within float32 rounding."""
    got = getattr(cases, what)(mx)
    want = arrays_under(stored, f"{what}/")
    assert set(got) == set(want)
    for key, value in want.items():
        assert got[key].shape == value.shape, key
        if key == "roll_over":
            # MXNet counts the samples that begin a new epoch as padding, so its predict drops them; weftplan does not.
            assert value[:, 1].tolist() == [0, 0, 3, 0, 0, 2, 0, 0]
            assert not got[key][:, 1].any()
            value[:, 1] = 0
        np.testing.assert_allclose(got[key], value, rtol=2e-6, atol=1e-7, err_msg=key)


@pytest.mark.parametrize("what", ["unrolls", "file_orders"])
@pytest.mark.filterwarnings("ignore:FusedRNNCell. layout:UserWarning")
def test_sequences(stored, what):
    """Outputs, states and gradients of unrolled cells, and the samples of iterators over files, equal MXNet's."""
    got = getattr(sequences, what)(mx)
    want = arrays_under(stored, f"{what}/")
    assert set(got) == set(want)
    wrong = [key for key, value in want.items()
             if got[key].shape != value.shape or not np.allclose(got[key], value, rtol=1e-5, atol=1e-6)]  # fmt: skip
    assert not wrong


CORRECTED = ("f1*:N1:N*", "mcc*:N1:N*", "pcc:N:NCT", "pcc:N1:NCT", "pcc:N[CT]:N*", "top_k*:N:N", "top_k*:N1:N")
"""Shapes of labels and predictions for which docs/mxnet-differences.md states another value, or a refusal."""


def test_metrics_accept_the_shapes_of_mxnet(stored):
    """Each shape of labels and predictions that MXNet accepts gives MXNet's value; only the listed shapes differ."""
    want, differing = arrays_under(stored, "label_shapes/"), set()
    for name, values in cases.label_shapes(mx).items():
        accepted = ~np.isinf(want[name][..., -1]).all(axis=2)
        assert accepted.any(), name
        for row, column in np.argwhere(accepted):
            theirs, ours = want[name][row, column], values[row, column]
            here = ~np.isinf(theirs)
            if not np.allclose(ours[here], theirs[here], rtol=1e-5, equal_nan=True):
                differing.add(f"{name}:{list(cases.LABEL_SHAPES)[row]}:{list(cases.PREDICTIONS)[column]}")
    assert [key for key in differing if not any(fnmatch.fnmatch(key, pattern) for pattern in CORRECTED)] == []


@pytest.mark.parametrize("name", ["acc", "mse", "ce", "f1", "mcc", "pcc", "loss", "torch", "caffe", "perplexity"])
def test_metrics_take_arrays_of_any_kind(name):
    """NumPy arrays and nested lists give the value of NDArrays."""
    label, pred = np.array([[1.0], [0.0], [1.0]]), np.array([[0.25, 0.75], [0.5, 0.5], [0.625, 0.375]])
    kinds = (mx.nd.array, np.asarray, np.ndarray.tolist)
    values = []
    for kind in kinds:
        metric = mx.metric.create(name, **({"ignore_label": None} if name == "perplexity" else {}))
        metric.update([kind(label)], [kind(pred)])
        values.append(metric.get()[1])
    np.testing.assert_allclose(values, values[0], rtol=1e-6)


def test_initializers_have_the_same_distributions(stored):
    """Initializers have MXNet's means, standard deviations within 2 %, and uniform limits within 1 %."""
    got = cases.initializers(mx)
    want = arrays_under(stored, "initializers/")
    assert set(got) == set(want)
    for key, value in want.items():
        if key.endswith(":fixed"):
            np.testing.assert_array_equal(got[key], value, err_msg=key)
            continue
        mean, deviation, low, high = got[key]
        scale = max(abs(value[2]), abs(value[3]))
        assert abs(mean - value[0]) <= 0.02 * scale, key
        np.testing.assert_allclose(deviation, value[1], rtol=0.02, err_msg=key)
        near = 0.01 if key.startswith(("uniform", "xavier:", "xavier-in", "zero", "one", "constant")) else 0.4
        np.testing.assert_allclose([low, high], value[2:], rtol=near, err_msg=key)
