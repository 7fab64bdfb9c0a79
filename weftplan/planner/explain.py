"""Plans in words and numbers: who is alive when, what fills the peak, how two plans differ.

Everything here reads a finished plan. A *run* is what a storage holds without a break: entries computed in place of
each other, or the scratch of one node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weftplan.ops.schema import DType, Shape
from weftplan.planner.buffer_table import last_reader, use_of
from weftplan.planner.buffer_table import scratch as scratch_of
from weftplan.planner.graph import IntArray
from weftplan.planner.inplace import Kind
from weftplan.planner.layout import Layout


@dataclass(frozen=True, slots=True)
class Alive:
    """One buffer that is alive at some step."""

    name: str
    nbytes: int
    shape: Shape
    dtype: DType | None
    """None for scratch."""
    op: str
    """Operator that makes it."""
    first: int
    last: int
    last_reader: str
    """Name of the node that reads it last; ``(caller)`` for an output."""
    use: str = "scratch"
    """What it is for, as in :class:`~weftplan.planner.buffer_table.Bar`."""


@dataclass(frozen=True, slots=True)
class Runs:
    """All runs of a plan as arrays."""

    storage: IntArray
    first: IntArray
    last: IntArray
    nbytes: IntArray
    device: IntArray


def runs(plan: Layout) -> Runs:
    """The runs of ``plan``, those of entries first (by storage, then time), then those of scratch."""
    held = np.flatnonzero(plan.entry_storage >= 0)
    held = held[np.lexsort((plan.entry_first[held], plan.entry_storage[held]))]
    storage = plan.entry_storage[held].astype(np.int64)
    first = plan.entry_first[held].astype(np.int64)
    last = plan.entry_last[held].astype(np.int64)
    # A run ends where every earlier entry of the storage is dead: make lifetimes of different storages disjoint, so
    # that one running maximum serves all of them.
    span = int(last.max(initial=0)) + 1
    reach = np.maximum.accumulate(last + storage * span) if len(held) else last
    begins = np.ones(len(held), dtype=bool)
    begins[1:] = (first + storage * span)[1:] >= reach[:-1]
    starts = np.flatnonzero(begins)
    if len(held):
        run_last = np.maximum.reduceat(last, starts)
        run_bytes = np.maximum.reduceat(plan.entry_nbytes[held], starts)
    else:
        run_last = run_bytes = np.zeros(0, dtype=np.int64)
    scratch, moment = scratch_of(plan)
    storages = np.concatenate([storage[starts], plan.workspace_storage[scratch].astype(np.int64)])
    return Runs(
        storage=storages,
        first=np.concatenate([first[starts], moment]),
        last=np.concatenate([run_last, moment + 1]),
        nbytes=np.concatenate([run_bytes, plan.workspace_nbytes[scratch]]),
        device=plan.slab_device[plan.storage_slab[storages]].astype(np.int64),
    )


def timeline(plan: Layout, device: int | None = None) -> NDArray[np.int64]:
    """Bytes alive at each step, on device number ``device`` of the plan or on all of them."""
    found = runs(plan)
    chosen = slice(None) if device is None else found.device == device
    change = np.zeros(len(plan.labels.steps) + 1, dtype=np.int64)
    np.add.at(change, found.first[chosen], found.nbytes[chosen])
    np.subtract.at(change, found.last[chosen], found.nbytes[chosen])
    return np.cumsum(change)[:-1]


def alive_at(plan: Layout, step: int, limit: int | None = None) -> list[Alive]:
    """Buffers alive at ``step``, the largest first; of entries that share memory, the one written last."""
    labels = plan.labels
    alive = np.flatnonzero((plan.entry_storage >= 0) & (plan.entry_first <= step) & (step < plan.entry_last))
    newest: dict[int, int] = {}
    for eid in alive[np.argsort(plan.entry_first[alive], kind="stable")].tolist():
        newest[int(plan.entry_storage[eid])] = eid
    rows = []
    end = len(labels.steps)
    for eid in newest.values():
        last = int(plan.entry_last[eid])
        rows.append(
            Alive(
                name=labels.name(eid),
                nbytes=int(plan.entry_nbytes[eid]),
                shape=labels.shape(eid),
                dtype=labels.dtype(eid),
                op=labels.node_op(labels.maker(eid)),
                first=int(plan.entry_first[eid]),
                last=last,
                last_reader=last_reader(plan, eid),
                use=use_of(plan, labels.node_name(labels.maker(eid)), int(plan.entry_first[eid])),
            )
        )
    if 0 <= step < end:
        nid = labels.steps[step]
        scratch = int(plan.workspace_nbytes[nid])
        if scratch:
            name = labels.node_name(nid)
            rows.append(
                Alive(f"{name} (workspace)", scratch, (scratch,), None, labels.node_op(nid), step, step + 1, name)
            )
    rows.sort(key=lambda row: (-row.nbytes, row.name))
    return rows[:limit]


def peak_step(plan: Layout) -> int:
    """The first step at which most bytes are alive; 0 for an empty plan."""
    alive = timeline(plan)
    return int(alive.argmax()) if len(alive) else 0


def summary(plan: Layout, limit: int = 10) -> str:
    """The plan as text: totals, devices, kinds of entries, and what is alive at the peak."""
    step = peak_step(plan)
    steps = len(plan.labels.steps)
    lines = [
        f"plan: strategy {plan.strategy}, {steps} steps, {len(plan.entry_nbytes)} entries, "
        f"{plan.num_storages} storages in {plan.num_slabs} allocations",
        _row("peak", plan.peak),
        _row("  lower bound", plan.lower_bound, plan.peak, "the plan is {:.3f} times it"),
        _row("  without sharing", plan.unshared_bytes, plan.peak, "the plan is {:.3f} times it"),
    ]
    lines += [_row(f"  on {context}", nbytes) for context, nbytes in plan.peak_by_device.items()]
    for purpose, nbytes in plan.external_bytes.items():
        if nbytes:
            lines.append(_row(purpose.replace("_", " "), nbytes))
    lines.append(_row("total", plan.total))
    counts = np.bincount(plan.entry_kind, minlength=len(Kind))
    kinds = ", ".join(f"{counts[kind]} {kind.name.lower()}" for kind in Kind if counts[kind])
    lines.append(f"entries: {kinds}; {reuse(plan)}")
    if steps:
        where = f"{plan.labels.node_op(plan.labels.steps[step])} ({plan.labels.node_name(plan.labels.steps[step])!r})"
        lines.append(f"alive at the peak, step {step} of {steps}, {where}:")
        for item in alive_at(plan, step, limit):
            kind = "scratch" if item.dtype is None else f"{item.dtype} {item.shape}"
            lines.append(
                f"  {item.nbytes:>15,}  {item.name}  {kind}, steps {item.first} to {item.last}, "
                f"last read by {item.last_reader}"
            )
    lines += [f"note: {note}" for note in plan.notes]
    lines.append(left_out(plan))
    return "\n".join(lines)


_IN_WORDS = {
    "gradients": "results of the backward part",
    "recomputed": "results that are computed again",
    "scratch": "scratch memory",
    "spilled": "results that wait on the host or came back",
}


def story(plan: Layout) -> str:
    """What happens at the peak, in two sentences.

    >>> from weftplan import models
    >>> print(story(models.get("mlp").plan(data=(32, 784))))
    The peak of 41.25 KiB lasts 1 of 12 steps: step 9, which runs fc2_backward. The largest part of it is \
