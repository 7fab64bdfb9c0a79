"""From an assignment of storages to a finished :class:`~weftplan.planner.memory_plan.MemoryPlan`.

:func:`blocks` gives every storage a slab of its own and every device one workspace per colour; :func:`arena` gives
every group of in-place entries and every workspace an offset in one slab per device.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.planner.graph import IntArray
from weftplan.planner.inplace import Assignment, Kind
from weftplan.planner.labels import GraphLabels
from weftplan.planner.liveness import Facts, lifetimes, live_bytes
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.options import PlanOptions
from weftplan.planner.packing import Packing, check_packing, pack, reuse_edges
from weftplan.planner.packing.api import Effort
from weftplan.planner.packing.precedence import Precedence
from weftplan.planner.reachability import MOST_STEPS, ancestors
from weftplan.planner.workspace import with_added_outputs

WORTH_A_SEARCH = 1 << 20
"""Bytes above the lower bound for which a second, longer packing is worth its time."""


@dataclass(slots=True)
class Buffers:
    """Groups and workspaces as buffers with lifetimes: what has to be placed.

    Invariant: every buffer has a first writer that runs. A buffer without one would stand between an earlier user of
    its bytes and a later one without making the later one wait, since the order of reuse is passed on from writer to
    writer. So outputs that nobody reads are no buffers, even where MXNet's walk gave them a block, and neither is the
    scratch of nodes that do not run.
    """

    facts: Facts
    found: Assignment
    options: PlanOptions
    entry_first: IntArray = field(init=False)
    entry_last: IntArray = field(init=False)
    entry_nbytes: IntArray = field(init=False)
    entry_group: IntArray = field(init=False)
    first: IntArray = field(init=False)
    """Per buffer: the groups that have entries, then one per node with scratch."""
    last: IntArray = field(init=False)
    nbytes: IntArray = field(init=False)
    device: IntArray = field(init=False)
    num_groups: int = field(init=False)
    workspace: dict[int, int] = field(init=False)
    """Scratch bytes per node that runs."""
    workspace_nodes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Measure groups and workspaces."""
        facts, found = self.facts, self.found
        starts, ends = lifetimes(facts)
        self.entry_first = np.array(starts, dtype=np.int64)
        self.entry_last = np.array(ends, dtype=np.int64)
        self.entry_nbytes = np.array(facts.nbytes, dtype=np.int64)
        group = np.array(found.group, dtype=np.int64)
        group[np.frombuffer(found.kind, dtype=np.uint8) == Kind.UNUSED] = -1
        held = np.flatnonzero(group >= 0)
        # Some groups may have lost their entries to partial sums: renumber the rest, keeping their order.
        used, renumbered = np.unique(group[held], return_inverse=True)
        self.num_groups = len(used)
        group[held] = renumbered
        self.entry_group = group
        members = group[held]
        steps = len(facts.order)
        first = np.full(self.num_groups, steps, dtype=np.int64)
        last = np.zeros(self.num_groups, dtype=np.int64)
        nbytes = np.zeros(self.num_groups, dtype=np.int64)
        device = np.zeros(self.num_groups, dtype=np.int64)
        np.minimum.at(first, members, self.entry_first[held])
        np.maximum.at(last, members, self.entry_last[held])
        np.maximum.at(nbytes, members, self.entry_nbytes[held])
        device[members] = np.array(facts.device, dtype=np.int64)[facts.graph.entry_node[held]]
        workspace: dict[int, int] = {}
        if self.options.workspaces:
            workspace = with_added_outputs(facts.workspaces, facts.graph, facts.nbytes, (*facts.added, *found.added))
            workspace = {nid: n for nid, n in workspace.items() if nid not in found.skipped}
        self.workspace = workspace
        where = {nid: step for step, nid in enumerate(facts.order) if nid in workspace}
        self.workspace_nodes = list(where)
        moments = np.array(list(where.values()), dtype=np.int64)
        self.first = np.concatenate([first, moments])
        self.last = np.concatenate([last, moments + 1])
        self.nbytes = np.concatenate([nbytes, np.array([workspace[nid] for nid in where], dtype=np.int64)])
        self.device = np.concatenate([device, np.array([facts.device[nid] for nid in where], dtype=np.int64)])

    def live(self) -> IntArray:
        """Bytes alive per device and step."""
        return live_bytes(
            self.first, self.last, self.nbytes, self.device, len(self.facts.contexts), len(self.facts.order)
        )

    def lower_bound(self) -> int:
        """Most bytes alive at once, summed over devices."""
        live = self.live()
        return int(live.max(axis=1).sum()) if live.shape[1] else 0

    def order(self) -> Precedence | None:
        """Which nodes use each buffer, and which its first writer waits for anyway.

        None for orders of more than `MOST_STEPS` steps, for which this is not worth its memory.
        """
        facts = self.facts
        if len(facts.order) > MOST_STEPS:
            return None
        producers, users = _dataflow(facts, self.found, self.entry_group.tolist(), self.num_groups)
        first = self.first.tolist()
        users += [1 << step for step in first[self.num_groups :]]
        needs = ancestors(producers)
        return Precedence(users, [needs[step] for step in first])

    def rounded(self, nbytes: IntArray, device: IntArray) -> IntArray:
        """These sizes as whole multiples of the device's alignment."""
        units = np.array([self.options.alignment or alignment_of(c) for c in self.facts.contexts], dtype=np.int64)
        unit = units[device]
        return (nbytes + unit - 1) // unit * unit

    def unshared(self) -> int:
        """Bytes with a buffer for every entry that is made and one workspace per device as large as its largest."""
        facts = self.facts
        planned = np.flatnonzero(np.array(self.found.group, dtype=np.int64) >= 0)
        places = np.array(facts.device, dtype=np.int64)[facts.graph.entry_node[planned]]
        total = int(self.rounded(self.entry_nbytes[planned], places).sum())
        largest = [0] * len(facts.contexts)
        for nid, nbytes in self.workspace.items():
            largest[facts.device[nid]] = max(largest[facts.device[nid]], nbytes)
        return total + sum(largest)


