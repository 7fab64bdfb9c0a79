"""Strategies of sharing memory: a program and options in, a :class:`Draft` with the memory plan out.

A strategy assigns storages to entries and places them; :data:`~weftplan.planner.options.STRATEGIES` holds every
strategy by its name, and the options, ``WEFTPLAN_PLANNER_STRATEGY``, the command line and the docs read it there.
``inplace.py`` decides which entries share a storage, ``slabs.py`` where storages are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Protocol, TypeVar, cast

from weftplan.errors import PlanError
from weftplan.planner import paddle
from weftplan.planner.buffers import Buffers
from weftplan.planner.inplace import Assignment, add_in_place, assign
from weftplan.planner.liveness import MOST_STEPS
from weftplan.planner.match_range import BlockPool, colors
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.options import STRATEGIES, PlanOptions
from weftplan.planner.packing import pack
from weftplan.planner.program import Program
from weftplan.planner.slabs import Packer, arena, blocks


@dataclass(frozen=True, slots=True)
class Draft:
    """A graph in execution order, its plan, which of its entries share a storage, and decisions in words."""

    program: Program
    memory: MemoryPlan
    assignment: Assignment
    notes: tuple[str, ...] = ()

    def slowed(self, more_time: float) -> Draft:
        """Return the same draft, whose plan takes longer by this share of a step."""
        return replace(self, memory=replace(self.memory, more_time=more_time))


@dataclass(frozen=True, slots=True)
class Shared:
    """An assignment of storages, with the facts that placing them needs."""

    assignment: Assignment
    block_bytes: int
    """Bytes of all blocks as the strategy's own rule counts them (``MemoryPlan.reported_bytes``)."""
    color: list[int]
    """The colour of each node, or nothing if all have one (:func:`~weftplan.planner.inplace.colors`)."""


class Strategy(Protocol):
    """One way to share memory. It keeps no state, so that threads may plan at once."""

    @property
    def name(self) -> str:
        """The value of ``PlanOptions.strategy`` that chooses it."""
        ...

    def assign(self, program: Program, options: PlanOptions) -> Shared:
        """Give every entry a storage; the planner then also tries gradient sums that are added in place."""
        ...

    def place(self, buffers: Buffers, shared: Shared) -> MemoryPlan:
        """Give every buffer of one assignment its slab and offset."""
        ...


S = TypeVar("S", bound=Strategy)


def register(strategy: S) -> S:
    """Add a strategy under its name. Returns it.

    Raises:
        PlanError: another strategy has this name.
    """
    if STRATEGIES.setdefault(strategy.name, strategy) is not strategy:
        raise PlanError(f"a strategy {strategy.name!r} is registered already; give {strategy!r} another name")
    return strategy


def registered() -> Mapping[str, Strategy]:
    """Return every strategy by its name, in the order of registration."""
    return cast("Mapping[str, Strategy]", STRATEGIES)


def strategy_of(options: PlanOptions) -> Strategy:
    """Return the chosen strategy; range 0 is MXNet's switch for "no sharing", which counts for every strategy."""
    return registered()[options.strategy if options.match_range else "none"]


def plan_graph(program: Program, options: PlanOptions) -> Draft:
    """Return the graph with the plan of the chosen strategy: the smallest one over the variants of its assignment."""
    strategy = strategy_of(options)
    shared = strategy.assign(program, options)
    variants = _variants(program, options, shared.assignment)
    best: Draft | None = None
    # Smallest bound first (equal bounds as they come): packing takes longest, and a bound can make it pointless.
    for buffers in sorted(variants, key=attrgetter("lower_bound")) if len(variants) > 1 else variants:
        if best is not None and (buffers.lower_bound >= best.memory.peak or buffers.least_peak() >= best.memory.peak):
            break
        plan = strategy.place(buffers, shared)
        if best is None or plan.peak < best.memory.peak:
            best = Draft(program, plan, buffers.assignment)
    assert best is not None
    return best


def assignment(program: Program, options: PlanOptions) -> Assignment:
    """Return the assignment with the smallest lower bound, without placing anything."""
    shared = strategy_of(options).assign(program, options)
    return min(_variants(program, options, shared.assignment), key=attrgetter("lower_bound")).assignment


