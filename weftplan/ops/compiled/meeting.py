"""A sum over the processes of one host as one compiled call: show, see that all are here, add, see that all have, take.

Every process has *slots* in memory that the others can read, at the same places: the number of a message, its length,
and from :data:`TEXT` on the message, of which the first :data:`HEAD` bytes are compared. Message n is in slot n % 2,
and its number is written last. What others have not written after some looks is left to the caller, who waits for them
in other ways, and goes on with another call. So a call ends soon whatever the others do, and decides nothing but that
all is as it should be.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from weftplan.ops.compiled.addresses import address
from weftplan.ops.compiled.ir import Function
from weftplan.ops.compiled.jit import library
from weftplan.ops.compiled.sums import LINE, Pieces, pieces_function

SLOT = 8192
"""Bytes of a slot."""

TEXT = 64
HEAD = 32

NEW, BEGUN, TOLD, DONE = range(4)
"""How far a sum has come: nothing is done; this process has shown its share and said so; it has added what is its part
and said so; all is over."""

_STAGE, _NUMBER, _FIRST = 0, 1, 2
_SECOND = _FIRST + HEAD // 8
_SHOW, _ADD, _TAKE, _OWN, _COUNT, _OTHERS = range(_SECOND + HEAD // 8, _SECOND + HEAD // 8 + 6)
"""Words of a call: how far it has come; the number of the first of its two messages, and how they begin; the tables of
pieces; the own slots; the number of others, and the slots of each."""

_SPINS, _LOOKS = 64, 300
"""Looks at a message before others may have the core between two, and looks in all: some hundred microseconds."""


class MeetingSum:
    """A sum whose places are known; it can be made again and again, by one thread at a time.

    Args:
        show, add, take: what moves the pieces of each step; of one dtype.
        own, others: addresses of slots.

    Attributes:
        stage: how far the last one has come.
    """

    __slots__ = ("_entry", "_keeps", "_start", "_view", "_words", "stage")

    def __init__(self, show: Pieces, add: Pieces, take: Pieces, own: int, others: Iterable[int]) -> None:
        slots = list(others)
        scalar, name = add.scalar, f"meeting-{add.terms}-{take.targets}-{add.scalar}"

        def functions(_: object) -> list[Function]:
            steps = [
                pieces_function(step, scalar, pieces.terms, pieces.targets, local=True)
                for step, pieces in (("show", show), ("add", add), ("take", take))
            ]
            return [_meeting(scalar, *steps), *steps]

        self._entry = library(name, functions, ("meeting",))["meeting"]
        self._keeps = show, add, take
        self._words = np.zeros(_OTHERS + len(slots), np.int64)
        self._words[_SHOW:] = show.start, add.start, take.start, own, len(slots), *slots
        self._view, self._start = self._words.data.cast("B"), address(self._words)
        self.stage = DONE

    def begin(self, number: int, heads: bytes) -> int:
        """Make the sum anew, as far as that is possible now; returns how far.

        Args:
            number: of the first of two messages.
            heads: what both are, one behind the other.
        """
        self._words[:_FIRST] = NEW, number
        self._view[8 * _FIRST : 8 * _SHOW] = heads
        return self.go_on()

    def go_on(self) -> int:
        """Go on where the last call has stopped."""
        self._entry(self._start)
        self.stage = stage = int(self._words[_STAGE])
        return stage


def _meeting(scalar: str, show: Function, add: Function, take: Function) -> Function:
    f = Function("meeting", (("ptr", "words"),), scalar, LINE // (4 if scalar == "float" else 8))
    f.declare("declare void @llvm.x86.sse2.pause()")
    f.declare("declare i32 @sched_yield()")
    first = f.word("%words", _NUMBER)
    second = f.value(f"add i64 {first}, 1")
    with f.when(f.compare("eq", f.word("%words", _STAGE), NEW)):
        f.call(show, f.pointer("%words", _SHOW))
        _tell(f, first, _FIRST)
        f.keep(BEGUN, "%words", _STAGE)
    with f.when(f.compare("eq", f.word("%words", _STAGE), BEGUN)), f.when(_all_here(f, first, _FIRST)):
        f.call(add, f.pointer("%words", _ADD))
        _tell(f, second, _SECOND)
        f.keep(TOLD, "%words", _STAGE)
    with f.when(f.compare("eq", f.word("%words", _STAGE), TOLD)), f.when(_all_here(f, second, _SECOND)):
        f.call(take, f.pointer("%words", _TAKE))
        f.keep(DONE, "%words", _STAGE)
    return f


def _slot(f: Function, slots: str, number: str) -> str:
    return f.at(slots, f.mul(f.value(f"and i64 {number}, 1"), SLOT))


def _tell(f: Function, number: str, head: int) -> None:
    slot = _slot(f, f.pointer("%words", _OWN), number)
    for word in range(HEAD // 8):
        f.keep(f.word("%words", head + word), f.at(slot, TEXT), word)
    f.keep(HEAD, slot, 1)
    f.emit(f"store atomic i64 {number}, ptr {slot} release, align 8")


def _all_here(f: Function, number: str, head: int) -> str:
    """Whether all others have sent message ``number``, and it begins like the own one."""
    good, others = f.local("i64"), f.word("%words", _COUNT)
    f.keep(0, good)
    with f.loop(0, others) as other:
        slot = _slot(f, f.pointer(f.at("%words", 8 * _OTHERS), other), number)
        with f.loop(0, _LOOKS) as look:
            seen = f.value(f"load atomic i64, ptr {slot} acquire, align 8")
            f.leave(f.compare("eq", seen, number))
            f.emit("call void @llvm.x86.sse2.pause()")
            with f.when(f.compare("sge", look, _SPINS)):
                f.value("call i32 @sched_yield()")
        seen = f.value(f"load atomic i64, ptr {slot} acquire, align 8")
        same = f.compare("eq", seen, number)
        for word in range(HEAD // 8):
            alike = f.compare("eq", f.word(f.at(slot, TEXT), word), f.word("%words", head + word))
            same = f.value(f"and i1 {same}, {alike}")
        f.keep(f.add(f.word(good), f.choose(same, 1, 0)), good)
    return f.compare("eq", f.word(good), others)
