"""Model check of sleeping and waking workers, pushing threads and the seat, over all interleavings.

See ``test_protocol_model.py``; the modelled code is ``workers.py`` and ``helping.py``. The seat is the right of one
waiting thread to run operations in place of a worker. An operation is a number: how many further operations become
ready, one after another, after it has run. :data:`USER_CODE` pushes an operation and waits for it; its worker lends its
slot meanwhile.
"""

from typing import Any, NamedTuple

import pytest

from tests.engine.model import Actor, Found, Steps, Violation, explore
from tests.engine.test_protocol_model import apply

USER_CODE, AWAITED = 100, 50
"""Operations with user code, and that for which it waits."""


class Setting(NamedTuple):
    """One queue and its threads; ``threads`` is the number of workers."""

    threads: int
    pushes: tuple[tuple[int, ...], ...]
    """Operations of each pushing thread."""
    seats: tuple[int, ...] = ()
    """Maximum number of operations per waiting thread."""
    asleep: int = 0
    """Number of workers that have started and sleep; the others may still be started."""
    change: str = ""


class Queue:
    """``WorkerQueue`` and its threads as steps of the model; ``change`` names a deliberate fault."""

    def __init__(self, setting: Setting) -> None:
        self.threads = setting.threads
        self.alone = setting.threads == 1
        self.change = setting.change
        self.asleep = setting.asleep
        self.lends = any(USER_CODE in operations for operations in setting.pushes)

    # -- the region ------------------------------------------------------------------------------------------------

    def handle(self, request: tuple[str, int]) -> Steps:
        """Model the admission or completion of an operation, and ``_dispatch``."""
        yield "first", "requests"
        kind, more = request
        if kind == "complete":
            more = -1 if more in (USER_CODE, AWAITED) else more - 1
        if more < 0:
            return
        if self.change == "look for sleepers before the operation is there":
            wake = yield from self.wake_needed()
            yield "append", "items", more
        else:
            yield "append", "items", more
            wake = yield from self.wake_needed()
        if wake and ((yield "get", "idle") or (yield "get", "permits")):
            yield from self.wake()

    def wake_needed(self) -> Steps:
        """Return whether a queued operation needs another worker to be woken."""
        return not (yield "get", "waking") and not (yield "get", "looking")

    def push(self, operations: tuple[int, ...]) -> Steps:
        """Model a thread that pushes ``operations``."""
        for _, more in enumerate(operations):  # the number is part of the state, which an iterator would hide
            yield "append", "requests", ("admit", more)
            if (yield "get", "token"):
                yield from apply(self.handle)

    def complete(self, more: int) -> Steps:
        """Model the completion of an operation; ``more`` operations become ready after it."""
        yield "append", "requests", ("complete", more)
        if (yield "get", "token"):
            yield from apply(self.handle)

    # -- workers ---------------------------------------------------------------------------------------------------

    def wake(self) -> Steps:
        """Model ``WorkerQueue.wake``."""
        busy = yield from self.busy()  # a value in the middle of an expression is no part of the state
        if busy >= (yield from self.slots()):
            return
        if self.change == "waking is set before a sleeper is found":
            yield "set", "waking", 1
        worker = yield "last", "idle"
        if worker is not None:
            if self.change == "waking is set after the release":
                yield "release", f"park{worker}"
                yield "set", "waking", 1
            else:
                yield "set", "waking", 1
                yield "release", f"park{worker}"
            return
        if self.change == "waking is set before a sleeper is found":
            yield "set", "waking", 0
        if (yield "get", "permits"):
            if (yield "first", "permits") is None:
                return
            number = yield "get", "started"
            yield "add", "started", 1
            yield "set", "waking", 1
            yield "release", f"park{number}"

    def busy(self) -> Steps:
        """Model ``WorkerQueue.busy``."""
        seated = not (yield "get", "seat")
        started = yield "get", "started"
        return started - len((yield "get", "idle")) + seated

    def slots(self) -> Steps:
        """Return ``WorkerQueue.threads``, which is fixed if no operation has user code."""
        return (yield "get", "threads") if self.lends else self.threads

    def crowded(self) -> Steps:
        """Model ``WorkerQueue.crowded``; without a loan or a seat holder no worker is too many."""
        if not self.lends and (yield "get", "seat"):
            return False
        busy = yield from self.busy()
        return busy > (yield from self.slots())

    # -- user code -------------------------------------------------------------------------------------------------

    def wait_in_user_code(self) -> Steps:
        """Model ``_acquired`` on a worker or in the seat: push an operation, lend the slot until it has run."""
        yield from self.push((AWAITED,))
        if self.change != "no slot is lent":
            yield "set", "lent", 1
            yield "add", "threads", 1
            if self.change != "no worker may be started for a loan" and not (yield "get", "idle"):
                yield "append", "permits", 1
            if self.change != "a loan wakes no worker" and (yield "get", "items") and not (yield "get", "waking"):
                yield from self.wake()
        yield "add", "running", -1
        yield "acquire", "done"
        yield "add", "running", 1
        if self.change not in ("no slot is lent", "the slot is not taken back"):
            yield "add", "threads", -1
            yield "first", "permits"

    def woken(self) -> Steps:
        """Model a worker from its wake-up to its next check; return whether a waiting thread has taken its place."""
        if self.change == "look at the seat before waking is cleared":
            back = yield from self.crowded()
            yield "set", "waking", 0
        else:
            if self.change != "waking is cleared after the look for more":
                yield "set", "waking", 0
            back = yield from self.crowded()
        return back

    def worker(self, me: int) -> Steps:
        """Model ``_work``, the loop of worker ``me``."""
        yield "acquire", f"park{me}"
        back = yield from self.woken()
        while True:
            if not self.is_sole(me) and self.change != "looking is cleared after the look for more":
                yield "set", "looking", 0
            if self.lends and not self.is_sole(me) and (yield "get", "lent"):
                back = yield from self.crowded()
            more = None if back else (yield "first", "items")
            if more is None:
                seen = self.change == "look before entering idle" and (yield from self.stay(back))
                yield "append", "idle", me
                if self.change != "look before entering idle":
                    seen = yield from self.stay(back)
                if seen and (yield "remove", "idle", me):
                    if self.change == "no look at the seat when out of idle again":
                        back = False
                    else:
                        back = yield from self.crowded()
                    continue
                yield "acquire", f"park{me}"
                back = yield from self.woken()
                continue
            if (
                not self.is_sole(me)
                and (yield "get", "items")
                and not (yield "get", "waking")
                and ((yield "get", "idle") or (yield "get", "permits"))
            ):
                yield from self.wake()
            if self.change == "waking is cleared after the look for more":
                yield "set", "waking", 0
            if self.change == "looking is cleared after the look for more":
                yield "set", "looking", 0
            yield "add", "running", 1
            if more == USER_CODE:
                yield from self.wait_in_user_code()
            yield "add", "running", -1
            if not self.is_sole(me):
                yield "set", "looking", 1
            if more == AWAITED:
                yield "release", "done"
            yield from self.complete(more)

    def is_sole(self, me: int) -> bool:
        """Return whether the queue had one thread when worker ``me`` started; a loan's worker finds two."""
        return self.alone and me == 0

    def stay(self, back: bool) -> Steps:
        """Return whether the worker must stay awake: an operation is queued, and no waiting thread has its place.

        ``back`` is whether a waiting thread had its place at the previous check.
        """
        if not (yield "get", "items"):
            return False
        if self.lends:
            busy = yield from self.busy()
            return busy < (yield from self.slots())
        return not (back and not (yield "get", "seat"))

    # -- the seat --------------------------------------------------------------------------------------------------

    def wait(self, most: int) -> Steps:
        """Model ``_stand_in``: a waiting thread runs at most ``most`` operations."""
        if not (yield "get", "items") or (yield "first", "seat") is None:
            return
        started = yield "get", "started"
        idle = len((yield "get", "idle"))
        if started - idle - (yield "get", "waking") <= 0:
            for _ in range(most):  # `_` is part of the state
                if not (yield "get", "items"):
                    break
                more = yield "first", "items"
                if more is None:
                    break
                yield "set", "looking", 0
                if not self.alone and (yield "get", "items") and (yield "get", "idle"):
                    yield from self.wake()
                yield "add", "running", 1
                if more == USER_CODE:
                    yield from self.wait_in_user_code()
                yield "add", "running", -1
                yield "set", "looking", 1
                if more == AWAITED:
                    yield "release", "done"
                yield from self.complete(more)
        yield "set", "looking", 0
        if self.change == "the seat is given back after the last look":
            wake = yield from self.leave_to_workers()
            yield "append", "seat", 1
        else:
            yield "append", "seat", 1
            wake = yield from self.leave_to_workers()
        if wake:
            yield from self.wake()

    def leave_to_workers(self) -> Steps:
        """Return whether a waiting thread that leaves the seat must wake a worker."""
        return (
            (yield "get", "items")
            and not (yield "get", "waking")
            and ((yield "get", "idle") or (yield "get", "permits"))
        )


