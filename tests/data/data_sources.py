"""Datasets for tests of ``mx.io.DatasetIter``, in a module that worker processes can import."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from weftplan.data.input.seeding import sample_rng


class Numbers:
    """Dataset whose sample ``n`` is the pair (array of two values ``n``, ``n``), with an optional fault.

    Args:
        count: number of samples.
        bad: number of the sample whose reading calls ``act``.
        act: name of an entry of :data:`ACTS`.
        start: name of the entry of :data:`ACTS` that is called when a worker unpickles the dataset.
        once: file that the first call creates; if the file exists, nothing is called.
    """

    def __init__(self, count: int, bad: int = -1, act: str = "", *, start: str = "", once: Path | None = None) -> None:
        self.count, self.bad, self.act, self.start, self.once = count, bad, act, start, once

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        if number == self.bad:
            self._do(self.act)
            if self.act == "shape" and not (self.once and self.once.exists()):
                return np.zeros(3, "float32"), number
        return np.full(2, number, "float32"), number

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.start:
            self._do(self.start)

    def _do(self, act: str) -> None:
        if self.once is not None:
            if self.once.exists():
                return
            self.once.touch()
        ACTS[act]()


def fail_on_purpose() -> None:
    """Raise ValueError."""
    raise ValueError("this one is broken")


def hang_on_purpose() -> None:
    """Wait forever."""
    threading.Event().wait()


ACTS = {
    "raise": fail_on_purpose,
    "leave": lambda: sys.exit(3),
    "exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": hang_on_purpose,
    "shape": lambda: None,
}


class Growing:
    """Dataset with a length that a test can change: the attribute ``count``; sample ``n`` is two values ``n``."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return np.full(2, number, "float32")


def blas_thread_count(sample: Any) -> Any:
    """Return (number of BLAS threads, process id) of this process as float32; a transform that ignores its sample."""
    from threadpoolctl import ThreadpoolController

    actual = [library["num_threads"] for library in ThreadpoolController().info() if library["user_api"] == "blas"]
    return np.float32(max(actual, default=1)), np.float32(os.getpid())


class Fickle(Growing):
    """Dataset that has one sample more in each process that unpickles it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.count = state["count"] + 1


class OnlyIterable:
    """Iterable that can be pickled; it has no length and no indexing."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def noisy(sample: Any) -> Any:
    """Replace the data of ``sample`` by a sum of draws from all three generators that are seeded for each sample."""
    drawn = random.random() + np.random.random() + sample_rng().random()  # noqa: NPY002
    return np.float64(drawn), sample[1]


def data_lists(batch: Any) -> list[Any]:
    """Return each data array of ``batch`` as nested lists."""
    return [array.tolist() for array in batch.data]


def label_list(batch: Any) -> Any:
    """Return the first label array of ``batch`` as a list; for :class:`Numbers` these are the sample numbers."""
    return batch.label[0].tolist()
