"""All interleavings of a polling thread and owners that hand over parts (``kernels/compiled/exchange/polling.py``).

Like ``tests/engine/test_protocol_model.py``, but for the states of a box. A shared operation runs repeatedly, as in the
steps of a network. Its counter therefore restarts while another thread may still have its address.
"""

from typing import Any, NamedTuple

import pytest

from tests.engine.model import Actor, Found, Steps, Violation, explore

AWAY, LOOKS, HANDED, WORKS = range(4)


class Setting(NamedTuple):
    """One polling thread, and owners of work that use its box alternately."""

    owners: tuple[int, ...]
    """For each owner, the number of times it runs its own work."""
    parts: int = 2
    looks: int = 2
    """Number of times the thread starts to poll."""
    turns: int = 1
    called: bool = False
    """Whether a thread changes the polled word."""
    change: str = ""


class Box:
    """``looking``, ``sharing`` and ``parts`` of the implementation, as steps of the model."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.change = setting.change

    def look(self) -> Steps:
        """Poll ``setting.looks`` times, each time until the word changes or the turns are over, as a helper does."""
        for _ in range(self.setting.looks):  # _ is part of the state
            old = yield "get", "word"
            yield "set", "state", LOOKS
            count = 0
            while count < self.setting.turns and (yield "get", "word") == old:
                if (yield "get", "state") == HANDED:
                    yield from self.take()
                    count = 0
                count += 1
            yield "set", "state", AWAY

    def take(self) -> Steps:
        """Take parts of the work that was handed over, unless the owner has taken it back."""
        if self.change == "it begins without asking":
            yield "set", "state", WORKS
        elif not (yield "change", "state", HANDED, WORKS):
            return
        job = yield "get", "job"
        yield from self.do(job)
        yield "set", "state", LOOKS

    def do(self, job: int) -> Steps:
        """Run parts of a job until none is left, as ``parts`` does."""
        yield "add", f"inside{job}", 1
        while True:
            number = yield "take a number", f"next{job}"
            if number >= self.setting.parts:
                break
            yield "append", f"done{job}", number
        yield "add", f"inside{job}", -1

    def own(self, job: int, times: int) -> Steps:
        """Run ``with_lookers`` and ``sharing`` ``times`` times."""
        for _ in range(times):
            yield "acquire", "free"
            yield "set", f"running{job}", 1
            yield "set", f"next{job}", 0
            if self.change == "the address comes after the state":
                yield "change", "state", LOOKS, HANDED
                yield "set", "job", job
            else:
                yield "set", "job", job
                if self.change == "who is away is handed parts":
                    yield "set", "state", HANDED
                else:
                    yield "change", "state", LOOKS, HANDED
            yield from self.do(job)
            if self.change == "it is taken back from who has begun":
                yield "set", "state", LOOKS
            elif self.change != "it is not taken back":
                yield "change", "state", HANDED, LOOKS
            if self.change != "nobody is waited for":
                yield "unless", "state", WORKS
            yield "set", f"running{job}", 0
            done = yield "get", f"done{job}"
            yield "set", "wrong", int(sorted(done) != list(range(self.setting.parts))) or (yield "get", "wrong")
            yield "set", f"done{job}", ()
            yield "release", "free"

    def call(self) -> Steps:
        """Change the polled word, as a caller with other work for the helper does."""
        yield "add", "word", 1


def check(setting: Setting) -> Found:
    """Explore all interleavings of ``setting``.

    Raises:
        Violation: a property does not hold.
    """
    box, jobs = Box(setting), range(len(setting.owners))
    shared: dict[str, Any] = {"word": 0, "state": AWAY, "job": -1, "free": 1, "wrong": 0}
    for job in jobs:
        shared |= {f"next{job}": 0, f"inside{job}": 0, f"running{job}": 0, f"done{job}": ()}
    shared |= {"inside-1": 0, "next-1": 0, "done-1": ()}

    def always(state: dict[str, Any]) -> str | None:
        if state["wrong"]:
            return "a part was left out, or done twice"
        if any(state[f"inside{job}"] and not state[f"running{job}"] for job in jobs):
            return "somebody is at work on what is over"
        return "somebody works on nothing" if state["inside-1"] else None

    def at_end(state: dict[str, Any]) -> str | None:
        return None if state["state"] == AWAY else "the box says that somebody looks"

    actors = [Actor("looker", box.look)]
    actors += [Actor(f"owner {job}", lambda job=job: box.own(job, setting.owners[job])) for job in jobs]  # type: ignore[misc]
    if setting.called:
        actors.append(Actor("caller", box.call))
    return explore(shared, actors, always, at_end)


@pytest.mark.parametrize(
    "setting",
    [
        Setting((1,), turns=2),
        Setting((2,), called=True),
        Setting((1, 1), called=True),
        Setting((3,), parts=1),
        pytest.param(Setting((2, 2), parts=3, turns=3, called=True), marks=pytest.mark.stress),
    ],
    ids=str,
)
def test_each_part_is_done_once(setting: Setting):
    """Each part runs once, whenever the polling thread starts and stops.

    No thread works on a job that is over.
    """
    assert check(setting).ends >= 1


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("it begins without asking", "on what is over|says that somebody looks|left out"),
        ("the address comes after the state", "on nothing|on what is over"),
        ("who is away is handed parts", "says that somebody looks"),
        ("it is taken back from who has begun", "on what is over"),
        ("it is not taken back", "on what is over|on nothing"),
        ("nobody is waited for", "on what is over"),
    ],
)
def test_each_step_is_needed(change: str, what: str):
    """Without any one step, a thread works on freed arrays, or parts are handed to a box that no thread polls."""
    with pytest.raises(Violation, match=what):
        check(Setting((2,), change=change))