def check(setting: Setting, *, stalls: bool = False) -> Found:
    """Explore all interleavings of ``setting``.

    With ``stalls`` an operation may take long, and free workers must run the other operations.

    Raises:
        Violation: a property is false in some interleaving.
    """
    queue, n = Queue(setting), setting.threads
    workers = n + queue.lends
    shared: dict[str, Any] = {"requests": (), "token": (1,), "items": (), "idle": tuple(range(setting.asleep))}
    shared |= {"waking": 0, "looking": 0, "permits": (1,) * (n - setting.asleep), "seat": (1,)}
    shared |= {"started": setting.asleep, "running": 0} | {f"park{i}": 0 for i in range(workers)}
    shared |= {"threads": n, "lent": 0, "done": 0} if queue.lends else {}

    def always(state: dict[str, Any]) -> str | None:
        # A worker whose loan has ended and the other worker may both end their operations.
        return f"{state['running']} run at once" if state["running"] > workers else None

    def at_end(state: dict[str, Any]) -> str | None:
        if state["items"] or state["requests"]:
            return "something stays behind"
        if state.get("threads", n) != n or state["running"]:
            return "a slot is not returned"
        if state["waking"] or state["looking"]:
            return "somebody is awaited who does not come"
        return None if state["token"] and state["seat"] else "the token or the seat is lost"

    def if_busy(state: dict[str, Any]) -> str | None:
        return (
            "an operation waits although a worker is free"
            if stalls and state["items"] and state["running"] < n
            else None
        )

    actors = [Actor(f"pusher {i}", lambda ops=ops: queue.push(ops)) for i, ops in enumerate(setting.pushes)]  # type: ignore[misc]
    actors += [Actor(f"waiter {i}", lambda most=most: queue.wait(most)) for i, most in enumerate(setting.seats)]  # type: ignore[misc]
    actors += [Actor(f"worker {i}", lambda i=i: queue.worker(i)) for i in range(workers)]  # type: ignore[misc]
    return explore(shared, actors, always, at_end, "running", if_busy)


