"""Bulk segments: consecutive steps pushed as one engine operation, so that small operations cost little.

A segment ends at a cross-device copy, at a change of context, at the node limit, and when gradients that the caller
waits for have become ready (so that their exchange overlaps the rest of backward), unless these are so small that one
more operation takes longer than their exchange. A result that is copied to the host ends a segment, and the first
reader of a copy back begins a segment: the copies run concurrently with all other segments. On a device with several
compute streams it overlaps branches of the graph, which are segments of their own: a segment runs on one stream, so
:func:`chains` regroups steps before they are cut.

    a step joins the chain whose last step it needs, if it waits for nothing that the chain does not wait for anyway
    any other step begins a chain; a chain ends after each of its steps that such a step needs

So no step waits longer than in a segment of its own, but for chains too short to be worth an operation. Each chain
follows all chains that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import reduce
from operator import or_
from time import perf_counter_ns
from typing import Any, Protocol, TypeVar

import numpy as np

from weftplan import config, device, engine
from weftplan.device.context import Context
from weftplan.engine import FnProperty
from weftplan.engine.var import Var
from weftplan.executor.memory import RunState
from weftplan.executor.prepared_calls import Step
from weftplan.ndarray.copying import passing

WORTH_TELLING = 1 << 16
"""Bytes of gradients that end a segment. An engine takes some 20 microseconds for an operation; memory moves several
times as many bytes meanwhile. Training steps on two cores with the store ``local``, medians of ratios to this value: an
MLP takes 1.008 with 1 byte to 16 KiB, and 0.999 to 1.006 with 256 KiB, 1 MiB or no limit; a MobileNet has 55 backward
segments with 1 byte and 12 with this, and takes 1.008 with 1 byte, 0.985 with 256 KiB and 1.027 with 1 MiB, no more
apart than two runs of one value; an LSTM shows no difference."""
LONG_NS = 500_000
"""A run of a segment that takes more nanoseconds is long, compared with the 60 microseconds of :meth:`Engine.give_way`.
A training step of an MLP, whose forward part takes about a millisecond, takes 1.4 % more on two cores if no segment is
long; between 0 and 500,000 this step, an LSTM and a MobileNet show no difference."""


class Replay:
    """The work of one segment, in training or not, which may become a CUDA graph (``MXNET_ENABLE_CUDA_GRAPHS``).

    The first run enqueues call by call, which compiles kernels and loads libraries; the second is captured; from the
    third on, one launch does it all. The arguments of the calls are those of the capture, so a segment whose calls
    differ from run to run is not captured, nor is one that makes the host wait or takes memory. When memory moves, the
    executor makes its segments again, and with them their graphs. A segment is run by one thread at a time, as its vars
    say; nothing here locks.
    """

    def __init__(self, work: Callable[[], None], place: Any) -> None:
        self._work = work
        self._place = place
        self._warm = False
        self._graph: Any = None
        self.reason = ""
        """Why there is no graph; empty while there may be one."""

    @property
    def state(self) -> str:
        """The next run's action, and its reason, in words."""
        if self._graph is not None:
            return "captured"
        return self.reason or ("to be captured" if self._warm else "not run yet")

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.launch()
            return
        if self.reason or not self._warm:
            self._work()
            self._warm = True
            return
        graph = self._place.capture(self._work)
        if isinstance(graph, str):
            self.reason = graph
            self._work()
        else:
            self._graph = graph
            graph.launch()


class _LastRun:
    """How long the last run of a segment took."""

    __slots__ = ("ns",)

    def __init__(self) -> None:
        self.ns = 0
        """Nanoseconds."""


