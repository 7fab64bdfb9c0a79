"""Engine contract: the queue of each FnProperty on each engine, and its number of threads."""

import os
import subprocess
import sys
import textwrap
import threading

import pytest

from weftplan import engine
from weftplan.device.context import cpu, cpu_pinned, sim
from weftplan.engine import FnProperty

MAIN = threading.main_thread().name
POOLED = dict.fromkeys(FnProperty, "weftplan worker 0") | dict.fromkeys(
    (FnProperty.COPY_FROM_GPU, FnProperty.COPY_TO_GPU), "weftplan copy 0"
)
"""Threads of ThreadedEngine: one pool and one thread for copies, for all contexts."""


def of_cpu(index):
    """Return the thread of each property on a CPU of ThreadedEnginePerDevice.

    There is one queue per CPU and a priority queue for the process; short operations run inline.
    """
    return dict.fromkeys(FnProperty, f"weftplan cpu({index}) worker 0") | {
        FnProperty.CPU_PRIORITIZED: "weftplan priority 0",
        FnProperty.ASYNC: MAIN,
        FnProperty.DELETE_VAR: MAIN,
        FnProperty.TASK: f"weftplan cpu({index}) task 0",
    }


OF_DEVICE = dict.fromkeys(FnProperty, "weftplan sim(0) worker 0") | {
    FnProperty.COPY_FROM_GPU: "weftplan sim(0) copy 0",
    FnProperty.COPY_TO_GPU: "weftplan sim(0) copy 0",
    FnProperty.CPU_PRIORITIZED: "weftplan sim(0) priority 0",
    FnProperty.GPU_PRIORITIZED: "weftplan sim(0) priority 0",
}
"""Threads of a device of ThreadedEnginePerDevice: three queues, and no operation runs inline."""


def on_one_thread(thread):
    """Return the same thread for every property."""
    return dict.fromkeys(FnProperty, thread)


