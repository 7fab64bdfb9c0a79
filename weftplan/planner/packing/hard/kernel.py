"""Depth-first search for a placement under a given capacity.

The search decides whether all buffers fit under ``capacity``. Time is divided into *sections*, one per birth. The
*sky* of a section is the top of its placed buffers; a *valley* is a maximal run of sections at one level with
higher walls on both sides. In a pushed-down solution exactly one of these holds for the leftmost section of a valley:
an unplaced buffer that begins there and ends inside the valley sits on its floor, or that floor is wasted up to the
next possible offset. The same holds for the rightmost section and buffers that end there. The search branches on the
end with the fewest choices, so it stays local, its branches are disjoint, and most nodes have one or two children.

Pruning: in every changed section, the unplaced buffers are stacked in order of their least possible offsets (optimal
for one machine with release times); a stack above the capacity refutes the node. A buffer without unplaced conflicts is
placed immediately. A section without unplaced buffers splits the others into independent parts, and a failure in one
part backtracks directly over the decisions of the other parts.

The functions keep no state; the tables in their arguments belong to one search. They are lists of integers, which
Python indexes faster than arrays. The file is long because its functions share the layout of these tables.
"""

from __future__ import annotations

from collections.abc import MutableSequence

Ints = MutableSequence[int]
Tables = tuple[Ints, ...]

SOLVED = 1
REFUTED = 0
STOPPED = -1

NO_LEVEL = 1 << 62

# Slots of the counter array, the last member of the state tuple.
PLACED, DIRTY, WORK = 0, 1, 2

# Rules for choosing the next valley (see `choose_valley`).
FEWEST, FEWEST_LOW, FAILURES, FEWEST_TIGHT = 0, 1, 2, 3


def reset(problem: Tables, state: Tables, capacity: int) -> bool:
    """Reset the state to an empty placement; return False if a section holds more than ``capacity``."""
    _, _, size, cptr, _, sptr, sec, _, _, _, _ = problem
    off, placed, floor, sky, rem, uncovered, conflicts, dirty, _, key, value, _, slack, count = state
    for i in range(len(size)):
        placed[i] = 0
        floor[i] = 0
        off[i] = -1
        conflicts[i] = cptr[i + 1] - cptr[i]
    key.clear()
    value.clear()
    count[PLACED] = 0
    count[DIRTY] = 0
    count[WORK] = len(sec)
    fits = True
    for t in range(len(sky)):
        sky[t] = 0
        dirty[t] = 0
        slack[t] = 0
        live = 0
        for p in range(sptr[t], sptr[t + 1]):
            live += size[sec[p]]
        rem[t] = live
        uncovered[t] = sptr[t + 1] - sptr[t]
        if live > capacity:
            fits = False
    return fits


def lift_row(problem: Tables, state: Tables, pointer: Ints, row: Ints, r: int, level: int) -> None:
    """Raise the floor of the unplaced buffers of row ``r`` to at least ``level``; queue the sections to check again.

    Lifting one buffer by d raises the stack of a section by at most d. A section is checked again if the sum of such
    rises since its last check exceeds the slack that it had then, or if its lowest buffer was lifted. Slack that is
    left from a deeper node may be too small but never too large, because stacks only grow down the tree.
    """
    lo, hi = problem[0], problem[1]
    placed, floor, dirty, queue = state[1], state[2], state[7], state[8]
    sky, key, value, slack, count = state[3], state[9], state[10], state[12], state[13]
    queued, work = count[DIRTY], count[WORK]
    for p in range(pointer[r], pointer[r + 1]):
        j = row[p]
        if placed[j] == 0 and floor[j] < level:
            old = floor[j]
            key.append(j)
            value.append(old)
            floor[j] = level
            work += hi[j] - lo[j]
            for t in range(lo[j], hi[j]):
                if slack[t] >= 0:
                    slack[t] -= level - old
                if dirty[t] == 0 and (slack[t] < 0 or sky[t] == old):
                    dirty[t] = 1
                    queue[queued] = t
                    queued += 1
    count[DIRTY], count[WORK] = queued, work


