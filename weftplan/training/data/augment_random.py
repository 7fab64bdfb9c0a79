"""Random decisions of augmentations, drawn from the seeded sequence of ``mx.random`` by the thread that reads."""

from __future__ import annotations

import numpy as np

from weftplan.device.context import cpu
from weftplan.ndarray import random
from weftplan.training.data import ndarray_iter


def generator() -> np.random.Generator:
    """A generator whose numbers depend on the seed of ``mx.random`` and the order of the calls alone."""
    return ndarray_iter.generator(random.next_key(cpu()))
