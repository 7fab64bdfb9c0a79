"""Questions: do training steps of PyTorch stay within predicted memory and planned budgets, and how fast are they?

    python bench/bench_torch.py                       # estimates, budgets, planning time
    python bench/bench_torch.py budgets --only gpt unet
    python bench/bench_torch.py time                  # paired slowdowns at equal peaks; worth little on a busy machine
    python bench/bench_torch.py prices                # extra time of budgets: modelled and measured
    python bench/bench_torch.py time --only unet resnet50 lstm
    python bench/bench_torch.py goals                 # public records, 43 cases, budgets, a billion parameters
    python bench/bench_torch.py budgets time --only gpt --inner inductor     # compiles for minutes; needs g++

Baselines in the same run are eager PyTorch (or inductor without a budget), full checkpointing of every block, and
PyTorch's ``activation_memory_budget`` with its default solver. Planning times are CPU seconds. The profiler measures
the CPU allocator's peaks, exact to the byte. For estimates it starts before the model is made; for budgets it starts
before the step, which frees no older tensor. The profiler sometimes loses an event and then reports too little, so a
peak is the largest of several measurements.

Needs PyTorch: ``pip install 'weftplan[torch]'``.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint
from torch_models import MODELS, Layers, Llama, Text, ids

from weftplan.errors import BudgetError
from weftplan.torch import budget, estimate
from weftplan.torch.choice import Plan
from weftplan.torch.compilers import INNER, eager
from weftplan.torch.fit import Budgeted, Partition
from weftplan.torch.private_compile import aot_autograd
from weftplan.torch.probe import peak_of
from weftplan.torch.trade_off import planned

SHARES = (0.75, 0.5, 0.35)
THEIRS = (0.2, 0.05)
ROUNDS = 9
"""Number of times that each step of a comparison is timed; the steps alternate."""
DEEP = {
    "gpt, 32": (lambda: Text(layers=32), ids(4, 256, 1000)),
    "llama, 32": (lambda: Llama(layers=32), ids(4, 256, 1000)),
    "bert, 32": (lambda: Text(layers=32, bert=True), ids(4, 256, 1000)),
}
"""Models of 32 layers, for planning time."""
inner = "eager"
"""Kernels of the measured steps, with or without a budget: ``eager`` or ``inductor``, from ``--inner``."""
CASES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adam": {"adam": True},
    "kept": {"none": False},
    "amp": {"amp": True},
    "checkpoint": {"adam": True, "full": True},
}


def checkpointed(module: Any) -> Any:
    """Wrap every block of a module in ``checkpoint``, in place, and return the module."""
    for block in module.blocks:
        inner = block.forward
        block.forward = lambda *args, inner=inner: checkpoint(inner, *args, use_reentrant=False)
    return module


def step(module: Any, optimizer: Any, x: Any, y: Any, *, none: bool = True, amp: bool = False) -> None:
    """Run one training step; ``none`` is ``set_to_none`` of ``zero_grad``, ``amp`` switches bfloat16 autocast on."""
    optimizer.zero_grad(set_to_none=none)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss = F.cross_entropy(module(x), y)
    loss.backward()
    optimizer.step()


def largest_peak(prepare: Callable[[], Callable[[], Any]], repeats: int = 3) -> int:
    """Return the largest of ``repeats`` measured peaks, in bytes, of the function that ``prepare`` returns."""
    peaks = []
    for _ in range(repeats):
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            run = prepare()
            with record_function("the step"):
                run()
        peaks.append(peak_of(prof, "the step"))
        del run
    return max(peaks)


def bench_estimates(names: list[str]) -> None:
    """Print the predicted and the measured peak of whole eager training steps, by model and case."""
    result = {**MODELS, "nn.LSTM": (Layers, ids(35, 20, 2000))}
    for name in names or result:
        make, inputs = result[name]
        for case, given in CASES.items():
            options = dict(given)
            full, adam = options.pop("full", False), options.pop("adam", False)
            if full and not make().blocks:
                continue

            def build(full: bool = full, adam: bool = adam, make: Any = make, inputs: Any = inputs) -> Any:
                torch.manual_seed(0)
                module = checkpointed(make()) if full else make()
                kind = torch.optim.Adam if adam else torch.optim.SGD
                return module, kind(module.parameters(), 1e-3), *inputs()

            parts = build()

            def whole(*given: Any, options: Any = options) -> None:
                step(*given, **options)

            began = time.perf_counter()
            actual = estimate(whole, *parts)
            first = time.perf_counter() - began

            def prepare(build: Any = build, options: Any = options) -> Any:
                parts = build()
                step(*parts, **options)
                return lambda: step(*parts, **options)

            real = largest_peak(prepare)
            unseen = f"  not counted: {', '.join(actual.unseen)}" if actual.unseen else ""
            print(
                f"{name:9} {case:10} predicted {actual.peak:>13,} real {real:>13,} ratio {actual.peak / real:.4f} "
                f"in {first:.1f} s{unseen}",
                flush=True,
            )


class Trial:
    """One variant of a model to measure: ``wrap`` changes its loss function, ``full`` checkpoints every block."""

    def __init__(self, name: str, wrap: Callable[[Any], Any] = lambda loss: loss, *, full: bool = False) -> None:
        self.make, self.inputs = MODELS[name]
        self.wrap, self.full = wrap, full
        torch._dynamo.reset()

    def prepare(self) -> Callable[[], Any]:
        """Return a function that runs one forward and backward pass. The first pass, which compiles, has run."""
        torch.manual_seed(0)
        module = checkpointed(self.make()) if self.full else self.make()
        x, y = self.inputs()
        self.module, self.args = module, (x, y)

        def loss(x: Any, y: Any) -> Any:
            return F.cross_entropy(module(x), y)

        call = self.wrap(loss)

        def run() -> Any:
            module.zero_grad(set_to_none=True)
            torch.manual_seed(1)
            call(x, y).backward()
            return module

        run()
        module.zero_grad(set_to_none=True)
        return run

    def measure(self, repeats: int = 3) -> tuple[int, list[Any]]:
        """Return the measured peak in bytes, including parameters and inputs, and the gradients.

        Gradients are dropped before the profiler starts. The step then frees no older tensor, and the bytes that are
        live before it are known.
        """
        run = self.prepare()
        peaks = []
        for _ in range(repeats):
            self.module.zero_grad(set_to_none=True)
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof, record_function("the step"):
                run()
            peaks.append(peak_of(prof, "the step"))
        held = [*self.module.parameters(), *self.module.buffers(), *self.args]
        resident = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        return max(peaks) + sum(resident.values()), [p.grad.clone() for p in self.module.parameters()]


def own_inductor() -> Callable[[Any, Any], Any]:
    """Return a new Inductor backend; with the same backend, one-line functions would share compiled code."""
    return lambda module, inputs: compile_fx(module, inputs)


def without_budget(loss: Any) -> Any:
    """Return the loss without a budget: unchanged for eager kernels, else compiled by Inductor."""
    return loss if inner == "eager" else torch.compile(loss, backend=own_inductor(), dynamic=False)


def torch_budget(share: float) -> Callable[[Any], Any]:
    """Return a function that compiles a loss with ``activation_memory_budget`` set to ``share``."""

    def wrap(loss: Any) -> Any:
        chosen: Any = own_inductor()
        if inner == "eager":
            chosen = aot_autograd(
                fw_compiler=eager,
                bw_compiler=eager,
                partition_fn=min_cut_rematerialization_partition,
                keep_inference_input_mutations=True,
            )
        compiled = torch.compile(loss, backend=chosen, dynamic=False)

        def call(*args: Any) -> Any:
            with config.patch(activation_memory_budget=share):
                return compiled(*args)

        return call

    return wrap


def bench_budgets(names: list[str]) -> None:
    """Print measured peaks, modelled slowdowns and gradients under budgets, and the smallest peak of each method."""
    for name in names or MODELS:
        plain, want = Trial(name, without_budget).measure()
        print(f"{name}: {inner} {plain:,}", flush=True)
        full = Trial(name, without_budget, full=True).measure()[0] if len(MODELS[name][0]().blocks) else plain
        least = min(Trial(name, torch_budget(share)).measure()[0] for share in THEIRS)
        smallest = smallest_budget(name)
        print(
            f"  full checkpointing {full:,}; activation_memory_budget at its smallest {least:,}; ours {smallest:,}",
            flush=True,
        )
        times = []
        for share in (*SHARES, None):
            most = smallest if share is None else int(share * plain)
            wrapped: list[Any] = []

            def wrap(loss: Any, most: int = most, wrapped: list[Any] = wrapped) -> Any:
                wrapped.append(budget(loss, most, inner=inner))
                return wrapped[-1]

            try:
                real, gradients = Trial(name, wrap).measure()
            except BudgetError as error:
                print(f"  {share}: budget {most:,} refused, the smallest is {error.smallest:,}", flush=True)
                continue
            chosen = wrapped[-1].plans[-1]
            times.append(chosen.more_time)
            equal = all(torch.equal(a, b) for a, b in zip(gradients, want, strict=True))
            close = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(gradients, want, strict=True))
            print(
                f"  {share or 'smallest'}: budget {most:,} planned {chosen.peak:,} real {real:,} "
                f"({real / chosen.peak:.5f} of plan, {'within' if real <= most else 'ABOVE'}), "
                f"{len(chosen.repeated)} twice, +{100 * chosen.more_time:.1f} % modelled, gradients "
                f"{'equal' if equal else 'close' if close else 'DIFFER'}, "
                f"{'monotone' if times == sorted(times) else 'NOT MONOTONE'}",
                flush=True,
            )


def smallest_budget(name: str) -> int:
    """Return the smallest feasible budget in bytes, which the error for a budget of one byte states."""
    try:
        Trial(name, lambda loss: budget(loss, 1, inner=inner)).prepare()
    except BudgetError as error:
        return error.smallest or 0
    raise AssertionError("a step cannot fit one byte")


def bench_planning(names: list[str]) -> None:
    """Print the CPU seconds of planning each model at two budgets, split into weftplan's part and PyTorch's."""
    result = {**MODELS, **DEEP}
    for name in names or result:
        module, (x, y) = result[name][0](), result[name][1]()

        def loss(x: Any, y: Any, module: Any = module) -> Any:
            return F.cross_entropy(module(x), y)

        plan = planned(loss, (x, y))[1]  # measures scratch now, outside the figures below
        for label, most in (("largest", plan.plain), ("smallest", plan.smallest)):
            torch.compiler.reset()
            part = Timed(most, inner=inner)
            began = time.process_time()
            Budgeted(loss, part, fullgraph=True)(x, y)
            whole = time.process_time() - began
            points = len(part.choices[0].points)
            print(
                f"{name:9} {label:8} ours {part.spent:5.2f} s (search {part.choices[0].seconds:.2f} s of wall time), "
                f"tracing by PyTorch and the first forward pass {whole - part.spent:5.2f} s; {points} choices, "
                f"smallest {plan.smallest / plan.plain:.3f} of {plan.plain:,} bytes; {'; '.join(plan.notes)}",
                flush=True,
            )


class Timed(Partition):
    """A partition function that stores the CPU seconds of its last call in ``spent``."""

    spent = 0.0

    def __call__(self, *args: Any, **more: Any) -> Any:
        """Partition a joint graph, and measure the CPU seconds."""
        began = time.process_time()
        try:
            return super().__call__(*args, **more)
        finally:
            self.spent = time.process_time() - began


def bench_time(names: list[str]) -> None:
    """Print slowdowns over the plain step: of PyTorch's budget, full checkpointing, and our budgets at their peaks."""
    logs: dict[str, list[float]] = {}
    for name in names or MODELS:
        rivals: dict[str, Trial] = {f"share {share}": Trial(name, torch_budget(share)) for share in (0.4, 0.1)}
        if len(MODELS[name][0]().blocks):
            rivals["full"] = Trial(name, without_budget, full=True)
        smallest = smallest_budget(name)
        for how, rival in rivals.items():
            torch.compiler.reset()
            peak = rival.measure()[0]
            if peak < smallest:
                print(f"{name:9} {how:10} peak {peak:,}: ours needs {smallest:,}", flush=True)
                continue
            torch.compiler.reset()
            trial = Trial(name, lambda loss, peak=peak: budget(loss, peak, inner=inner))
            runs = [Trial(name, without_budget).prepare(), rival.prepare(), trial.prepare()]
            rows = [[seconds(run) for run in runs] for _ in range(ROUNDS)]
            their, our = (statistics.median(row[k][1] / row[0][1] for row in rows) for k in (1, 2))
            wall, ratios = (sorted(row[2][clock] / row[1][clock] for row in rows) for clock in (0, 1))
            quarter = ROUNDS // 4
            logs.setdefault(how, []).append(statistics.median(ratios))
            print(
                f"{name:9} {how:10} peak {peak:,}: theirs {their:.3f}, ours {our:.3f} of {inner}; ours / theirs "
                f"{statistics.median(ratios):.3f} (quartiles {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}, "
                f"{ROUNDS} pairs), wall {statistics.median(wall):.3f}",
                flush=True,
            )
    for how, actual in logs.items():
        print(f"geometric mean of ours / {how}: {statistics.geometric_mean(actual):.3f} over {len(actual)} models")


