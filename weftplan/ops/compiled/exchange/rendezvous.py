"""A sum over the processes of a host as one compiled call: publish, wait, add, wait, copy out.

Every process has *slots* in shared memory, at the same offsets: a message's number, its length, and from :data:`TEXT`
on the message, whose first :data:`HEAD` bytes are compared. Message n is in slot n % 2, and its number is written last.
If another process has not written its message after some polls, the call returns to the caller, which waits by other
means and calls again. A call therefore ends soon whatever the other processes do, and its only decision is whether the
messages agree.

Data for other processes is written through the caches or past them. Writing past them takes a quarter longer if two
processors share a cache, and a quarter of the time if they do not, since each line that another processor has read must
be taken from it first. From time to time all processes measure both ways over some sums, and use the faster way
afterwards.

Small data travels in the first message, after its head, and there is no second message. Only the second word of a
message's head changes: the number of the exchange.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from weftplan.ops.compiled.addresses import address
from weftplan.ops.compiled.exchange.sums import LINE, Pieces, pieces_function
from weftplan.ops.compiled.ir import Function, Value
from weftplan.ops.compiled.jit import library

SLOT = 8192
"""Bytes of a slot."""

TEXT = 64
HEAD = 32

NEW, BEGUN, TOLD, DONE = range(4)
"""Stages of a sum: not started; this process has published its share; it has added its part and published the result;
finished. Each publication ends with a message."""

_STAGE, _NUMBER, _FIRST = 0, 1, 2
_SECOND = _FIRST + HEAD // 8
_SHOW, _ADD, _TAKE, _LENGTH, _OWN, _PAST, _SPENT, _TRIAL, _TIMES = range(_SECOND + HEAD // 8, _SECOND + HEAD // 8 + 9)
_COUNT = _TIMES + 2
_OTHERS = _COUNT + 1
"""Indices of a call's words: its stage; the number of the first message; the heads of both messages; the tables of
pieces (show, add, take); the bytes of the first message; the addresses of its own slots; whether shared results are
written past the caches; the time of its steps without the waits; the number of the last trial, and the shortest sum in
that trial through the caches and past them; the number of other processes; the addresses of their slots."""

_TRIALS, _TRIED = 7, 3
"""Binary logarithms of the exchanges between trials, and of the exchanges in a trial. A trial writes half of them
through the caches, half past them."""
_NEVER = 1 << 40
"""Initial minimum: more cycles than any sum takes."""

_SPINS, _LOOKS = 64, 300
"""Polls of a message before the core is yielded after each poll, and polls in all: some hundred microseconds."""


class MeetingSum:
    """A sum over fixed addresses that can be repeated, by one thread at a time.

    Args:
        show, add, take: functions that move the pieces of each step; of one dtype. ``take`` None: adding is the last
            step.
        own, others: addresses of slots.
        heads: heads of the messages, concatenated.
        nbytes: bytes of the data in the first message.

    Attributes:
        messages: number of messages that each process sends.
        stage: stage that the last sum has reached.
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
            parts = [
                pieces_function(f"{step}{kind}", scalar, pieces.terms, pieces.targets, local=True, past=bool(kind))
                for step, pieces in steps.items()
                for kind in ("", "_past")[: 1 if take is None or step == "take" else 2]
            ]
            return [_meeting(scalar, {function.name: function for function in parts}), *parts]

        self._entry = library(f"meeting-{name}-{scalar}", functions, ("meeting",))["meeting"]
        self._keeps: tuple[object, ...] = show, add, take
        self._words = np.zeros(_OTHERS + len(slots), np.int64)
        self._words[_SHOW:_TAKE] = show.start, add.start
        self._words[_TAKE : _OWN + 1] = take.start if take else 0, HEAD + nbytes, own
        self._words[_TRIAL:_COUNT] = -1, _NEVER, _NEVER
        self._words[_COUNT:] = len(slots), *slots
        self.messages = len(steps) - 1
        words = np.frombuffer(heads, np.int64)
        self._words[_FIRST : _FIRST + words.size] = words
        # Of a memoryview, because those of arrays take ten times as long.
        self._numbers, self._start = self._words.data, address(self._words)
        self.stage = DONE

    def begin(self, number: int, sequence: int) -> int:
        """Start the sum again, run it as far as possible, and return the stage reached.

        Args:
            number: of the first message.
            sequence: of the exchange.
        """
        numbers = self._numbers
        numbers[_STAGE], numbers[_NUMBER] = NEW, number
        numbers[_FIRST + 1] = numbers[_SECOND + 1] = sequence
        return self.go_on()

    def go_on(self) -> int:
        """Continue from the stage of the last call."""
        self._entry(self._start)
        stage: int = self._numbers[_STAGE]
        self.stage = stage
        return stage


