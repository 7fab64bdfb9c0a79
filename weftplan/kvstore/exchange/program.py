"""Programs: a route as a sequence of copies between devices and additions on devices, with its modelled duration.

A *position* is a device's index; the *home* is the device of the sum. :func:`push_steps` sums the arrays of all devices
into an array at the home; :func:`pull_steps` copies an array at the home to all devices. :func:`timed` models the
duration: steps on shared wires delay each other, and each pair of devices, and each device's additions, have a stream.
Simulated devices run programs in the same way. The functions of this module are pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from weftplan.device.links import HOST, Interconnect
from weftplan.device.wire_schedule import Wires
from weftplan.kvstore.exchange.ways import Parents, SumRoute


class BufferKind(Enum):
    """The kinds of arrays that a piece can belong to."""

    VALUE = 1
    """The array of a device that is pushed, or filled by a pull."""
    INBOX = 2
    """The receive buffer of a device, also used for partial sums."""
    TOTAL = 3
    """The sum, or the stored value, at the home."""
    HOST = 4
    """Host memory for copies between devices that are not peers."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``begin`` to ``end`` of one array."""

    buffer: BufferKind
    position: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ExchangeStep:
    """A copy of one source, or a sum of several sources from left to right, into a target.

    Attributes:
        target: receives the copy or sum.
        sources: the terms; those of a sum are on the target's device.
        predecessors: indices of the steps that must end before this step begins.
    """

    target: Piece
    sources: tuple[Piece, ...]
    predecessors: tuple[int, ...]

    @property
    def lane(self) -> tuple[int, int]:
        """(position of the source, position of the target). Steps of a lane run in sequence."""
        return self.sources[0].position, self.target.position


@dataclass(frozen=True, slots=True)
class ExchangeProgram:
    """The steps of a push or a pull.

    Attributes:
        steps: steps in order of enqueuing.
        inboxes: elements of the receive buffer of each device.
        hosted: elements of host memory that the program needs.
        seconds: modelled duration.
    """

    steps: tuple[ExchangeStep, ...]
    inboxes: tuple[int, ...]
    hosted: int
    seconds: float


class _ProgramBuilder:
    """Collects the steps of a program and allocates its buffers; ``step`` and ``copy`` return the index of a step."""

    def __init__(self, links: Interconnect, itemsize: int) -> None:
        self.links = links
        self.itemsize = itemsize
        self.steps: list[ExchangeStep] = []
        self.inboxes = [0] * links.count
        self.hosted = 0

    def step(self, target: Piece, sources: Sequence[Piece], predecessors: Sequence[int]) -> int:
        self.steps.append(ExchangeStep(target, tuple(sources), tuple(predecessors)))
        return len(self.steps) - 1

    def copy(self, source: Piece, target: Piece, predecessors: Sequence[int]) -> int:
        if source.position != target.position and not self.links.peers(source.position, target.position):
            stop = Piece(BufferKind.HOST, HOST, self.hosted, self.hosted + source.end - source.begin)
            self.hosted = stop.end
            predecessors = [self.step(stop, [source], predecessors)]
            source = stop
        return self.step(target, [source], predecessors)

    def inbox(self, position: int, size: int) -> Piece:
        begin = self.inboxes[position]
        self.inboxes[position] += size
        return Piece(BufferKind.INBOX, position, begin, begin + size)

    def program(self) -> ExchangeProgram:
        order, seconds = timed(self.steps, self.links, self.itemsize)
        number = {old: new for new, old in enumerate(order)}
        steps = [
            ExchangeStep(step.target, step.sources, tuple(number[predecessor] for predecessor in step.predecessors))
            for step in (self.steps[old] for old in order)
        ]
        return ExchangeProgram(tuple(steps), tuple(self.inboxes), self.hosted, seconds)


