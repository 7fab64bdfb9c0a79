"""Programs: a route as a sequence of copies between devices and additions on devices, with its modelled duration.

A *place* is a device's index; the *home* is the place of the sum. :func:`push_steps` sums the arrays of all places into
an array at the home; :func:`pull_steps` copies an array at the home to all places. :func:`timed` models the duration:
steps on shared wires delay each other, and each pair of places, and each place's additions, have a stream. Simulated
devices run programs in the same way. The functions of this module are pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from weftplan.device.links import HOST, Interconnect
from weftplan.device.wire_schedule import Wires
from weftplan.kvstore.exchange.ways import Parents, Way


class Room(Enum):
    """The kinds of arrays that a piece can belong to."""

    VALUE = 1
    """The array of a place that is pushed, or filled by a pull."""
    INBOX = 2
    """The receive buffer of a place, also used for partial sums."""
    WHOLE = 3
    """The sum, or the stored value, at the home."""
    HOST = 4
    """Host memory for copies between devices that are not peers."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``first`` to ``end`` of one array."""

    room: Room
    place: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Step:
    """A copy of one source, or a sum of several sources from left to right, into a target.

    Attributes:
        target: receives the copy or sum.
        sources: the terms; those of a sum are on the target's device.
        after: indices of the steps that must end before this step begins.
    """

    target: Piece
    sources: tuple[Piece, ...]
    after: tuple[int, ...]

    @property
    def lane(self) -> tuple[int, int]:
        """(place of the source, place of the target). Steps of a lane run in sequence."""
        return self.sources[0].place, self.target.place


@dataclass(frozen=True, slots=True)
class Program:
    """The steps of a push or a pull.

    Attributes:
        steps: steps in order of enqueuing.
        inboxes: elements of the receive buffer of each place.
        hosted: elements of host memory that the program needs.
        seconds: modelled duration.
    """

    steps: tuple[Step, ...]
    inboxes: tuple[int, ...]
    hosted: int
    seconds: float


class _ProgramBuilder:
    """Collects the steps of a program and allocates its buffers; ``step`` and ``copy`` return the index of a step."""

    def __init__(self, links: Interconnect, itemsize: int) -> None:
        self.links = links
        self.itemsize = itemsize
        self.steps: list[Step] = []
        self.inboxes = [0] * links.count
        self.hosted = 0

    def step(self, target: Piece, sources: Sequence[Piece], after: Sequence[int]) -> int:
        self.steps.append(Step(target, tuple(sources), tuple(after)))
        return len(self.steps) - 1

    def copy(self, source: Piece, target: Piece, after: Sequence[int]) -> int:
        if source.place != target.place and not self.links.peers(source.place, target.place):
            stop = Piece(Room.HOST, HOST, self.hosted, self.hosted + source.end - source.first)
            self.hosted = stop.end
            after = [self.step(stop, [source], after)]
            source = stop
        return self.step(target, [source], after)

    def inbox(self, place: int, size: int) -> Piece:
        first = self.inboxes[place]
        self.inboxes[place] += size
        return Piece(Room.INBOX, place, first, first + size)

    def program(self) -> Program:
        order, seconds = timed(self.steps, self.links, self.itemsize)
        number = {old: new for new, old in enumerate(order)}
        steps = [
            Step(step.target, step.sources, tuple(number[before] for before in step.after))
            for step in (self.steps[old] for old in order)
        ]
        return Program(tuple(steps), tuple(self.inboxes), self.hosted, seconds)


