"""Example data sets: scikit-learn's handwritten digits and the text of Python's help topics.

Each call loads the data from disk; no result is cached.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weftplan.errors import MXNetError
from weftplan.support.array_types import DType

Host = np.ndarray[Any, DType]


class Split(NamedTuple):
    """Images (samples, 1, 8, 8) float32 in [0, 1] and labels (samples,) float32, for training and for testing."""

    train_images: Host
    train_labels: Host
    test_images: Host
    test_labels: Host


def load_digits(*, seed: int = 0, test_share: float = 0.2) -> Split:
    """Load the 1,797 images of 8x8 pixels of the UCI optical digits, split at random by ``seed``.

    Raises:
        MXNetError: scikit-learn is not installed.
    """
    table = _digits()
    images, labels = table[:, :-1], table[:, -1]
    order = np.random.RandomState(seed).permutation(len(images))
    pixels = (images[order] / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)
    targets = labels[order].astype(np.float32)
    test = round(len(images) * test_share)
    return Split(pixels[test:], targets[test:], pixels[:test], targets[:test])


def _digits() -> Host:
    """Return a row per image, (1797, 65) float64: its pixels from 0 to 16, and its label.

    The file is read directly from scikit-learn's folder, because importing scikit-learn takes seconds of CPU time.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None:
        raise MXNetError("the digits come with scikit-learn: pip install 'weftplan[examples]'")
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.exists():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits as load  # a version with another file layout

    images, labels = load(return_X_y=True)
    return np.column_stack((images, labels))


class Lines(NamedTuple):
    """Lines of text, each a list of character numbers from 1 that ends with the newline, for training and testing."""

    train: list[list[int]]
    test: list[list[int]]
    characters: str
    """Character number n is ``characters[n - 1]``."""


def load_help_text(*, seed: int = 0, test_share: float = 0.1, shortest: int = 4, longest: int = 79) -> Lines:
    """Load the lines of Python's help topics (``help("topics")``), chapters of its language reference, with
    ``shortest`` to ``longest`` characters; split at random by ``seed``.

    Raises:
        MXNetError: this Python was installed without the topics.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise MXNetError("this Python has no pydoc_data.topics, which is part of its standard library") from error
    text = "\n".join(topics[name] for name in sorted(topics))
    unique = dict.fromkeys(line.strip() for line in text.splitlines())
    lines = [f"{line}\n" for line in unique if shortest <= len(line) <= longest and line.isascii()]
    characters = "".join(sorted({character for line in lines for character in line}))
    numbers = {character: number for number, character in enumerate(characters, 1)}
    order = np.random.RandomState(seed).permutation(len(lines))
    coded = [[numbers[character] for character in lines[index]] for index in order]
    test = round(len(coded) * test_share)
    return Lines(coded[test:], coded[:test], characters)