class Segment:
    """Steps that run one after the other in one engine operation."""

    __slots__ = (
        "_binds",
        "_graphs",
        "_last",
        "_operators",
        "_replays",
        "context",
        "name",
        "prop",
        "random",
        "reads",
        "steps",
        "writes",
    )  # fmt: skip

    def __init__(self, steps: Sequence[Step], *, graphs: str | None = "off") -> None:
        self.steps = list(steps)
        self._binds = [step.bind for step in steps if step.bind is not None]
        self.context: Context = steps[0].context
        self.prop = steps[0].copies or FnProperty.NORMAL
        self.random = any(step.node.op is not None and step.node.op.random for step in steps)
        names = [step.node.name for step in steps]
        self.name = names[0] if len(names) == 1 else f"[{','.join(names[:4])}{',…' if len(names) > 4 else ''}]"
        if steps[0].copies is not None and steps[0].inputs and steps[0].outputs:
            source, target = steps[0].inputs[0], steps[0].outputs[0]
            if source is not None and target is not None:
                self.name += passing(source, target)
        self.reads, self.writes = engine.dedupe(
            [var for step in steps for var in step.reads], [var for step in steps for var in step.writes]
        )
        self._operators: dict[bool, Any] = {}
        self._graphs = graphs
        """None: the segment is captured as a CUDA graph if it can be; otherwise why not."""
        if graphs is None and self.random:
            self._graphs = "its random numbers differ from run to run"
        elif graphs is None and self.prop is not FnProperty.NORMAL:
            self._graphs = "a copy between devices"
        elif graphs is None and not hasattr(device.get(self.context), "capture"):
            self._graphs = f"{self.context} has no CUDA graphs"
        self._replays: dict[bool, Replay] = {}
        self._last = _LastRun()

    @property
    def graphs(self) -> dict[bool, str]:
        """By ``is_train``: whether a CUDA graph stands for the segment, or why not."""
        if self._graphs is not None:
            return {True: self._graphs}
        return {is_train: replay.state for is_train, replay in self._replays.items()}

    @property
    def pushed(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._binds)

    @property
    def long(self) -> bool:
        """Whether the last run took long compared with a change of thread."""
        return self._last.ns > LONG_NS

    def write_too(self, more: Sequence[Var]) -> None:
        """Let the segment write more vars; to be called before it is pushed."""
        self.reads, self.writes = engine.dedupe(self.reads, [*self.writes, *more])

    def _work(self, run: RunState) -> Callable[[], None]:
        """Return the function of one engine operation."""
        calls = [bind(run) for bind in self._binds]
        last = self._last  # not the segment itself, which has this function

        def work() -> None:
            start = perf_counter_ns()
            # Infinities and NaNs are results, not warnings, as everywhere in the field.
            with np.errstate(all="ignore"):
                for call in calls:
                    call()
            last.ns = perf_counter_ns() - start

        return work

    def push(self, run: RunState, priority: int = 0) -> None:
        """Hand the segment to the engine for one run."""
        if not self._binds:
            return
        current = engine.get()
        if self.random:
            work = self._work(run)
            current.push(work, self.reads, self.writes, self.context, prop=self.prop, priority=priority, name=self.name)
            return
        # Without random numbers a run differs in is_train alone: two stored operators serve all runs.
        operator = self._operators.get(run.is_train)
        if operator is None:
            work = self._work(run)
            if self._graphs is None:
                work = self._replays[run.is_train] = Replay(work, device.get(self.context))
            operator = self._operators[run.is_train] = current.new_operator(
                work, self.reads, self.writes, prop=self.prop, name=self.name
            )
        current.push(operator, ctx=self.context, priority=priority)


def bulk_limits(training: bool, steps: int) -> tuple[bool, int, int]:
    """Return (whether steps are joined, most steps of a forward segment, of a backward one), as the environment says
    now."""
    bulk = bool(config.get(f"MXNET_EXEC_BULK_EXEC_{'TRAIN' if training else 'INFERENCE'}"))
    if not training:
        return bulk, steps + 1, steps + 1
    most = int(config.get("MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN"))
    forward, backward = (config.get(f"MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_{way}") or most for way in ("FWD", "BWD"))
    return bulk, int(forward), int(backward)


