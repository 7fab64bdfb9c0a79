"""Lazy store values: a sum stays in the exchange's memory until its first use.

In a loop that pushes and pulls, what is stored is written at every step and read at none: the exchange itself writes
what is pulled. So where the same arrays are exchanged again and again, the stored values are *late*: a sum stays in the
memory that the processes share, where each has added up its range, and what is stored has no bytes. Whoever uses it,
as an operation that has been granted it, finds none and has them written (:class:`LateChunk`); whoever drives exchanges
writes them before a message that lets others write over the sums (``Meeting.settle``). The sums of two exchanges that
follow one another are at different places, so one that fails harms no value.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

from weftplan.device.context import Context
from weftplan.engine.shield import shielded, unbroken
from weftplan.errors import KVStoreError
from weftplan.kvstore.copies import HOST
from weftplan.kvstore.distributed.transport.shared_memory import SharedMemory
from weftplan.locks import Lock, members, whole_in_children
from weftplan.ndarray import NDArray
from weftplan.ndarray.memory.chunk import Chunk
from weftplan.ops.compiled.exchange.sums import Pieces
from weftplan.support import slots
from weftplan.support.array_types import RawArray

_EAGER = 32
"""Exchanges that write what is stored at once after somebody has wanted it: it costs twice as much to be wrong."""

_all: weakref.WeakSet[Late] = weakref.WeakSet()


class LateChunk(Chunk):
    """A chunk whose bytes may be written when they are first used."""

    __slots__ = ("late",)
    late: Late | None

    def __init__(self, ctx: Context, nbytes: int) -> None:
        self.late = None
        super().__init__(ctx, nbytes, delay_alloc=True)

    def _first_use(self) -> RawArray:
        if self.late is not None:
            self.late.settle(wanted=True)
        raw: RawArray | None = self._raw
        return super()._first_use() if raw is None else raw


def may_be_late(array: NDArray) -> NDArray:
    """An array like this one, which nobody has used yet, on a chunk whose bytes may come late."""
    if type(array.chunk) is not Chunk or array.context.device_type not in HOST:
        return array  # its bytes may wait elsewhere
    return NDArray(LateChunk(array.context, array.nbytes), array.shape, array.dtype)


class Late:
    """What is stored for the arrays of an exchange that comes again.

    What has no ``wanted`` is for whoever drives exchanges, while nobody else may use the arrays.

    Args:
        memory: where the sums are.
        pieces: what writes the values, from the place of the first sums and from that of the second.
        keeps: what must live as long as they.
    """

    def __init__(self, memory: SharedMemory, pieces: Sequence[Pieces], keeps: object) -> None:
        self._memory, self._pieces, self._keeps = memory, pieces, keeps
        self._arrays: list[weakref.ref[NDArray]] = []
        self._lock = whole_in_children(Lock())
        self._without: list[tuple[NDArray, Any, Any]] | None = None
        """The arrays while they have nothing, and what each and its chunk have had."""
        self._turn = self._epoch = self._eager = 0
        self._wanted = False
        _all.add(self)

    def be_of(self, arrays: Sequence[NDArray]) -> None:
        """Say which arrays have the values."""
        if all(isinstance(array.chunk, LateChunk) for array in arrays):
            self._arrays = [weakref.ref(array) for array in arrays]

    def may_wait(self, turn: int) -> bool:
        """Whether the next exchange, whose sums are made at place ``turn``, need not write what is stored."""
        if self._without is not None:
            return self._turn != turn
        if self._wanted:
            self._wanted, self._eager = False, _EAGER
        if self._eager:
            self._eager -= 1
            return False
        return bool(self._arrays)

    def withhold(self, turn: int) -> None:
        """From now on the values are the sums at place ``turn``; the caller may write them."""
        self._turn = turn
        if self._without is None:
            self._epoch = self._memory.epoch
            arrays = [array for one in self._arrays if (array := one()) is not None]
            self._without = [(array, array.ready, array.chunk._raw) for array in arrays]
            for array in arrays:
                chunk = array.chunk
                assert isinstance(chunk, LateChunk), "said to be one by be_of"
                chunk.late, chunk._raw, array.ready = self, None, None

    @property
    def places(self) -> list[RawArray] | None:
        """Where the values will be written, while they are withheld."""
        return None if self._without is None else [ready for _, ready, _ in self._without]

    def settle(self, *, wanted: bool = False) -> None:
        """Write what is stored, if that is still to be done; ``wanted``: somebody uses it.

        Raises:
            KVStoreError: the others took this process for lost, and have gone on without it.
        """
        with shielded(), self._lock:
            unbroken()
            if self._without is None:
                return
            self._pieces[self._turn]()
            if self._memory.passed(self._epoch):
                raise KVStoreError(
                    "the other processes have gone on without this one, and what it had stored is lost: they took it "
                    "for dead after WEFTPLAN_KVSTORE_TIMEOUT seconds; end it"
                )
            self._wanted = self._wanted or wanted
            for array, ready, raw in self._without:
                array.chunk._raw, array.ready = raw, ready
            self._without = None


def _settle_all() -> None:
    """Before a fork: parent and child share what the exchanges write, but not what is stored."""
    for late in members(_all):
        with contextlib.suppress(KVStoreError):
            late.settle()


slots.BEFORE_FORK.get().append(_settle_all)
