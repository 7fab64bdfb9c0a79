"""``load_digits``: the handwritten digits that the examples use."""

import importlib.util
import sys
import types

import numpy as np
import pytest

from weftplan.data import datasets
from weftplan.errors import MXNetError


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn")
def test_the_digits_are_all_there():
    """Each of the 1797 images comes once with its label, in an order given by the seed.

    The sum of the pixels and the count of each digit are those of the published file.
    """
    split = datasets.load_digits(seed=3)
    images = np.concatenate([split.test_images, split.train_images])
    labels = np.concatenate([split.test_labels, split.train_labels])
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == labels.dtype == np.float32
    assert (16.0 * images.astype(np.float64)).sum() == 561718
    assert np.bincount(labels.astype(int)).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert len(split.test_labels) == 359
    first = datasets.load_digits(seed=4)
    assert (first.test_labels != split.test_labels).any()
    assert (datasets.load_digits(seed=3).train_images == split.train_images).all()


def test_a_scikit_learn_that_keeps_them_elsewhere_is_asked(monkeypatch, tmp_path):
    """If scikit-learn's data file is not at its usual path, its ``load_digits`` is called."""
    images, labels = np.arange(640.0).reshape(10, 64) % 17, np.arange(10)
    asked = types.SimpleNamespace(load_digits=lambda return_X_y: (images, labels))
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setitem(sys.modules, "sklearn", types.ModuleType("sklearn"))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", asked)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    split = datasets.load_digits()
    assert sorted([*split.test_labels, *split.train_labels]) == list(range(10))
    row = split.train_images[0].reshape(64)
    np.testing.assert_array_equal(row, (images[int(split.train_labels[0])] / 16).astype(np.float32))


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    """Without scikit-learn the error names the extra to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MXNetError, match=r"pip install 'weftplan\[examples\]'"):
        datasets.load_digits()
