"""Random generator for image augmentation, seeded by ``mx.random`` on the thread that reads."""

from __future__ import annotations

import numpy as np

from weftplan.device.context import cpu
from weftplan.ndarray import random
from weftplan.training.data import ndarray_iter


def generator() -> np.random.Generator:
    """Return a generator whose numbers depend only on the seed of ``mx.random`` and the order of calls."""
    return ndarray_iter.generator(random.next_key(cpu()))
