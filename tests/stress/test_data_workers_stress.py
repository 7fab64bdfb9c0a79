"""Data workers under stress: killed at random moments, and any number of them compared with none."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading

import pytest

import weftplan as mx
from tests.data.data_sources import Numbers, noisy
from weftplan.errors import DataWorkerError

pytestmark = [pytest.mark.stress, pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="looks into /dev/shm")]


def contents(batch):
    """Return the contents of a batch as plain values."""
    return batch.data[0].tolist(), batch.label[0].tolist(), batch.pad, batch.index.tolist()


def shared_segments():
    """Return the names of the package's segments in shared memory."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("weftplan-")}


@pytest.mark.parametrize("seed", range(8))
def test_worker_count_does_not_change_batches(seed):
    """Zero to four workers give the same batches, for any ``ahead`` and start method, and after ``set_state()``."""
    chance = random.Random(seed)
    settings = {
        "batch_size": chance.randint(1, 9),
        "shuffle": chance.random() < 0.7,
        "last_batch_handle": chance.choice(["pad", "discard"]),
        "on_error": "skip",
        "transform": noisy,
    }
    source, jumps = Numbers(60, chance.randint(-1, 59), "raise"), [chance.randint(0, 5) for _ in range(4)]
    runs = []
    for workers in range(5):
        mx.random.seed(seed)
        method = chance.choice(["forkserver", "spawn"]) if workers < 3 else "forkserver"
        ahead = chance.randint(1, 4)
        with mx.io.DatasetIter(source, num_workers=workers, ahead=ahead, start_method=method, **settings) as it:
            results, state = [], it.state()
            for jump in jumps:
                results += [contents(batch) for batch, _ in zip(it, range(jump), strict=False)]
                kept, state = state, it.state()
                it.set_state(kept)
                results += [contents(batch) for batch in it]
                it.reset()
        runs.append(results)
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("seed", range(6))
def test_kills_at_random_moments(seed):
    """While a thread kills workers, every batch comes once and in order.

    Errors name the killed worker, and no segment of shared memory is left.
    """
    chance = random.Random(seed)
    before, stop = shared_segments(), threading.Event()
    expected = [contents(batch) for batch in mx.io.DatasetIter(Numbers(600), 3)]
    with mx.io.DatasetIter(Numbers(600), 3, num_workers=2, ahead=chance.randint(1, 3)) as it:

        def kill():
            while not stop.wait(chance.random() * 0.1):
                for pid in it.worker_pids[chance.randint(0, 1) :][:1]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        errors = 0
        try:
            while errors < 5:
                seen = []
                while len(seen) < len(expected):
                    try:
                        seen.append(contents(it.next()))
                    except DataWorkerError as error:
                        assert "was killed by SIGKILL" in str(error)  # noqa: PT017
                        errors += 1
                    if errors == 5:
                        stop.set()
                assert seen == expected
                it.reset()
        finally:
            stop.set()
            killer.join()
    assert shared_segments() == before
