"""A race detector for executors: it lists unordered operations that touch the same bytes.

It shares no code with the planner. It reads the bytes of an operation from the arrays that its kernel gets, and the
order of operations from the vars of each push: an operation runs after the writers of the vars that it reads, and after
all users of the vars that it writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weftplan.executor.prepared_calls import PreparedStep

Range = tuple[int, int]
"""(address, end address)."""


def races(executor: Any, runs: int = 2, *, pushed: bool = False) -> list[str]:
    """Return the pairs of unordered operations of ``runs`` runs that touch the same bytes, if at least one writes them.

    Every step counts as one operation, as without bulk execution, which orders fewer operations than larger segments
    do.

    Args:
        pushed: compare the pushed segments instead; a segment runs its steps in sequence.
    """
    executor._prepare_once()
    steps = [*executor._prepare_once().forward_steps, *executor._prepare_once().backward_steps]
    segments = [*executor._prepare_once().forward_segments, *executor._prepare_once().backward_segments]
    program: list[tuple[str, list[Any], list[Any], list[Range], list[Range]]] = []
    for _ in range(runs):
        if executor._overlaps and not (pushed and executor._prepare_once().fences_itself):
            program.append(("fence", [], executor._prepare_once().fence_vars, [], []))
        for one in segments if pushed else steps:
            touched = [_touched(executor, step) for step in (one.steps if pushed else [one]) if step.bind is not None]
            if touched:  # segments without kernels are not pushed
                name = one.name if pushed else one.node.name
                ranges = [[r for both in touched for r in both[k]] for k in (0, 1)]
                program.append((name, one.reads, one.writes, *ranges))
    before: list[int] = []
    writer: dict[int, int] = {}
    users: dict[int, int] = {}
    for number, (_, read_vars, write_vars, _, _) in enumerate(program):
        waits = 0
        for var in read_vars:
            waits |= writer.get(id(var), 0)
        for var in write_vars:
            waits |= writer.get(id(var), 0) | users.get(id(var), 0)
        reached = waits
        for second in _members(waits):
            reached |= before[second]
        before.append(reached)
        for var in read_vars:
            users[id(var)] = users.get(id(var), 0) | 1 << number
        for var in write_vars:
            writer[id(var)], users[id(var)] = 1 << number, 0
    results = []
    for later, (name, _, _, reads, writes) in enumerate(program):
        for earlier in range(later):
            if before[later] >> earlier & 1:
                continue
            second, _, _, other_reads, other_writes = program[earlier]
            if _meet(writes, other_writes) or _meet(writes, other_reads) or _meet(reads, other_writes):
                results.append(f"{second} and {name}")
    return results


def _touched(executor: Any, step: PreparedStep) -> tuple[list[Range], list[Range]]:
    """Return the bytes that a step may read, and those that it may write."""
    op = step.node.op
    assert op is not None
    reads = [_range(array.raw()) for array in step.inputs if array is not None]
    writes = [_range(array.raw()) for array in step.outputs if array is not None]
    writes += [_range(array.raw()) for i in op.aux if (array := step.inputs[i]) is not None]
    scratch = executor._memory.workspace(step.nid)
    if scratch is not None:
        start = _range(scratch[0].raw)[0]
        writes.append((start, start + scratch[1]))
    return reads, writes


def _range(raw: Any) -> Range:
    """Return the first address of an array and the address after its last byte."""
    start = raw.ctypes.data
    return start, start + raw.nbytes


def _meet(some: list[Range], others: list[Range]) -> bool:
    """Return whether a range of ``some`` overlaps a range of ``others``."""
    return any(a < d and c < b for a, b in some for c, d in others)


def _members(numbers: int) -> Iterator[int]:
    """Yield the positions of the bits that are set in ``numbers``, lowest first."""
    while numbers:
        lowest = numbers & -numbers
        yield lowest.bit_length() - 1
        numbers ^= lowest
