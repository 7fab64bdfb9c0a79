"""Storage assignment: each entry is computed in place of an input if allowed, else it is allocated.

All strategies share this walk over the program. They differ in the allocator: the match-range pool reuses released
blocks; other strategies always get a new storage, which they later place at an offset. So all strategies merge the same
entries in place, and their plans have the same lower bound.

For each node, in execution order: (1) outputs that must share memory take their input's storage; (2) other outputs take
inputs' storages according to the operator's in-place pairs; (3) the remaining outputs are allocated, the largest first;
(4) the inputs are released. Because inputs are released last, a node's output never reuses the block of its own input
except by rules 1 and 2.
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
    """Memory of the caller: arguments, auxiliary states, head gradients, gradient arrays. Storage -1."""
    OWN = 1
    """The first entry of its storage."""
    SHARED = 2
    """An entry in a storage that held another, dead entry before."""
    INPLACE = 3
    """An entry written over an input of the same node (:attr:`MemoryPlan.entry_inplace`)."""
    ADDTO = 4
    """A term that its maker adds into the memory of a partial gradient sum (``Req.ADD``)."""
    UNUSED = 5
    """An entry without a reader: it is not written (``Req.NULL``) and has no memory. With ``compat="mxnet"`` whole
    blocks still reserve a block for it, as MXNet does."""


@dataclass(slots=True)
class Assignment:
    """Storage, group, kind and in-place input of each entry."""

    storage: list[int]
    """Storage of each entry; -1 without planned memory."""
    group: list[int]
    """Group of each entry, -1 without planned memory. Entries of one group are computed in place of each other; groups
    of one storage follow each other in time."""
    kind: bytearray
    """:class:`Kind` of each entry."""
    inplace: list[int]
    """Slot of the input that each entry overwrites; -1 if it overwrites none."""
    skipped: set[int]
    """Nodes that must not run: see :func:`add_terms_inplace`."""
    added: set[int]
    """Entries that their makers add to a partial sum."""


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
    """Assign a storage to each entry.

    Args:
        program: the graph in execution order.
        pool: the allocator.
        enable_inplace: whether outputs may take the memory of inputs by optional pairs.
        keep_unused: whether outputs without a reader also get memory, as in MXNet.
        compute_unused: the same; such outputs are also written.
        rule: replaces MXNet's in-place rule (the node is the last reader of the input's memory, or the pair is an
            identity). With a rule, outputs are allocated in their order, not the largest first.
        never: labels of operators that compute nothing in place.
    """
    graph, row, refs = program.graph, program.graph.row, program.refs
    inputs, reads, pairs, external = graph.inputs, program.reads, program.pairs, program.external
    device, holds = program.device, program.holds
    storage = [-1] * graph.num_entries
    group = [-1] * graph.num_entries
    num_groups = 0
    inplace = [-1] * graph.num_entries
    owned, shared, inplace_kind, unused, outside = map(
        int, (Kind.OWN, Kind.SHARED, Kind.INPLACE, Kind.UNUSED, Kind.EXTERNAL)
    )
    kind = external.translate(bytearray.maketrans(b"\0\1", bytes((unused, outside))))
    keeps = keep_unused or compute_unused
    live: list[int] = []  # per storage: number of remaining reads of its entries

    for nid in program.order:
        start, end = row[nid], row[nid + 1]
        for i, out, _ in graph.works[nid].over:
            source = inputs[nid][i]
            if storage[source] >= 0 and refs[start + out]:
                storage[start + out] = storage[source]
                live[storage[source]] += refs[start + out]
                inplace[start + out] = i
                kind[start + out] = inplace_kind
                group[start + out] = group[source]
        if enable_inplace and pairs[nid] and not (never and graph.works[nid].label in never):
            for i, out, identity in pairs[nid]:
                out += start
                source = inputs[nid][i]
                block = storage[source]
                if block < 0 or storage[out] >= 0 or not refs[out] or (end - start > 1 and i in inplace[start:end]):
                    continue
                # An identity may share before the input's last read: both contents are equal, and the next writer
                # waits for the readers of both. The node itself reads the input only once.
                once = live[block] == 1 or (identity and reads[nid].count(source) == 1)
                if rule(nid, source, out) if rule else once:
                    storage[out] = block
                    live[block] += refs[out]
                    inplace[out] = i
                    kind[out] = inplace_kind
                    group[out] = group[source]
        todo: Sequence[int]
        if end - start == 1:  # fast path: most nodes have one output
            todo = () if storage[start] >= 0 or external[start] or not (refs[start] or keeps) else (start,)
        else:
            todo = [e for e in range(start, end) if storage[e] < 0 and not external[e] and (refs[e] or keeps)]
        if not rule and len(todo) > 1:
            todo = sorted(todo, key=lambda e: (-(program.nbytes[e] // program.dtypes[e].itemsize), -e))
        for e in todo:
            block = pool.allocate(e, device[nid], nid)
            if block == len(live):
                live.append(refs[e])
                kind[e] = owned
            else:
                live[block] = refs[e]
                kind[e] = shared
            storage[e] = block
            group[e] = num_groups
            num_groups += 1
        for e in (*reads[nid], *holds[nid]) if nid in holds else reads[nid]:
            block = storage[e]
            if block >= 0:
                readers_left = live[block] = live[block] - 1
                if not readers_left:
                    pool.release(block, nid)
        for e in range(start, end) if keeps else ():
            if not refs[e] and storage[e] >= 0:
                if not compute_unused:
                    kind[e] = unused
                pool.release(storage[e], nid)
    return Assignment(storage, group, kind, inplace, set(), set())


def add_terms_inplace(program: Program, plain: Assignment) -> Assignment:
    """Return ``plain`` with gradient sums replaced by in-place additions.

    If a sum node computes ``out = total + term`` with ``out`` in place of ``total``, the maker of ``term`` adds to
    ``total`` directly and the sum node is skipped. Conditions: (1) ``term`` has no other reader; (2) it is made after
    ``total``, on the same device; (3) its maker is no copy between devices, which can only overwrite; (4) no node reads
    ``total`` between the maker and the sum, because ``total`` changes early.
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
        maker, partial = entry_node[term], entry_node[total]
        if (
            group < 0
            or summed.group[total] != group
            or summed.group[term] < 0
            or summed.group[term] == group
            or maker not in position
            or partial not in position
            or program.refs[term] != 1
            or position[partial] >= position[maker]
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