def make_segments(
    steps: Sequence[Step],
    *,
    limit: int,
    bulk: bool,
    ends_after: Container[int] = (),
    ready: Callable[[Step], int] | None = None,
    begins_at: Container[int] = (),
    graphs: str | None = "off",
    branches: Callable[[Step], float] | None = None,
) -> list[Segment]:
    """Cut ``steps`` (in execution order) into segments.

    Args:
        limit: most steps of one segment.
        bulk: False: one segment per step.
        ends_after: ids of nodes that end a segment.
        ready: bytes of gradients that are ready after a step; those of a segment end it when they are worth it.
        begins_at: ids of nodes that begin a segment.
        graphs: None: segments are captured as CUDA graphs if they can be; otherwise why not.
        branches: seconds of a step, if branches of the graph are to be segments of their own; None: they need not.
    """
    segments: list[Segment] = []
    pending: list[Step] = []
    untold = 0

    def flush() -> None:
        nonlocal untold
        untold = 0
        if pending:
            segments.append(Segment(pending, graphs=graphs))
            pending.clear()

    for chain in [list(steps)] if branches is None or not bulk else chains(steps, branches):
        for step in chain:
            cut = step.copies is not None or step.nid in begins_at
            if pending and (cut or step.context != pending[0].context or len(pending) >= limit):
                flush()
            pending.append(step)
            untold += 0 if ready is None else ready(step)
            if not bulk or step.copies is not None or step.nid in ends_after or untold >= WORTH_TELLING:
                flush()
        flush()
    return segments


def may_fence(segments: Sequence[Segment], pool_var: Var) -> bool:
    """Return whether all segments come after the first segment in any case, the var of their pool aside: then it can
    write the vars of a fence, and no segment waits longer for that."""
    pushed = [segment for segment in segments if segment.pushed]
    if not pushed or pushed[0] is not segments[0] or pushed[0].prop is not FnProperty.NORMAL:
        return False
    read, written = set(pushed[0].reads) - {pool_var}, set(pushed[0].writes)
    for segment in pushed[1:]:
        if written.isdisjoint(segment.reads) and written.isdisjoint(segment.writes) and read.isdisjoint(segment.writes):
            return False
        read.update(segment.reads)
        written.update(segment.writes)
        read.discard(pool_var)
    return True


LEAST_S = 30e-6
"""Modelled seconds below which a chain is not worth an operation of the engine, which takes some 20 microseconds."""
MOST = 4096
"""Steps beyond which a graph is not looked at: the masks would take megabytes."""


class Uses(Protocol):
    """The vars that a step reads and writes."""

    reads: Any
    writes: Any


class BranchStep(Uses, Protocol):
    """A step, with its device; ``copies`` is None unless it is a copy between devices."""

    context: Context
    copies: FnProperty | None


S = TypeVar("S", bound=BranchStep)


def parents(items: Sequence[Uses]) -> list[set[int]]:
    """Return for each item the earlier items with which it clashes by a var: the last writer, and for a write all
    readers since. Items before these are left out."""
    clashes: list[set[int]] = []
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for number, item in enumerate(items):
        mine: set[int] = set()
        for var in (*item.reads, *item.writes):
            if id(var) in writer:
                mine.add(writer[id(var)])
        for var in item.writes:
            mine.update(readers.pop(id(var), ()))
            writer[id(var)] = number
        for var in item.reads:
            readers.setdefault(id(var), []).append(number)
        mine.discard(number)
        clashes.append(mine)
    return clashes


def ancestors(above: Sequence[set[int]]) -> list[int]:
    """Return for each item a mask of all items that come before it in any case."""
    masks: list[int] = []
    for mine in above:
        mask = 0
        for number in mine:
            mask |= masks[number] | 1 << number
        masks.append(mask)
    return masks