def _dataflow(facts: Facts, found: Assignment, group: Sequence[int], count: int) -> tuple[list[list[int]], list[int]]:
    """(steps whose results each step reads, set of steps that use each of ``count`` buffers).

    A skipped sum touches nothing, but whoever reads it needs what was added to it.
    """
    row, reads = facts.graph.row, facts.reads
    made: list[int] = [-1] * facts.graph.num_entries
    producers: list[list[int]] = []
    users = [0] * count
    for step, nid in enumerate(facts.order):
        mine = 1 << step if nid not in found.skipped else 0
        sources = []
        for e in reads[nid]:
            if made[e] >= 0:
                sources.append(made[e])
            if group[e] >= 0:
                users[group[e]] |= mine
        producers.append(sources)
        for e in range(row[nid], row[nid + 1]):
            made[e] = step
            if group[e] >= 0:
                users[group[e]] |= mine
    return producers, users


def blocks(
    buffers: Buffers,
    strategy: str,
    reported_bytes: int,
    color: Sequence[int] = (),
    *,
    one_slab: bool = False,
    added_waits: int | None = None,
) -> MemoryPlan:
    """The plan in which storages do not overlap: each is an allocation of its own, or they lie side by side.

    With ``one_slab`` they are stacked in one slab per device, so that executors with other shapes can use it too.
    """
    facts, found = buffers.facts, buffers.found
    storage = np.array(found.storage, dtype=np.int64)
    held = np.flatnonzero(storage >= 0)
    used, renumbered = np.unique(storage[held], return_inverse=True)
    storage[held] = renumbered
    nbytes = np.zeros(len(used), dtype=np.int64)
    device = np.zeros(len(used), dtype=np.int64)
    np.maximum.at(nbytes, renumbered, buffers.entry_nbytes[held])
    device[renumbered] = np.array(facts.device, dtype=np.int64)[facts.graph.entry_node[held]]
    # One workspace per device and colour, as large as its largest user needs.
    pools: dict[tuple[int, int], int] = {}
    sizes: list[int] = []
    workspace_storage = np.full(facts.graph.num_nodes, -1, dtype=np.int32)
    for nid in buffers.workspace_nodes:
        key = (facts.device[nid], color[nid] if color else 0)
        pool = pools.setdefault(key, len(pools))
        if pool == len(sizes):
            sizes.append(0)
        sizes[pool] = max(sizes[pool], buffers.workspace[nid])
        workspace_storage[nid] = len(used) + pool
    nbytes = np.concatenate([nbytes, np.array(sizes, dtype=np.int64)])
    device = np.concatenate([device, np.array([key[0] for key in pools], dtype=np.int64)])
    count = len(nbytes)
    # An allocation takes whole multiples of the alignment, which MXNet does not count.
    separate = buffers.options.compat == "mxnet" and not one_slab
    room = nbytes if separate else buffers.rounded(nbytes, device)
    slab = np.arange(count)
    offset = np.zeros(count, dtype=np.int64)
    slab_device, slab_nbytes = device, room
    if one_slab:
        slab_device, slab = np.unique(device, return_inverse=True)
        slab_nbytes = np.zeros(len(slab_device), dtype=np.int64)
        for index in range(len(slab_device)):
            mine = np.flatnonzero(slab == index)
            ends = np.cumsum(room[mine])
            offset[mine] = ends - room[mine]
            slab_nbytes[index] = ends[-1]
    return _finish(
        buffers,
        strategy,
        storage=storage,
        workspace_storage=workspace_storage,
        storage_slab=slab,
        storage_offset=offset,
        storage_nbytes=nbytes,
        slab_device=slab_device,
        slab_nbytes=slab_nbytes,
        after=(np.zeros(count + 1, dtype=np.int64), np.zeros(0, dtype=np.int32)),
        num_added_waits=added_waits,
        reported_bytes=reported_bytes,
    )


