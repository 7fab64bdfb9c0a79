"""Bulk segments: consecutive steps pushed as one engine operation, to save the cost of an operation per step.

A segment ends at a cross-device copy, at a change of context, and at the node limit. Three more rules let work overlap:

* A segment ends when ``WORTH_TELLING`` bytes of gradients are ready, so that their exchange overlaps the rest of
  backward.
* A segment ends after a step whose result is copied to another device, and begins at the first reader of a copy, so
  that copies overlap computation.
* A segment runs on one stream. On a device with several compute streams, branches of the graph become separate
  segments, so that they overlap. :func:`chains` groups the steps of each branch before they are cut into segments:

  1. A step that needs the last step of a chain continues this chain, if that last step waits for all other steps that
     the new step waits for.
  2. Any other step begins a chain. If it directly needs a step of another chain, that chain is cut after the needed
     step.
  3. A chain that is too short to be worth an operation is merged with a neighbour.

  So, except for merged chains, no step starts later than it would in a separate segment. Each chain comes after all
  chains that it needs.
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
from weftplan.executor.prepared_calls import PreparedStep
from weftplan.ndarray.copying import passing

WORTH_TELLING = 1 << 16
"""Bytes of gradients that end a segment. An engine operation takes about 20 microseconds, in which memory moves several
times that number of bytes. Time of a training step on two cores with the store ``local``, relative to this value: an
MLP takes 1.008 with 1 byte to 16 KiB, and 0.999 to 1.006 with 256 KiB, 1 MiB or no limit; a MobileNet takes 1.008 with
1 byte (55 backward segments instead of 12), 0.985 with 256 KiB and 1.027 with 1 MiB, which is within the noise; an LSTM
shows no difference."""
LONG_NS = 500_000
"""Nanoseconds above which a run of a segment is long, so that :meth:`Engine.yield_to_worker` (60 us) is worth it.
If no segment counts as long, a training step of an MLP takes 1.4 % more on two cores. Its forward part takes about a
millisecond. Between 0 and 500,000 this step, an LSTM and a MobileNet show no difference."""


class Replay:
    """The work of one segment in one mode, replayed as a CUDA graph if possible (``MXNET_ENABLE_CUDA_GRAPHS``).

    The first run enqueues each call, which compiles kernels and loads libraries. The second run is captured, and later
    runs launch the captured graph. A graph repeats the arguments of the capture. So a segment cannot be captured if its
    calls differ from run to run, make the host wait, or allocate memory. If memory moves, the executor makes new
    segments and thus new graphs. There is no lock, because the engine runs a segment on one thread at a time.
    """

    def __init__(self, work: Callable[[], None], target_device: Any) -> None:
        self._work = work
        self._device = target_device
        self._warm = False
        self._graph: Any = None
        self.reason = ""
        """The reason why the capture failed; empty before a capture and after its success."""

    @property
    def state(self) -> str:
        """``captured``, ``to be captured``, ``not run yet``, or the reason why there is no graph."""
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
        graph = self._device.capture(self._work)
        if isinstance(graph, str):
            self.reason = graph
            self._work()
        else:
            self._graph = graph
            graph.launch()


class _LastRun:
    """The duration of the last run of a segment, 0 before the first."""

    __slots__ = ("ns",)

    def __init__(self) -> None:
        self.ns = 0
        """Nanoseconds."""


class StepSegment:
    """Steps on one context that run one after the other in one engine operation."""

    __slots__ = (
        "_binds",
        "_graphs",
        "_last_run",
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

    def __init__(self, steps: Sequence[PreparedStep], *, graphs: str | None = "off") -> None:
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
        """The reason why the segment is not captured as a CUDA graph; None: a :class:`Replay` tries to capture it."""
        if graphs is None and self.random:
            self._graphs = "its random numbers differ from run to run"
        elif graphs is None and self.prop is not FnProperty.NORMAL:
            self._graphs = "a copy between devices"
        elif graphs is None and not hasattr(device.get(self.context), "capture"):
            self._graphs = f"{self.context} has no CUDA graphs"
        self._replays: dict[bool, Replay] = {}
        self._last_run = _LastRun()

    @property
    def graphs(self) -> dict[bool, str]:
        """By ``is_train``: the state of the segment's CUDA graph in words; see :attr:`Replay.state`."""
        if self._graphs is not None:
            return {True: self._graphs}
        return {is_train: replay.state for is_train, replay in self._replays.items()}

    @property
    def pushed(self) -> bool:
        """Whether the segment has work; otherwise it is not pushed."""
        return bool(self._binds)

    @property
    def long(self) -> bool:
        """Whether the last run took more than ``LONG_NS`` nanoseconds."""
        return self._last_run.ns > LONG_NS

    def write_too(self, more: Sequence[Var]) -> None:
        """Add vars that the segment writes; call this before the first push."""
        self.reads, self.writes = engine.dedupe(self.reads, [*self.writes, *more])

    def _work(self, run: RunState) -> Callable[[], None]:
        """Return a function that does all calls of ``run`` and measures their time."""
        calls = [bind(run) for bind in self._binds]
        last_run = self._last_run  # a reference to the segment would be a cycle

        def work() -> None:
            start = perf_counter_ns()
            # Infinities and NaNs are results, without warnings, as in other frameworks.
            with np.errstate(all="ignore"):
                for call in calls:
                    call()
            last_run.ns = perf_counter_ns() - start

        return work

    def push(self, run: RunState, priority: int = 0) -> None:
        """Push the segment for one run, unless it has no work."""
        if not self._binds:
            return
        current = engine.get()
        if self.random:
            work = self._work(run)
            current.push(work, self.reads, self.writes, self.context, prop=self.prop, priority=priority, name=self.name)
            return
        # Without random numbers runs differ only in is_train, so two cached operators serve all runs.
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
    """Return whether segments may have several steps, and how many a forward and a backward segment may have.

    The values come from environment variables. Without training there is no limit.

    Args:
        training: whether the graph has gradients.
        steps: the number of steps of the graph.
    """
    bulk = bool(config.get(f"MXNET_EXEC_BULK_EXEC_{'TRAIN' if training else 'INFERENCE'}"))
    if not training:
        return bulk, steps + 1, steps + 1
    node_limit = int(config.get("MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN"))
    forward, backward = (
        config.get(f"MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_{suffix}") or node_limit for suffix in ("FWD", "BWD")
    )
    return bulk, int(forward), int(backward)


