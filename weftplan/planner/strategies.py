"""Strategies behind one interface: a program and options in, a :class:`Draft` with the memory plan out.

This file decides which plans are made and which one is used. It relies on ``inplace.py`` for who shares a storage and
on ``slabs.py`` for where storages are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter

from weftplan.planner import paddle
from weftplan.planner.buffers import Buffers
from weftplan.planner.inplace import Assignment, add_in_place, assign
from weftplan.planner.match_range import BlockPool, colors
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.options import PlanOptions
from weftplan.planner.program import Program
from weftplan.planner.reachability import MOST_STEPS
from weftplan.planner.slabs import arena, blocks


@dataclass(frozen=True, slots=True)
class Draft:
    """A graph in execution order, its plan, which of its entries share a storage, and what was decided, in words."""

    program: Program
    memory: MemoryPlan
    assignment: Assignment
    notes: tuple[str, ...] = ()

    def slowed(self, more_time: float) -> Draft:
        """The same, whose plan says by what share of a step it takes longer."""
        return replace(self, memory=replace(self.memory, more_time=more_time))


def plan_graph(program: Program, options: PlanOptions) -> Draft:
    """The graph with the plan of the chosen strategy.

    ``auto`` is the smallest of the plans of all strategies, always in one slab per device; equal peaks prefer whole
    blocks, which need no extra edges.
    """
    color = colors(program, options.num_temp)
    reported, variants = _variants(program, options, color)
    best: Draft | None = None
    # Smallest bound first (equal ones as they come): packing takes longest, and a bound can make it pointless.
    for buffers in sorted(variants, key=attrgetter("lower_bound")) if len(variants) > 1 else variants:
        if best is not None and (buffers.lower_bound >= best.memory.peak or buffers.least_peak() >= best.memory.peak):
            break
        plan = _plan(buffers, options, reported, color)
        if best is None or plan.peak < best.memory.peak:
            best = Draft(program, plan, buffers.assignment)
    assert best is not None
    return best


def assignment(program: Program, options: PlanOptions) -> Assignment:
    """The assignment with the smallest lower bound, without placing anything."""
    _, variants = _variants(program, options, colors(program, options.num_temp))
    return min(variants, key=attrgetter("lower_bound")).assignment


def _strategy(options: PlanOptions) -> str:
    # Range 0 is MXNet's switch for "no sharing", which the user wants from every strategy.
    return options.strategy if options.match_range else "none"


def _variants(program: Program, options: PlanOptions, color: list[int]) -> tuple[int, list[Buffers]]:
    """(bytes that MXNet's rule reports, what is to be placed: with gradient sums as they are, and added in place)."""
    match_range = 0 if _strategy(options) == "none" else options.match_range
    pool, plain = _whole_blocks(program, options, match_range, color)
    variants = [plain]
    if options.enable_inplace and options.compat not in paddle.COMPAT:
        summed = add_in_place(program, plain)
        if summed.skipped:
            # The scratch of additions can cost more than the sums' terms: compare, except where MXNet would not.
            variants = [summed] if options.compat == "mxnet" else [plain, summed]
    made = [Buffers(program, variants[0], options=options)]
    made += [Buffers(program, found, options=options, like=made[0]) for found in variants[1:]]
    return sum(pool.block_bytes), made


def _plan(buffers: Buffers, options: PlanOptions, reported: int, color: list[int]) -> MemoryPlan:
    strategy = _strategy(options)
    if strategy == "arena":
        return arena(buffers, color)
    name = "none" if strategy == "none" else "match_range"
    least = _least_of_blocks(buffers, reported)
    packed = arena(buffers, color) if strategy == "auto" and least > buffers.lower_bound else None
    if packed is not None and packed.peak < least:
        return packed
    waits = None
    if options.compat == "paddle" and name == "match_range" and len(buffers.program.order) <= MOST_STEPS:
        waits = len(paddle.order_edges(buffers.program, buffers.assignment))
    peak, whole = blocks(buffers, name, reported_bytes=reported, color=color, added_waits=waits)
    if strategy == "auto" and peak != buffers.lower_bound:
        packed = packed or arena(buffers, color)
        if packed.peak < peak:
            return packed
    return whole()


def _least_of_blocks(buffers: Buffers, reported: int) -> int:
    """Bytes that whole blocks take in any case: what MXNet's rule counts of them, where sums stay as they are."""
    true_sizes = buffers.options.sizes != "mxnet" and not buffers.assignment.added
    return reported if true_sizes else 0


def _whole_blocks(
    program: Program, options: PlanOptions, match_range: int, color: list[int]
) -> tuple[BlockPool, Assignment]:
    """MXNet's walk; with ``auto_search`` over ranges 1, 2, 4, … keeping the strictly smallest total. Or Paddle's."""
    if options.compat in paddle.COMPAT:
        later = options.compat == "paddle_pir"
        exact = paddle.ExactPool(program, reuse=match_range > 0 and not later)
        return exact, assign(
            program,
            exact,
            enable_inplace=options.enable_inplace,
            rule=paddle.InplaceRule(program, pir=later),
            never=options.inplace_blacklist,
        )
    sizes = program.nbytes
    if options.sizes == "mxnet":
        sizes = [4 * (nbytes // dtype.itemsize) for nbytes, dtype in zip(sizes, program.dtypes, strict=True)]
    ranges = [match_range]
    if options.auto_search and match_range:
        ranges = [1 << k for k in range(match_range.bit_length())]
    best: tuple[BlockPool, Assignment] | None = None
    for candidate in ranges:
        pool = BlockPool(sizes, candidate, color=color)
        found = assign(
            program,
            pool,
            enable_inplace=options.enable_inplace,
            keep_unused=options.compat == "mxnet",
            compute_unused=not options.drop_dead_outputs,
            never=options.inplace_blacklist,
        )
        if best is None or sum(pool.block_bytes) < sum(best[0].block_bytes):
            best = pool, found
    assert best is not None
    return best
