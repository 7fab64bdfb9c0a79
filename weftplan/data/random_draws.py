"""Random draws of data iterators: the order of an epoch, and the numbers of image augmentation."""

from __future__ import annotations

import numpy as np

from weftplan.device.context import cpu
from weftplan.ndarray import random


def order_key() -> tuple[int, int]:
    """Draw a key for the order of an epoch.

    If the program has called ``np.random.seed``, the key comes from NumPy's global generator, so that the seed decides
    the order, as in MXNet. Otherwise it comes from the sequence of ``mx.random``, which is reproducible even unseeded.
    """
    if np.random.get_bit_generator().seed_seq is not None:  # type: ignore[attr-defined]
        return random.next_key(cpu())
    first_key, second = np.random.randint(0, 2**63, 2, np.int64).tolist()  # noqa: NPY002 - the program has seeded it
    return first_key, second


def generator(key: tuple[int, int]) -> np.random.Generator:
    """Return a generator that depends only on the key of a draw."""
    mask = 2**64 - 1
    return np.random.Generator(np.random.Philox(key=[key[0] & mask, key[1] & mask]))


def draw_generator() -> np.random.Generator:
    """Return a generator for one augmentation; it depends only on the seed of ``mx.random`` and the order of calls."""
    return generator(random.next_key(cpu()))