SETTINGS = (
    Setting(1, ((0, 0),), asleep=0),
    Setting(1, ((0,), (0,)), asleep=1),
    Setting(1, ((1,),), (1,), asleep=1),
    Setting(1, ((0, 0),), (2,), asleep=1),
    Setting(2, ((0, 0),), asleep=1),
    pytest.param(Setting(2, ((1, 0),), asleep=2), marks=pytest.mark.stress),
)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_all_operations_run_within_the_limit(setting):
    """All operations run, never more at a time than there are workers (races 2, 3 and 11 of the README)."""
    assert check(setting).ends >= 1


@pytest.mark.parametrize("setting", [Setting(2, ((0, 0),), asleep=2), Setting(2, ((0, 0),), asleep=0)], ids=str)
def test_free_worker_takes_operations_after_a_long_one(setting):
    """While one operation takes long, no other operation waits if a worker is free (race 3 of the README)."""
    assert check(setting, stalls=True).ends >= 1


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        (Setting(1, ((0, 0),), asleep=1, change="look before entering idle"), "stays behind"),
        (Setting(1, ((0, 0),), asleep=1, change="look for sleepers before the operation is there"), "stays behind"),
        (Setting(1, ((0, 0),), asleep=1, change="waking is set after the release"), "stays behind"),
        (Setting(1, ((0, 0),), (1,), 1, "the seat is given back after the last look"), "stays behind"),
        (Setting(1, ((0, 0),), (1,), 1, "look at the seat before waking is cleared"), "2 run at once"),
        pytest.param(
            Setting(1, ((0, 0, 0),), (1,), 1, "no look at the seat when out of idle again"),
            "2 run at once",
            marks=pytest.mark.stress,
        ),
        pytest.param(
            Setting(1, ((0, 0, 0),), (1,), 1, "waking is set before a sleeper is found"),
            "2 run at once",
            marks=pytest.mark.stress,
        ),
    ],
    ids=str,
)
def test_each_order_of_steps_is_needed(setting, what):
    """With two steps exchanged or a check left out, Violation reports a lost operation or two that run at once."""
    with pytest.raises(Violation, match=what):
        check(setting)


LENDING = (
    Setting(1, ((USER_CODE,),), asleep=0),
    Setting(1, ((USER_CODE,),), asleep=1),
    pytest.param(Setting(1, ((USER_CODE, 0),), asleep=1), marks=pytest.mark.stress),
)


@pytest.mark.parametrize("setting", LENDING, ids=str)
def test_user_code_that_waits_lends_its_slot(setting):
    """Whatever user code waits for runs, in every interleaving, and the queue has its slots again at the end."""
    assert check(setting).ends >= 1


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("no slot is lent", "stays behind"),
        ("no worker may be started for a loan", "stays behind"),
        ("a loan wakes no worker", "stays behind"),
        ("the slot is not taken back", "a slot is not returned"),
    ],
)
def test_each_step_of_a_loan_is_needed(change, what):
    """Without the slot, the permit, the wake-up or the return, Violation reports what is lost."""
    with pytest.raises(Violation, match=what):
        check(Setting(1, ((USER_CODE,),), asleep=1, change=change))


@pytest.mark.parametrize(
    "setting",
    [
        Setting(2, ((0, 0),), asleep=2, change="waking is cleared after the look for more"),
        Setting(2, ((1, 0, 0),), asleep=2, change="looking is cleared after the look for more"),
    ],
    ids=str,
)
def test_flags_are_cleared_before_the_look(setting):
    """If a flag is cleared after the queue check, Violation reports that an operation waits needlessly or is lost."""
    with pytest.raises(Violation, match=r"although a worker is free|stays behind"):
        check(setting, stalls=True)