def raise_sky(state: Tables, buffers: int, start: int, stop: int, level: int) -> None:
    """Raise the sky of sections ``first <= t < last`` to ``level`` and queue them; no more buffers go below it."""
    sky, dirty, queue, key, value, count = state[3], state[7], state[8], state[9], state[10], state[13]
    for t in range(start, stop):
        key.append(buffers + t)
        value.append(sky[t])
        sky[t] = level
        if dirty[t] == 0:
            dirty[t] = 1
            queue[count[DIRTY]] = t
            count[DIRTY] += 1


def waste(problem: Tables, state: Tables, t: int, level: int) -> None:
    """Leave section ``t`` empty up to ``level``."""
    raise_sky(state, len(problem[0]), t, t + 1, level)
    lift_row(problem, state, problem[5], problem[6], t, level)


def place(problem: Tables, state: Tables, i: int) -> None:
    """Place buffer ``i`` on its floor."""
    lo, hi, size, cptr, conf, _, _, _, _, _, _ = problem
    off, placed, floor, _, rem, uncovered, conflicts, dirty, queue, _, _, order, _, count = state
    top = floor[i] + size[i]
    placed[i] = 1
    off[i] = floor[i]
    order[count[PLACED]] = i
    count[PLACED] += 1
    for t in range(lo[i], hi[i]):
        rem[t] -= size[i]
        uncovered[t] -= 1
    for p in range(cptr[i], cptr[i + 1]):
        j = conf[p]
        conflicts[j] -= 1
        if conflicts[j] == 0 and dirty[lo[j]] == 0:
            dirty[lo[j]] = 1
            queue[count[DIRTY]] = lo[j]
            count[DIRTY] += 1
    raise_sky(state, len(lo), lo[i], hi[i], top)
    lift_row(problem, state, cptr, conf, i, top)


def undo(problem: Tables, state: Tables, placed_before: int, trail_before: int) -> None:
    """Undo placements and raised levels in reverse order, back to the given counts."""
    lo, hi, size, cptr, conf, _, _, _, _, _, _ = problem
    _, placed, floor, sky, rem, uncovered, conflicts, _, _, key, value, order, _, count = state
    while count[PLACED] > placed_before:
        count[PLACED] -= 1
        i = order[count[PLACED]]
        placed[i] = 0
        for t in range(lo[i], hi[i]):
            rem[t] += size[i]
            uncovered[t] += 1
        for p in range(cptr[i], cptr[i + 1]):
            conflicts[conf[p]] += 1
    buffers = len(lo)
    while len(key) > trail_before:
        k = key.pop()
        if k < buffers:
            floor[k] = value.pop()
        else:
            sky[k - buffers] = value.pop()


def stack_section(
    start: int, stop: int, sec: Ints, size: Ints, placed: Ints, floor: Ints, count: Ints
) -> tuple[int, int]:
    """Return (least floor, lower bound of the height) of the unplaced buffers in a section's row ``sec[start:stop]``.

    The function sorts the row by floor (by offset for placed buffers) and leaves it sorted, so that the insertion sort
    has little to move at the next visit.
    """
    moved = 0
    for p in range(start, stop):
        j = sec[p]
        level = floor[j]
        q = p
        while q > start and floor[sec[q - 1]] > level:
            sec[q] = sec[q - 1]
            q -= 1
        sec[q] = j
        moved += p - q
    count[WORK] += 4 + stop - start + moved
    least = -1
    height = 0
    for p in range(start, stop):
        j = sec[p]
        if placed[j] == 0:
            if least < 0:
                least = floor[j]
            if floor[j] > height:
                height = floor[j]
            height += size[j]
    return least, height


