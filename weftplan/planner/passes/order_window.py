"""Improve an order where its peak is: whole blocks where they can be solved, windows around the peak where not.

A node that is comparable with every other (all run before it, or after it, in any order) is a *bottleneck*: what has
run when it ends is the same in every order, so an order splits there into blocks that do not know each other. The peak
of the order is that of its highest blocks, so only those are worth a search; once one of them cannot be lowered, no
order can have a smaller peak, and the work ends.

A block that the search cannot finish is improved by windows: consecutive nodes around a peak step, put into their best
order, over and over while that lowers the peak or the number of steps at it.

All limits are counts of priced steps, never clocks, so that the same graph always gets the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from weftplan.planner.passes.order_model import Block, OrderModel
from weftplan.planner.passes.order_search import best_order, unavoidable
from weftplan.planner.passes.order_series_parallel import add_order

WINDOW = 10
"""Nodes of a window."""
WINDOW_WORK = 2000
"""Steps priced for one window; the down-sets of ten nodes are at most 1024, and safe moves skip most."""
LARGEST = 4000
"""Nodes of a block that is searched as a whole; its sets are bit masks, so memory is quadratic."""
RELAXATIONS = (0.0, 0.5, 0.9)
"""How far between what is unavoidable and the present peak an order is good enough, one attempt after the other."""

Reduce = Callable[[Block], None]
"""Adds order to a block without loss: see :mod:`weftplan.planner.passes.order_series_parallel`."""


def improve(
    model: OrderModel, order: Sequence[int], forward: int, reduce: Reduce | None = add_order
) -> tuple[list[int], bool]:
    """An order with a smaller peak, or the same; the first ``forward`` steps stay in front.

    Returns the order and whether its peak is proven to be the least of the model, over all orders that keep the parts
    apart. Work is at most proportional to the number of nodes.
    """
    chosen = list(order)
    budget = 60_000 + 100 * len(chosen)
    while budget > 0:
        held, during = model.profile(chosen)
        if not during:
            return chosen, True
        peak = max(during)
        budget -= len(chosen)
        for start, end in _blocks(model, chosen, forward):
            if max(during[start:end]) < peak:
                continue
            nodes, proven, work = _lower(model, chosen, start, end, held[start], peak, budget, reduce)
            budget -= work
            if nodes is None:
                return chosen, proven
            chosen[start:end] = nodes
    return chosen, False


def _lower(
    model: OrderModel,
    order: Sequence[int],
    start: int,
    end: int,
    base: int,
    peak: int,
    budget: int,
    reduce: Reduce | None,
) -> tuple[list[int] | None, bool, int]:
    """(nodes of the block in an order with less than ``peak`` bytes, or None; whether none exists; steps priced)."""
    spent = 0
    if end - start <= LARGEST:
        block = Block.of(model, order, start, end, base)
        if reduce is not None:
            reduce(block)
        least = unavoidable(block)
        for relaxation in RELAXATIONS:
            found = best_order(block, peak, budget // 4, least + int(relaxation * (peak - 1 - least)))
            spent += found.work
            if found.order is not None:
                return [block.nodes[i] for i in found.order], False, spent
            if found.proven:
                return None, True, spent
    better, work = _slide(model, order, start, end, budget - spent)
    return better, False, spent + work


def _blocks(model: OrderModel, order: Sequence[int], forward: int) -> list[tuple[int, int]]:
    """The steps of each block, half-open: up to and with a bottleneck or the end of a part."""
    found = []
    for low, high in ((0, forward), (forward, len(order))):
        ends = [step + 1 for step in bottlenecks(model, order, low, high)]
        if high > low and (not ends or ends[-1] < high):
            ends.append(high)
        found += list(pairwise([low, *ends]))
    return found


def bottlenecks(model: OrderModel, order: Sequence[int], start: int, end: int) -> list[int]:
    """Steps of nodes that are comparable with every other node of the part ``start`` to ``end``.

    Such a node is the only one of its prefix that has no follower in it, and the only one of its suffix that waits for
    nobody in it.
    """
    place = {nid: step for step, nid in enumerate(order[start:end])}
    count = end - start
    first_follower = [count] * count
    last_need = [-1] * count
    for nid, step in place.items():
        for other in model.before[nid]:
            at = place.get(other, -1)
            if at >= 0:
                last_need[step] = max(last_need[step], at)
                first_follower[at] = min(first_follower[at], step)
    # Sinks of each prefix and sources of each suffix, by differences.
    sinks, sources = [0] * (count + 1), [0] * (count + 1)
    for step in range(count):
        sinks[step] += 1
        sinks[first_follower[step]] -= 1
        # step is a source of the suffixes that begin after last_need, up to its own.
        sources[last_need[step] + 1] += 1
        sources[step + 1] -= 1
    found = []
    open_sinks = open_sources = 0
    for step in range(count):
        open_sinks += sinks[step]
        open_sources += sources[step]
        if open_sinks == 1 and open_sources == 1:
            found.append(start + step)
    return found


def _slide(model: OrderModel, order: Sequence[int], start: int, end: int, budget: int) -> tuple[list[int] | None, int]:
    """The nodes of the block after windows have lowered its peak, or None; and the steps priced.

    A window that gets below the block's peak removes its peak steps; the block's peak falls when all are gone.
    """
    chosen = list(order)
    spent = 0
    held, during = model.profile(chosen)
    peak = max(during[start:end])
    while spent < budget:
        tops = [step for step in range(start, end) if during[step] == peak]
        if not tops:
            return chosen[start:end], spent
        step = tops[0]
        for shift in (WINDOW // 2, WINDOW - 2, 1):
            low = max(start, min(step - shift, end - WINDOW))
            high = min(end, low + WINDOW)
            block = Block.of(model, chosen, low, high, held[low])
            found = best_order(block, peak, WINDOW_WORK)
            spent += WINDOW + found.work
            if found.order is not None:
                chosen[low:high] = [block.nodes[i] for i in found.order]
                held, during = model.profile(chosen)
                spent += len(chosen) // 4
                break
        else:
            return None, spent
    return None, spent
