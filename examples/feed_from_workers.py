"""A dataset of your own, read by worker processes: the same bits for any number of them, broken samples, a dead worker.

    python examples/feed_from_workers.py

A worker begins by importing this file. So the class of the dataset, which workers receive, is defined at the top, and
the program is below ``if __name__ == "__main__":``.
"""

import logging
import os
import signal

import numpy as np

import weftplan as mx
from weftplan.errors import DataWorkerError


class Digits:
    """Pictures of four classes, shifted at random; every fiftieth picture raises an error."""

    def __init__(self, count):
        rng = np.random.default_rng(0)
        self.labels = rng.integers(0, 4, count)
        self.pixels = rng.standard_normal((4, 1, 8, 8))[self.labels] + 0.3 * rng.standard_normal((count, 1, 8, 8))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, number):
        if number % 50 == 49:
            raise OSError(f"picture {number} is truncated")
        shift = mx.io.sample_rng().integers(-1, 2)  # the sample's own generator, in any process
        return np.roll(self.pixels[number], shift, axis=2), self.labels[number]


def batches(workers):
    """Return an iterator over batches of 32 in random order; it skips and counts unreadable samples."""
    return mx.io.DatasetIter(Digits(512), 32, shuffle=True, on_error="skip", num_workers=workers)


def weights(workers):
    """Train a network on batches from ``workers`` processes, and return its weights."""
    logging.getLogger("weftplan").setLevel(logging.ERROR)  # hide the warnings about skipped samples
    mx.random.seed(3)
    module = mx.mod.Module(mx.models.digits("mlp"))
    with batches(workers) as it:
        module.fit(it, num_epoch=4, initializer=mx.init.Xavier(), optimizer_params={"learning_rate": 0.1})
        print(f"{workers} workers: accuracy {module.score(it, 'acc')[0][1]:.2f}, {it.skipped} samples left out")
    return {name: value.asnumpy() for name, value in module.get_params()[0].items()}


if __name__ == "__main__":
    alone, shared = weights(0), weights(2)
    assert all(np.array_equal(alone[name], shared[name]) for name in alone)
    print("both learned the same weights, bit for bit")

    with batches(1) as it:
        it.next()
        os.kill(it.worker_pids[0], signal.SIGKILL)
        count = 1
        while True:
            try:
                it.next()
                count += 1
            except StopIteration:
                break
            except DataWorkerError as error:
                print(error)
        print(f"another one went on: {count} batches of {-(-512 // 32)}")
