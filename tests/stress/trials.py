"""Trials with new seeds: ``python -m tests.stress.trials KIND SEED COUNT``.

KIND is one of:

* ``graphs``: compare a random network under a random option set, on each engine, with and without bulk, with the same
  network without memory sharing; validate its plan, check its executor for races, and count its bytes.
* ``images``: the same with convolutions on larger images, for compiled kernels if available.
* ``slices``: the same with convolutions whose filters are packed in slices.
* ``dynamic``: either kind of network under the strategy that allocates while it runs.
* ``budgets``: train a random network within a budget. It must use the budget and give the same bits, or be refused with
  a minimum that works.
* ``spilled``: the same with results offloaded to host memory, files or another device.
* ``calls``: programs of array calls.
* ``exchanges``: sums over links between simulated devices.
* ``folding``: compare networks before and after their batch normalisation is folded for inference.
* ``convolutions``: one layer, compared with its float64 definition.
* ``crowded``: multi-threaded programs in a fraction of their memory.

Hostile files have their own program, ``python -m tests.stress.hostile``. A trial that fails prints its seed.
"""

from __future__ import annotations

import os
import random
import sys
import traceback
import warnings
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np

import weftplan as mx
from tests.executor.races import races
from tests.stress import array_calls, convolutions, crowded, exchanges, folding
from tests.stress.random_graphs import Maker, option_sets, without_sharing
from tests.stress.random_images import ImageMaker, SliceMaker
from weftplan import engine, planner
from weftplan.device.offload_targets import Link
from weftplan.engine.simulator import Simulator
from weftplan.errors import BudgetError, MXNetError
from weftplan.planner import PlanOptions

SETS = option_sets()
ENGINES = ("NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator")


def make_executor(
    symbol: Any, shapes: dict[str, Any], grad_req: Any, options: PlanOptions, ctx: mx.Context | None = None, **how: Any
) -> Any:
    """Return an executor whose arrays have values that depend only on their names."""
    types = dict.fromkeys(shapes, "float32")
    executor = symbol.simple_bind(ctx or mx.cpu(), grad_req, types, plan_options=options, **how, **shapes)
    for name, array in (*executor.arg_dict.items(), *executor.aux_dict.items()):
        rng = np.random.default_rng(sum(map(ord, name)))
        array[:] = rng.uniform(-1, 1, array.shape).astype(array.dtype)
    for name, array in executor.grad_dict.items():
        if array is not None:
            array[:] = (len(name) % 3) * np.ones(array.shape, array.dtype)
    return executor


def results(executor: Any, runs: int = 2) -> dict[str, bytes]:
    """Return the bits of outputs, gradients and auxiliary states after ``runs`` training steps.

    All NaN get the same bits.
    """
    mx.random.seed(11)
    for _ in range(runs):
        out = executor.forward(is_train=True)
        if executor.planned.gradients:
            executor.backward([mx.nd.ones(o.shape, dtype=o.dtype) for o in out])
    arrays = {f"output {k}": array for k, array in enumerate(executor.outputs)}
    arrays |= {f"gradient of {n}": array for n, array in executor.grad_dict.items() if array is not None}
    arrays |= {f"state {n}": array for n, array in executor.aux_dict.items()}
    return {name: _bits(array.asnumpy()) for name, array in arrays.items()}


def _bits(values: Any) -> bytes:
    values = np.array(values)
    if values.dtype.kind == "f":
        values[np.isnan(values)] = np.nan
    return values.tobytes()


def network(rng: random.Random, kind: type[Maker] = Maker) -> tuple[Any, dict[str, Any], Any]:
    """Return a random network: (symbol, input shapes, grad_reqs)."""
    maker = kind(rng.randrange(1 << 30))
    symbol = maker.graph(rng.randrange(1, 25 if kind is Maker else 10))
    names = symbol.list_arguments()
    shapes = {name: maker.shapes[name] for name in names if name in maker.shapes}
    wanted = rng.choice(("write", "add", "null", "mixed"))
    requests = {n: rng.choice(("write", "add", "null")) for n in names} if wanted == "mixed" else wanted
    return symbol, shapes, requests


def make_engine(name: str, seed: int) -> Any:
    """Return a new engine of the kind ``name``; ``seed`` is for the simulator."""
    if name == "Simulator":
        return Simulator(seed=seed)
    return engine.create(name, **({} if name == "NaiveEngine" else {"cpu_workers": 3}))