def bench_prices(names: list[str]) -> None:
    """Print the extra time of budgets as plans model it, and as the processor time of alternating steps."""
    gaps = []
    for name in names or MODELS:
        plan = planned_loss(name)
        parts = [
            Partition(int(plan.plain - share * (plan.plain - plan.smallest)), inner=inner) for share in (0, 0.5, 1)
        ]
        wraps = [lambda loss, part=part: Budgeted(loss, part, fullgraph=True) for part in parts]
        runs = [Trial(name, wrap).prepare() for wrap in (without_budget, *wraps)]
        rows = [[seconds(run)[1] for run in runs] for _ in range(ROUNDS)]
        base = statistics.median(row[1] / row[0] for row in rows)
        print(f"{name:9} without recomputation / {inner}: {base:.3f}", flush=True)
        for k, part in enumerate(parts[1:], 2):
            modelled = 100 * part.plans[-1].more_time
            measured = 100 * (statistics.median(row[k] / row[1] for row in rows) - 1)
            gaps.append(abs(modelled - measured))
            share = part.plans[-1].peak / plan.plain
            print(f"{name:9} {share:.2f} of plain: modelled +{modelled:.1f}, measured {measured:+.1f} %", flush=True)
    print(f"largest gap {max(gaps):.1f} points; within 5: {sum(gap <= 5 for gap in gaps)} of {len(gaps)}")


