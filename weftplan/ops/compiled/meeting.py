"""A sum over the processes of one host as one compiled call: show, see that all are here, add, see that all have, take.

Every process has *slots* in memory that the others can read, at the same places: the number of a message, its length,
and from :data:`TEXT` on the message, of which the first :data:`HEAD` bytes are compared. Message n is in slot n % 2,
and its number is written last. What others have not written after some looks is left to the caller, who waits for them
in other ways, and goes on with another call. So a call ends soon whatever the others do, and decides nothing but that
all is as it should be.

What is small travels in the first message, behind its head, and there is no second one. Of how a message begins only
its second word is another one each time: the number of the exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from weftplan.ops.compiled.addresses import address
from weftplan.ops.compiled.ir import Function, Value
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
_SHOW, _ADD, _TAKE, _LENGTH, _OWN, _COUNT, _OTHERS = range(_SECOND + HEAD // 8, _SECOND + HEAD // 8 + 7)
"""Words of a call: how far it has come; the number of the first of its two messages, and how they begin; the tables of
pieces; the bytes of the first message; the own slots; the number of others, and the slots of each."""

_SPINS, _LOOKS = 64, 300
"""Looks at a message before others may have the core between two, and looks in all: some hundred microseconds."""


class MeetingSum:
    """A sum whose places are known; it can be made again and again, by one thread at a time.

    Args:
        show, add, take: what moves the pieces of each step; of one dtype. None to take: all is over when it is added.
        own, others: addresses of slots.
        heads: how each message begins, one behind the other.
        nbytes: of what is shown in the first message.

    Attributes:
        messages: that each process sends.
        stage: how far the last one has come.
    """

    __slots__ = ("_entry", "_keeps", "_numbers", "_start", "_words", "messages", "stage")

    def __init__(
        self,
        show: Pieces,
        add: Pieces,
        take: Pieces | None,
        own: int,
        others: Iterable[int],
        heads: bytes,
        nbytes: int = 0,
    ) -> None:
        slots, steps = list(others), {"show": show, "add": add}
        if take is not None:
            steps["take"] = take
        scalar, name = add.scalar, "-".join(f"{step.terms}-{step.targets}" for step in steps.values())

        def functions(_: object) -> list[Function]:
            made = [
                pieces_function(step, scalar, pieces.terms, pieces.targets, local=True)
                for step, pieces in steps.items()
            ]
            return [_meeting(scalar, *made), *made]

        self._entry = library(f"meeting-{name}-{scalar}", functions, ("meeting",))["meeting"]
        self._keeps: tuple[object, ...] = show, add, take
        self._words = np.zeros(_OTHERS + len(slots), np.int64)
        self._words[_SHOW:_TAKE] = show.start, add.start
        self._words[_TAKE:] = take.start if take else 0, HEAD + nbytes, own, len(slots), *slots
        self.messages = len(steps) - 1
        words = np.frombuffer(heads, np.int64)
        self._words[_FIRST : _FIRST + words.size] = words
        # Of a memoryview, because those of arrays take ten times as long.
        self._numbers, self._start = self._words.data, address(self._words)
        self.stage = DONE

    def begin(self, number: int, sequence: int) -> int:
        """Make the sum anew, as far as that is possible now; returns how far.

        Args:
            number: of the first message.
            sequence: of the exchange.
        """
        numbers = self._numbers
        numbers[_STAGE], numbers[_NUMBER] = NEW, number
        numbers[_FIRST + 1] = numbers[_SECOND + 1] = sequence
        return self.go_on()

    def go_on(self) -> int:
        """Go on where the last call has stopped."""
        self._entry(self._start)
        stage: int = self._numbers[_STAGE]
        self.stage = stage
        return stage


class TurnSum(MeetingSum):
    """A sum that is made at two places in turn.

    Args:
        show: what moves the pieces that others read.
        adds, takes: what moves those of exchanges with even numbers, and with odd ones.
        own, others, heads: as of every such sum.
    """

    __slots__ = ("_places",)

    def __init__(
        self,
        show: Pieces,
        adds: Sequence[Pieces],
        takes: Sequence[Pieces],
        own: int,
        others: Iterable[int],
        heads: bytes,
    ) -> None:
        super().__init__(show, adds[0], takes[0], own, others, heads)
        self._keeps = show, *adds, *takes
        self._places = [(add.start, take.start) for add, take in zip(adds, takes, strict=True)]

    def begin(self, number: int, sequence: int) -> int:
        self._numbers[_ADD], self._numbers[_TAKE] = self._places[sequence % 2]
        return super().begin(number, sequence)


class MessageSum(MeetingSum):
    """A sum of what travels in the messages themselves.

    Args:
        shows, adds: what moves the pieces of messages with even numbers, and with odd ones.
        heads, nbytes: of the one message.
    """

    __slots__ = ("_places",)

    def __init__(
        self,
        shows: Sequence[Pieces],
        adds: Sequence[Pieces],
        own: int,
        others: Iterable[int],
        heads: bytes,
        nbytes: int,
    ) -> None:
        super().__init__(shows[0], adds[0], None, own, others, heads, nbytes)
        self._keeps = *shows, *adds
        self._places = [(show.start, add.start) for show, add in zip(shows, adds, strict=True)]

    def begin(self, number: int, sequence: int) -> int:
        self._numbers[_SHOW], self._numbers[_ADD] = self._places[number % 2]
        return super().begin(number, sequence)


def _meeting(scalar: str, show: Function, add: Function, take: Function | None = None) -> Function:
    f = Function("meeting", (("ptr", "words"),), scalar, LINE // (4 if scalar == "float" else 8))
    f.declare("declare void @llvm.x86.sse2.pause()")
    f.declare("declare i32 @sched_yield()")
    first = f.word("%words", _NUMBER)
    second = f.value(f"add i64 {first}, 1")
    with f.when(f.compare("eq", f.word("%words", _STAGE), NEW)):
        f.call(show, f.pointer("%words", _SHOW))
        _tell(f, first, _FIRST, f.word("%words", _LENGTH))
        f.keep(BEGUN, "%words", _STAGE)
    with f.when(f.compare("eq", f.word("%words", _STAGE), BEGUN)), f.when(_all_here(f, first, _FIRST)):
        f.call(add, f.pointer("%words", _ADD))
        if take is not None:
            _tell(f, second, _SECOND, HEAD)
        f.keep(DONE if take is None else TOLD, "%words", _STAGE)
    if take is None:
        return f
    with f.when(f.compare("eq", f.word("%words", _STAGE), TOLD)), f.when(_all_here(f, second, _SECOND)):
        f.call(take, f.pointer("%words", _TAKE))
        f.keep(DONE, "%words", _STAGE)
    return f


def _slot(f: Function, slots: str, number: str) -> str:
    return f.at(slots, f.mul(f.value(f"and i64 {number}, 1"), SLOT))


def _tell(f: Function, number: str, head: int, length: Value) -> None:
    slot = _slot(f, f.pointer("%words", _OWN), number)
    for word in range(HEAD // 8):
        f.keep(f.word("%words", head + word), f.at(slot, TEXT), word)
    f.keep(length, slot, 1)
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
