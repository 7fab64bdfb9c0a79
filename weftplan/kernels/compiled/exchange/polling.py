"""Polling of a memory word without the interpreter, and work handed to polling threads.

A sleeping thread continues some 40 microseconds after another thread wakes it; a polling thread continues immediately.
It yields the core between polls, so a thread with work loses little time.

An owner of work can hand parts of a compiled function (:class:`SharedParts`) to a polling thread, which runs them
without the interpreter. The polling thread's words are a box with a state: *away*, *looks*, *handed* or *works*. Only
the polling thread changes the state to *away*, or from *handed* to *works*. Only the owner that has reserved the box
hands work over, or takes it back if the thread has not begun. So an owner waits at most for one running part per
thread. ``tests/kernels/compiled/test_polling_model.py`` checks all interleavings.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence

import numpy as np

from weftplan.kernels.compiled.ir import Function, Value
from weftplan.kernels.compiled.jit import Entry, library
from weftplan.kernels.compiled.target import host
from weftplan.support import slots
from weftplan.support.addresses import address

_OLD, _TURNS, _PAUSES = range(1, 4)
"""Indices of a call's words, after the polled word: its old value; the number of rounds of :data:`_LOOKS` polls, each
followed by a yield of the core; the number of pauses after a change."""
_LOOKS = 32
"""Polls before the core is yielded: a microsecond or two, much less than a thread waits for a core."""
_STATE, _JOB, _SCRATCH_INDEX = range(4, 7)
"""Indices of a box's words: its state, the shared work that was handed over, and its scratch room."""
_ASLEEP, _LOOKS_ON, _HANDED, _WORKS = range(4)
_NEXT_PART, _COUNT, _FUNCTION, _BOXES, _FIRST_BOX = range(5)
"""Indices of the words of shared work: the next part, the number of parts, the function, the number of boxes, and the
first box."""
MAX_BOXES = 3
"""Maximum helpers of one operation; each adds a table of argument addresses, for its scratch room."""
_TABLES = _FIRST_BOX + MAX_BOXES
"""Index of the first part's argument address; the addresses are ordered by room, then by part."""
_ENDLESS = 1 << 62
"""End of a loop that only ``leave`` ends."""


def look() -> Entry | None:
    """Return the compiled function that polls a word until it changes, or for a limited number of rounds.

    Return None if no compiler is available, or none has been used yet: importing it here would take long.
    """
    if not host.cache_info().currsize:
        return None
    entries = _entries()
    return None if entries is None else entries["looking"]


@functools.cache
def _entries() -> dict[str, Entry] | None:
    target = host()
    if isinstance(target, str) or target.bits < 256 or not hasattr(os, "sched_yield"):
        return None
    return library("looking", lambda _: [_looking(), _sharing(), _parts()], ("looking", "sharing"))


class SharedParts:
    """The parts of one operation, which the calling thread and polling threads run; one :meth:`run` at a time.

    Args:
        entry: the compiled function of each part.
        words: for every scratch room, the address of each part's argument words if the part uses that room.
    """

    __slots__ = ("_start", "_words")

    def __init__(self, entry: Entry, words: Sequence[Sequence[int]]) -> None:
        function = ctypes.cast(entry, ctypes.c_void_p).value or 0  # type: ignore[arg-type]  # it is ctypes' own
        count = len(words[0])
        self._words = np.zeros(_TABLES + count * len(words), np.int64)
        self._words[[_COUNT, _FUNCTION]] = count, function
        self._words[_TABLES:] = np.ravel(words)
        self._start = address(self._words)

    def run(self, boxes: Sequence[int]) -> None:
        """Run all parts on this thread and on the threads that poll ``boxes``, which the caller has reserved.

        There are at most :data:`MAX_BOXES` boxes. This thread uses scratch room 0, the thread of box k room k + 1.
        """
        entries = _entries()
        assert entries is not None
        count = len(boxes)
        self._words[_BOXES] = count
        self._words[_FIRST_BOX : _FIRST_BOX + count] = boxes
        entries["sharing"](self._start)


def available() -> bool:
    """Return whether polling threads can take parts."""
    return _entries() is not None


def _function(name: str, *arguments: tuple[str, str], local: bool = False) -> Function:
    f = Function(name, arguments or (("ptr", "words"),), "float", 8, local=local)
    f.declare("declare void @llvm.x86.sse2.pause()")
    f.declare("declare i32 @sched_yield()")
    return f