def arena(buffers: Buffers, color: Sequence[int] = ()) -> MemoryPlan:
    """The plan in which every buffer has an offset in one slab per device.

    With ``color`` (per node) reuse is to make branches wait for each other as little as it can in the memory that the
    colours would need each on their own: the sum of the most bytes alive of what nodes of one colour write. Orders too
    long for sets of steps get just that: the parts of the colours one behind the other, which share no bytes.
    """
    facts = buffers.facts
    count = len(buffers.nbytes)
    offset = np.zeros(count, dtype=np.int64)
    slab_of = np.full(len(facts.contexts), -1, dtype=np.int64)
    slab_device: list[int] = []
    slab_nbytes: list[int] = []
    later: list[NDArray[np.int64]] = []
    earlier: list[NDArray[np.int64]] = []
    order = buffers.order()
    for index, context in enumerate(facts.contexts):
        mine = np.flatnonzero((buffers.device == index) & (buffers.nbytes > 0))
        if not len(mine):
            if not np.any(buffers.device == index):
                continue
            slab_of[index] = len(slab_device)
            slab_device.append(index)
            slab_nbytes.append(0)
            continue
        alignment = buffers.options.alignment or alignment_of(context)
        slab_of[index] = len(slab_device)
        slab_device.append(index)
        top = room = 0
        parts = _parts(buffers, mine, color)
        if len(parts) > 1 and order is not None:
            room, parts = sum(_most_alive(buffers, part) for part in parts), [mine]
        for part in parts:
            lower, upper, size = buffers.first[part], buffers.last[part], buffers.nbytes[part]
            known = None if order is None else order.take(part)
            packed = _packed(lower, upper, size, alignment, buffers.options.effort, known, room)
            top = -(-top // alignment) * alignment
            offset[part] = packed.offsets + top
            top += int(packed.peak)
            pointers, rows = reuse_edges(lower, upper, size, packed.offsets)
            later.append(part[np.repeat(np.arange(len(part)), np.diff(pointers))])
            earlier.append(part[rows])
        slab_nbytes.append(top)
    workspace_storage = np.full(facts.graph.num_nodes, -1, dtype=np.int32)
    workspace_storage[buffers.workspace_nodes] = np.arange(buffers.num_groups, count)
    after = _rows(later, earlier, count)
    return _finish(
        buffers,
        "arena",
        storage=buffers.entry_group,
        workspace_storage=workspace_storage,
        storage_slab=slab_of[buffers.device] if count else np.zeros(0, dtype=np.int64),
        storage_offset=offset,
        storage_nbytes=buffers.nbytes,
        slab_device=np.array(slab_device, dtype=np.int64),
        slab_nbytes=np.array(slab_nbytes, dtype=np.int64),
        after=after,
        num_added_waits=None if order is None else order.waits(*after),
        reported_bytes=sum(slab_nbytes),
    )


def _parts(buffers: Buffers, mine: IntArray, color: Sequence[int]) -> list[IntArray]:
    """The buffers ``mine``, split by the colour of the node that writes them first."""
    if not color:
        return [mine]
    writers = np.array(buffers.facts.order, dtype=np.int64)[buffers.first[mine]]
    shades = np.array(color, dtype=np.int64)[writers]
    return [mine[shades == shade] for shade in np.unique(shades)]


def _most_alive(buffers: Buffers, part: IntArray) -> int:
    """Most bytes that these buffers of one device need at once."""
    place = np.zeros(len(part), dtype=np.int64)
    nbytes = buffers.rounded(buffers.nbytes[part], buffers.device[part])
    steps = len(buffers.facts.order)
    return int(live_bytes(buffers.first[part], buffers.last[part], nbytes, place, 1, steps).max())


def _packed(
    lower: IntArray, upper: IntArray, size: IntArray, alignment: int, effort: str, order: Precedence | None, room: int
) -> Packing:
    """Pack as hard as the option says (see :attr:`PlanOptions.effort`), and judge the result.

    Two live buffers in one place would corrupt results silently, and judging costs little beside packing. When the
    longer search errs, the quick packing stands and a warning says so.

    Raises:
        PlanError: the packing is wrong.
    """
    first = cast(Effort, "fast" if effort == "auto" else effort)
    packed = pack(lower, upper, size, alignment=alignment, effort=first, order=order, room=room)
    check_packing(lower, upper, size, packed.offsets, alignment=alignment)
    wasted = packed.peak - packed.lower_bound
    if effort == "auto" and not room and wasted > WORTH_A_SEARCH and wasted > packed.lower_bound // 200:
        harder = pack(lower, upper, size, alignment=alignment, effort="medium", order=order)
        try:
            check_packing(lower, upper, size, harder.offsets, alignment=alignment)
        except PlanError as error:
            warnings.warn(f"a search for better offsets failed and is not used: {error}", RuntimeWarning, stacklevel=2)
        else:
            packed = min(packed, harder, key=lambda candidate: candidate.peak)
    return packed


def alignment_of(context: Context) -> int:
    """Bytes to which offsets on a device are aligned."""
    return 64 if context.is_host else 256


def _rows(
    later: list[NDArray[np.int64]], earlier: list[NDArray[np.int64]], count: int
) -> tuple[IntArray, NDArray[np.int32]]:
    """Compressed rows of the pairs (later, earlier), ascending."""
    if not later:
        return np.zeros(count + 1, dtype=np.int64), np.zeros(0, dtype=np.int32)
    rows, values = np.concatenate(later), np.concatenate(earlier)
    order = np.lexsort((values, rows))
    pointers = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(rows, minlength=count), out=pointers[1:])
    return pointers, values[order].astype(np.int32)