def chains(steps: Sequence[S], seconds: Callable[[S], float]) -> list[list[S]]:
    """Return ``steps``, which are in execution order, as chains in an order that the engine may take.

    Args:
        steps: each has ``reads``, ``writes``, ``context`` and ``copies``; a copy between devices is a chain of its own.
        seconds: how long a step takes.
    """
    if not 1 < len(steps) <= MOST:
        return [list(steps)]
    above = parents(steps)
    masks = ancestors(above)
    groups = _cut(_grouped(steps, above, masks), above, masks)
    return [[steps[number] for number in group] for group in _joined(steps, groups, above, masks, seconds)]


def _grouped(steps: Sequence[BranchStep], above: Sequence[set[int]], masks: Sequence[int]) -> list[list[int]]:
    """Return the longest chains, by number of their first step."""
    groups: list[list[int]] = []
    ending: dict[int, list[int]] = {}
    """By last step its chain; a copy ends its chain for good."""
    for number, step in enumerate(steps):
        chain = None
        if step.copies is None:
            for last in sorted(above[number], reverse=True):
                candidate = ending.get(last)
                if candidate is None or steps[last].context != step.context:
                    continue
                # The chain waits for these steps; every member needs the member before it.
                if not masks[number] & ~(masks[last] | 1 << last):
                    chain = candidate
                    break
        if chain is None:
            chain = []
            groups.append(chain)
        else:
            del ending[chain[-1]]
        chain.append(number)
        if step.copies is None:
            ending[number] = chain
    return groups


def _cut(groups: list[list[int]], above: Sequence[set[int]], masks: Sequence[int]) -> list[list[int]]:
    """Return the chains, cut after the steps for which first steps of other chains wait."""
    ends: set[int] = set()
    for first, *_ in groups:
        covered = 0
        for number in above[first]:
            covered |= masks[number]
        ends |= {number for number in above[first] if not covered >> number & 1}
    parts: list[list[int]] = []
    for group in groups:
        begin = 0
        for index, number in enumerate(group, 1):
            if number in ends or index == len(group):
                if begin < index:
                    parts.append(group[begin:index])
                begin = index
    parts.sort(key=lambda group: group[0])
    return parts


def _joined(
    steps: Sequence[S],
    groups: list[list[int]],
    above: Sequence[set[int]],
    masks: Sequence[int],
    seconds: Callable[[S], float],
) -> list[list[int]]:
    """Return the chains; those too short for an operation of their own are joined with a neighbour.

    No long chain may wait for more than before. So a short chain joins the next chain if all its users wait for that
    chain, too, and the previous chain if it waits for nothing else.
    """
    chain_of = {number: index for index, group in enumerate(groups) for number in group}
    waiting: list[set[int]] = [set() for _ in groups]
    """Of each chain: first steps of others that wait for it."""
    for first, *_ in groups:
        for number in above[first]:
            waiting[chain_of[number]].add(first)
    joined: list[list[int]] = []
    lengths: list[float] = []
    users: list[set[int]] = []
    for group, waits in zip(groups, waiting, strict=True):
        length = sum(seconds(steps[number]) for number in group)
        first, last, end = group[0], group[-1], joined[-1][-1] if joined else group[0]
        copies = steps[end].copies is not None or steps[first].copies is not None
        if joined and not copies and steps[end].context == steps[first].context:
            others = users[-1] - {first}
            stem = lengths[-1] < LEAST_S and first in users[-1] and all(masks[one] >> last & 1 for one in others)
            members = sum(1 << number for number in (*joined[-1], *group))
            covered = reduce(or_, [masks[number] for number in joined[-1]], members)
            tail = length < LEAST_S and not masks[last] & ~covered
            if stem or tail:
                joined[-1] += group
                lengths[-1] += length
                users[-1] = others | waits
                continue
        joined.append(list(group))
        lengths.append(length)
        users.append(waits)
    return joined
