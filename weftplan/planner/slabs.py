"""Placement: assign slabs and offsets to buffers and build the :class:`~weftplan.planner.memory_plan.MemoryPlan`.

:func:`blocks` places storages without overlap and adds one workspace per device and colour. :func:`arena` assigns to
every group of in-place entries and to every workspace an offset in one slab per device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.planner.buffers import Buffers, alignment_of, renumbered
from weftplan.planner.memory_plan import Labels, MemoryPlan
from weftplan.planner.options import PlanOptions
from weftplan.planner.packing import Packing, check_packing, pack, reuse_edges
from weftplan.planner.packing.api import Effort
from weftplan.planner.packing.reuse import Precedence, compressed_rows
from weftplan.planner.program import IntArray


class Packer(Protocol):
    """A function with the interface of :func:`weftplan.planner.pack`; :func:`judged` checks its result."""

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
        """Assign an offset to every buffer; the packing may grow up to ``room`` bytes to avoid waits."""
        ...


def blocks(
    buffers: Buffers, strategy: str, *, reported_bytes: int, color: Sequence[int], added_waits: int | None
) -> tuple[int, Callable[[], MemoryPlan]]:
    """Return the bytes of the plan with disjoint storages, and a function that builds the plan, which takes longer.

    With the strategies ``match_range`` and ``none``, each storage is a separate allocation. With any other strategy of
    the options, storages are stacked in one slab per device, so that executors with other shapes can share the slab.
    """
    program = buffers.program
    storage, used = renumbered(buffers.assignment.storage)
    nbytes, device = [0] * used, [0] * used
    for e, k in enumerate(storage):
        if k >= 0:
            nbytes[k] = max(nbytes[k], program.nbytes[e])
            device[k] = program.device[program.graph.entry_node[e]]
    # One workspace per device and colour, sized for its largest user.
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
    shares_slab = buffers.options.strategy not in ("match_range", "none")
    # Allocations are rounded up to the alignment; MXNet does not count the rounding.
    separate = buffers.options.compat == "mxnet" and not shares_slab
    reserved = nbytes if separate else buffers.rounded(nbytes, device)

    def plan() -> MemoryPlan:
        count = len(nbytes)
        slab, offset = np.arange(count), np.zeros(count, dtype=np.int64)
        slab_device, slab_nbytes = np.array(device, dtype=np.int64), np.array(reserved, dtype=np.int64)
        if shares_slab:
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

    return sum(reserved), plan


def arena(buffers: Buffers, color: Sequence[int], *, name: str = "arena", packer: Packer = pack) -> MemoryPlan:
    """Return the plan that assigns every buffer an offset in one slab per device.

    With several colours (``color`` is per node) the packer minimizes waits between branches. It may use as much memory
    as separate slabs per colour would need: the sum over colours of the peak of live bytes of that colour's buffers. If
    the order is too long for sets of steps, the colours are packed separately, one above the other, and share no bytes.
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
        top = headroom = 0
        parts = _parts(buffers, mine, color)
        if len(parts) > 1 and order is not None:
            rounded = np.zeros((len(parts), count), dtype=np.int64)
            for row, part in zip(rounded, parts, strict=True):
                row[part] = buffers.rounded(buffers.nbytes[part].tolist(), buffers.device[part].tolist())
            headroom, parts = sum(int(buffers.live(row).max()) for row in rounded), [mine]
        for part in parts:
            packed, reused = _packed(buffers, part, alignment=alignment, order=order, room=headroom, pack=packer)
            top = -(-top // alignment) * alignment
            offset[part] = packed.offsets + top
            top += int(packed.peak)
            edges.append((part, *reused))
        slab_nbytes.append(top)
    workspace_storage = np.full(program.graph.num_nodes, -1, dtype=np.int32)
    workspace_storage[buffers.workspace_nodes] = np.arange(buffers.num_groups, count)
    pointers, rows = _concatenated(edges, count)
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


def _concatenated(edges: Sequence[tuple[IntArray, IntArray, IntArray]], count: int) -> tuple[IntArray, IntArray]:
    """Return the reuse edges of all parts as one compressed row matrix over ``count`` buffers.

    Each part is given as (its buffers, row pointers, earlier buffers), numbered within the part.
    """
    if len(edges) == 1 and len(edges[0][0]) == count:
        return edges[0][1:]
    later = [part.repeat(pointers[1:] - pointers[:-1]) for part, pointers, _ in edges]
    earlier = [part[rows] for part, _, rows in edges]
    none = np.zeros(0, dtype=np.int64)
    return compressed_rows(np.concatenate([none, *later]), np.concatenate([none, *earlier]), count)


def _by_device(device: IntArray) -> tuple[IntArray, IntArray]:
    """Return (used devices in ascending order, index of each item's device among them)."""
    used = np.bincount(device)
    return used.nonzero()[0], (used > 0).cumsum()[device] - 1


def _parts(buffers: Buffers, mine: IntArray, color: Sequence[int]) -> list[IntArray]:
    """Split the buffers ``mine`` by the colour of their first writer."""
    if not color:
        return [mine]
    writers = np.array(buffers.program.order, dtype=np.int64)[buffers.first[mine]]
    shades = np.array(color, dtype=np.int64)[writers]
    return [mine[shades == shade] for shade in np.unique(shades)]


def _packed(
    buffers: Buffers, part: IntArray, *, alignment: int, order: Precedence | None, room: int, pack: Packer
) -> tuple[Packing, tuple[IntArray, IntArray]]:
    """Pack with the effort of the options, check the result, and return it with its `reuse_edges`.

    Every packing is checked, because overlapping live buffers would corrupt results silently and a check is cheap
    compared with packing. If the longer search of effort ``auto`` returns an invalid packing, the quick packing is used
    and a warning is issued.

    Raises:
        PlanError: the packing is invalid.
    """
    lower, upper, size, precedence = buffers.first, buffers.last, buffers.nbytes, order
    if len(part) < len(size):
        lower, upper, size, precedence = (
            lower[part],
            upper[part],
            size[part],
            None if order is None else order.take(part),
        )
    effort = buffers.options.effort
    quick_effort = cast(Effort, "fast" if effort == "auto" else effort)
    packed = pack(lower, upper, size, alignment=alignment, effort=quick_effort, order=precedence, room=room)
    edges = judged(lower, upper, size, packed.offsets, alignment=alignment)
    wasted = packed.peak - packed.lower_bound
    if effort == "auto" and not room and wasted > packed.lower_bound // 200:
        harder = pack(lower, upper, size, alignment=alignment, effort="normal", order=precedence)
        try:
            later_waits = judged(lower, upper, size, harder.offsets, alignment=alignment)
        except PlanError as error:
            warnings.warn(f"a search for better offsets failed and is not used: {error}", RuntimeWarning, stacklevel=2)
        else:
            if harder.peak < packed.peak:
                packed, edges = harder, later_waits
    return packed, edges


def judged(
    lower: IntArray, upper: IntArray, size: IntArray, offsets: IntArray, *, alignment: int
) -> tuple[IntArray, IntArray]:
    """Return the `reuse_edges` of a packing after checking it, in a twentieth of the time of `check_packing`.

    A packing is valid if all last holders of a buffer's bytes are dead at the buffer's birth. Proof: assume two live
    buffers that overlap on a byte; of all such pairs on that byte take one whose later birth is earliest. At that
    birth the earlier buffer is still the byte's last holder: any buffer that took the byte in between would form a
    pair with an earlier later birth.

    Raises:
        PlanError: the packing is invalid.
    """
    if int(offsets.min(initial=0)) >= 0 and not (offsets % alignment).any():
        pointers, earlier = reuse_edges(lower, size, offsets)
        later = np.arange(len(size)).repeat(pointers[1:] - pointers[:-1])
        if not (upper[earlier] > lower[later]).any():
            return pointers, earlier
    check_packing(lower, upper, size, offsets, alignment=alignment)
    raise PlanError("the packing is wrong, since its buffers take over bytes that others still need")


class _Common(TypedDict):
    """Fields of a plan that do not depend on addresses."""

    options: PlanOptions
    contexts: tuple[Context, ...]
    entry_nbytes: IntArray
    entry_kind: NDArray[np.int8]
    entry_first: NDArray[np.int32]
    entry_last: NDArray[np.int32]
    entry_inplace: NDArray[np.int32]
    workspace_nbytes: IntArray
    lower_bound: int
    unshared_bytes: int
    labels: Labels
    external_bytes: Mapping[str, int]


def _common(buffers: Buffers) -> _Common:
    """Return the fields of a plan that do not depend on addresses, by name."""
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