def make_segments(
    steps: Sequence[PreparedStep],
    *,
    limit: int,
    bulk: bool,
    ends_after: Container[int] = (),
    ready: Callable[[PreparedStep], int] | None = None,
    begins_at: Container[int] = (),
    graphs: str | None = "off",
    branches: Callable[[PreparedStep], float] | None = None,
) -> list[StepSegment]:
    """Cut ``steps`` (in execution order) into segments.

    Args:
        steps: the steps to cut.
        limit: maximum number of steps of a segment.
        bulk: False: one segment per step.
        ends_after: ids of nodes that end a segment.
        ready: returns the bytes of gradients that a step completes; ``WORTH_TELLING`` bytes end a segment. None: none.
        begins_at: ids of nodes that begin a segment.
        graphs: the reason why segments are not captured as CUDA graphs; None: capture them if possible.
        branches: returns the seconds of a step; branches of the graph then become separate segments. None: they do not.
    """
    segments: list[StepSegment] = []
    pending: list[PreparedStep] = []
    ready_bytes = 0

    def flush() -> None:
        nonlocal ready_bytes
        ready_bytes = 0
        if pending:
            segments.append(StepSegment(pending, graphs=graphs))
            pending.clear()

    for chain in [list(steps)] if branches is None or not bulk else chains(steps, branches):
        for step in chain:
            cut = step.copies is not None or step.nid in begins_at
            if pending and (cut or step.context != pending[0].context or len(pending) >= limit):
                flush()
            pending.append(step)
            ready_bytes += 0 if ready is None else ready(step)
            if not bulk or step.copies is not None or step.nid in ends_after or ready_bytes >= WORTH_TELLING:
                flush()
        flush()
    return segments


def may_fence(segments: Sequence[StepSegment], pool_var: Var) -> bool:
    """Return whether the first segment can write the vars of a fence without making any other segment wait longer.

    That is so if every other segment waits for an earlier segment, and thus for the first, even without the pool's var.
    """
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
"""Modelled seconds below which a chain is not worth a separate engine operation, which takes about 20 microseconds."""
MAX_STEPS = 4096
"""Maximum number of steps of a graph that is grouped into chains; the masks of more steps would take megabytes."""


class Uses(Protocol):
    """An object with the vars that it reads and writes, such as a step or a segment."""

    reads: Any
    writes: Any


class BranchStep(Uses, Protocol):
    """A step as :func:`chains` sees it: its vars, its device, and whether it is a cross-device copy."""

    context: Context
    copies: FnProperty | None