@pytest.mark.parametrize(
    ("kind", "ctx", "want"),
    [
        ("NaiveEngine", cpu(0), on_one_thread(MAIN)),
        ("NaiveEngine", sim(0), on_one_thread(MAIN)),
        ("Simulator", cpu(0), on_one_thread(MAIN)),
        ("Simulator", sim(0), on_one_thread(MAIN)),
        ("ThreadedEngine", cpu(0), POOLED),
        ("ThreadedEngine", sim(0), POOLED),
        ("ThreadedEnginePerDevice", cpu(0), of_cpu(0)),
        ("ThreadedEnginePerDevice", cpu(3), of_cpu(3)),
        ("ThreadedEnginePerDevice", cpu_pinned(1), of_cpu(1)),
        ("ThreadedEnginePerDevice", sim(0), OF_DEVICE),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
@pytest.mark.parametrize("prop", FnProperty)
def test_thread_of_each_property(monkeypatch, kind, ctx, want, prop):
    """An operation runs on a thread whose name contains its device and queue."""
    monkeypatch.setenv("WEFTPLAN_ENGINE_WAITERS_HELP", "0")  # otherwise a waiting thread may run it
    eng = engine.create(kind, cpu_workers=1, priority_workers=1, gpu_workers=1, copy_workers=1)
    if want is OF_DEVICE:
        eng.push(lambda: None, (), [eng.new_variable()], ctx)  # the first operation on it creates its stream
        eng.wait_for_all()
    ran = []
    eng.push(lambda: ran.append(threading.current_thread().name), (), [eng.new_variable()], ctx, prop=prop)
    eng.wait_for_all()
    assert ran == [want[prop]]
    eng.stop()


@pytest.mark.parametrize("kind", ["ThreadedEngine", "ThreadedEnginePerDevice"])
def test_deletes_jump_the_queue(kind):
    """A delete runs before operations queued earlier, unless they use its var."""
    eng = engine.create(kind, cpu_workers=1, gpu_workers=1)
    ctx = sim(0) if kind == "ThreadedEnginePerDevice" else cpu(0)  # on a CPU it would run on this thread
    begun, gate, order = threading.Event(), threading.Event(), []
    free, used = eng.new_variable(), eng.new_variable()
    eng.push(lambda: (begun.set(), gate.wait(60)), (), [], ctx)
    assert begun.wait(60)
    for i in range(3):
        eng.push(lambda i=i: order.append(i), [used], (), ctx)
    eng.delete_variable(free, lambda: order.append("free"), ctx)
    eng.delete_variable(used, lambda: order.append("used"), ctx)
    gate.set()
    eng.wait_for_all()
    assert order == ["free", 0, 1, 2, "used"]
    eng.stop()


@pytest.mark.parametrize("prop", [FnProperty.COPY_TO_GPU, FnProperty.COPY_FROM_GPU, FnProperty.GPU_PRIORITIZED])
def test_device_queues_honour_priority(prop):
    """The queues for copies and priorities run larger priorities first, equal priorities in push order.

    The device's worker queue ignores priorities.
    """
    eng = engine.create("ThreadedEnginePerDevice", gpu_workers=1, copy_workers=1)
    for kind, want in ((prop, [9, 9, 5, 1, -3]), (FnProperty.NORMAL, [1, 9, -3, 5, 9])):
        gate, order = threading.Event(), []
        eng.push(gate.wait, (), [], sim(0), prop=kind, priority=100)
        for p in (1, 9, -3, 5, 9):
            eng.push(lambda p=p, order=order: order.append(p), (), [], sim(0), prop=kind, priority=p)
        gate.set()
        eng.wait_for_all()
        assert order == want
    eng.stop()


def test_copies_overlap_with_compute():
    """A copy, a prioritized and an ordinary operation of one device run at the same time."""
    eng = engine.create("ThreadedEnginePerDevice", gpu_workers=1, copy_workers=1)
    meet = threading.Barrier(3, timeout=60)
    for prop in (FnProperty.NORMAL, FnProperty.COPY_TO_GPU, FnProperty.GPU_PRIORITIZED):
        eng.push(meet.wait, (), [], sim(0), prop=prop)
    eng.wait_for_all()
    eng.stop()


def run_program(text, **environment):
    """Run a program in its own process; return the words that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=60,
        env={k: v for k, v in os.environ.items() if not k.startswith(("MXNET_", "WEFTPLAN_"))} | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


THREADS = """
    import threading, time
    import weftplan as mx
    from weftplan.engine import FnProperty

    eng = mx.engine.get()
    gate = threading.Event()
    for ctx, prop in ((mx.cpu(0), "NORMAL"), (mx.cpu(2), "NORMAL"), (mx.cpu(0), "CPU_PRIORITIZED"),
                      (mx.sim(0), "NORMAL"), (mx.sim(0), "GPU_PRIORITIZED"), (mx.sim(0), "COPY_TO_GPU")):
        for _ in range(20):
            eng.push(gate.wait, (), [], ctx, prop=FnProperty[prop])
    while any(queue.permits for queue in eng._all_queues):  # until every queue has started all its threads
        time.sleep(0.001)
    print(*(f"{queue.context}/{queue.queue}={queue.workers}" for queue in eng.statistics().queues))
    gate.set()
    eng.wait_for_all()
"""


@pytest.mark.shows(
    "MXNET_CPU_WORKER_NTHREADS",
    "MXNET_CPU_PRIORITY_NTHREADS",
    "MXNET_GPU_WORKER_NTHREADS",
    "MXNET_GPU_COPY_NTHREADS",
    "MXNET_ENGINE_TYPE",
)
def test_variables_set_the_threads():
    """Each MXNET_..._NTHREADS sets the number of threads of its queues; the defaults are 1, 4, 2 and 1."""
    assert run_program(THREADS) == [
        "cpu(0)/worker=1",
        "cpu(2)/worker=1",
        "None/priority=4",
        "sim(0)/worker=2",
        "sim(0)/priority=2",
        "sim(0)/copy=1",
    ]
    assert run_program(
        THREADS,
        MXNET_CPU_WORKER_NTHREADS="3",
        MXNET_CPU_PRIORITY_NTHREADS="2",
        MXNET_GPU_WORKER_NTHREADS="5",
        MXNET_GPU_COPY_NTHREADS="6",
    ) == [
        "cpu(0)/worker=3",
        "cpu(2)/worker=3",
        "None/priority=2",
        "sim(0)/worker=5",
        "sim(0)/priority=5",
        "sim(0)/copy=6",
    ]
    assert run_program(THREADS, MXNET_ENGINE_TYPE="ThreadedEngine") == ["None/worker=16", "None/copy=1"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.shows("MXNET_MP_WORKER_NTHREADS")
def test_forked_children_use_their_thread_count():
    """MXNET_MP_WORKER_NTHREADS sets the threads of inherited and of new engines in a forked child."""
    text = """
        import os, threading, warnings
        import weftplan as mx

        warnings.simplefilter("ignore", DeprecationWarning)
        inherited = mx.engine.get()
        inherited.push(lambda: None)
        inherited.wait_for_all()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for eng in (inherited, mx.engine.create()):
                    meet = threading.Barrier(3, timeout=60)
                    for _ in range(3):
                        eng.push(meet.wait)
                    eng.wait_for_all()
                    (queue,) = eng.statistics().queues
                    assert queue.workers == 3, queue
                status = 0
            finally:
                os._exit(status)
        print(os.waitpid(pid, 0)[1])
    """
    assert run_program(text, MXNET_CPU_WORKER_NTHREADS="1", MXNET_MP_WORKER_NTHREADS="3") == ["0"]


@pytest.mark.shows("WEFTPLAN_TASK_WORKERS")
def test_variable_sets_the_task_threads():
    """WEFTPLAN_TASK_WORKERS sets how many tasks run at the same time on the first CPU."""
    text = """
        import threading
        import weftplan as mx
        meeting = threading.Barrier(3, timeout=60)
        for task in [mx.engine.submit(meeting.wait) for _ in range(3)]:
            task.wait()
        print(*(queue.workers for queue in mx.engine.get().statistics().queues if queue.queue == "task"))
    """
    assert run_program(text, WEFTPLAN_TASK_WORKERS="3") == ["3"]
    assert run_program(text.replace("Barrier(3", "Barrier(1"), WEFTPLAN_TASK_WORKERS="1") == ["1"]