results of the backward part (58 %); the largest buffer, fc2_backward_output0, is 39 % of it.
    """
    alive = timeline(plan)
    if not len(alive) or not alive.max():
        return "Nothing is planned: whatever the network computes is in memory that the caller brings."
    step = int(alive.argmax())
    top = int(alive[step])
    lasts = int((alive == top).sum())
    buffers = alive_at(plan, step)
    by_use: dict[str, int] = {}
    for item in buffers:
        by_use[item.use] = by_use.get(item.use, 0) + item.nbytes
    use, most = max(by_use.items(), key=lambda pair: pair[1])
    where = plan.labels.node_name(plan.labels.steps[step])
    return (
        f"The peak of {amount(top)} lasts {lasts:,} of {len(alive):,} steps: step {step:,}, which runs {where}. The "
        f"largest part of it is {_IN_WORDS.get(use, use)} ({100 * most / top:.0f} %); the largest buffer, "
        f"{buffers[0].name}, is {100 * buffers[0].nbytes / top:.0f} % of it."
    )


def reuse(plan: Layout) -> str:
    """How many order edges the reuse of memory makes, in words, and what they cost."""
    text = f"{plan.num_reuse_edges} order edges from reuse"
    if not plan.num_reuse_edges and plan.num_added_waits:
        text += f"; {plan.num_added_waits} more between users of one block that are not ordered anyway"
    elif plan.num_reuse_edges and plan.num_added_waits is not None:
        text += f", {plan.num_added_waits} of them between nodes that are not ordered anyway"
    return text


def left_out(plan: Layout) -> str:
    """What the figures of a plan do not contain, in words."""
    absent = [
        "" if "optimizer_states" in plan.external_bytes else "optimizer states",
        "" if plan.options.workspaces else "scratch memory of operators",
        ""
        if "kvstore_stored" in plan.external_bytes or "host_copies" in plan.external_bytes
        else "buffers of the kvstore",
        "the input pipeline",
        "the interpreter and its libraries",
        "slack of the storage pool",
        "and on a GPU the CUDA context and workspaces inside cuBLAS and cuDNN",
    ]
    return f"Not in these figures: {', '.join(filter(None, absent))}."


def compare(plan: Layout, other: Layout) -> str:
    """Two plans side by side, with the ratio of ``other`` to ``plan``."""
    rows = [("", plan.strategy, other.strategy, "")]
    for name in ("peak", "lower_bound", "unshared_bytes", "total", "num_storages", "num_slabs", "num_reuse_edges"):
        a, b = getattr(plan, name), getattr(other, name)
        rows.append((name.replace("_", " "), f"{a:,}", f"{b:,}", f"{b / a:.3f}" if a else ""))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}".rstrip()
        for row in rows
    )


def amount(nbytes: float) -> str:
    """A number of bytes for people, in powers of 1024.

    >>> amount(1536), amount(10)
    ('1.50 KiB', '10 B')
    """
    scale, unit = unit_of(nbytes)
    return f"{nbytes / scale:.2f} {unit}" if unit != "B" else f"{nbytes:.0f} B"


def unit_of(nbytes: float) -> tuple[int, str]:
    """The unit in which people read such a number of bytes, and how many bytes it has.

    >>> unit_of(5 << 20)
    (1048576, 'MiB')
    """
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(nbytes) >= 1024**power:
            return 1024**power, unit
    return 1, "B"


def _row(name: str, nbytes: int, of: int = 0, note: str = "") -> str:
    remark = f"  ({note.format(of / nbytes)})" if note and nbytes else ""
    return f"{name:<20}{nbytes:>18,} bytes{remark}"
