"""A route as a program of copies between devices and additions on them, with its duration.

:func:`push_steps` sums the arrays of all places into one array at the home; :func:`pull_steps` copies an array of the
home to every place. :func:`timed` orders steps by their earliest start and returns the time of the last end: it models
a stream for each pair of places, a stream for the additions of each place, and shared wires. A simulated device does
the same with these steps. Pure functions.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from weftplan.device.links import HOST, Interconnect
from weftplan.device.simulated_hardware import Wires
from weftplan.kvstore.exchange.ways import Parents, Way


class Room(Enum):
    """Which array a piece is of."""

    VALUE = 1
    """A place's pushed array, or the target of its pull."""
    INBOX = 2
    """A place's receive buffer, also for partial sums."""
    WHOLE = 3
    """The sum, or the stored value, at the home."""
    HOST = 4
    """Host memory, where devices are no peers."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``first`` to ``end`` of one array."""

    room: Room
    place: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Step:
    """A copy of one source, or the sum of several from left to right, into the target.

    Attributes:
        after: numbers of the steps that come before it.
    """

    target: Piece
    sources: tuple[Piece, ...]
    after: tuple[int, ...]

    @property
    def lane(self) -> tuple[int, int]:
        """Steps of one lane run one after the other."""
        return self.sources[0].place, self.target.place


@dataclass(frozen=True, slots=True)
class Program:
    """Steps in enqueue order.

    Attributes:
        inboxes: elements of each place's inbox.
        hosted: elements of host memory.
        seconds: modelled time.
    """

    steps: tuple[Step, ...]
    inboxes: tuple[int, ...]
    hosted: int
    seconds: float


class _Writer:
    """Collects steps and gives out room."""

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
    """Sum over all places. Terms of an addition come in the order of the first place that each of them holds."""
    write = _Writer(links, itemsize)
    for share in way.shares:
        size = share.end - share.first
        root, order, children = _downwards(share.parents)
        partial: dict[int, tuple[int, Piece, list[int]]] = {}
        """Of a place: the first place of its subtree, where its sum is, and the step that made it."""
        for place in reversed(order):
            own = Piece(Room.VALUE, place, share.first, share.end)
            terms: list[tuple[int, Piece]] = [(place, own)]
            arrived: list[int] = []
            for child in children[place]:
                first, piece, producer = partial[child]
                inbox = write.inbox(place, size)
                arrived.append(write.copy(piece, inbox, producer))
                terms.append((first, inbox))
            terms.sort(key=lambda term: term[0])
            if len(terms) == 1:
                partial[place] = place, own, []
                continue
            if place == root == home:
                total = Piece(Room.WHOLE, home, share.first, share.end)
            else:  # the first that was received is among the first two terms, where a sum may overwrite it
                total = next(piece for _, piece in terms if piece.room is Room.INBOX)
            partial[place] = terms[0][0], total, [write.step(total, [piece for _, piece in terms], arrived)]
        if root != home:
            _, total, producer = partial[root]
            write.copy(total, Piece(Room.WHOLE, home, share.first, share.end), producer)
    return write.program()


def pull_steps(way: Way, home: int, links: Interconnect, itemsize: int) -> Program:
    """Copy the home's array to all places, its own included, along the same links."""
    write = _Writer(links, itemsize)
    end = way.shares[-1].end
    write.step(Piece(Room.VALUE, home, 0, end), [Piece(Room.WHOLE, home, 0, end)], ())
    for share in way.shares:
        have: dict[int, tuple[Piece, list[int]]] = {home: (Piece(Room.WHOLE, home, share.first, share.end), [])}
        for here, there in _away_from(home, share.parents):
            source, producer = have[here]
            target = Piece(Room.VALUE, there, share.first, share.end)
            have[there] = target, [write.copy(source, target, producer)]
    return write.program()


def timed(steps: Sequence[Step], links: Interconnect, itemsize: int) -> tuple[list[int], float]:
    """Return (the steps ordered by earliest start, seconds until the last end)."""
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
    """Return (root, places with each parent before its children, children of each place)."""
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


def _away_from(home: int, parents: Parents) -> list[tuple[int, int]]:
    """Return the links of a tree as (nearer to the home, farther from it), the nearest first."""
    beside: list[list[int]] = [[] for _ in parents]
    for place, parent in enumerate(parents):
        if parent != place:
            beside[place].append(parent)
            beside[parent].append(place)
    seen, links = [home], []
    for here in seen:
        for there in beside[here]:
            if there not in seen:
                seen.append(there)
                links.append((here, there))
    return links
