"""Looks at memory without the interpreter: they end with a change, or after their turns."""

from __future__ import annotations

import ctypes
import threading

import pytest

from weftplan.ops.compiled import looking
from weftplan.ops.compiled.target import host


@pytest.fixture
def look():
    """What looks, where the processor has the instructions."""
    host()
    found = looking.look()
    if found is None:
        pytest.skip("nothing looks without the interpreter here")
    return found


def words(*values):
    """Words in memory, and where they begin."""
    made = (ctypes.c_int64 * len(values))(*values)
    return made, ctypes.addressof(made)


def test_nobody_changes_anything(look):
    """It ends all the same, and writes nothing."""
    made, start = words(7, 7, 3, 3)
    look(start)
    assert list(made) == [7, 7, 3, 3]


def test_changed_before(look):
    """It ends at once, though its turns and pauses would never be over."""
    _, start = words(8, 7, 1 << 62, 1 << 62)
    look(start)


def test_changed_meanwhile(look):
    """It ends with the change, which another thread can make, since the interpreter is free."""
    made, start = words(7, 7, 1 << 62, 100)
    thread = threading.Thread(target=look, args=(start,), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    made[0] += 1
    thread.join(60)
    assert not thread.is_alive()


def test_no_compiler_is_imported_for_it(monkeypatch):
    """A process in which nobody has asked for compiled kernels does not begin to."""

    class Never:
        def cache_info(self):
            return type("Info", (), {"currsize": 0})()

        def __call__(self):
            raise AssertionError("asked for a compiler")

    monkeypatch.setattr(looking, "host", Never())
    assert looking.look() is None