def push_steps(way: Way, home: int, links: Interconnect, itemsize: int) -> Program:
    """Return the program that sums the arrays of all places at ``home``.

    The terms of an addition are ordered by the smallest place whose array each term includes.
    """
    builder = _ProgramBuilder(links, itemsize)
    for share in way.shares:
        size = share.end - share.first
        root, order, children = _downwards(share.parents)
        partial: dict[int, tuple[int, Piece, list[int]]] = {}
        """(Smallest place of the subtree, piece with the sum, [index of the summing step] or []), by place."""
        for place in reversed(order):
            own = Piece(Room.VALUE, place, share.first, share.end)
            terms: list[tuple[int, Piece]] = [(place, own)]
            arrived: list[int] = []
            for child in children[place]:
                first, piece, producer = partial[child]
                inbox = builder.inbox(place, size)
                arrived.append(builder.copy(piece, inbox, producer))
                terms.append((first, inbox))
            terms.sort(key=lambda term: term[0])
            if len(terms) == 1:
                partial[place] = place, own, []
                continue
            if place == root == home:
                total = Piece(Room.WHOLE, home, share.first, share.end)
            else:
                # Sum in place, in the first received term. It is one of the first two terms, since only `own` is not
                # received, and an addition may overwrite one of its first two terms.
                total = next(piece for _, piece in terms if piece.room is Room.INBOX)
            partial[place] = terms[0][0], total, [builder.step(total, [piece for _, piece in terms], arrived)]
        if root != home:
            _, total, producer = partial[root]
            builder.copy(total, Piece(Room.WHOLE, home, share.first, share.end), producer)
    return builder.program()


def pull_steps(way: Way, home: int, links: Interconnect, itemsize: int) -> Program:
    """Return the program that copies an array at ``home`` to all places, also the home, along the trees of ``way``."""
    builder = _ProgramBuilder(links, itemsize)
    end = way.shares[-1].end
    builder.step(Piece(Room.VALUE, home, 0, end), [Piece(Room.WHOLE, home, 0, end)], ())
    for share in way.shares:
        have: dict[int, tuple[Piece, list[int]]] = {home: (Piece(Room.WHOLE, home, share.first, share.end), [])}
        for here, there in _links_from(home, share.parents):
            source, producer = have[here]
            target = Piece(Room.VALUE, there, share.first, share.end)
            have[there] = target, [builder.copy(source, target, producer)]
    return builder.program()


def timed(steps: Sequence[Step], links: Interconnect, itemsize: int) -> tuple[list[int], float]:
    """Return (indices of the steps ordered by earliest start, seconds until the last step ends)."""
    waiting = [len(step.after) for step in steps]
    followers: list[list[int]] = [[] for _ in steps]
    for index, step in enumerate(steps):
        for before in step.after:
            followers[before].append(index)
    ready = [0.0] * len(steps)
    heap = [(0.0, index) for index, count in enumerate(waiting) if not count]
    lanes: dict[tuple[int, int], float] = {}
    wires = Wires()
    order, last = [], 0.0
    while heap:
        begin, index = heapq.heappop(heap)
        step = steps[index]
        end = max(begin, lanes.get(step.lane, 0.0))
        source, target = step.lane
        if len(step.sources) > 1:
            end += links.launch
        else:
            end = wires.copy(links, source, target, (step.target.end - step.target.first) * itemsize, end)
        lanes[step.lane] = end
        last = max(last, end)
        order.append(index)
        for follower in followers[index]:
            waiting[follower] -= 1
            ready[follower] = max(ready[follower], end)
            if not waiting[follower]:
                heapq.heappush(heap, (ready[follower], follower))
    return order, last


def _downwards(parents: Parents) -> tuple[int, list[int], list[list[int]]]:
    """Return (the root, all places with parents before their children, the children of each place)."""
    children: list[list[int]] = [[] for _ in parents]
    root = 0
    for place, parent in enumerate(parents):
        if parent == place:
            root = place
        else:
            children[parent].append(place)
    order = [root]
    for place in order:
        order += children[place]
    return root, order, children


def _links_from(home: int, parents: Parents) -> list[tuple[int, int]]:
    """Return the links of a tree as (place nearer to ``home``, place farther away), in breadth-first order."""
    neighbours: list[list[int]] = [[] for _ in parents]
    for place, parent in enumerate(parents):
        if parent != place:
            neighbours[place].append(parent)
            neighbours[parent].append(place)
    seen, links = [home], []
    for here in seen:
        for there in neighbours[here]:
            if there not in seen:
                seen.append(there)
                links.append((here, there))
    return links
