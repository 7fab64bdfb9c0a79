"""Inline sums and copies of small arrays in host memory, on the calling thread.

To wake a worker for them takes longer than they do. The engine makes them one step of its own (``write_at_once``), so
they have their place in the order of operations; where it cannot, nothing is done, and the caller pushes them. Any
thread that may push may call everything here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from weakref import ref

from weftplan.engine import get as get_engine
from weftplan.engine.var import Var
from weftplan.errors import KVStoreError
from weftplan.kvstore.copies import HOST
from weftplan.kvstore.keys import Key
from weftplan.kvstore.reduce import BlockSum, sum_as_one_block
from weftplan.ndarray import NDArray
from weftplan.support.slots import MAKE_ROOM

AT_ONCE = 1 << 18
"""Bytes, read and written, of such work: some microseconds, which is less than it takes to wake a worker."""


def sum_at_once(sources: Sequence[NDArray], target: NDArray, block_sum: BlockSum) -> bool:
    """``target[...] = sum of sources``, all of one shape and dtype; False: nothing is done."""
    if not in_memory(target) or (1 + len(sources)) * target.nbytes > AT_ONCE:
        return False
    own = target.chunk.var
    reads: list[Var] = []
    for source in sources:
        var = source.chunk.var
        if var is own or not in_memory(source):
            return False
        if var not in reads:
            reads.append(var)

    def add() -> None:
        # Only now can nobody move or free the bytes. An array without any is an error, and the sum is pushed.
        sum_as_one_block([source.ready for source in sources], target.ready, block_sum)

    return get_engine().write_at_once(add, reads, (own,))


class SmallCopies:
    """Copies of one array into others. Kept, it makes them again without the checks of the first time.

    It keeps no target alive.
    """

    __slots__ = ("_reads", "_source", "_targets", "_writes")

    def __init__(self, source: NDArray, targets: Sequence[NDArray], writes: Sequence[Var]) -> None:
        self._source, self._reads, self._writes = source, (source.chunk.var,), writes
        self._targets = [ref(target) for target in targets]

    @classmethod
    def settle(cls, source: NDArray, targets: Sequence[NDArray]) -> SmallCopies | None:
        """For arrays of one shape and dtype; None where they are not small, not in memory, or share a chunk."""
        if not in_memory(source) or (1 + len(targets)) * source.nbytes > AT_ONCE:
            return None
        own = source.chunk.var
        writes: list[Var] = []
        for target in targets:
            var = target.chunk.var
            if not in_memory(target) or var is own or var in writes:
                return None
            if target.__class__ is not NDArray and target.stype != "default":
                return None  # a later pull may have to leave it alone
            writes.append(var)
        return cls(source, targets, writes)

    def again(self, source: NDArray, targets: object) -> bool:
        """:meth:`make`, if these are its arrays and may still be used at once; ``targets``: of a user, anything."""
        if source is not self._source or MAKE_ROOM.value is not None:
            return False
        if targets.__class__ is not list and targets.__class__ is not tuple:
            targets = (targets,)
        known = self._targets
        if len(targets) != len(known):
            return False
        for one, target in zip(known, targets, strict=True):
            if one() is not target:
                return False
        return self.make(targets)

    def make(self, targets: Sequence[NDArray]) -> bool:
        """Copy into these, its targets; False: nothing is done, and the copies are to be pushed."""
        work = partial(_fill_at_once, self._source, tuple(targets))
        return get_engine().write_at_once(work, self._reads, self._writes)


def pulled_again(kept: Mapping[Key, SmallCopies], stored: Mapping[Key, NDArray], key: object, out: object) -> bool:
    """Make a pull that is one of those ``kept``, by key; False: it is another one, or is to be pushed.

    Args:
        key, out: of a user, anything; one key may stand in a list.
    """
    if key.__class__ is list and len(key) == 1 and out.__class__ is list and len(out) == 1:
        key, out = key[0], out[0]
    if key.__class__ is not str and key.__class__ is not int:
        return False
    known = kept.get(key)
    return known is not None and known.again(stored[key], out)


def _fill_at_once(source: NDArray, targets: tuple[NDArray, ...]) -> None:
    values = source.ready  # only now, when nobody can move or free it any more
    if values is None:
        raise KVStoreError("what is stored has no bytes now")  # an error, and all of this is pushed
    for target in targets:
        target.ready[...] = values  # one that is None is an error, and all of this is pushed


def in_memory(array: NDArray) -> bool:
    """Whether the array is on the host and its bytes are there, with nothing to be done for them."""
    return array.ready is not None and array.chunk.context.device_type in HOST and MAKE_ROOM.value is None