def _looking() -> Function:
    f = _function("looking")
    old, turns, pauses = (f.word("%words", index) for index in (_OLD, _TURNS, _PAUSES))
    state, count = f.at("%words", 8 * _STATE), f.local("i64")
    with f.when(f.compare("eq", _seen(f), old)):
        f.keep(0, count)
        _tell(f, _LOOKS_ON, state)
        with f.loop(0, _ENDLESS):
            with f.loop(0, _LOOKS):
                f.leave(f.compare("ne", _seen(f), old))
                with f.when(f.compare("eq", _seen(f, state), _HANDED)):
                    _take(f, state)
                    f.keep(0, count)
                f.emit("call void @llvm.x86.sse2.pause()")
            f.leave(f.compare("ne", _seen(f), old))
            f.value("call i32 @sched_yield()")
            f.keep(f.add(f.word(count), 1), count)
            f.leave(f.compare("sge", f.word(count), turns))
        _tell(f, _ASLEEP, state)  # an owner that has just handed over work then takes it back
        with f.loop(0, pauses):
            f.emit("call void @llvm.x86.sse2.pause()")
    return f


def _take(f: Function, state: str) -> None:
    """Emit code that runs parts of the work that was handed over, unless the owner has taken it back."""
    with f.when(_changed(f, state, _HANDED, _WORKS)):
        f.call(_parts(), f.pointer("%words", _JOB), f.word("%words", _SCRATCH_INDEX))
        _tell(f, _LOOKS_ON, state)


def _parts() -> Function:
    """Return the function ``parts(work, room)``, which runs parts in a scratch room until none is left."""
    f = _function("parts", ("ptr", "work"), ("i64", "room"), local=True)
    count, function = f.word("%work", _COUNT), f.pointer("%work", _FUNCTION)
    table = f.at(f.at("%work", 8 * _TABLES), f.mul("%room", f.mul(count, 8)))
    with f.loop(0, _ENDLESS):
        number = f.value("atomicrmw add ptr %work, i64 1 acq_rel, align 8")
        f.leave(f.compare("sge", number, count))
        f.emit(f"call void {function}(ptr {f.pointer(table, number)})")
    return f


def _sharing() -> Function:
    """Return the function ``sharing(words)``, which runs shared work with the help of polling threads.

    It hands work to the threads, runs parts itself, takes back work that has not begun, and waits for running parts.
    """
    f = _function("sharing")
    boxes = f.word("%words", _BOXES)
    f.keep(0, "%words", _NEXT_PART)
    with f.loop(0, boxes) as number:
        box = _box(f, number)
        f.emit(f"store ptr %words, ptr {f.at(box, 8 * _JOB)}, align 8")
        f.keep(f.add(number, 1), box, _SCRATCH_INDEX)
        _changed(f, f.at(box, 8 * _STATE), _LOOKS_ON, _HANDED)  # fails if the thread is away; it does not help then
    f.call(_parts(), "%words", 0)
    with f.loop(0, boxes) as number:
        state = f.at(_box(f, number), 8 * _STATE)
        _changed(f, state, _HANDED, _LOOKS_ON)
        with f.loop(0, _ENDLESS):
            with f.loop(0, _LOOKS):
                f.leave(f.compare("ne", _seen(f, state), _WORKS))
                f.emit("call void @llvm.x86.sse2.pause()")
            f.leave(f.compare("ne", _seen(f, state), _WORKS))
            f.value("call i32 @sched_yield()")
    return f


def _box(f: Function, number: Value) -> str:
    return f.pointer(f.at("%words", 8 * _FIRST_BOX), number)


def _seen(f: Function, word_at: str = "%words") -> str:
    return f.value(f"load atomic i64, ptr {word_at} acquire, align 8")


def _tell(f: Function, value: int, word_at: str) -> None:
    f.emit(f"store atomic i64 {value}, ptr {word_at} release, align 8")


def _changed(f: Function, word_at: str, old: int, new: int) -> str:
    """Emit a compare-and-swap of the word at ``word_at`` from ``old`` to ``new``; return the flag of its success."""
    swapped = f.value(f"cmpxchg ptr {word_at}, i64 {old}, i64 {new} acq_rel acquire, align 8")
    return f.value(f"extractvalue {{ i64, i1 }} {swapped}, 1")


slots.POLLING.fill(look)
