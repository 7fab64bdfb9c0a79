"""Text reports of plans: the buffers at the peak, differences of two plans, memory outside the plan.

Every function reads a finished plan; any thread may call it.
"""

from __future__ import annotations

import numpy as np

from weftplan.device import cublas
from weftplan.device.amounts import amount, counted
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.storage_assignment import Kind
from weftplan.report.plan_buffers import alive_at, peak_step, timeline


def summary(plan: MemoryPlan, limit: int = 10) -> str:
    """Return the plan as text: totals, devices, kinds of entries, and the buffers alive at the peak."""
    step = peak_step(plan)
    steps = len(plan.labels.steps)
    lines = [
        f"plan: strategy {plan.strategy}, {steps} steps, {len(plan.entry_nbytes)} entries, "
        f"{plan.num_storages} storages in {counted(plan.num_slabs, 'allocation')}",
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
        node_text = (
            f"{plan.labels.node_op(plan.labels.steps[step])} ({plan.labels.node_names[plan.labels.steps[step]]!r})"
        )
        lines.append(f"alive at the peak, step {step} of {steps}, {node_text}:")
        for item in alive_at(plan, step, limit):
            kind = "scratch" if item.use == "scratch" else f"{item.dtype} {item.shape}"
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


def story(plan: MemoryPlan) -> str:
    """Describe the step with the most live bytes in two sentences.

    >>> from weftplan import models
    >>> print(story(models.get("mlp").plan(data=(32, 784))))
    At most 41.25 KiB are in use, at 1 of 12 steps: step 9, which runs fc2_backward. The largest part of it is \
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
    use, nbytes = max(by_use.items(), key=lambda pair: pair[1])
    node_name = plan.labels.node_names[plan.labels.steps[step]]
    return (
        f"At most {amount(top)} are in use, at {lasts:,} of {len(alive):,} steps: step {step:,}, which runs "
        f"{node_name}. The largest part of it is {_IN_WORDS.get(use, use)} ({100 * nbytes / top:.0f} %); "
        f"the largest buffer, {buffers[0].name}, is {100 * buffers[0].nbytes / top:.0f} % of it."
    )


def reuse(plan: MemoryPlan) -> str:
    """Return the number and the cost of order edges that reuse of memory adds, in words."""
    text = f"{plan.num_reuse_edges} order edges from reuse"
    if not plan.num_reuse_edges and plan.num_added_waits:
        text += f"; {plan.num_added_waits} more between users of one block that are not ordered anyway"
    elif plan.num_reuse_edges and plan.num_added_waits is not None:
        text += f", {plan.num_added_waits} of them between nodes that are not ordered anyway"
    return text


def left_out(plan: MemoryPlan) -> str:
    """Return the memory that a plan's figures exclude, in words."""
    absent = [
        "" if "optimizer_states" in plan.external_bytes else "optimizer states",
        "" if plan.options.workspaces else "scratch memory of operators",
        ""
        if "kvstore_stored" in plan.external_bytes or "host_copies" in plan.external_bytes
        else "buffers of the kvstore",
        "the input pipeline",
        "the interpreter and its libraries",
        "slack of the storage pool",
        f"and on a GPU {_of_libraries(plan)}",
    ]
    return f"Not in these figures: {', '.join(filter(None, absent))}."


def _of_libraries(plan: MemoryPlan) -> str:
    """Return the memory that CUDA's libraries allocate and no figure contains."""
    if not any(context.device_type == "gpu" for context in plan.contexts):
        return "the CUDA context and workspaces inside cuBLAS and cuDNN"
    text = "the CUDA context and workspaces inside cuDNN"
    if not plan.external_bytes.get("cublas_workspaces"):
        text += " and cuBLAS"
    if cublas.is_reproducible():
        return text
    return f"{text} ({cublas.VARIABLE} is set to a value with which products may vary from run to run)"


def compare(plan: MemoryPlan, other: MemoryPlan) -> str:
    """Return a table that compares two plans, with the ratio of ``other`` to ``plan``."""
    rows = [("", plan.strategy, other.strategy, "")]
    for name in ("peak", "lower_bound", "unshared_bytes", "total", "num_storages", "num_slabs", "num_reuse_edges"):
        a, b = getattr(plan, name), getattr(other, name)
        rows.append((name.replace("_", " "), f"{a:,}", f"{b:,}", f"{b / a:.3f}" if a else ""))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}".rstrip()
        for row in rows
    )


def _row(name: str, nbytes: int, of: int = 0, note: str = "") -> str:
    remark = f"  ({note.format(of / nbytes)})" if note and nbytes else ""
    return f"{name:<20}{nbytes:>18,} bytes{remark}"