def _finish(
    buffers: Buffers,
    strategy: str,
    *,
    storage: IntArray,
    workspace_storage: NDArray[np.int32],
    storage_slab: IntArray,
    storage_offset: IntArray,
    storage_nbytes: IntArray,
    slab_device: IntArray,
    slab_nbytes: IntArray,
    after: tuple[IntArray, NDArray[np.int32]],
    reported_bytes: int,
    num_added_waits: int | None = None,
) -> MemoryPlan:
    facts, found = buffers.facts, buffers.found
    workspace_nbytes = np.zeros(facts.graph.num_nodes, dtype=np.int64)
    for nid, nbytes in buffers.workspace.items():
        workspace_nbytes[nid] = nbytes
    return MemoryPlan(
        strategy=strategy,
        options=buffers.options,
        contexts=facts.contexts,
        entry_storage=storage.astype(np.int32),
        entry_nbytes=buffers.entry_nbytes,
        entry_kind=np.frombuffer(bytes(found.kind), dtype=np.int8).copy(),
        entry_first=buffers.entry_first.astype(np.int32),
        entry_last=buffers.entry_last.astype(np.int32),
        entry_inplace=np.array(found.inplace, dtype=np.int32),
        storage_slab=storage_slab.astype(np.int32),
        storage_offset=storage_offset,
        storage_nbytes=storage_nbytes,
        slab_device=slab_device.astype(np.int32),
        slab_nbytes=slab_nbytes,
        workspace_nbytes=workspace_nbytes,
        workspace_storage=workspace_storage,
        after_ptr=after[0],
        after_storages=after[1],
        num_added_waits=num_added_waits,
        lower_bound=buffers.lower_bound(),
        unshared_bytes=buffers.unshared(),
        reported_bytes=reported_bytes,
        labels=GraphLabels(facts.graph, facts.order, facts.shapes, facts.dtypes, found),
        external_bytes=facts.external_bytes,
    )
