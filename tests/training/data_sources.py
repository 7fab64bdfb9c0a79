"""Datasets that misbehave, for tests of their readers; workers import this file."""

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

from weftplan.training.data.input.seeding import sample_rng


class Numbers:
    """Samples ``(number, number)``; one sample, and the start in a worker, may misbehave.

    Args:
        count: samples.
        bad: the sample at which ``act`` is called.
        act: a name of :data:`ACTS`.
        start: a name of :data:`ACTS`, called when a worker gets the dataset.
        once: a file that the first call creates; if it exists, nothing is called.
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
    """Raise."""
    raise ValueError("this one is broken")


def hang_on_purpose() -> None:
    """Wait for an event that never happens."""
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
    """A dataset whose length changes when ``count`` does."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return np.full(2, number, "float32")


def threads_of_blas(sample: Any) -> Any:
    """Return how many threads a product may use in this process."""
    from threadpoolctl import ThreadpoolController

    actual = [library["num_threads"] for library in ThreadpoolController().info() if library["user_api"] == "blas"]
    return np.float32(max(actual, default=1)), np.float32(os.getpid())


class Fickle(Growing):
    """As long as it says, but one more in every other process."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.count = state["count"] + 1


class OnlyIterable:
    """An iterable that can be sent to a process."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def noisy(sample: Any) -> Any:
    """Noise from every generator that is seeded for a sample."""
    drawn = random.random() + np.random.random() + sample_rng().random()  # noqa: NPY002
    return np.float64(drawn), sample[1]


def rows(batch: Any) -> list[Any]:
    """Data of a batch as lists."""
    return [array.tolist() for array in batch.data]


def labels(batch: Any) -> Any:
    """Return the numbers of the samples."""
    return batch.label[0].tolist()