def planned_loss(name: str) -> Plan:
    """Return the plan of a model without a budget."""
    module, args = MODELS[name][0](), MODELS[name][1]()
    return planned(lambda x, y: F.cross_entropy(module(x), y), args)[1]


def seconds(run: Callable[[], Any]) -> tuple[float, float]:
    """Return (wall seconds, CPU seconds) of one pass."""
    wall, used = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - used


def bench_goals(names: list[str]) -> None:
    """Print the goals of forecasts with what they reach: records of cards, real peaks, budgets, a large model."""
    import torch_goals

    ours = {"truth": torch_goals.bench_truth, "kept": torch_goals.bench_kept}
    for name in names or ["mlp", "convolutional", *ours, "billion"]:
        print(f"-- {name}", flush=True)
        if name in ours:
            ours[name]()
        else:  # in a process of its own, whose memory is that of the forecast
            subprocess.run([sys.executable, Path(__file__).parent / "torch_cards.py", name], check=True)


PARTS = {"goals": bench_goals, "estimates": bench_estimates, "budgets": bench_budgets, "planning": bench_planning}
PARTS |= {"time": bench_time, "prices": bench_prices}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help=f"any of {', '.join(PARTS)}")
    parser.add_argument("--only", nargs="*", default=[], help="names of models, or of goals")
    parser.add_argument("--inner", choices=INNER, default="eager", help="kernels of budgeted steps and of their rivals")
    asked = parser.parse_args()
    inner = asked.inner
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"PyTorch {torch.__version__}, {platform.processor() or platform.machine()}, 1 thread, load {load:.1f}")
    for part in asked.parts or ["estimates", "budgets", "planning"]:
        print(f"-- {part}")
        PARTS[part](asked.only)
