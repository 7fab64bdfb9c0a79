"""The diagram ``docs/images/var-states.svg`` has the states and state changes of a var."""

from __future__ import annotations

import random
from typing import Any

from tests.support.scripts import script
from weftplan.engine.var import Var


class Request:
    """An operation on a single var, with the attributes that Var uses."""

    def __init__(self, var: Var, *, writes: bool) -> None:
        self.writes = (var,) if writes else ()
        self.wait = 1


def state_changes(seed: int) -> set[tuple[str, str]]:
    """Return the pairs (before, after) of a var's states during 200 random requests and completions."""
    rng, var, seen = random.Random(seed), Var(None), set()
    running: list[Any] = []
    for _ in range(200):
        before = var.state
        if running and rng.random() < 0.55:
            done = running.pop(rng.randrange(len(running)))
            (var.finish_write if done.writes else var.finish_read)(running)
        else:
            request: Any = Request(var, writes=rng.random() < 0.4)
            granted = var.write is None and (not request.writes or not var.readers)
            (var.add_write if request.writes else var.add_read)(request)
            running += [request] * granted
        seen.add((before, var.state))
    return seen


def test_the_picture_has_every_change_of_state() -> None:
    """The diagram has an arrow for exactly the state changes that occur; the file is the script's present output."""
    picture = script("draw_states")
    seen = set().union(*map(state_changes, range(50)))
    assert {(before, after) for before, after in seen if before != after} == set(picture.ARROWS)
    assert {state for change in seen for state in change} == set(picture.STATES)
    assert picture.TARGET.read_text(encoding="utf-8") == picture.drawing()
