"""Strategies of memory sharing: plan a program under options as a :class:`Draft`.

A strategy assigns storages to entries and places them. :data:`~weftplan.planner.options.STRATEGIES` maps names to
strategies; the options, ``WEFTPLAN_PLANNER_STRATEGY``, the command line and the documentation read it.
``storage_assignment.py`` decides which entries share a storage; ``slabs.py`` places the storages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Protocol, TypeVar, cast

from weftplan.errors import PlanError
from weftplan.planner import paddle
from weftplan.planner.buffers import Buffers
from weftplan.planner.liveness import MAX_STEPS
from weftplan.planner.match_range import BlockPool, colors
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.options import STRATEGIES, PlanOptions
from weftplan.planner.packing import pack
from weftplan.planner.program import Program
from weftplan.planner.slabs import Packer, arena, blocks
from weftplan.planner.storage_assignment import Assignment, add_terms_inplace, assign


@dataclass(frozen=True, slots=True)
class Draft:
    """A graph in execution order with its memory plan, its storage assignment and notes on decisions."""

    program: Program
    memory: MemoryPlan
    assignment: Assignment
    notes: tuple[str, ...] = ()

    def slowed(self, more_time: float) -> Draft:
        """Return a copy whose plan takes ``more_time`` longer, as a share of a step."""
        return replace(self, memory=replace(self.memory, more_time=more_time))


@dataclass(frozen=True, slots=True)
class SharedStorages:
    """A storage assignment with the facts needed to place the storages."""

    assignment: Assignment
    block_bytes: int
    """Bytes of all blocks, counted by the strategy's own rule (``MemoryPlan.reported_bytes``)."""
    color: list[int]
    """Colour of each node; empty if all have the same (:func:`~weftplan.planner.match_range.colors`)."""


class Strategy(Protocol):
    """A method of sharing memory. It keeps no state, so several threads may use it concurrently."""

    @property
    def name(self) -> str:
        """Value of ``PlanOptions.strategy`` that selects this strategy."""
        ...

    def assign(self, program: Program, options: PlanOptions) -> SharedStorages:
        """Assign a storage to every entry; the planner then also tries in-place gradient sums."""
        ...

    def place(self, buffers: Buffers, shared: SharedStorages) -> MemoryPlan:
        """Assign a slab and an offset to every buffer of one assignment."""
        ...


S = TypeVar("S", bound=Strategy)


def register(strategy: S) -> S:
    """Register a strategy under its name and return it.

    Raises:
        PlanError: another strategy has this name.
    """
    if STRATEGIES.setdefault(strategy.name, strategy) is not strategy:
        raise PlanError(f"a strategy {strategy.name!r} is registered already; give {strategy!r} another name")
    return strategy


def registered() -> Mapping[str, Strategy]:
    """Return all strategies by name, in the order of registration."""
    return cast("Mapping[str, Strategy]", STRATEGIES)


def strategy_of(options: PlanOptions) -> Strategy:
    """Return the strategy of the options; match range 0, MXNet's switch for no sharing, overrides it by ``none``."""
    return registered()[options.strategy if options.match_range else "none"]


def plan_graph(program: Program, options: PlanOptions) -> Draft:
    """Plan with the strategy of the options; return the smallest plan over the variants of its assignment."""
    strategy = strategy_of(options)
    shared = strategy.assign(program, options)
    variants = _variants(program, options, shared.assignment)
    best: Draft | None = None
    # The lowest bound first: packing takes longest, and a bound can show that it cannot win.
    for buffers in sorted(variants, key=attrgetter("lower_bound")) if len(variants) > 1 else variants:
        if best is not None and (buffers.lower_bound >= best.memory.peak or buffers.least_peak() >= best.memory.peak):
            break
        plan = strategy.place(buffers, shared)
        if best is None or plan.peak < best.memory.peak:
            best = Draft(program, plan, buffers.assignment)
    assert best is not None
    return best


def assignment(program: Program, options: PlanOptions) -> Assignment:
    """Return the assignment with the smallest lower bound, without placement."""
    shared = strategy_of(options).assign(program, options)
    return min(_variants(program, options, shared.assignment), key=attrgetter("lower_bound")).assignment


def _variants(program: Program, options: PlanOptions, plain: Assignment) -> list[Buffers]:
    """Return the buffers of each variant of an assignment: plain, and with gradient sums added in place."""
    variants = [plain]
    if options.enable_inplace and options.compat not in paddle.COMPAT:
        summed = add_terms_inplace(program, plain)
        if summed.skipped:
            # The scratch of additions may exceed the savings, so both variants are planned. MXNet does not compare.
            variants = [summed] if options.compat == "mxnet" else [plain, summed]
    plain_buffers = [Buffers(program, variants[0], options=options)]
    return plain_buffers + [
        Buffers(program, variant, options=options, like=plain_buffers[0]) for variant in variants[1:]
    ]


