"""Model check of the engine's lock-free protocols over all interleavings, with and without deviations.

The actors follow the code of ``region.py``, ``workers.py``, ``helping.py`` and ``waiting.py`` step by step. Each access
to shared state is one step, finer than with the GIL. ``change`` names one deviation from the code. Without a deviation
all properties must be true; each deviation must violate one.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.model import Actor, Found, Steps, Violation, explore


def apply(handle: Callable[[Any], Steps], change: str = "", most: int = 9, me: Any = 0) -> Steps:
    """Model ``Region.apply``; ``handle`` serves one request, removes it, and dispatches.

    After ``most`` requests the thread leaves its own mark as the token, and continues unless another thread has been
    inside since.
    """
    stay = 0
    while (yield "get", "requests"):
        if (yield "first", "token") is None:
            return
        left, stay = most, stay + 1
        while left and (requests := (yield "get", "requests")):
            left -= 1
            yield from handle(requests[0])
        mark = (me, stay) if not left else 1
        yield "append", "token", mark
        if change == "look before giving the token back":
            return
        if not left:
            if change == "leave it to whoever comes next":
                return
            if (yield "get", "token") != (mark,):
                return


def one_inside(state: dict[str, Any]) -> str | None:
    """Return a complaint if more than one thread is inside the region, else None."""
    return "two threads inside" if state.get("inside", 0) > 1 else None


# -- requests and the token --------------------------------------------------------------------------------------------


def requests_model(threads: int, each: int, change: str = "", most: int = 9) -> Found:
    """Explore threads that each append ``each`` requests, and serve requests while they own the token."""

    def handle(_: Any) -> Steps:
        yield "add", "inside", 1
        yield "add", "done", 1
        yield "first", "requests"
        yield "add", "inside", -1

    def thread(me: int) -> Steps:
        for number in range(each):
            if change == "look for the token before the request":
                free = yield "get", "token"
                yield "append", "requests", (me, number)
            else:
                yield "append", "requests", (me, number)
                free = yield "get", "token"
            if free:
                yield from apply(handle, change, most, (me, number))

    def at_end(state: dict[str, Any]) -> str | None:
        if state["requests"]:
            return "a request stays behind"
        return (
            None if len(state["token"]) == 1 and state["done"] == threads * each else "the token or a request is lost"
        )

    actors = [Actor(f"thread {i}", lambda i=i: thread(i)) for i in range(threads)]  # type: ignore[misc]
    return explore({"requests": (), "token": (1,), "inside": 0, "done": 0}, actors, one_inside, at_end)


@pytest.mark.parametrize(("threads", "each"), [(2, 2), (3, 1)])
def test_every_request_is_served(threads, each):
    """All requests are served, by one thread at a time."""
    assert requests_model(threads, each).states > 100


@pytest.mark.parametrize(
    ("threads", "each", "most"), [(2, 2, 1), (2, 2, 2), pytest.param(3, 1, 1, marks=pytest.mark.stress)]
)
def test_every_request_is_served_with_a_limit(threads, each, most):
    """All requests are served although a thread gives the token back after ``most`` requests.

    The thread then continues, unless another thread has taken the token meanwhile.
    """
    assert requests_model(threads, each, most=most).states > 100


@pytest.mark.parametrize("change", ["look before giving the token back", "look for the token before the request"])
def test_each_order_of_request_and_token_is_needed(change):
    """If a thread checks before a step instead of after it, explore raises Violation (race 1 of the README).

    The steps are the append of a request, before the check of the token, and the return of the token, before the check
    of the requests.
    """
    with pytest.raises(Violation, match="stays behind"):
        requests_model(2, 1, change)


def test_leaving_requests_to_other_threads_is_wrong():
    """If a thread at its limit leaves requests to the next thread, explore raises Violation (race 1 of the README)."""
    with pytest.raises(Violation, match="stays behind"):
        requests_model(2, 2, "leave it to whoever comes next", most=1)


# -- waits -------------------------------------------------------------------------------------------------------------


def waits_model(change: str = "", *, for_all: bool = False) -> Found:
    """Explore a thread that pushes a write and waits for it, or with ``for_all`` for all operations.

    A second thread serves requests, and a worker runs the write.
    """

    def handle(request: str) -> Steps:
        if request == "admit":
            yield "set", "write", 1
            yield "add", "pending", 1
            yield "first", "requests"
            yield "release", "item"
        elif request == "complete":
            yield "set", "write", 0
            if change == "count down after the request is gone":
                yield "first", "requests"
                yield "add", "pending", -1
            else:
                yield "add", "pending", -1
                yield "first", "requests"
        else:
            yield "first", "requests"
        if not (yield "get", "pending") and (yield "get", "idle_waiters"):
            while waiting := (yield "get", "idle_waiters"):
                yield "append", "opened", waiting[0]
                yield "first", "idle_waiters"

    def waiter() -> Steps:
        yield "append", "requests", "admit"
        if (yield "get", "token"):
            yield from apply(handle)
        if (yield "get", "requests"):
            yield from apply(handle)
        if not for_all:
            order = ("write", "requests") if change == "requests last" else ("requests", "write")
            if not (yield "get", order[0]) and not (yield "get", order[1]):
                yield "set", "early", not (yield "get", "ran")
            return
        lock = 0
        while True:
            lock = (lock + 1) % 4  # a new closed lock; modulo 4 keeps the number of states finite
            yield "remove", "opened", lock
            yield from apply(handle)
            order = ("pending", "requests") if change == "requests last" else ("requests", "pending")
            if not (yield "get", order[0]) and not (yield "get", order[1]):
                yield "set", "early", not (yield "get", "ran")
                return
            if change != "look before being a waiter":
                yield "append", "idle_waiters", lock
            if not (yield "get", order[0]) and not (yield "get", order[1]):
                continue
            if change == "look before being a waiter":
                yield "append", "idle_waiters", lock
            yield "await", "opened", lock

    def other() -> Steps:
        yield "append", "requests", "something else"
        yield from apply(handle)

    def worker() -> Steps:
        yield "acquire", "item"
        yield "set", "ran", 1
        yield "append", "requests", "complete"
        if (yield "get", "token"):
            yield from apply(handle)

    shared: dict[str, Any] = {"requests": (), "token": (1,), "write": 0, "pending": 0, "idle_waiters": (), "opened": ()}
    shared |= {"item": 0, "ran": 0, "early": False, "returned": 0}

    def wait_and_return() -> Steps:
        yield from waiter()
        yield "set", "returned", 1

    def always(state: dict[str, Any]) -> str | None:
        return "the wait returned before the write had run" if state["early"] else None

    def at_end(state: dict[str, Any]) -> str | None:
        return None if state["returned"] and not state["requests"] else "the wait does not end"

    actors = [Actor("waiter", wait_and_return), Actor("other", other), Actor("worker", worker)]
    return explore(shared, actors, always, at_end)


@pytest.mark.parametrize("for_all", [False, True])
def test_waits_return_neither_early_nor_never(for_all):
    """``wait_for_var`` and ``wait_for_all`` return, and only after the write has run."""
    assert waits_model(for_all=for_all).states > 100


@pytest.mark.parametrize(
    ("change", "for_all", "what"),
    [
        ("requests last", False, "before the write had run"),
        ("requests last", True, "before the write had run"),
        ("look before being a waiter", True, "does not end"),
    ],
)
def test_each_order_in_waits_is_needed(change, for_all, what):
    """If two steps of a wait are exchanged, explore raises Violation (the README's section "Without the GIL")."""
    with pytest.raises(Violation, match=what):
        waits_model(change, for_all=for_all)
