"""Sums and compressed gradients against what MXNet 1.9.1 computed, bit for bit."""

import importlib.util
from pathlib import Path

import numpy as np

import weftplan as mx

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def load_cases():
    """The module that both packages run."""
    spec = importlib.util.spec_from_file_location("kvstore_cases", GOLDEN / "kvstore_cases.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_stored_result():
    """The same keys, dtypes and bytes."""
    ours = load_cases().run(mx)
    with np.load(GOLDEN / "data" / "kvstore.npz") as archive:
        theirs = dict(archive)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 156
    for key, want in theirs.items():
        assert ours[key].dtype == want.dtype, key
        assert ours[key].tobytes() == want.tobytes(), (key, ours[key], want)
