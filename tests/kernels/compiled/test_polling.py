"""Polling memory without the interpreter: it ends after a change or after its turns, and takes parts handed over."""

from __future__ import annotations

import ctypes
import threading

import pytest

from weftplan.kernels.compiled.exchange import polling
from weftplan.kernels.compiled.target import host


@pytest.fixture
def look():
    """Return the polling function; skip the test if none is available."""
    host()
    actual = polling.look()
    if actual is None:
        pytest.skip("nothing looks without the interpreter here")
    return actual


def words(*values):
    """Return an array of these words followed by an empty box of three words, and the array's address."""
    result = (ctypes.c_int64 * (len(values) + 3))(*values)
    return result, ctypes.addressof(result)


def test_polling_ends_without_a_change(look):
    """If the word does not change, polling ends after the given number of turns and writes nothing."""
    result, start = words(7, 7, 3, 3)
    look(start)
    assert list(result) == [7, 7, 3, 3, 0, 0, 0]


def test_changed_before(look):
    """Polling ends immediately if the word has changed before, however many turns remain."""
    _, start = words(8, 7, 1 << 62, 1 << 62)
    look(start)


def test_changed_meanwhile(look):
    """Polling ends when another thread changes the word; while it polls, other threads can run Python code."""
    result, start = words(7, 7, 1 << 62, 100)
    thread = threading.Thread(target=look, args=(start,), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    result[0] += 1
    thread.join(60)
    assert not thread.is_alive()


def test_no_compiler_is_imported_for_it(monkeypatch):
    """``polling.look`` returns None and asks for no compiler if the process uses no compiled kernels."""

    class Never:
        def cache_info(self):
            return type("Info", (), {"currsize": 0})()

        def __call__(self):
            raise AssertionError("asked for a compiler")

    monkeypatch.setattr(polling, "host", Never())
    assert polling.look() is None


AWAY, LOOKS, HANDED = range(3)


class Parts:
    """Work in parts that records the number, room and thread of each part.

    The first ``meet`` parts wait until ``meet`` threads have one each.
    """

    def __init__(self, count, rooms, meet=1):
        self.words = (ctypes.c_int64 * (count * rooms))(*range(count * rooms))
        self.count, self.seen = count, []
        self.together = threading.Barrier(meet, timeout=60)
        self.entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._part)
        start = ctypes.addressof(self.words)
        places = [[start + 8 * (room * count + number) for number in range(count)] for room in range(rooms)]
        self.shared = polling.SharedParts(self.entry, places)

    def _part(self, place):
        room, number = divmod((place - ctypes.addressof(self.words)) // 8, self.count)
        self.seen.append((number, room, threading.get_ident()))
        if len(self.seen) <= self.together.parties:
            self.together.wait()


def test_parts_run_without_helpers(look):
    """Without helpers, the calling thread runs every part once, in the first room."""
    parts = Parts(5, 2)
    for _ in range(2):
        parts.seen.clear()
        parts.shared.run([])
        assert parts.seen == [(number, 0, threading.get_ident()) for number in range(5)]


def test_polling_thread_takes_parts(look):
    """A polling thread takes parts, in its own room, and each part runs once.

    It goes on polling until the word changes.
    """
    result, start = words(7, 7, 1 << 62, 0)
    thread = threading.Thread(target=look, args=(start,), daemon=True)
    thread.start()
    while result[4] != LOOKS:
        thread.join(1e-3)
    for _ in range(20):
        parts = Parts(6, 2, meet=2)
        parts.shared.run([start])
        assert sorted(number for number, _, _ in parts.seen) == list(range(6))
        rooms = {(room, ident == threading.get_ident()) for _, room, ident in parts.seen}
        assert rooms == {(0, True), (1, False)}
        assert result[4] == LOOKS
    result[0] += 1
    thread.join(60)
    assert not thread.is_alive()
    assert result[4] == AWAY


@pytest.mark.parametrize("state", [AWAY, LOOKS])
def test_absent_helper_is_not_awaited(look, state):
    """The caller runs all parts itself if the box's thread is away or takes none."""
    result, start = words(7, 7, 1 << 62, 0)
    result[4] = state
    parts = Parts(3, 2)
    parts.shared.run([start])
    assert [number for number, _, _ in parts.seen] == [0, 1, 2]
    assert result[4] == state


def test_handed_over_at_the_end_of_looks(look):
    """Parts handed over at the end of the last turn run once, in whichever thread reaches them first.

    looks       sees its last turn end
    owner                                looks -> handed
    looks       away
    owner                                does parts; waits for no thread
    """
    result, start = words(7, 7, 0, 0)  # no turns: it leaves at once
    for _ in range(200):
        parts = Parts(4, 2)
        thread = threading.Thread(target=look, args=(start,), daemon=True)
        thread.start()
        parts.shared.run([start])
        thread.join(60)
        assert not thread.is_alive()
        assert sorted(number for number, _, _ in parts.seen) == [0, 1, 2, 3]
        assert result[4] == AWAY