@dataclass(frozen=True, slots=True)
class WholeBlocks:
    """The strategy of whole blocks, reused by MXNet's or Paddle's rule, or not at all without ``reuse``."""

    name: str
    reuse: bool

    def assign(self, program: Program, options: PlanOptions) -> SharedStorages:
        """Assign a block to every entry with MXNet's or Paddle's allocator."""
        return match_blocks(program, options, options.match_range if self.reuse else 0)

    def place(self, buffers: Buffers, shared: SharedStorages) -> MemoryPlan:
        """Place all blocks without overlap."""
        return self.placed(buffers, shared)[1]()

    def placed(self, buffers: Buffers, shared: SharedStorages) -> tuple[int, Callable[[], MemoryPlan]]:
        """Return the plan's bytes and a function that builds the plan, which takes longer."""
        waits = None
        if self.reuse and buffers.options.compat == "paddle" and len(buffers.program.order) <= MAX_STEPS:
            waits = len(paddle.order_edges(buffers.program, buffers.assignment))
        return blocks(buffers, self.name, reported_bytes=shared.block_bytes, color=shared.color, added_waits=waits)


@dataclass(frozen=True, slots=True)
class Arena:
    """The strategy of offsets in one slab per device, computed by a packer (:func:`weftplan.planner.pack`)."""

    name: str
    packer: Packer = pack

    def assign(self, program: Program, options: PlanOptions) -> SharedStorages:
        """Assign blocks as :class:`WholeBlocks` does; the placement uses only their groups of in-place entries."""
        return match_blocks(program, options, options.match_range)

    def place(self, buffers: Buffers, shared: SharedStorages) -> MemoryPlan:
        """Assign an offset to every group and every workspace."""
        return arena(buffers, shared.color, name=self.name, packer=self.packer)


@dataclass(frozen=True, slots=True)
class Smallest:
    """The strategy that takes the smaller plan of two; at equal peaks whole blocks, which need no reuse edges."""

    name: str
    blocks: WholeBlocks
    offsets: Strategy

    def assign(self, program: Program, options: PlanOptions) -> SharedStorages:
        """Assign storages once for both strategies."""
        return self.blocks.assign(program, options)

    def place(self, buffers: Buffers, shared: SharedStorages) -> MemoryPlan:
        """Return the smaller plan; skip a strategy that cannot win."""
        # Without in-place sums, whole blocks need at least the bytes that MXNet's rule counts.
        counted = buffers.options.sizes != "mxnet" and not buffers.assignment.added
        least = shared.block_bytes if counted else 0
        packed = self.offsets.place(buffers, shared) if least > buffers.lower_bound else None
        if packed is not None and packed.peak < least:
            return packed
        peak, whole_block_plan = self.blocks.placed(buffers, shared)
        if peak != buffers.lower_bound:
            packed = packed or self.offsets.place(buffers, shared)
            if packed.peak < peak:
                return packed
        return whole_block_plan()


def match_blocks(program: Program, options: PlanOptions, match_range: int) -> SharedStorages:
    """Assign blocks by the rules of MXNet or, if ``options.compat`` says so, of Paddle.

    With ``auto_search``, match ranges 1, 2, 4, … are tried and the first with the smallest total is kept.
    """
    color = colors(program, options.num_temp)
    how: dict[str, Any] = {"enable_inplace": options.enable_inplace, "never": options.inplace_blacklist}
    if options.compat in paddle.COMPAT:
        later = options.compat == "paddle_pir"
        pools: list[BlockPool] = [paddle.ExactPool(program.nbytes, int(match_range > 0 and not later))]
        how["rule"] = paddle.InplaceRule(program, pir=later)
    else:
        sizes, ranges = program.nbytes, [match_range]
        if options.sizes == "mxnet":
            sizes = [4 * (nbytes // dtype.itemsize) for nbytes, dtype in zip(sizes, program.dtypes, strict=True)]
        if options.auto_search and match_range:
            ranges = [1 << k for k in range(match_range.bit_length())]
        pools = [BlockPool(sizes, candidate, color=color) for candidate in ranges]
        how.update(keep_unused=options.compat == "mxnet", compute_unused=not options.drop_dead_outputs)
    walked = [assign(program, pool, **how) for pool in pools]
    least = min(range(len(pools)), key=lambda k: sum(pools[k].block_bytes))
    return SharedStorages(walked[least], sum(pools[least].block_bytes), color)


register(Smallest("auto", blocks=WholeBlocks("match_range", reuse=True), offsets=Arena("arena")))
register(Arena("arena"))
register(WholeBlocks("match_range", reuse=True))
register(WholeBlocks("none", reuse=False))