def propagate(problem: Tables, state: Tables, weights: Ints, capacity: int) -> bool:
    """Check every queued section and place buffers without unplaced conflicts; return False if the node is refuted."""
    size, sptr, sec = problem[2], problem[5], problem[6]
    _, placed, floor, sky, _, uncovered, conflicts, dirty, queue, key, value, _, slack, count = state
    buffers = len(size)
    fits = True
    while count[DIRTY] > 0:
        count[DIRTY] -= 1
        t = queue[count[DIRTY]]
        dirty[t] = 0
        if not fits or uncovered[t] == 0:
            continue
        least, height = stack_section(sptr[t], sptr[t + 1], sec, size, placed, floor, count)
        if height > capacity:
            weights[t] += 1
            fits = False
            continue
        slack[t] = capacity - height
        if least > sky[t]:
            key.append(buffers + t)
            value.append(sky[t])
            sky[t] = least
        for p in range(sptr[t], sptr[t + 1]):
            j = sec[p]
            if conflicts[j] == 0 and placed[j] == 0:
                place(problem, state, j)
    return fits


def rank(rule: int, options: int, level: int, slack: int, weight: int, capacity: int) -> int:
    """Return the score of branching at one end of a valley; the lowest score is chosen."""
    if rule == FEWEST_LOW:
        return (options << 20) + level // (capacity // 4096 + 1)
    if rule == FAILURES:
        return ((2 * options - 1) << 20) // (1 + weight)
    if rule == FEWEST_TIGHT:
        return (options << 20) + slack // (capacity // 4096 + 1)
    return options << 20


def choose_valley(problem: Tables, state: Tables, weights: Ints, capacity: int, rule: int) -> tuple[int, int, int]:
    """Return (first section, last section + 1, side) of the valley end to branch on; side 0 is left, 1 is right."""
    lo, hi, _, _, _, _, _, bptr, beg, eptr, end = problem
    placed, floor, sky, rem, uncovered = state[1], state[2], state[3], state[4], state[5]
    sections = len(sky)
    best, best_a, best_b, best_side = NO_LEVEL, 0, 0, 0
    a = 0
    while a < sections:
        if uncovered[a] == 0:
            a += 1
            continue
        y = sky[a]
        b = a + 1
        while b < sections and uncovered[b] > 0 and sky[b] == y:
            b += 1
        left_open = a > 0 and uncovered[a - 1] > 0 and sky[a - 1] < y
        right_open = b < sections and uncovered[b] > 0 and sky[b] < y
        if not left_open and not right_open:
            for side in range(2):
                t = a if side == 0 else b - 1
                slack = capacity - y - rem[t]
                options = 1 if slack > 0 else 0
                start, stop = (bptr[a], bptr[a + 1]) if side == 0 else (eptr[b], eptr[b + 1])
                for p in range(start, stop):
                    j = beg[p] if side == 0 else end[p]
                    if placed[j] == 0 and lo[j] >= a and hi[j] <= b and floor[j] == y:
                        options += 1
                score = rank(rule, options, y, slack, weights[t], capacity)
                if score < best:
                    best, best_a, best_b, best_side = score, a, b, side
        a = b
    return best_a, best_b, best_side


def list_children(
    problem: Tables,
    state: Tables,
    nodes: Tables,
    priority: Ints,
    capacity: int,
    valley: tuple[int, int, int],
    begin_children: int,
) -> int:
    """Write the children of a node to the child stack from ``begin_children``; return the new end of the stack.

    A child either places a buffer (stored as its index) or leaves a section empty up to a level (stored as
    ``-1 - section`` and the level).
    """
    lo, hi, size, cptr, conf, sptr, sec, bptr, beg, eptr, end = problem
    placed, floor, sky, rem = state[1], state[2], state[3], state[4]
    what, level = nodes[6], nodes[7]
    a, b, side = valley
    t = a if side == 0 else b - 1
    y = sky[t]
    end_children = begin_children
    upper = NO_LEVEL
    start, stop = (bptr[a], bptr[a + 1]) if side == 0 else (eptr[b], eptr[b + 1])
    for p in range(start, stop):
        j = beg[p] if side == 0 else end[p]
        if placed[j] != 0 or lo[j] < a or hi[j] > b or floor[j] != y:
            continue
        twin = False
        for q in range(begin_children, end_children):
            k = what[q]
            if lo[k] == lo[j] and hi[k] == hi[j] and size[k] == size[j]:
                twin = True
        if twin:
            continue
        # The least start and the least top of unplaced buffers that could go below j.
        start_below = NO_LEVEL
        for r in range(cptr[j], cptr[j + 1]):
            k = conf[r]
            if placed[k] == 0:
                if floor[k] < start_below:
                    start_below = floor[k]
                if floor[k] + size[k] < upper:
                    upper = floor[k] + size[k]
        if start_below >= y + size[j]:
            what[begin_children] = j  # no buffer can go below j, so placing j loses no solution
            return begin_children + 1
        q = end_children
        while q > begin_children and priority[what[q - 1]] < priority[j]:
            what[q] = what[q - 1]
            q -= 1
        what[q] = j
        end_children += 1
    for p in range(sptr[t], sptr[t + 1]):
        j = sec[p]
        if placed[j] == 0 and floor[j] > y and floor[j] < upper:
            upper = floor[j]
    if upper < NO_LEVEL and upper + rem[t] <= capacity:
        what[end_children] = -1 - t
        level[end_children] = upper
        end_children += 1
    return end_children


