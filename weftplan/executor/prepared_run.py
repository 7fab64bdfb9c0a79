"""The prepared run of an executor: its calls at the present addresses of planned memory, cut into segments.

An executor prepares its run before the first forward, and again after planned memory has moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from weftplan import engine
from weftplan.engine.streams import compute_streams
from weftplan.engine.var import Var
from weftplan.executor.memory import PlannedMemory
from weftplan.executor.prepared_calls import PreparedStep, StepBuilder, crossings
from weftplan.executor.segments import StepSegment, make_segments, may_fence
from weftplan.ndarray import NDArray
from weftplan.planner import PlannedGraph


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """Steps and segments of the two parts of a run."""

    forward_steps: Sequence[PreparedStep]
    backward_steps: Sequence[PreparedStep]
    forward_segments: Sequence[StepSegment]
    backward_segments: Sequence[StepSegment]
    fence_vars: Sequence[Var]
    """Vars that order a run after all earlier operations on its addresses: of the pool and of planned outputs."""
    fences_itself: bool
    """Whether the first forward segment writes :attr:`fence_vars`, so that forward needs no fence operation."""
    random: bool
    """Whether a step draws random numbers, so that each forward takes a new key."""


def prepare_run(
    planned: PlannedGraph,
    memory: PlannedMemory,
    external: Mapping[int, NDArray],
    outputs: Sequence[NDArray],
    gradients: Sequence[NDArray | None],
    *,
    limits: tuple[bool, int, int],
    overlaps: bool,
) -> PreparedRun:
    """Prepare the calls of a run and cut them into segments.

    Args:
        planned: graph and plan.
        memory: the memory of the planned storages; all its chunks are in place.
        external: arrays by entry id that the plan does not place.
        outputs: arrays of the outputs.
        gradients: arrays of the arguments' gradients.
        limits: the result of :func:`bulk_limits` at bind.
        overlaps: whether storages of the plan share addresses, so that runs need a fence.
    """
    builder = StepBuilder(planned, memory, dict(external))
    steps = [builder.build(nid) for nid in planned.order]
    inputs = {id(array.var) for array in external.values()}
    planned_outputs = [array.var for array in outputs if id(array.var) not in inputs]
    _, fence_vars = engine.dedupe([], [memory.pool.var, *planned_outputs])
    nbytes = {id(array.var): array.nbytes for array in gradients if array is not None}

    def gradient_bytes(step: PreparedStep) -> int:
        return sum(nbytes.get(id(var), 0) for var in step.writes)

    bulk, forward_limit, backward_limit = limits
    leave, enter = crossings(planned)
    cut = partial(
        make_segments,
        bulk=bulk,
        ends_after=leave,
        begins_at=enter,
        graphs=memory.graphs,
        branches=builder.seconds if compute_streams(engine.get(), planned.devices) > 1 else None,
    )
    forward, backward = steps[: planned.num_forward_nodes], steps[planned.num_forward_nodes :]
    forward_segments = cut(forward, limit=forward_limit)
    backward_segments = cut(backward, limit=backward_limit, ready=gradient_bytes)
    fences_itself = overlaps and may_fence(forward_segments, memory.pool.var)
    if fences_itself:
        forward_segments[0].write_too(fence_vars)
    random = any(step.node.op is not None and step.node.op.random for step in steps)
    return PreparedRun(forward, backward, forward_segments, backward_segments, fence_vars, fences_itself, random)
