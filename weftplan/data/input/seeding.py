"""Epoch order and per-sample seeds: pure functions of a key, so all processes agree.

A sample's seed is local to the thread that reads the sample. Seeding a sample also seeds the global generators of
``random``, NumPy and PyTorch, which belong to the process.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from weftplan.errors import MXNetError

Key = tuple[int, int]
_MASK = 2**64 - 1


def epoch_order(samples: int, key: Key | None) -> npt.NDArray[np.int64]:
    """Return the sample numbers in the order of an epoch; without a key in ascending order.

    >>> epoch_order(4, None).tolist(), sorted(epoch_order(4, (1, 2)).tolist())
    ([0, 1, 2, 3], [0, 1, 2, 3])
    """
    order = np.arange(samples)
    if key is not None:
        philox(*key).shuffle(order)
    return order


def philox(key: int, second: int) -> np.random.Generator:
    """Return a Philox generator keyed by two numbers."""
    return np.random.Generator(np.random.Philox(key=[key & _MASK, second & _MASK]))


def epoch_seed(key: Key) -> int:
    """Hash an epoch's key into the base of its sample seeds (see :func:`sample_seed`)."""
    return _mixed(_mixed(key[0] & _MASK) ^ (key[1] & _MASK))


def sample_seed(epoch: int, number: int) -> int:
    """Return a 64-bit seed for a sample of an epoch; adjacent samples get uncorrelated seeds.

    >>> epoch = epoch_seed((1, 2))
    >>> sample_seed(epoch, 3) == sample_seed(epoch, 3) != sample_seed(epoch, 4)
    True
    """
    return _mixed(epoch ^ number)


def _mixed(value: int) -> int:
    """Return the splitmix64 finaliser."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class _Current(threading.local):
    seed: int | None = None
    generator: np.random.Generator | None = None


_current = _Current()
_numpy: np.random.RandomState = np.random.mtrand._rand
"""Global generator of ``numpy.random``; seeding it directly costs less than ``numpy.random.seed``."""


def sample_rng() -> np.random.Generator:
    """Return a NumPy generator for the sample being read, for use in random datasets and transforms.

    It depends only on the seed of ``mx.random``, the epoch and the sample's number, not on the process.

    Raises:
        MXNetError: no sample is being read on this thread.
    """
    if _current.seed is None:
        raise MXNetError(
            "sample_rng: no sample is being read on this thread; call it in __getitem__ of a dataset, or in transform"
        )
    if _current.generator is None:
        _current.generator = philox(_current.seed, 1)
    return _current.generator


def seed_sample(seed: int) -> None:
    """Seed all generators that a sample's code may use."""
    _current.seed, _current.generator = seed, None
    random.seed(seed)
    _numpy.seed(seed & 0xFFFFFFFF)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "default_generator"):
        torch.default_generator.manual_seed(seed >> 1)


@contextmanager
def borrowed_generators() -> Iterator[None]:
    """Restore the process's global generators at the end of the block."""
    was, was_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    torch: Any = sys.modules.get("torch")
    was_torch = torch.default_generator.get_state() if hasattr(torch, "default_generator") else None
    try:
        yield
    finally:
        _current.seed = _current.generator = None
        random.setstate(was)
        np.random.set_state(was_numpy)  # noqa: NPY002
        if was_torch is not None:
            torch.default_generator.set_state(was_torch)