def search(
    problem: Tables, state: Tables, nodes: Tables, priority: Ints, weights: Ints, capacity: int, limit: int, rule: int
) -> tuple[int, int]:
    """Search for offsets under ``capacity``; return (SOLVED | REFUTED | STOPPED, number of visited nodes).

    If the verdict is SOLVED, the offsets are in ``state[0]``.

    Args:
        problem, state, nodes: the tables, the state and the node stack of the search.
        priority: value of each buffer; the candidates of a node are tried in descending order of their values.
        weights: number of refutations per section; the FAILURES rule keeps it between calls.
        capacity: maximum height in units.
        limit: maximum work, in touched list cells; so a limit means the same time for few and for many buffers.
        rule: the rule of `choose_valley`.
    """
    child, position, trail_at, placed_at, part_a, part_b, what, level = nodes
    uncovered, count = state[5], state[13]
    buffers = len(problem[0])
    sections = len(uncovered)
    # A limit for the memory of the trail; one node adds at most an item per conflict and two per buffer and section.
    trail, max_trail = state[9], 11 * (len(problem[4]) + 2 * len(problem[6])) + 4 * buffers + 3 * sections
    max_depth = len(child) - 1
    max_children = len(what) - buffers - 1
    if not reset(problem, state, capacity):
        return REFUTED, 0
    for t in range(sections):
        state[7][t] = 1
        state[8][t] = t
    count[DIRTY] = sections
    depth = 0
    visited = 0
    end_children = 0
    while True:
        open_node = propagate(problem, state, weights, capacity)
        if open_node and count[PLACED] == buffers:
            return SOLVED, visited
        if open_node:
            if count[WORK] >= limit or len(trail) > max_trail or depth >= max_depth or end_children > max_children:
                return STOPPED, visited
            visited += 1
            count[WORK] += sections
            valley = choose_valley(problem, state, weights, capacity, rule)
            begin_children = end_children
            end_children = list_children(problem, state, nodes, priority, capacity, valley, begin_children)
            open_node = end_children > begin_children
            if open_node:
                a, b, _ = valley
                while a > 0 and uncovered[a - 1] > 0:
                    a -= 1
                while b < sections and uncovered[b] > 0:
                    b += 1
                child[depth] = begin_children
                position[depth] = begin_children
                trail_at[depth] = len(trail)
                placed_at[depth] = count[PLACED]
                part_a[depth] = a
                part_b[depth] = b
                depth += 1
        failed_a, failed_b = 0, sections
        while not open_node:
            if depth == 0:
                return REFUTED, visited
            d = depth - 1
            undo(problem, state, placed_at[d], trail_at[d])
            position[d] += 1
            related = part_a[d] < failed_b and part_b[d] > failed_a
            if related and position[d] < end_children:
                open_node = True
            else:
                if related:
                    failed_a, failed_b = part_a[d], part_b[d]
                end_children = child[d]
                depth = d
        d = depth - 1
        chosen = what[position[d]]
        if chosen >= 0:
            place(problem, state, chosen)
        else:
            waste(problem, state, -1 - chosen, level[position[d]])