class TurnSum(MeetingSum):
    """A sum with two alternating sets of buffers.

    Args:
        show: function that moves the pieces that other processes read.
        adds, takes: functions that move the pieces of exchanges with even numbers, and with odd numbers.
        own, others, heads: as for :class:`MeetingSum`.
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
    """A sum of data that travels in the messages themselves.

    Args:
        shows, adds: functions that move the pieces of messages with even numbers, and with odd numbers.
        heads, nbytes: head and bytes of the only message.
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


def _meeting(scalar: str, steps: dict[str, Function]) -> Function:
    f = Function("meeting", (("ptr", "words"),), scalar, LINE // (4 if scalar == "float" else 8))
    f.declare("declare void @llvm.x86.sse2.pause()")
    f.declare("declare i32 @sched_yield()")
    f.declare("declare i64 @llvm.readcyclecounter()")
    take = steps.get("take")
    first = f.word("%words", _NUMBER)
    second = f.value(f"add i64 {first}, 1")
    with f.when(f.compare("eq", f.word("%words", _STAGE), NEW)):
        if take is not None:
            _choose_way(f)
        with _timed(f):
            _write(f, steps, "show", _SHOW)
        _tell(f, first, _FIRST, f.word("%words", _LENGTH))
        f.keep(BEGUN, "%words", _STAGE)
    with f.when(f.compare("eq", f.word("%words", _STAGE), BEGUN)), f.when(_all_here(f, first, _FIRST)):
        with _timed(f):
            _write(f, steps, "add", _ADD)
        if take is not None:
            _tell(f, second, _SECOND, HEAD)
        f.keep(DONE if take is None else TOLD, "%words", _STAGE)
    if take is None:
        return f
    with f.when(f.compare("eq", f.word("%words", _STAGE), TOLD)), f.when(_all_here(f, second, _SECOND)):
        with _timed(f):
            f.call(take, f.pointer("%words", _TAKE))
        with f.when(_in_trial(f)):
            least = f.add(_TIMES, f.word("%words", _PAST))
            f.keep(f.smaller(f.word("%words", least), f.word("%words", _SPENT)), "%words", least)
        f.keep(DONE, "%words", _STAGE)
    return f


def _choose_way(f: Function) -> None:
    """Emit the choice whether this sum writes shared results past the caches: by trial number, else the faster way."""
    sequence = f.word("%words", _FIRST + 1)
    trial = f.value(f"lshr i64 {sequence}, {_TRIALS}")
    with f.when(f.compare("ne", f.word("%words", _TRIAL), trial)), f.when(_in_trial(f)):
        f.keep(trial, "%words", _TRIAL)
        f.keep(_NEVER, "%words", _TIMES)
        f.keep(_NEVER, "%words", _TIMES + 1)
    through, past = (f.word("%words", _TIMES + way) for way in range(2))
    better = f.value(f"and i1 {f.compare('slt', past, through)}, {f.compare('slt', through, _NEVER)}")
    tried = f.value(f"and i64 {f.value(f'lshr i64 {sequence}, {_TRIED - 1}')}, 1")
    f.keep(f.choose(_in_trial(f), tried, f.choose(better, 1, 0)), "%words", _PAST)
    f.keep(0, "%words", _SPENT)


def _in_trial(f: Function) -> str:
    within = f.value(f"and i64 {f.word('%words', _FIRST + 1)}, {(1 << _TRIALS) - 1}")
    return f.compare("slt", within, 1 << _TRIED)


def _write(f: Function, steps: dict[str, Function], name: str, table: int) -> None:
    """Emit a step whose results other processes read, past the caches if :func:`_choose_way` chose that."""
    past, pieces = f.word("%words", _PAST), f.pointer("%words", table)
    for way, function in enumerate([steps[one] for one in (name, f"{name}_past") if one in steps]):
        with f.when(f.compare("eq", past, way)):
            f.call(function, pieces)


@contextlib.contextmanager
def _timed(f: Function) -> Iterator[None]:
    begin = f.value("call i64 @llvm.readcyclecounter()")
    yield
    spent = f.sub(f.value("call i64 @llvm.readcyclecounter()"), begin)
    f.keep(f.add(f.word("%words", _SPENT), spent), "%words", _SPENT)


def _slot(f: Function, slots: str, number: str) -> str:
    return f.at(slots, f.mul(f.value(f"and i64 {number}, 1"), SLOT))


def _tell(f: Function, number: str, head: int, length: Value) -> None:
    slot = _slot(f, f.pointer("%words", _OWN), number)
    for word in range(HEAD // 8):
        f.keep(f.word("%words", head + word), f.at(slot, TEXT), word)
    f.keep(length, slot, 1)
    f.emit(f"store atomic i64 {number}, ptr {slot} release, align 8")


def _all_here(f: Function, number: str, head: int) -> str:
    """Emit polls for message ``number`` of every other process; return whether all have come with the same head as
    ours."""
    good, others = f.local("i64"), f.word("%words", _COUNT)
    f.keep(0, good)
    with f.loop(0, others) as process:
        slot = _slot(f, f.pointer(f.at("%words", 8 * _OTHERS), process), number)
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