def raise_unless_unbindable(error: MXNetError) -> bool:
    """Return False if the error says that the network cannot be bound; raise any other error."""
    if "not differentiable" in str(error) or "cannot be inferred" in str(error):
        return False
    raise error


native: Counter[str] = Counter()
"""Nodes of past trials that a compiled kernel has run, counted by operator."""
spilled: Counter[str] = Counter()
"""Bytes that plans of past trials offload, and the number of networks that offload any."""


def graph_trial(seed: str, kind: type[Maker] = Maker) -> bool:
    """Check one network under one option set on every engine: it has the bits of the network without memory sharing.

    Also validate its plan, compare its bytes with the plan, and check for races. Return False if it cannot be bound.
    """
    rng = random.Random(seed)
    symbol, shapes, requests = network(rng, kind)
    label = rng.choice(list(SETS))
    try:
        with engine.using(make_engine("NaiveEngine", 0)):
            expected = results(make_executor(symbol, shapes, requests, without_sharing(SETS[label])))
    except MXNetError as error:
        return raise_unless_unbindable(error)
    for driver in ENGINES:
        for bulk in ("0", "1"):
            os.environ["MXNET_EXEC_BULK_EXEC_TRAIN"] = os.environ["MXNET_EXEC_BULK_EXEC_INFERENCE"] = bulk
            chosen = make_engine(driver, rng.randrange(1 << 30))
            with engine.using(chosen):
                executor = make_executor(symbol, shapes, requests, PlanOptions(**SETS[label]))
                planner.validate(executor.planned)
                assert executor.allocated_bytes == executor.memory_plan.peak, "bytes differ from the plan"
                conflicts = races(executor)
                assert not conflicts, f"{label}: races: {conflicts[:3]}"
                got = results(executor)
                different = [name for name in expected if got[name] != expected[name]]
                assert not different, f"{label} on {driver}, bulk {bulk}: {different[:4]} differ"
                planned = executor.planned
                del executor
                chosen.wait_for_all()
            chosen.stop()
    for nid, choice in planned.kernels.items():
        native[planned.graph.nodes[nid].op.name] += choice.implementation.name == "native"
    return True


def image_trial(seed: str) -> bool:
    """Run :func:`graph_trial` with convolutions on larger images."""
    return graph_trial(seed, ImageMaker)


def slice_trial(seed: str) -> bool:
    """Run :func:`graph_trial` with convolutions of many channels."""
    return graph_trial(seed, SliceMaker)


def dynamic_trial(seed: str) -> bool:
    """Check that a network that allocates as it runs has the bits of the network without memory sharing.

    Return False if it cannot be bound.
    """
    rng = random.Random(seed)
    symbol, shapes, requests = network(rng, rng.choice((Maker, ImageMaker)))
    label = rng.choice([name for name in SETS if "recompute" not in name])
    ctx = rng.choice((mx.cpu(), mx.cpu(), mx.sim(3)))  # each draws its own random numbers
    try:
        with engine.using(make_engine("NaiveEngine", 0)):
            expected = results(make_executor(symbol, shapes, requests, without_sharing(SETS[label]), ctx))
    except MXNetError as error:
        return raise_unless_unbindable(error)
    before = os.environ.get("WEFTPLAN_EXECUTOR_STRATEGY")
    try:
        os.environ["WEFTPLAN_EXECUTOR_STRATEGY"] = "dynamic"
        for driver in ENGINES:
            chosen = make_engine(driver, rng.randrange(1 << 30))
            with engine.using(chosen):
                executor = make_executor(symbol, shapes, requests, PlanOptions(**SETS[label]), ctx)
                got = results(executor)
                different = [name for name in expected if got[name] != expected[name]]
                assert not different, f"{label} on {driver} and {ctx}: {different[:4]} differ"
                del executor
                chosen.wait_for_all()
            chosen.stop()
    finally:
        del os.environ["WEFTPLAN_EXECUTOR_STRATEGY"]
        if before is not None:
            os.environ["WEFTPLAN_EXECUTOR_STRATEGY"] = before
    return True


