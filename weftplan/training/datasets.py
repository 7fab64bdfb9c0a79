"""Real data for examples: the handwritten digits that scikit-learn ships.

The data are loaded at each call and nothing is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from weftplan.errors import MXNetError

Host = np.ndarray[Any, np.dtype[Any]]


class Split(NamedTuple):
    """Images (samples, 1, 8, 8) float32 in [0, 1] and labels (samples,) float32, for training and for testing."""

    train_images: Host
    train_labels: Host
    test_images: Host
    test_labels: Host


def load_digits(*, seed: int = 0, test_share: float = 0.2) -> Split:
    """The 1,797 images of 8x8 pixels of the UCI optical digits, split at random by ``seed``.

    Raises:
        MXNetError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise MXNetError("the digits come with scikit-learn: pip install 'weftplan[examples]'") from error
    images, labels = load(return_X_y=True)
    order = np.random.RandomState(seed).permutation(len(images))
    pixels = (images[order] / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)
    targets = labels[order].astype(np.float32)
    test = round(len(images) * test_share)
    return Split(pixels[test:], targets[test:], pixels[:test], targets[:test])
