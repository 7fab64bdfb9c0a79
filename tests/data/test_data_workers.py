"""Data workers that die, raise, hang or cannot start: errors name the worker and the sample; no resource leaks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import weftplan as mx
from tests.data.data_sources import Numbers, blas_thread_count
from weftplan.data.input import slots
from weftplan.data.input.layout import BatchLayout, SamplePart
from weftplan.errors import DataError, DataWorkerError, OutOfMemoryError, ParameterError

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks at processes by /proc")


def leaked_segments():
    """Return the names of shared memory segments that belong to this process or to dead processes.

    Segments of other live processes are left out, because other tests may run at the same time.
    """
    mine = str(os.getpid())
    owners = {name: name.split("-")[2] for name in os.listdir("/dev/shm") if name.startswith("weftplan-")}
    return {name for name, pid in owners.items() if pid == mine or not os.path.exists(f"/proc/{pid}")}


def child_pids():
    """Return the ids of this process's children; between tests these are the fork server and the tracker."""
    seen = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                seen.add(int(pid))
    return seen


def wait_until_gone(pids):
    """Wait up to a minute until none of the processes runs; return whether that is so. Zombies count as gone."""
    end = time.monotonic() + 60
    while any(slots._started(pid) != -1 for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    return all(slots._started(pid) == -1 for pid in pids)


@pytest.fixture(scope="module", autouse=True)
def _server():
    """Start the fork server and the resource tracker, so that a test's new child processes are leaks."""
    with mx.io.DatasetIter(Numbers(4), 2, num_workers=1) as it:
        it.next()


@pytest.fixture
def tidy():
    """Check that the test leaves no new child process, file descriptor or shared memory segment."""
    before = child_pids(), len(os.listdir("/proc/self/fd")), leaked_segments()
    yield
    assert (child_pids(), len(os.listdir("/proc/self/fd")), leaked_segments()) == before


def labels(batch):
    """Return the batch's labels, which are its sample numbers."""
    return batch.label[0].asnumpy().tolist()


@pytest.mark.parametrize(
    ("act", "says"),
    [("kill", "was killed by SIGKILL"), ("segv", "was killed by SIGSEGV"), ("exit", "ended with exit code 7")],
)
def test_a_worker_dies_at_work(tidy, tmp_path, act, says):
    """Batches before the fatal batch arrive, then an error names the worker; new workers read the batch."""
    with mx.io.DatasetIter(Numbers(12, 7, act, once=tmp_path / "done"), 2, num_workers=2) as it:
        pids = []
        for k in range(3):
            assert labels(it.next()) == [2 * k, 2 * k + 1]
            pids += it.worker_pids
        with pytest.raises(DataWorkerError, match=rf"data worker [01] \(process \d+\) {says}.* while it read batch 3"):
            it.next()
        assert it.worker_pids == []
        assert wait_until_gone(pids)
        assert [labels(batch) for batch in it] == [[6, 7], [8, 9], [10, 11]]


def test_a_worker_dies_without_work(tidy):
    """An idle worker that is killed causes one error at its next batch, and a new worker replaces it."""
    with mx.io.DatasetIter(Numbers(40), 2, num_workers=1, ahead=1) as it:
        assert labels(it.next()) == [0, 1]
        (pid,) = it.worker_pids
        os.kill(pid, signal.SIGKILL)
        assert wait_until_gone([pid])
        seen, errors = [], []
        while len(seen) < 3:
            try:
                seen.append(labels(it.next()))
            except DataWorkerError as error:
                errors.append(str(error))
        assert seen == [[2, 3], [4, 5], [6, 7]]  # the first of them may have been read before the kill
        assert len(errors) == 1
        assert f"process {pid}) was killed by SIGKILL" in errors[0]
        assert it.worker_pids != [pid]


def test_one_of_two_dies_without_work(tidy):
    """If one of two idle workers is killed, the same epoch raises one error and loses no batch."""
    with mx.io.DatasetIter(Numbers(80), 2, num_workers=2, ahead=1) as it:
        seen, errors = [labels(it.next())], []
        os.kill(it.worker_pids[1], signal.SIGKILL)
        assert wait_until_gone([it.worker_pids[1]])
        while len(seen) < 40:
            try:
                seen.append(labels(it.next()))
            except DataWorkerError as error:
                errors.append(str(error))
        assert seen == [[2 * k, 2 * k + 1] for k in range(40)]
        assert len(errors) == 1
        assert "data worker 1" in errors[0]


def test_views_outlive_the_workers(tidy):
    """A view of a slot can still be read after ``close``."""
    it = mx.io.DatasetIter(Numbers(4), 2, num_workers=1)
    it.next()
    view = it._pool.slots.views[0][0]
    it.close()
    assert view.shape == (2, 2)
    assert np.isfinite(view).all()
    del view
    with mx.io.DatasetIter(Numbers(4), 2, num_workers=1) as second:  # releases the remaining resources
        second.next()


@pytest.mark.parametrize(
    ("act", "says"),
    [
        ("kill", "was killed by SIGKILL .* before it began"),
        ("exit", "ended with exit code 7 before it began"),
        ("raise", "could not begin: ValueError: this one is broken[^§]*in fail_on_purpose"),
        ("leave", "could not begin: SystemExit: 3"),
    ],
)
def test_a_worker_does_not_begin(tidy, tmp_path, act, says):
    """A worker's death or exception at its start is reported, and the next call starts new workers."""
    with mx.io.DatasetIter(Numbers(4, start=act, once=tmp_path / "done"), 2, num_workers=2) as it:
        with pytest.raises(DataWorkerError, match=says):
            it.next()
        assert [labels(batch) for batch in it] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(("act", "says"), [("raise", "ValueError: this one is broken"), ("leave", "SystemExit: 3")])
def test_a_worker_raises(tidy, act, says):
    """The error states the exception, the worker and its traceback; the same worker reads the later batches."""
    with mx.io.DatasetIter(Numbers(8, 3, act), 2, num_workers=1) as it:
        assert labels(it.next()) == [0, 1]
        pids = it.worker_pids
        with pytest.raises(DataError, match=rf"{says}\n\nin data worker 0 \(process {pids[0]}\):\nTraceback[^§]*_do"):
            it.next()
        assert [labels(batch) for batch in it] == [[4, 5], [6, 7]]
        assert it.worker_pids == pids


def test_a_worker_hangs(tidy, tmp_path):
    """At the deadline the worker is killed; the error names it, its batch and its stack, and a new worker continues."""
    with mx.io.DatasetIter(Numbers(8, 4, "hang", once=tmp_path / "done"), 2, num_workers=1, ahead=1) as it:
        assert [labels(it.next()) for _ in range(2)] == [[0, 1], [2, 3]]
        it._pool._deadline = 0.3  # the next call waits for the hanging worker
        with pytest.raises(
            DataWorkerError, match=r"data worker 0 \(process \d+\) has given nothing for 0.3 s"
        ) as error:
            it.next()
        assert "while it read batch 2; it stands at" in str(error.value)
        assert "in hang_on_purpose" in str(error.value)
        assert [labels(batch) for batch in it] == [[4, 5], [6, 7]]


def test_a_worker_hangs_when_it_begins(tidy):
    """The deadline also covers a worker's start."""
    it = mx.io.DatasetIter(Numbers(4, start="hang"), 2, num_workers=1, deadline=0.5)
    with pytest.raises(DataWorkerError, match=r"data worker 0 \(process \d+\) has not begun within 0\.5 s"):
        it.next()
    it.close()


def test_leaving_in_the_middle(tidy):
    """Nothing leaks if an iterator with batches in flight is reset, closed twice, read again or dropped."""
    it = mx.io.DatasetIter(Numbers(40), 2, num_workers=2, ahead=3)
    it.next()
    for _ in range(3):
        it.reset()
        assert labels(it.next()) == [0, 1]
    it.close()
    it.close()
    assert labels(it.next()) == [2, 3]
    del it


def test_threads_of_libraries_are_bounded(tidy):
    """A worker's BLAS uses one thread."""
    with mx.io.DatasetIter(Numbers(4), 2, transform=blas_thread_count, num_workers=1) as it:
        batch = it.next()
        assert batch.data[0].asnumpy().tolist() == [1, 1]
        assert labels(batch) == [float(np.float32(it.worker_pids[0]))] * 2


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # since Python 3.12
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_other_ways_to_begin(tidy, method):
    """Workers started by spawn, or by fork while engine threads run, give the right batches."""
    mx.nd.ones((2,)).wait_to_read()
    transform = None if method == "spawn" else lambda sample: sample  # a lambda cannot be pickled
    with mx.io.DatasetIter(Numbers(6), 2, transform=transform, num_workers=1, start_method=method) as it:
        assert [labels(batch) for batch in it] == [[0, 1], [2, 3], [4, 5]]


def test_what_cannot_be_sent(tidy):
    """A source or transform that cannot be pickled raises DataError, which recommends num_workers=0."""
    for source, transform in ((Numbers(4), lambda sample: sample), ((n for n in range(4)), None)):
        kwargs = {} if transform else {"label_names": ()}
        with (
            mx.io.DatasetIter(source, 2, transform=transform, num_workers=1, **kwargs) as it,
            pytest.raises(DataError, match=r"cannot be sent to workers[^§]*num_workers=0"),
        ):
            it.next()
    with pytest.raises(ParameterError, match="start_method must be one of"):
        mx.io.DatasetIter(Numbers(4), 2, start_method="thread")


OWNER = """
import os, signal
from multiprocessing import resource_tracker
import weftplan as mx
from tests.data.data_sources import Numbers
from weftplan.data.input import slots

def die(self):
    print(self.name, flush=True)
    os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

it = mx.io.DatasetIter(Numbers(40), 2, num_workers=1, start_method="fork")
if {early}:
    slots.Slots.unname = die
it.next()
print("-", *it.worker_pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("early", [False, True])
def test_the_owner_is_killed(tidy, early):
    """If the owner and its resource tracker are killed, the workers exit, and the next owner removes leaked segments.

    Args:
        early: kill the owner before it unlinks its segment, so that the segment leaks.
    """
    script = OWNER.format(early=early)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == -signal.SIGKILL, done.stderr
    name, *pids = done.stdout.split()
    assert (name in leaked_segments()) == early
    assert wait_until_gone([int(pid) for pid in pids])
    with mx.io.DatasetIter(Numbers(4), 2, num_workers=1) as it:
        it.next()
        assert leaked_segments() == set()


def test_sweeping(tmp_path):
    """``sweep`` removes segments of dead processes, not of live processes, other namespaces or programs."""
    own = f"weftplan-{slots._space()}-{os.getpid()}-{slots._started(os.getpid())}-0"
    dead = f"weftplan-{slots._space()}-{os.getpid()}-{slots._started(os.getpid()) - 1}-0"  # its id was reused
    stay = {own, f"weftplan-{slots._space() + 1}-1-1-0", "weftplan-x", "psm_1"}
    for name in {*stay, dead}:
        (tmp_path / name).touch()
    assert slots.sweep(tmp_path) == [dead]
    assert {path.name for path in tmp_path.iterdir()} == stay
    assert slots.sweep(tmp_path / "nowhere") == []


def test_no_room_for_shared_memory():
    """If /dev/shm is too small, creating the slots raises OutOfMemoryError and leaves no segment."""
    layout = BatchLayout((SamplePart("data", None, (1 << 45,), np.dtype("float32"), False),), 8)
    before = leaked_segments()
    with pytest.raises(OutOfMemoryError, match=r"shm|shared memory"):
        slots.Slots(layout, 4)
    assert leaked_segments() == before
