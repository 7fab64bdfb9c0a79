"""Finalizers that look up vars in the middle of a look-up of the same thread, wherever the interpreter can run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.support.nested_calls import run_with
from weftplan import engine
from weftplan.engine.core import Engine
from weftplan.support import address_ranges
from weftplan.tasks import array_vars as registry_module
from weftplan.tasks.array_vars import registry

FILES = (registry_module.__file__, address_ranges.__file__)


@pytest.fixture
def naive() -> Iterator[Engine]:
    """An engine without threads."""
    with engine.using(engine.create("NaiveEngine")) as current:
        yield current


def foreign(memory: bytearray, start: int = 0) -> np.ndarray:
    """Return an array over memory that no array owns."""
    return np.frombuffer(memory, np.uint8)[start:]


@pytest.mark.parametrize("dies", ["outer", "nested", "both"])
@pytest.mark.parametrize("make", [lambda: foreign(bytearray(64)), lambda: np.zeros(8)], ids=["foreign", "own"])
def test_lookups_nest(naive: Engine, make: Callable[[], np.ndarray], dies: str) -> None:
    """With a look-up nested at any step of another, live arrays keep their vars, and dead arrays leave no entry."""
    shared = bytearray(64)
    kept = [foreign(shared), make(), make()]
    variables = [engine.var_of(array) for array in kept]
    before, step, more = len(registry), 0, True
    while more:
        step += 1
        doomed = {name: [make(), make()] for name in ("outer", "nested")}
        assert all(engine.var_of(array) for arrays in doomed.values() for array in arrays)
        seen: list[object] = []

        def look_up(name: str, doomed: dict[str, list[np.ndarray]] = doomed, seen: list[object] = seen) -> None:
            if dies in (name, "both"):
                doomed[name].clear()
            engine.var_of(make())
            seen.append(engine.var_of(foreign(shared)))
            seen += [engine.var_of(array) for array in kept[1:]]

        more = run_with(FILES, step, lambda: look_up("nested"), lambda: look_up("outer"))
        assert sorted(map(id, seen)) == sorted(map(id, variables * (1 + more))), step
        doomed.clear()
        assert len(registry) == before, step
    assert step > 30


def test_first_lookups_of_one_buffer_nest(naive: Engine) -> None:
    """A look-up of a buffer, nested at any step of another look-up of this buffer, gets the same var.

    In half of the cases both are the first look-ups of the buffer. In the other half, the array that was looked up
    first dies in the nested look-up.
    """
    step, more = 0, True
    while more:
        step += 1
        memory, seen = bytearray(64), []
        last = [foreign(memory)]
        if step % 2:
            engine.var_of(last[0])
        array = foreign(memory, 8)

        def nested(last: list[np.ndarray] = last, seen: list[object] = seen, array: np.ndarray = array) -> None:
            last.clear()
            seen.append(engine.var_of(array))

        more = run_with(FILES, (step + 1) // 2, nested, lambda: seen.append(engine.var_of(array)))  # noqa: B023
        assert len(set(map(id, seen))) == 1, step
        assert engine.var_of(array) is seen[0], step
