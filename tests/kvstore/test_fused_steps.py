"""Fused optimizer steps on stores: they have the bits of single updates, for every optimizer, dtype and device."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import weftplan as mx
from tests import standin_cupy
from tests.kvstore.ranks import run_ranks
from tests.standin_cupy.meter import meter
from tests.standin_cupy.nccl import nccl
from tests.support.optimizer_runs import FUSED, KEYS, OPTIMIZERS, PLAIN, SET, arrays, trained
from weftplan import engine

FORMS = [("float32", False), ("float64", False), ("float16", True), ("float16", False)]
RUNS = [("local", mx.cpu, PLAIN, "auto"), ("device", mx.cpu, SET, "numpy"), ("device", mx.sim, SET, "auto")]


def run_fused_and_single(monkeypatch, kind, contexts, dtype, name, settings):
    """Return the bytes of weights and states after three fused steps, and after three steps without fusion."""
    results = []
    for fused in (True, False):
        with monkeypatch.context() as patch:
            if not fused:
                patch.setattr(mx.optimizer.Optimizer, "fuses", False)
                patch.setattr("weftplan.training.optimizers.fused_step._can_fuse", lambda steps: False)
            results.append(trained(mx.kv.create(kind), contexts, dtype, name, settings))
    return results


def test_every_optimizer_is_here():
    """All registered optimizers but four are tested here, and exactly those in ``FUSED`` fuse their steps."""
    names = {name for name, klass in mx.optimizer.Optimizer.opt_registry.items() if klass.__module__[:8] == "weftplan"}
    assert names - {name for name, _ in OPTIMIZERS} == {"ccsgd", "groupadagrad", "sgld", "test"}
    assert {name for name in names if mx.optimizer.create(name).fuses} == FUSED | {"ccsgd"}


@pytest.mark.parametrize(("name", "own"), OPTIMIZERS)
def test_fused_steps_have_the_bits_of_single_ones(name, own, monkeypatch, four_cores):
    """On CPUs and simulated devices, fused steps have the bits of single steps.

    They run as compiled formulas and as NumPy code, with weight decay, clipping and multipliers.
    """
    with engine.using(made := engine.create("ThreadedEnginePerDevice")):
        for (dtype, mixed), (kind, place, settings, kernels) in itertools.product(FORMS, RUNS):
            monkeypatch.setenv("WEFTPLAN_KERNELS", kernels)
            settings = {"multi_precision": mixed, **settings, **own}
            fused, single = run_fused_and_single(monkeypatch, kind, [place(0), place(1)], dtype, name, settings)
            assert fused == single, (dtype, kind, settings, kernels)
    made.stop()


@pytest.mark.parametrize(("name", "own"), OPTIMIZERS)
def test_fused_steps_on_gpus(name, own, monkeypatch):
    """On stand-in GPUs fused steps have the bits of single steps, and take one launch per GPU for all its keys."""
    with standin_cupy.installed("NaiveEngine"), nccl():
        contexts = [mx.gpu(0), mx.gpu(1)]
        fused, single = run_fused_and_single(monkeypatch, "nccl", contexts, "float32", name, {**SET, **own})
        assert fused == single
        for dtype, mixed in FORMS:
            fused, single = run_fused_and_single(
                monkeypatch, "device", contexts, dtype, name, {**SET, **own, "multi_precision": mixed}
            )
            assert fused == single, (dtype, mixed)
        if name in FUSED - {"lamb"}:
            kv = mx.kv.create("device")
            kv.init(KEYS, [row[0] for row in arrays(0, contexts, "float32")])
            kv.set_optimizer(mx.optimizer.create(name, **own))
            meter.reset()
            kv.push(KEYS, arrays(1, contexts, "float32"))
            assert meter.launches["optimizer_step"] == len(contexts)


RANKS = """
    sys.path.insert(0, os.getcwd())
    from tests.support import optimizer_runs as runs

    kv.close()
    for name, own in runs.OPTIMIZERS:
        for dtype, mixed in (("float32", False), ("float16", True)):
            results = []
            for fused in (True, False):
                kv = mx.kv.create("dist_sync")
                if not fused:
                    mx.optimizer.Optimizer.fuses, kept = False, mx.optimizer.Optimizer.fuses
                settings = {**runs.SET, **own, "multi_precision": mixed}
                results.append(runs.trained(kv, [mx.cpu(0)], dtype, name, settings))
                kv.close()
            mx.optimizer.Optimizer.fuses = kept
            assert results[0] == results[1], (name, dtype)
    print("equal", rank, flush=True)
"""


def test_fused_steps_over_processes(tmp_path: Path):
    """On ``dist_sync`` with two processes, fused steps have the bits of single steps."""
    assert run_ranks(tmp_path, 2, RANKS).stdout.count("equal") == 2
