"""Counts of a training step on the CuPy stand-in: launches per node, host waits, memory outside the plan.

Tests and ``bench/bench_gpu.py`` use them.
"""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import weftplan as mx
from tests.standin_cupy import meter
from weftplan import device


class Counts(NamedTuple):
    """Counts of one training step, forward and backward; only ``beside`` is for two steps."""

    launches: dict[str, list[int]]
    """Numbers of launches of each node, by operator."""
    waits: int
    """Number of host waits inside the step; the final wait does not count."""
    beside: int
    """Bytes that CuPy allocated outside the plan in two steps, from storage or its own pool."""
    atomics: int
    planned: int
    """Peak of the memory plan in bytes; ``allocated`` is the number of bytes that the executor allocated."""
    allocated: int

    @property
    def total(self) -> int:
        """Return the number of launches of all nodes."""
        return sum(map(sum, self.launches.values()))

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return sum(map(len, self.launches.values()))

    @property
    def mean(self) -> float:
        """Return the mean number of launches per node."""
        return self.total / self.nodes

    @property
    def worst(self) -> str:
        """Return the operator of the node with the most launches."""
        return max(self.launches, key=lambda op: max(self.launches[op]))

    @property
    def most(self) -> int:
        """Return the largest number of launches of a node."""
        return max(self.launches[self.worst])


def counted(network: Any, shapes: dict[str, Any], context: Any, *, dry: bool = True) -> Counts:
    """Run two training steps of ``network`` on a stand-in context; return their counts.

    Arrays without an entry in ``shapes`` get gradients. With ``dry`` nothing is computed, so that networks may be
    large; operators that inspect their values need False.
    """
    meter.dry = dry
    try:
        return _counted(network, shapes, context)
    finally:
        meter.dry = False


def _counted(network: Any, shapes: dict[str, Any], context: Any) -> Counts:
    where: Any = device.get(context)
    where.temporaries.release()
    before = where.temporaries.reserved
    requests = {name: "null" if name in shapes else "write" for name in network.list_arguments()}
    executor = network.simple_bind(context, grad_req=requests, **shapes)
    heads = [mx.nd.ones(shape, ctx=context) for shape in network.infer_shape(**shapes)[1]]
    mx.nd.waitall()
    meter.reset()
    for _ in range(2):
        meter.syncs.clear()
        executor.forward(is_train=True)
        executor.backward(heads)
        mx.nd.waitall()
    waits, atomics = sum(meter.syncs.values()), sum(meter.atomics.values())
    meter.syncs.clear()
    mx.nd.waitall()  # the final wait of a step does not count
    waits -= sum(meter.syncs.values())
    beside = meter.temporary_bytes + where.temporaries.reserved - before
    launches = collections.defaultdict(list)
    with where.new_stream() as stream:
        for segment in (*executor._prepare_once().forward_segments, *executor._prepare_once().backward_segments):
            for step in segment.steps:
                meter.reset()
                if step.bind is not None:
                    step.bind(executor._run)()
                launches[step.node.op.name].append(meter.total)
        stream.synchronize()  # the engine does not wait for this stream
    return Counts(dict(launches), waits, beside, atomics, executor.memory_plan.peak, executor.allocated_bytes)
