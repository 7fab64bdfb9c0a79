"""Explicit-state model checker for protocols between threads.

An actor is a generator that yields operations on shared state and receives their results. Every operation is atomic;
any other actor may run between two of them. :func:`explore` visits all interleavings. A state consists of the shared
fields and, per actor, its position and local variables. Everything relevant must be a local variable: an iterator, for
example, hides its position.
"""

from collections import deque
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

Op = tuple[Any, ...]
Steps = Generator[Op, Any, Any]
BLOCKED = object()


class Violation(AssertionError):
    """A violated property; the text is the interleaving that violates it."""


class Actor:
    """A generator function as an automaton.

    Generators cannot be copied, so its local states are found by running the function again with recorded results.
    """

    def __init__(self, name: str, make: Callable[[], Steps]) -> None:
        self.name = name
        self._make = make
        self._numbers: dict[Any, int] = {}
        self._histories: list[tuple[Any, ...]] = []
        self.pending: list[Op | None] = []
        """Next operation of each local state, by the state's number; None if the actor has ended."""
        self._next: dict[tuple[int, Any], int] = {}
        self.first = self._reach((None,))

    def _reach(self, history: tuple[Any, ...]) -> int:
        steps = self._make()
        op: Op | None = None
        try:
            for response in history:
                op = steps.send(response)
        except StopIteration:
            op = None
        key = "over" if op is None else (*_frames(steps), op)
        number = self._numbers.setdefault(key, len(self._histories))
        if number == len(self._histories):
            self._histories.append(history)
            self.pending.append(op)
        return number

    def advance(self, number: int, response: Any) -> int:
        """Return the number of the local state that follows ``number`` after ``response``."""
        successor = self._next.get((number, response))
        if successor is None:
            successor = self._next[number, response] = self._reach((*self._histories[number], response))
        return successor


def _frames(steps: Any) -> Generator[Any, None, None]:
    while steps is not None:
        frame = steps.gi_frame
        yield frame.f_lasti, tuple(frame.f_locals.items())
        steps = steps.gi_yieldfrom


def perform(fields: dict[str, int], shared: tuple[Any, ...], op: Op) -> tuple[Any, tuple[Any, ...]]:
    """Return the result of ``op`` and the shared state after it; the result is BLOCKED if the actor must wait.

    Operations on fields: ``get f``, ``set f v``, ``add f n``, ``take a number f`` (add 1, return the old value),
    ``change f v w`` (compare and swap, return whether it changed), ``unless f v`` (wait while the value is v). On
    tuples: ``append f v``, ``first f`` and ``last f`` (remove and return; None if empty), ``remove f v`` (return
    whether v was present), ``await f v`` (wait until v is present). On locks (0 closed, 1 open): ``acquire f``,
    ``release f``.
    """
    kind, name = op[0], op[1]
    at = fields[name]
    old = shared[at]
    new, response = old, None
    if kind == "get":
        return old, shared
    if kind == "set":
        new = op[2]
    elif kind == "add":
        new = old + op[2]
    elif kind == "change":
        response = old == op[2]
        new = op[3] if response else old
    elif kind == "take a number":
        new, response = old + 1, old
    elif kind == "unless":
        if old == op[2]:
            return BLOCKED, shared
    elif kind == "append":
        new = (*old, op[2])
    elif kind == "first":
        response, new = (old[0], old[1:]) if old else (None, old)
    elif kind == "last":
        response, new = (old[-1], old[:-1]) if old else (None, old)
    elif kind == "remove":
        response = op[2] in old
        new = tuple(x for x in old if x != op[2])
    elif kind == "await":
        if op[2] not in old:
            return BLOCKED, shared
    elif kind == "acquire":
        if not old:
            return BLOCKED, shared
        new = 0
    elif kind == "release":
        assert not old, f"{name} is released twice"
        new = 1
    else:
        raise ValueError(f"unknown operation {op!r}")
    return response, (*shared[:at], new, *shared[at + 1 :])


class Found(NamedTuple):
    """Result of an exploration: the number of states, and of states in which no actor can continue."""

    states: int
    ends: int


def explore(
    shared: dict[str, Any],
    actors: list[Actor],
    always: Callable[[dict[str, Any]], str | None],
    at_end: Callable[[dict[str, Any]], str | None],
    busy: str = "",
    if_busy: Callable[[dict[str, Any]], str | None] = lambda _: None,
) -> Found:
    """Visit all interleavings; return the numbers of states and of ends.

    Args:
        always: returns a complaint about a reachable state, or None.
        at_end: returns a complaint about a state in which no actor can continue, or None.
        busy: name of a field. Decreasing it ends an operation that may take arbitrarily long.
        if_busy: returns a complaint, or None, about a state in which actors can only end such operations.

    Raises:
        Violation: a function returns a complaint, or no end can be reached from a state. The text is the shortest
            interleaving that leads to the state.
    """
    fields = {name: i for i, name in enumerate(shared)}
    start = (tuple(shared.values()), tuple(actor.first for actor in actors))
    came: dict[Any, Any] = {start: None}
    before: dict[Any, list[Any]] = {}
    ends: list[Any] = []
    queue = deque([start])

    def fail(state: Any, what: str) -> None:
        steps = []
        last = dict(zip(fields, state[0], strict=True))
        while came[state] is not None:
            state, name, op = came[state]
            steps.append(f"  {name}: {' '.join(map(str, op))}")
        raise Violation("\n".join([what, *reversed(steps), f"  -> {last}"]))

    while queue:
        state = queue.popleft()
        values, places = state
        moved = long = False
        for i, actor in enumerate(actors):
            op = actor.pending[places[i]]
            if op is None:
                continue
            try:
                response, after = perform(fields, values, op)
            except AssertionError as error:
                fail(state, str(error))
            if response is BLOCKED:
                continue
            if op[0] == "add" and op[1] == busy and op[2] < 0:
                long = True
            else:
                moved = True
            following = (after, (*places[:i], actor.advance(places[i], response), *places[i + 1 :]))
            before.setdefault(following, []).append(state)
            if following not in came:
                came[following] = (state, actor.name, op)
                queue.append(following)
                complaint = always(dict(zip(fields, after, strict=True)))
                if complaint:
                    fail(following, complaint)
        if not moved:
            judge = if_busy if long else at_end
            complaint = judge(dict(zip(fields, values, strict=True)))
            if complaint:
                fail(state, complaint)
            if not long:
                ends.append(state)
    reached, stack = set(ends), list(ends)
    while stack:
        for state in before.get(stack.pop(), ()):
            if state not in reached:
                reached.add(state)
                stack.append(state)
    for state in came:
        if state not in reached:
            fail(state, "no end can be reached from here")
    return Found(len(came), len(ends))