def _variants(program: Program, options: PlanOptions, plain: Assignment) -> list[Buffers]:
    """The buffers to place: with gradient sums as they are, and added in place."""
    variants = [plain]
    if options.enable_inplace and options.compat not in paddle.COMPAT:
        summed = add_in_place(program, plain)
        if summed.skipped:
            # The scratch of additions can cost more than the sums' terms: compare, except where MXNet would not.
            variants = [summed] if options.compat == "mxnet" else [plain, summed]
    plain_buffers = [Buffers(program, variants[0], options=options)]
    return plain_buffers + [
        Buffers(program, variant, options=options, like=plain_buffers[0]) for variant in variants[1:]
    ]


@dataclass(frozen=True, slots=True)
class WholeBlocks:
    """Whole blocks, each handed on to one entry after another: MXNet's rule, or Paddle's; without ``reuse`` to none."""

    name: str
    reuse: bool

    def assign(self, program: Program, options: PlanOptions) -> Shared:
        """Walk over the program with MXNet's or Paddle's allocator of blocks."""
        return whole_blocks(program, options, options.match_range if self.reuse else 0)

    def place(self, buffers: Buffers, shared: Shared) -> MemoryPlan:
        """Give every block bytes of its own."""
        return self.placed(buffers, shared)[1]()

    def placed(self, buffers: Buffers, shared: Shared) -> tuple[int, Callable[[], MemoryPlan]]:
        """Return the plan's bytes, and the function that makes the plan, which takes longer."""
        waits = None
        if self.reuse and buffers.options.compat == "paddle" and len(buffers.program.order) <= MOST_STEPS:
            waits = len(paddle.order_edges(buffers.program, buffers.assignment))
        return blocks(buffers, self.name, reported_bytes=shared.block_bytes, color=shared.color, added_waits=waits)


@dataclass(frozen=True, slots=True)
class Arena:
    """Offsets in one slab per device, found by a packer (:func:`weftplan.planner.pack`)."""

    name: str
    packer: Packer = pack

    def assign(self, program: Program, options: PlanOptions) -> Shared:
        """Walk over the program as whole blocks do; of the result only the groups in place of each other matter."""
        return whole_blocks(program, options, options.match_range)

    def place(self, buffers: Buffers, shared: Shared) -> MemoryPlan:
        """Give every group and every workspace an offset."""
        return arena(buffers, shared.color, name=self.name, packer=self.packer)


@dataclass(frozen=True, slots=True)
class Smallest:
    """The smaller plan of two strategies; equal peaks prefer whole blocks, which need no extra edges."""

    name: str
    blocks: WholeBlocks
    offsets: Strategy

    def assign(self, program: Program, options: PlanOptions) -> Shared:
        """Walk once for both strategies."""
        return self.blocks.assign(program, options)

    def place(self, buffers: Buffers, shared: Shared) -> MemoryPlan:
        """Place by whichever strategy needs less, and by one alone if the other cannot win."""
        # Whole blocks take at least the bytes that MXNet's rule counts, if sums stay as they are.
        counted = buffers.options.sizes != "mxnet" and not buffers.assignment.added
        least = shared.block_bytes if counted else 0
        packed = self.offsets.place(buffers, shared) if least > buffers.lower_bound else None
        if packed is not None and packed.peak < least:
            return packed
        peak, whole = self.blocks.placed(buffers, shared)
        if peak != buffers.lower_bound:
            packed = packed or self.offsets.place(buffers, shared)
            if packed.peak < peak:
                return packed
        return whole()


def whole_blocks(program: Program, options: PlanOptions, match_range: int) -> Shared:
    """MXNet's walk; with ``auto_search`` over ranges 1, 2, 4, … keeping the strictly smallest total. Or Paddle's."""
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
    return Shared(walked[least], sum(pools[least].block_bytes), color)


register(Smallest("auto", blocks=WholeBlocks("match_range", reuse=True), offsets=Arena("arena")))
register(Arena("arena"))
register(WholeBlocks("match_range", reuse=True))
register(WholeBlocks("none", reuse=False))
