"""From buffers to slabs and offsets: a finished :class:`~weftplan.planner.memory_plan.MemoryPlan`.

:func:`blocks` gives every storage a slab of its own and every device one workspace per colour; :func:`arena` gives
every group of in-place entries and every workspace an offset in one slab per device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np

from weftplan.errors import PlanError
from weftplan.planner.buffers import Buffers, alignment_of, renumbered
from weftplan.planner.memory_plan import Labels, MemoryPlan
from weftplan.planner.packing import Packing, check_packing, pack, reuse_edges
from weftplan.planner.packing.api import Effort
from weftplan.planner.packing.reuse import Precedence, compressed_rows
from weftplan.planner.program import IntArray

WORTH_A_SEARCH = 1 << 20
"""Bytes above the lower bound that are worth a second, longer packing."""


class Packer(Protocol):
    """A function with the interface of :func:`weftplan.planner.pack`; :func:`judged` checks what it returns."""

    def __call__(
        self,
        lower: IntArray,
        upper: IntArray,
        size: IntArray,
        *,
        alignment: int,
        effort: Effort,
        order: Precedence | None,
        room: int = 0,
    ) -> Packing:
        """Give every buffer an offset; up to ``room`` bytes may go to reuse that lets no node wait for another."""
        ...


def blocks(
    buffers: Buffers, strategy: str, *, reported_bytes: int, color: Sequence[int], added_waits: int | None
) -> tuple[int, Callable[[], MemoryPlan]]:
    """Return the bytes of the plan with disjoint storages, and the function that makes it, which takes longer.

    Each storage is an allocation of its own, or they lie side by side: if the options ask for the best of several
    strategies, they are stacked in one slab per device, so that executors with other shapes can use it too.
    """
    program = buffers.program
    storage, used = renumbered(buffers.assignment.storage)
    nbytes, device = [0] * used, [0] * used
    for e, k in enumerate(storage):
        if k >= 0:
            nbytes[k] = max(nbytes[k], program.nbytes[e])
            device[k] = program.device[program.graph.entry_node[e]]
    # One workspace per device and colour, as large as its largest user needs.
    pools: dict[tuple[int, int], int] = {}
    workspace_storage = np.full(program.graph.num_nodes, -1, dtype=np.int32)
    for nid in buffers.workspace_nodes:
        key = (program.device[nid], color[nid] if color else 0)
        pool = pools.setdefault(key, len(nbytes))
        if pool == len(nbytes):
            nbytes.append(0)
            device.append(key[0])
        nbytes[pool] = max(nbytes[pool], buffers.workspace[nid])
        workspace_storage[nid] = pool
    one_slab = buffers.options.strategy not in ("match_range", "none")
    # An allocation takes whole multiples of the alignment, which MXNet does not count.
    separate = buffers.options.compat == "mxnet" and not one_slab
    room = nbytes if separate else buffers.rounded(nbytes, device)

    def plan() -> MemoryPlan:
        count = len(nbytes)
        slab, offset = np.arange(count), np.zeros(count, dtype=np.int64)
        slab_device, slab_nbytes = np.array(device, dtype=np.int64), np.array(room, dtype=np.int64)
        if one_slab:
            slab_device, slab = _by_device(slab_device)
            sizes, slab_nbytes = slab_nbytes, np.zeros(len(slab_device), dtype=np.int64)
            for index in range(len(slab_device)):
                mine = np.flatnonzero(slab == index)
                ends = np.cumsum(sizes[mine])
                offset[mine] = ends - sizes[mine]
                slab_nbytes[index] = ends[-1]
        return MemoryPlan(
            strategy=strategy,
            entry_storage=np.array(storage, dtype=np.int32),
            workspace_storage=workspace_storage,
            storage_slab=slab.astype(np.int32),
            storage_offset=offset,
            storage_nbytes=np.array(nbytes, dtype=np.int64),
            slab_device=slab_device.astype(np.int32),
            slab_nbytes=slab_nbytes,
            after_ptr=np.zeros(count + 1, dtype=np.int64),
            after_storages=np.zeros(0, dtype=np.int32),
            num_added_waits=added_waits,
            reported_bytes=reported_bytes,
            **_common(buffers),
        )

    return sum(room), plan


def arena(buffers: Buffers, color: Sequence[int], *, name: str = "arena", packer: Packer = pack) -> MemoryPlan:
    """Return the plan that gives every buffer an offset in one slab per device.

    With ``color`` (per node) reuse is to make branches wait for each other as little as it can in the memory that the
    colours would need each on their own: the sum over colours of the most live bytes that nodes of one colour write.
    Orders too long for sets of steps get just that: the parts of the colours one after another, which share no bytes.
    """
    program = buffers.program
    count = len(buffers.nbytes)
    offset = np.zeros(count, dtype=np.int64)
    slab_device, slab = _by_device(buffers.device)
    slab_nbytes: list[int] = []
    edges: list[tuple[IntArray, IntArray, IntArray]] = []
    order = buffers.order()
    for index in slab_device.tolist():
        mine = ((buffers.device == index) & (buffers.nbytes > 0)).nonzero()[0]
        alignment = buffers.options.alignment or alignment_of(program.contexts[index])
        top = room = 0
        parts = _parts(buffers, mine, color)
        if len(parts) > 1 and order is not None:
            rounded = np.zeros((len(parts), count), dtype=np.int64)
            for row, part in zip(rounded, parts, strict=True):
                row[part] = buffers.rounded(buffers.nbytes[part].tolist(), buffers.device[part].tolist())
            room, parts = sum(int(buffers.live(row).max()) for row in rounded), [mine]
        for part in parts:
            packed, reused = _packed(buffers, part, alignment=alignment, order=order, room=room, pack=packer)
            top = -(-top // alignment) * alignment
            offset[part] = packed.offsets + top
            top += int(packed.peak)
            edges.append((part, *reused))
        slab_nbytes.append(top)
    workspace_storage = np.full(program.graph.num_nodes, -1, dtype=np.int32)
    workspace_storage[buffers.workspace_nodes] = np.arange(buffers.num_groups, count)
    pointers, rows = _in_one(edges, count)
    return MemoryPlan(
        strategy=name,
        entry_storage=np.array(buffers.entry_group, dtype=np.int32),
        workspace_storage=workspace_storage,
        storage_slab=slab.astype(np.int32),
        storage_offset=offset,
        storage_nbytes=buffers.nbytes,
        slab_device=slab_device.astype(np.int32),
        slab_nbytes=np.array(slab_nbytes, dtype=np.int64),
        after_ptr=pointers,
        after_storages=rows.astype(np.int32),
        num_added_waits=None if order is None else order.waits(pointers, rows),
        reported_bytes=sum(slab_nbytes),
        **_common(buffers),
    )


def _in_one(edges: Sequence[tuple[IntArray, IntArray, IntArray]], count: int) -> tuple[IntArray, IntArray]:
    """The reuse edges of parts of ``count`` buffers, each with the numbers of its buffers, as those of all."""
    if len(edges) == 1 and len(edges[0][0]) == count:
        return edges[0][1:]
    later = [part.repeat(pointers[1:] - pointers[:-1]) for part, pointers, _ in edges]
    earlier = [part[rows] for part, _, rows in edges]
    none = np.zeros(0, dtype=np.int64)
    return compressed_rows(np.concatenate([none, *later]), np.concatenate([none, *earlier]), count)


def _by_device(device: IntArray) -> tuple[IntArray, IntArray]:
    """(devices in use, ascending; for each of these numbers the place of its device among them)."""
    used = np.bincount(device)
    return used.nonzero()[0], (used > 0).cumsum()[device] - 1


def _parts(buffers: Buffers, mine: IntArray, color: Sequence[int]) -> list[IntArray]:
    """The buffers ``mine``, split by the colour of the node that writes them first."""
    if not color:
        return [mine]
    writers = np.array(buffers.program.order, dtype=np.int64)[buffers.first[mine]]
    shades = np.array(color, dtype=np.int64)[writers]
    return [mine[shades == shade] for shade in np.unique(shades)]


def _packed(
    buffers: Buffers, part: IntArray, *, alignment: int, order: Precedence | None, room: int, pack: Packer
) -> tuple[Packing, tuple[IntArray, IntArray]]:
    """Pack as hard as the option says (see :attr:`PlanOptions.effort`), and judge the result; with its `reuse_edges`.

    Two live buffers in one place would corrupt results silently, and judging costs little compared with packing. If the
    longer search errs, the quick packing stands and a warning says so.

    Raises:
        PlanError: the packing is wrong.
    """
    lower, upper, size, known = buffers.first, buffers.last, buffers.nbytes, order
    if len(part) < len(size):
        lower, upper, size, known = lower[part], upper[part], size[part], None if order is None else order.take(part)
    effort = buffers.options.effort
    first = cast(Effort, "fast" if effort == "auto" else effort)
    packed = pack(lower, upper, size, alignment=alignment, effort=first, order=known, room=room)
    edges = judged(lower, upper, size, packed.offsets, alignment=alignment)
    wasted = packed.peak - packed.lower_bound
    if effort == "auto" and not room and wasted > WORTH_A_SEARCH and wasted > packed.lower_bound // 200:
        harder = pack(lower, upper, size, alignment=alignment, effort="normal", order=known)
        try:
            others = judged(lower, upper, size, harder.offsets, alignment=alignment)
        except PlanError as error:
            warnings.warn(f"a search for better offsets failed and is not used: {error}", RuntimeWarning, stacklevel=2)
        else:
            if harder.peak < packed.peak:
                packed, edges = harder, others
    return packed, edges


def judged(
    lower: IntArray, upper: IntArray, size: IntArray, offsets: IntArray, *, alignment: int
) -> tuple[IntArray, IntArray]:
    """The `reuse_edges` of a packing; they show whether it is right, in a twentieth of the time of `check_packing`.

    It is right if all last holders of a buffer's bytes are dead when the buffer is born. For take two buffers that live
    at once on a common byte, and of all such pairs on that byte a pair whose later birth comes first. At that birth the
    earlier buffer held the byte last: a buffer that took it was born between the two, while the earlier lived.

    Raises:
        PlanError: the packing is wrong.
    """
    if int(offsets.min(initial=0)) >= 0 and not (offsets % alignment).any():
        pointers, earlier = reuse_edges(lower, size, offsets)
        later = np.arange(len(size)).repeat(pointers[1:] - pointers[:-1])
        if not (upper[earlier] > lower[later]).any():
            return pointers, earlier
    check_packing(lower, upper, size, offsets, alignment=alignment)
    raise PlanError("the packing is wrong, since its buffers take over bytes that others still need")


def _common(buffers: Buffers) -> dict[str, Any]:
    """Return fields of a plan, by name, that do not depend on addresses."""
    program, assignment = buffers.program, buffers.assignment
    workspace_nbytes = np.zeros(program.graph.num_nodes, dtype=np.int64)
    for nid, nbytes in buffers.workspace.items():
        workspace_nbytes[nid] = nbytes
    return {
        "options": buffers.options,
        "contexts": program.contexts,
        "entry_nbytes": np.array(program.nbytes, dtype=np.int64),
        "entry_kind": np.array(assignment.kind, dtype=np.int8),
        "entry_first": np.array(buffers.entry_first, dtype=np.int32),
        "entry_last": np.array(buffers.entry_last, dtype=np.int32),
        "entry_inplace": np.array(assignment.inplace, dtype=np.int32),
        "workspace_nbytes": workspace_nbytes,
        "lower_bound": buffers.lower_bound,
        "unshared_bytes": buffers.unshared(),
        "labels": Labels(
            program.graph,
            program.order,
            shapes=program.shapes,
            dtypes=program.dtypes,
            inplace=assignment.inplace,
            skipped=assignment.skipped,
        ),
        "external_bytes": program.external_bytes,
    }