def push_steps(route: SumRoute, home: int, links: Interconnect, itemsize: int) -> ExchangeProgram:
    """Return the program that sums the arrays of all devices at ``home``.

    The terms of an addition are ordered by the smallest position whose array each term includes.
    """
    builder = _ProgramBuilder(links, itemsize)
    for share in route.shares:
        size = share.end - share.begin
        root, order, children = _downwards(share.parents)
        partial: dict[int, tuple[int, Piece, list[int]]] = {}
        """(Smallest position of the subtree, piece with the sum, [index of the summing step] or []), by position."""
        for position in reversed(order):
            value = Piece(BufferKind.VALUE, position, share.begin, share.end)
            terms: list[tuple[int, Piece]] = [(position, value)]
            arrived: list[int] = []
            for child in children[position]:
                lowest, piece, producer = partial[child]
                inbox = builder.inbox(position, size)
                arrived.append(builder.copy(piece, inbox, producer))
                terms.append((lowest, inbox))
            terms.sort(key=lambda term: term[0])
            if len(terms) == 1:
                partial[position] = position, value, []
                continue
            if position == root == home:
                total = Piece(BufferKind.TOTAL, home, share.begin, share.end)
            else:
                # Sum in place, in the first received term. It is one of the first two terms, since only `value` is not
                # received, and an addition may overwrite one of its first two terms.
                total = next(piece for _, piece in terms if piece.buffer is BufferKind.INBOX)
            partial[position] = terms[0][0], total, [builder.step(total, [piece for _, piece in terms], arrived)]
        if root != home:
            _, total, producer = partial[root]
            builder.copy(total, Piece(BufferKind.TOTAL, home, share.begin, share.end), producer)
    return builder.program()


def pull_steps(route: SumRoute, home: int, links: Interconnect, itemsize: int) -> ExchangeProgram:
    """Return the program that copies an array at ``home`` to all devices, also home, along the trees of ``route``."""
    builder = _ProgramBuilder(links, itemsize)
    end = route.shares[-1].end
    builder.step(Piece(BufferKind.VALUE, home, 0, end), [Piece(BufferKind.TOTAL, home, 0, end)], ())
    for share in route.shares:
        have: dict[int, tuple[Piece, list[int]]] = {home: (Piece(BufferKind.TOTAL, home, share.begin, share.end), [])}
        for near, far in _links_from(home, share.parents):
            source, producer = have[near]
            target = Piece(BufferKind.VALUE, far, share.begin, share.end)
            have[far] = target, [builder.copy(source, target, producer)]
    return builder.program()


def timed(steps: Sequence[ExchangeStep], links: Interconnect, itemsize: int) -> tuple[list[int], float]:
    """Return (indices of the steps ordered by earliest start, seconds until the last step ends)."""
    waiting = [len(step.predecessors) for step in steps]
    followers: list[list[int]] = [[] for _ in steps]
    for index, step in enumerate(steps):
        for predecessor in step.predecessors:
            followers[predecessor].append(index)
    ready = [0.0] * len(steps)
    heap = [(0.0, index) for index, count in enumerate(waiting) if not count]
    lanes: dict[tuple[int, int], float] = {}
    wires = Wires()
    order, last_end = [], 0.0
    while heap:
        begin, index = heapq.heappop(heap)
        step = steps[index]
        end = max(begin, lanes.get(step.lane, 0.0))
        source, target = step.lane
        if len(step.sources) > 1:
            end += links.launch
        else:
            end = wires.copy(links, source, target, (step.target.end - step.target.begin) * itemsize, end)
        lanes[step.lane] = end
        last_end = max(last_end, end)
        order.append(index)
        for follower in followers[index]:
            waiting[follower] -= 1
            ready[follower] = max(ready[follower], end)
            if not waiting[follower]:
                heapq.heappush(heap, (ready[follower], follower))
    return order, last_end


def _downwards(parents: Parents) -> tuple[int, list[int], list[list[int]]]:
    """Return (the root, all devices with parents before their children, the children of each device)."""
    children: list[list[int]] = [[] for _ in parents]
    root = 0
    for position, parent in enumerate(parents):
        if parent == position:
            root = position
        else:
            children[parent].append(position)
    order = [root]
    for position in order:
        order += children[position]
    return root, order, children


def _links_from(home: int, parents: Parents) -> list[tuple[int, int]]:
    """Return the links of a tree as (position nearer to ``home``, position farther away), in breadth-first order."""
    neighbours: list[list[int]] = [[] for _ in parents]
    for position, parent in enumerate(parents):
        if parent != position:
            neighbours[position].append(parent)
            neighbours[parent].append(position)
    seen, links = [home], []
    for near in seen:
        for far in neighbours[near]:
            if far not in seen:
                seen.append(far)
                links.append((near, far))
    return links
