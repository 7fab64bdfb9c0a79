"""Branches of a graph as chains of steps, so that a device with several compute streams overlaps them.

A segment is one operation of the engine and runs on one stream. Consecutive steps of a graph may belong to branches
that need nothing of each other: in one segment they would run one after the other. :func:`chains` regroups steps:

    a step joins the chain whose last step it needs, if it waits for nothing that the chain does not wait for anyway
    any other step begins a chain; a chain ends after each of its steps that such a step needs

So no step waits longer than in a segment of its own, but for chains too short to be worth an operation. Each chain
follows all chains that it needs. Pure functions of the vars that steps use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from weftplan.device.context import Context
from weftplan.engine import FnProperty

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
    groups = _grouped(steps, above, masks)
    groups = _cut(groups, above, masks)
    return [[steps[number] for number in group] for group in _joined(steps, groups, above, masks, seconds)]


def _grouped(steps: Sequence[BranchStep], above: Sequence[set[int]], masks: Sequence[int]) -> list[list[int]]:
    """The longest chains, by number of their first step."""
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
        if joined and _alike(steps, joined[-1], group):
            first, last = group[0], group[-1]
            others = users[-1] - {first}
            stem = lengths[-1] < LEAST_S and first in users[-1] and all(masks[one] >> last & 1 for one in others)
            tail = length < LEAST_S and not masks[last] & ~_covered(joined[-1], masks) & ~_bits(group)
            if stem or tail:
                joined[-1] += group
                lengths[-1] += length
                users[-1] = others | waits
                continue
        joined.append(list(group))
        lengths.append(length)
        users.append(waits)
    return joined


def _bits(group: list[int]) -> int:
    return sum(1 << number for number in group)


def _covered(group: list[int], masks: Sequence[int]) -> int:
    """A mask of a chain's members and all that they wait for."""
    mask = _bits(group)
    for number in group:
        mask |= masks[number]
    return mask


def _alike(steps: Sequence[BranchStep], a: list[int], b: list[int]) -> bool:
    """Whether two chains may be one operation."""
    return steps[a[-1]].copies is None and steps[b[0]].copies is None and steps[a[-1]].context == steps[b[0]].context