S = TypeVar("S", bound=BranchStep)


def parents(items: Sequence[Uses]) -> list[set[int]]:
    """Return for each item the numbers of the earlier items that it must follow directly.

    For each of its vars these are the last writer and, if the item writes the var, all readers since that writer.
    """
    conflicts: list[set[int]] = []
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
        conflicts.append(mine)
    return conflicts


def ancestors(above: Sequence[set[int]]) -> list[int]:
    """Return for each item a bit mask of all items that it must follow, directly or through others.

    Args:
        above: the result of :func:`parents`.
    """
    masks: list[int] = []
    for mine in above:
        mask = 0
        for number in mine:
            mask |= masks[number] | 1 << number
        masks.append(mask)
    return masks


def chains(steps: Sequence[S], seconds: Callable[[S], float]) -> list[list[S]]:
    """Group ``steps`` into chains for separate streams; the module's docstring has the rules.

    Args:
        steps: steps in execution order; a cross-device copy becomes a separate chain.
        seconds: returns the seconds that a step takes.

    Returns:
        The chains, each after all chains that it needs.
    """
    if not 1 < len(steps) <= MAX_STEPS:
        return [list(steps)]
    above = parents(steps)
    masks = ancestors(above)
    groups = _cut_chains(_group(steps, above, masks), above, masks)
    return [[steps[number] for number in group] for group in _merge_short(steps, groups, above, masks, seconds)]


def _group(steps: Sequence[BranchStep], above: Sequence[set[int]], masks: Sequence[int]) -> list[list[int]]:
    """Return chains as lists of step numbers, as long as rule 1 allows, in the order of their first steps."""
    groups: list[list[int]] = []
    ending: dict[int, list[int]] = {}
    """The chains that may be continued, by their last step; a chain that ends with a copy cannot be continued."""
    for number, step in enumerate(steps):
        chain = None
        if step.copies is None:
            for last_step in sorted(above[number], reverse=True):
                candidate = ending.get(last_step)
                if candidate is None or steps[last_step].context != step.context:
                    continue
                # The step waits only for the chain's last step and for steps that this last step waits for, too.
                if not masks[number] & ~(masks[last_step] | 1 << last_step):
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


def _cut_chains(groups: list[list[int]], above: Sequence[set[int]], masks: Sequence[int]) -> list[list[int]]:
    """Return the chains, cut after each step that the first step of another chain directly waits for (rule 2)."""
    ends: set[int] = set()
    for first_step, *_ in groups:
        covered = 0
        for number in above[first_step]:
            covered |= masks[number]
        ends |= {number for number in above[first_step] if not covered >> number & 1}
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


def _merge_short(
    steps: Sequence[S],
    groups: list[list[int]],
    above: Sequence[set[int]],
    masks: Sequence[int],
    seconds: Callable[[S], float],
) -> list[list[int]]:
    """Return the chains after merging those that are shorter than ``LEAST_S`` with a neighbour (rule 3).

    No long chain may wait for more than before. So a short chain is merged with the next chain only if all its users
    wait for that chain, too. It is merged with the previous chain only if it waits for no steps but those of that chain
    and those that this chain waits for anyway.
    """
    chain_of = {number: index for index, group in enumerate(groups) for number in group}
    waiting: list[set[int]] = [set() for _ in groups]
    """For each chain, the first steps of other chains that wait for it."""
    for first_step, *_ in groups:
        for number in above[first_step]:
            waiting[chain_of[number]].add(first_step)
    merged: list[list[int]] = []
    lengths: list[float] = []
    users: list[set[int]] = []
    for group, waits in zip(groups, waiting, strict=True):
        length = sum(seconds(steps[number]) for number in group)
        first_step, last_step, end = group[0], group[-1], merged[-1][-1] if merged else group[0]
        copies = steps[end].copies is not None or steps[first_step].copies is not None
        if merged and not copies and steps[end].context == steps[first_step].context:
            other_users = users[-1] - {first_step}
            stem = (
                lengths[-1] < LEAST_S
                and first_step in users[-1]
                and all(masks[user] >> last_step & 1 for user in other_users)
            )
            members = sum(1 << number for number in (*merged[-1], *group))
            covered = reduce(or_, [masks[number] for number in merged[-1]], members)
            tail = length < LEAST_S and not masks[last_step] & ~covered
            if stem or tail:
                merged[-1] += group
                lengths[-1] += length
                users[-1] = other_users | waits
                continue
        merged.append(list(group))
        lengths.append(length)
        users.append(waits)
    return merged
