"""The walk that gives every entry a storage: in place of an input where allowed, else from an allocator.

All strategies share this walk and differ in the allocator: one that hands out released blocks again (match range), or
one that always makes a new storage, which is then placed at an offset. So every strategy merges the same entries in
place, and their plans have one lower bound.

Per node, in execution order: outputs that must share take their input's storage; others take inputs' storages by the
operator's inplace pairs; the other outputs are allocated, largest first; then the inputs are released. Releasing last
means that a node never gets as output a block that only it is about to free, except by the first rule.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from weftplan.planner.match_range import BlockPool
from weftplan.planner.program import Program

Rule = Callable[[int, int, int], bool]
"""(node, input entry, output entry) -> whether the output takes the input's memory."""


class Kind(IntEnum):
    """The origin of the bytes of an entry."""

    EXTERNAL = 0
    """Given by the caller: arguments, auxiliary states, head gradients, gradient arrays. Storage -1."""
    OWN = 1
    """The first entry of its storage."""
    SHARED = 2
    """Its storage held another entry before, which is dead."""
    INPLACE = 3
    """Written over an input of the same node (:attr:`MemoryPlan.entry_inplace`)."""
    ADDTO = 4
    """Added into the memory of the partial gradient sum it belongs to (request ADD)."""
    UNUSED = 5
    """It has no reader: the request is NULL, nothing is written, and it has no memory, except that whole blocks with
    ``compat="mxnet"`` keep one for it, as MXNet does."""


@dataclass(slots=True)
class Assignment:
    """Storage, group, kind and inplace input of every entry."""

    storage: list[int]
    group: list[int]
    """Entries of one group are computed in place of each other; groups of one storage follow each other in time."""
    kind: bytearray
    inplace: list[int]
    skipped: set[int]
    """Nodes that must not run: see :func:`add_in_place`."""
    added: set[int]
    """Entries whose makers add to a partial sum."""


def assign(
    program: Program,
    pool: BlockPool,
    *,
    enable_inplace: bool = True,
    keep_unused: bool = False,
    compute_unused: bool = False,
    rule: Rule | None = None,
    never: Container[str] = (),
) -> Assignment:
    """Run the walk.

    Args:
        enable_inplace: let outputs take the memory of inputs at all.
        keep_unused: give memory also to outputs without a reader, as MXNet does.
        compute_unused: the same, and let them be written.
        rule: decides in place of MXNet's rule (the input's memory is read no more, or the pair is an identity); where
            it is given, outputs are allocated in their order, not the largest first.
        never: labels of works that compute nothing in place.
    """
    graph, row, refs = program.graph, program.graph.row, program.refs
    inputs, reads, pairs, external = graph.inputs, program.reads, program.pairs, program.external
    device, holds = program.device, program.holds
    storage = [-1] * graph.num_entries
    group = [-1] * graph.num_entries
    num_groups = 0
    inplace = [-1] * graph.num_entries
    own, shared, in_place, unused, outside = map(int, (Kind.OWN, Kind.SHARED, Kind.INPLACE, Kind.UNUSED, Kind.EXTERNAL))
    kind = external.translate(bytearray.maketrans(b"\0\1", bytes((unused, outside))))
    keeps = keep_unused or compute_unused
    live: list[int] = []  # per storage, reads still to come of all entries in it

    for nid in program.order:
        start, end = row[nid], row[nid + 1]
        for i, out, _ in graph.works[nid].over:
            source = inputs[nid][i]
            if storage[source] >= 0 and refs[start + out]:
                storage[start + out] = storage[source]
                live[storage[source]] += refs[start + out]
                inplace[start + out] = i
                kind[start + out] = in_place
                group[start + out] = group[source]
        if enable_inplace and pairs[nid] and not (never and graph.works[nid].label in never):
            for i, out, identity in pairs[nid]:
                out += start
                source = inputs[nid][i]
                block = storage[source]
                if block < 0 or storage[out] >= 0 or not refs[out] or (end - start > 1 and i in inplace[start:end]):
                    continue
                # An identity may share while others still read: both contents are equal, and the next writer
                # waits for the readers of all of them.
                if rule(nid, source, out) if rule else live[block] == 1 or identity:
                    storage[out] = block
                    live[block] += refs[out]
                    inplace[out] = i
                    kind[out] = in_place
                    group[out] = group[source]
        todo: Sequence[int]
        if end - start == 1:  # most have one output
            todo = () if storage[start] >= 0 or external[start] or not (refs[start] or keeps) else (start,)
        else:
            todo = [e for e in range(start, end) if storage[e] < 0 and not external[e] and (refs[e] or keeps)]
        if not rule and len(todo) > 1:
            todo = sorted(todo, key=lambda e: (-(program.nbytes[e] // program.dtypes[e].itemsize), -e))
        for e in todo:
            block = pool.allocate(e, device[nid], nid)
            if block == len(live):
                live.append(refs[e])
                kind[e] = own
            else:
                live[block] = refs[e]
                kind[e] = shared
            storage[e] = block
            group[e] = num_groups
            num_groups += 1
        for e in (*reads[nid], *holds[nid]) if nid in holds else reads[nid]:
            block = storage[e]
            if block >= 0:
                left = live[block] = live[block] - 1
                if not left:
                    pool.release(block, nid)
        for e in range(start, end) if keeps else ():
            if not refs[e] and storage[e] >= 0:
                if not compute_unused:
                    kind[e] = unused
                pool.release(storage[e], nid)
    return Assignment(storage, group, kind, inplace, set(), set())


def add_in_place(program: Program, plain: Assignment) -> Assignment:
    """Return ``plain`` with partial gradient sums turned into additions by the makers of terms.

    For a node ``out = total + term`` that is a sum, with ``out`` in place of ``total``: the maker of ``term`` adds
    straight to ``total`` and the sum is skipped. Conditions: ``term`` has no other reader and is made after ``total``,
    on the same device, not by a copy between devices, which can only overwrite; no node reads the content of
    ``total`` between the two nodes, for it changes early.
    """
    graph, row = program.graph, program.graph.row
    sums = [n for n in program.order if graph.works[n].is_sum]
    if not sums:
        return plain
    copies = {"storage": plain.storage[:], "group": plain.group[:], "inplace": plain.inplace[:]}
    summed = replace(plain, **copies, kind=plain.kind[:], skipped=set(), added=set())
    position = {nid: step for step, nid in enumerate(program.order)}
    entry_node = graph.entry_node
    readers: dict[int, list[int]] = {}
    interesting = {summed.group[row[n]] for n in sums}
    for step, nid in enumerate(program.order):
        for e in program.reads[nid]:
            if summed.group[e] in interesting:
                readers.setdefault(summed.group[e], []).append(step)
    for nid in sums:
        total, term = graph.inputs[nid]
        out = row[nid]
        group = summed.group[out]
        maker, before = entry_node[term], entry_node[total]
        if (
            group < 0
            or summed.group[total] != group
            or summed.group[term] < 0
            or summed.group[term] == group
            or maker not in position
            or before not in position
            or program.refs[term] != 1
            or position[before] >= position[maker]
            or program.device[maker] != program.device[nid]
            or graph.works[maker].only_overwrites
            or maker in summed.skipped
            or term in summed.added
            or program.dtypes[term] != program.dtypes[total]
            or bisect_left(steps := readers.get(group, ()), position[nid]) > bisect_right(steps, position[maker])
        ):
            continue
        summed.storage[term] = summed.storage[out]
        summed.group[term] = group
        summed.inplace[term] = -1
        summed.kind[term] = Kind.ADDTO
        summed.added.add(term)
        summed.skipped.add(nid)
    return summed
