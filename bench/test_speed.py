"""Did a change slow the package down? Twelve kinds of work, timed with the functions of the other benches.

Results are not compared with a peer, but with an earlier run of the same measurements on the same machine::

    pytest bench --benchmark-autosave                    # before the change
    pytest bench --benchmark-compare                     # after it

CONTRIBUTING.md explains how to read the table on a noisy machine.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import array_calls
import bench_first_bind
import bench_models
import bench_packing
import bench_tasks
import engine_programs
import module_training
import numpy as np
import planning_time
import pytest
import storage_traces
import store_exchange
import weftplan_engine

import weftplan as mx
from weftplan import engine
from weftplan.kvstore.fixed_order_sums import reduce_arrays, sum_sequential_block
from weftplan.planner import plan_symbol

COUNT = 5_000
"""Operations, tasks or calls in one round."""


@pytest.fixture(params=[1, 2], ids=["1 worker", "2 workers"])
def workers(request):
    """Return an engine with one or two CPU workers."""
    result = engine.create("ThreadedEnginePerDevice", cpu_workers=request.param)
    yield result
    result.stop()


@pytest.mark.parametrize("shape", ["independent", "chain", "diamond", "wavefront"])
def test_engine(benchmark, workers, shape):
    """Time operations that do nothing, from the first push until all are done."""
    program = engine_programs.SHAPES[shape](COUNT)

    def prepare():
        return (workers, weftplan_engine.prepare(workers, *program), weftplan_engine.nothing), {}

    benchmark.pedantic(weftplan_engine.push_all, setup=prepare, rounds=20, warmup_rounds=1)


def test_push_and_wait(benchmark, workers):
    """Time a push and a wait for one operation, which a worker runs, as it does a user's function."""
    benchmark(weftplan_engine.push_and_wait, workers, workers.new_variable())


@pytest.mark.parametrize("kind", ["cost", "arrays"])
def test_tasks(benchmark, kind):
    """Time tasks that do nothing, without arguments or with three arrays, from first submission until all are done."""
    result = engine.create("ThreadedEnginePerDevice", task_workers=2)
    with engine.using(result), ThreadPoolExecutor(1) as pool:
        candidates = getattr(bench_tasks, kind)(pool, COUNT)
        benchmark.pedantic(candidates["weftplan"], rounds=20, warmup_rounds=1)
    result.stop()


@pytest.mark.parametrize("call", ["a + b", "nd.softmax(a)", "nd.FullyConnected(a, w, b)"])
def test_array_call(benchmark, call):
    """Time calls on arrays of 8 x 16, from the first call until all work is done."""
    benchmark.pedantic(array_calls.repeat, (mx.nd, array_calls.cases(mx.nd)[call], COUNT), rounds=20, warmup_rounds=1)


@pytest.mark.parametrize("nbytes", [4096, 1 << 20])
def test_allocate_and_free(benchmark, nbytes):
    """Time an allocation and its free from a warm pool of the default kind."""
    pool = storage_traces.POOLS["auto_growth"](storage_traces.HOST)
    benchmark(lambda: pool.free(pool.allocate(nbytes)))


def test_plan_of_resnet50(benchmark):
    """Time the training plan of a symbol that was just opened, so that nothing of it is cached."""

    def prepare():
        return planning_time.graph("resnet50, training", 0), {"grad_req": "write"}

    benchmark.pedantic(plan_symbol, setup=prepare, rounds=5, warmup_rounds=1)


def test_pack_of_hard_instances(benchmark):
    """Time the packing of the five hard public problems at effort ``fast``."""
    hard = [buffers for _, _, buffers in bench_packing.instances("hard", 0)]
    benchmark.pedantic(lambda: [bench_packing.measured(one, "fast") for one in hard], rounds=3, warmup_rounds=1)


@pytest.mark.parametrize("cached", [False, True], ids=["first", "cached"])
def test_bind_in_a_process(benchmark, tmp_path, cached):
    """Time a new process that binds ResNet-18 for training and makes two steps, without and with cached plans."""
    text = tmp_path / "resnet18-symbol.json"
    text.write_text(mx.models.get("resnet18").tojson())
    shapes, folders = mx.models.input_shapes("resnet18", 4), iter(range(100))

    def prepare():
        folder = tmp_path / ("one" if cached else f"folder {next(folders)}")
        folder.mkdir(mode=0o700, exist_ok=True)
        return (sys.executable, "weftplan", text, shapes, str(folder)), {}

    benchmark.pedantic(bench_first_bind.measured, setup=prepare, rounds=3, warmup_rounds=1)


@pytest.mark.parametrize("network", ["mlp", "lenet"])
def test_training_step(benchmark, network):
    """Time forward, backward and SGD with momentum on one batch."""
    benchmark.pedantic(module_training.train, (mx, *module_training.prepare(mx, network)), rounds=30, warmup_rounds=3)


@pytest.mark.parametrize("elements", [10_000, 1_000_000])
def test_push_and_pull(benchmark, elements):
    """Time a push and a pull of one key of a store ``device`` on four contexts; every pulled array has the sum, 10."""
    push, pull, outs = store_exchange.prepare(mx, "device", elements)

    def exchange():
        push()
        pull()
        mx.nd.waitall()

    benchmark.pedantic(exchange, rounds=50, warmup_rounds=2)
    assert all((out.asnumpy() == 10).all() for out in outs)


def test_sum_of_eight(benchmark):
    """Time the sum of eight arrays of 16 MB on two threads, with a store's own function."""
    arrays, out = [np.full(1 << 22, i + 1, np.float32) for i in range(8)], np.zeros(1 << 22, np.float32)
    keywords = {"block_sum": sum_sequential_block, "threads": 2, "bound": 1}
    benchmark.pedantic(reduce_arrays, (arrays, out), keywords, rounds=20, warmup_rounds=1)
    assert (out == 36).all()


def test_load_of_parameters(benchmark, tmp_path):
    """Time the loading of a ResNet-18's parameter file."""
    paths, _ = bench_models.write(Path(tmp_path), "resnet18", "1.9")

    def load():
        mx.nd.load(paths["params"])
        mx.nd.waitall()

    benchmark.pedantic(load, rounds=10, warmup_rounds=1)
