"""BLAS thread limit: when and to which libraries it applies, and that results do not depend on workers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import threadpoolctl

from weftplan import config
from weftplan.errors import ConfigError
from weftplan.support import blas_threads

PROBE = """
import numpy, weftplan as mx
from threadpoolctl import threadpool_info
threads = lambda: max(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")
before = threads()
mx.engine.create({kind!r}).stop()
print(before, threads())
"""


def run(code: str, **variables: str) -> list[int]:
    """Return the integers that ``code`` prints in a process without BLAS or weftplan variables except ``variables``."""
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in blas_threads.NATIVE and not k.startswith(("WEFTPLAN_", "MXNET_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | variables, capture_output=True, text=True, timeout=100, check=True
    )
    return [int(word) for word in done.stdout.split()]


class Library:
    """Test double of a BLAS library with a thread count per calling thread; it records the counts that are set."""

    threading_layer = "openmp"

    def __init__(self) -> None:
        self.set_to: list[int] = []

    def set_num_threads(self, threads: int) -> None:
        self.set_to.append(threads)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch):
    """A fake BLAS library, the only one loaded, as before the first engine and with no thread variable set."""
    for name in (*blas_threads.NATIVE, blas_threads.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    config._reset_for_tests()
    library = Library()

    class Controller:
        def select(self, **kind: str) -> Controller:
            assert kind == {"user_api": "blas"}
            return self

        lib_controllers = [library]  # noqa: RUF012 - a double

    monkeypatch.setattr(threadpoolctl, "ThreadpoolController", Controller)
    monkeypatch.setattr(blas_threads, "_rule", blas_threads._Rule())
    yield library
    config._reset_for_tests()


class TestInAProcess:
    """Tests with the real BLAS, each in a new process."""

    @pytest.mark.parametrize("kind", ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator"])
    def test_first_engine_limits_blas_threads(self, kind):
        """An import does not change BLAS; the first engine of any kind limits it to one thread."""
        before, after = run(PROBE.format(kind=kind))
        assert after == 1
        assert before == run("from threadpoolctl import *; import numpy; print(threadpool_info()[0]['num_threads'])")[0]

    @pytest.mark.shows("WEFTPLAN_BLAS_NTHREADS")
    def test_own_variable_wins(self):
        """WEFTPLAN_BLAS_NTHREADS sets the number of BLAS threads, whatever OMP_NUM_THREADS is."""
        assert run(PROBE.format(kind="ThreadedEngine"), WEFTPLAN_BLAS_NTHREADS="2", OMP_NUM_THREADS="1")[1] == 2

    def test_blas_variable_is_respected(self):
        """A user's OPENBLAS_NUM_THREADS is not changed."""
        before, after = run(PROBE.format(kind="ThreadedEngine"), OPENBLAS_NUM_THREADS="2")
        assert before == after == 2

    def test_same_bits_for_every_worker_count(self):
        """A matrix product of odd sizes has the same bits on every engine and for every number of workers."""
        code = """
import hashlib, numpy as np, weftplan as mx
rng = np.random.default_rng(0)
a, b = rng.random((301, 517), dtype=np.float32), rng.random((517, 203), dtype=np.float32)
digests = set()
for kind, options in [("NaiveEngine", {}), ("ThreadedEngine", {"cpu_workers": 1}),
                      ("ThreadedEngine", {"cpu_workers": 5}),
                      ("ThreadedEnginePerDevice", {"cpu_workers": 3})]:
    engine = mx.engine.create(kind, **options)
    with mx.engine.using(engine):
        outs = [np.empty((301, 203), np.float32) for _ in range(8)]
        for out in outs:
            mx.engine.submit(np.matmul, a, b, out=out)
        mx.engine.wait()
    engine.stop()
    digests |= {hashlib.sha256(out.tobytes()).hexdigest() for out in outs}
print(len(digests))
"""
        assert run(code) == [1]


class TestRule:
    """Rules of the thread limit, tested on a fake BLAS library."""

    def test_limit_is_set_once(self, fresh):
        """The first call of ``limit()`` sets one thread; a second call sets nothing."""
        blas_threads.limit()
        blas_threads.limit()
        assert fresh.set_to == [1]

    def test_workers_limit_per_thread_libraries(self, fresh):
        """After ``limit()``, each worker sets one thread in a library with a thread count per calling thread."""
        blas_threads.enter_worker()
        assert fresh.set_to == []
        blas_threads.limit()
        blas_threads.enter_worker()
        blas_threads.enter_worker()
        assert fresh.set_to == [1, 1, 1]

    def test_per_process_library_is_set_once(self, fresh):
        """``enter_worker()`` does not set the count of a library that has one thread count for the process."""
        fresh.threading_layer = "pthreads"
        blas_threads.limit()
        blas_threads.enter_worker()
        assert fresh.set_to == [1]

    def test_omp_num_threads_is_ignored(self, fresh, monkeypatch: pytest.MonkeyPatch):
        """OMP_NUM_THREADS, which containers and MXNet scripts set, leaves the limit unchanged."""
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        assert blas_threads.planned() == (1, "WEFTPLAN_BLAS_NTHREADS")
        blas_threads.limit()
        assert fresh.set_to == [1]

    @pytest.mark.parametrize("name", blas_threads.DECIDING)
    def test_planned_limit_names_its_variable(self, fresh, monkeypatch: pytest.MonkeyPatch, name: str):
        """If a BLAS variable is set, ``planned()`` returns None and its name, and limit() sets none."""
        assert blas_threads.planned() == (1, "WEFTPLAN_BLAS_NTHREADS")
        monkeypatch.setenv(name, "")
        assert blas_threads.planned() == (1, "WEFTPLAN_BLAS_NTHREADS")
        monkeypatch.setenv(name, "4")
        assert blas_threads.planned() == (None, name)
        blas_threads.limit()
        assert fresh.set_to == []

    def test_bad_count_limits_nothing(self, fresh, monkeypatch: pytest.MonkeyPatch):
        """With a bad WEFTPLAN_BLAS_NTHREADS, every call of ``limit()`` raises ConfigError and limits nothing."""
        monkeypatch.setenv("WEFTPLAN_BLAS_NTHREADS", "many")
        for _ in range(2):
            with pytest.raises(ConfigError, match="WEFTPLAN_BLAS_NTHREADS='many'"):
                blas_threads.limit()
        assert fresh.set_to == []


def test_training_step_ignores_omp_threads():
    """A training step uses one BLAS thread and gives equal bits with OMP_NUM_THREADS of 1, of 2 and unset.

    Two spinning BLAS threads next to the workers made a step ten times slower.
    """
    code = """
import hashlib, threading, numpy as np, weftplan as mx
from threadpoolctl import threadpool_info
net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=300), name="softmax")
step = net.simple_bind(mx.cpu(), data=(256, 600))
random = np.random.RandomState(0)
for array in step.arg_arrays:
    array[:] = random.standard_normal(array.shape)
for _ in range(3):
    step.forward(is_train=True)
    step.backward()
threads = max(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")
digest = hashlib.sha256(b"".join(grad.asnumpy().tobytes() for grad in step.grad_arrays)).hexdigest()
print(threads, int(digest[:8], 16))
"""
    alone, several, unset = (run(code, **more) for more in ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}, {}))
    assert several[0] == 1
    assert alone == several == unset