def spill_trial(seed: str) -> bool:
    """Run :func:`budget_trial` with intermediate results offloaded."""
    rng = random.Random(seed)
    fast = Link(bandwidth=1e12, latency=1e-8)  # otherwise no result of such small networks would be worth a copy
    with ExitStack() as stack:
        for name, value in (("place.FILE", fast), ("place.PEER", fast), ("place.PCIE", fast), ("search.SMALLEST", 64)):
            stack.enter_context(mock.patch(f"weftplan.planner.spill.{name}", value))
        file = f"file:{crowded.folder()}"
        targets: tuple[Any, ...] = (file, "host", f"host:2KB,{file}")
        kind = rng.choice((Maker, Maker, Maker, ImageMaker))
        if rng.random() < 0.5:
            return budget_trial(seed, kind, mx.cpu(), PlanOptions(spill=rng.choice(targets)))
        targets += (True, "peer", f"peer:1KB,host:2KB,{file}")
        return budget_trial(seed, kind, mx.sim(0), PlanOptions(spill=rng.choice(targets), peers=("sim(1)",)))


def budget_trial(
    seed: str, kind: type[Maker] = Maker, ctx: mx.Context | None = None, options: PlanOptions | None = None
) -> bool:
    """Check that training within a random budget has the bits of training without a budget, and a plan within it.

    If the budget is refused, train within the reported minimum. Return False if the network cannot be bound.
    """
    rng = random.Random(seed)
    symbol, shapes, requests = network(rng, kind)
    options = options or PlanOptions()
    try:
        with engine.using(make_engine("NaiveEngine", 0)):
            plain = make_executor(symbol, shapes, requests, PlanOptions(), ctx)
            expected = results(plain)
    except MXNetError as error:
        return raise_unless_unbindable(error)
    whole = plain.memory_plan
    outside = whole.total - whole.peak
    budget = outside + int(whole.peak * rng.uniform(0.2, 1.1))
    chosen = make_engine("NaiveEngine" if ctx is None else rng.choice(ENGINES), rng.randrange(1 << 30))
    with engine.using(chosen):
        refusal = None
        try:
            executor = make_executor(symbol, shapes, requests, options, ctx, memory_budget=max(budget, 1))
        except BudgetError as error:
            refusal = error
        if refusal is not None:
            assert refusal.smallest is not None
            assert refusal.smallest > budget, "a budget is refused that is said to work"
            budget = refusal.smallest
            executor = make_executor(symbol, shapes, requests, options, ctx, memory_budget=max(budget, 1))
        planner.validate(executor.planned)
        plan = executor.memory_plan
        assert plan.counted <= budget, "the plan exceeds the budget"
        spilled["bytes in offload targets"] += plan.offloaded
        spilled["networks"] += bool(plan.offloaded)
        conflicts = races(executor)
        assert not conflicts, f"races: {conflicts[:3]}"
        got = results(executor)
        different = [name for name in expected if got[name] != expected[name]]
        assert not different, f"budget {budget}: {different[:4]} differ"
    return True


TRIALS = {
    "graphs": graph_trial,
    "images": image_trial,
    "slices": slice_trial,
    "dynamic": dynamic_trial,
    "budgets": budget_trial,
    "spilled": spill_trial,
    "calls": array_calls.trial,
    "exchanges": exchanges.trial,
    "folding": folding.trial,
    "convolutions": convolutions.trial,
    "crowded": crowded.trial,
}


def run(kind: str, seed: int, count: int) -> int:
    """Run ``count`` trials of a kind; print the failures and return their number."""
    warnings.simplefilter("error")
    failed = ran = 0
    before = {key: os.environ.get(key) for key in ("MXNET_EXEC_BULK_EXEC_TRAIN", "MXNET_EXEC_BULK_EXEC_INFERENCE")}
    try:
        for number in range(count):
            try:
                ran += TRIALS[kind](f"{kind}/{seed}/{number}")
            except Exception as error:
                failed += 1
                print(f"{kind}/{seed}/{number}: {type(error).__name__}: {error}", flush=True)
                traceback.print_exc(limit=-4)
    finally:
        for key, value in before.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value
    print(f"{kind}, seed {seed}: {count} trials, {ran} of them ran to the end, {failed} failed", flush=True)
    if spilled:
        print(f"spilled: {dict(spilled)}", flush=True)
    if native:
        print(f"compiled kernels: {dict((+native).most_common())}", flush=True)
    return failed


if __name__ == "__main__":
    if len(sys.argv) == 3:  # repeat one trial, by kind and name
        TRIALS[sys.argv[1]](sys.argv[2])
    else:
        sys.exit(bool(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
