"""Resources for sums over devices: plans, streams, and receive buffers for gradients.

A push is one engine operation that reads every pushed array and writes the sum, and a pull one that reads the stored
value and writes every array. The caller takes turns; the operations themselves run on any engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftplan import config
from weftplan.device.context import Context, cpu_pinned
from weftplan.engine import FnProperty, dedupe
from weftplan.engine import get as get_engine
from weftplan.engine.var import Var
from weftplan.kvstore.exchange.choice import Chooser, Plan
from weftplan.kvstore.exchange.program import Piece, Program, Room
from weftplan.kvstore.exchange.runner import Runner
from weftplan.kvstore.exchange.ways import TreeRule
from weftplan.kvstore.keys import Key
from weftplan.ndarray import NDArray, empty
from weftplan.ndarray.pushing import holding
from weftplan.support.array_types import RawArray


class Between:
    """Exchanges between the devices of one process."""

    def __init__(self) -> None:
        self._chooser = Chooser(
            peers=bool(config.get("MXNET_ENABLE_GPU_P2P")),
            trees_only=bool(config.get("MXNET_KVSTORE_USETREE")),
            rule=TreeRule(
                int(config.get("MXNET_KVSTORE_TREE_ARRAY_BOUND")),
                bool(config.get("MXNET_KVSTORE_TREE_BACKTRACK")),
                float(config.get("MXNET_KVSTORE_TREE_LINK_USAGE_PENALTY")),
            ),
            log_trees=bool(config.get("MXNET_KVSTORE_LOGTREE")),
        )
        self._runners: dict[tuple[Context, ...], Runner] = {}
        self._room: dict[Key, dict[int, NDArray]] = {}
        """Of each key the inboxes by place, and host memory by -1."""
        self._home: dict[Key, tuple[Context, bool]] = {}
        """What the room of each key is for: the place of its sum and True, or that of its stored value and False, as
        long as nothing has been summed here."""

    def plan(self, contexts: Sequence[Context], home: Context, elements: int, itemsize: int) -> Plan | None:
        """How an array of so many elements is exchanged; None where that is not what these contexts need."""
        if home not in contexts or self._chooser.links(contexts) is None:
            return None
        return self._chooser.plan(contexts, list(contexts).index(home), elements, itemsize)

    def push(self, key: Key, arrays: Sequence[NDArray], merged: NDArray, priority: int) -> bool:
        """Push the operation that makes ``merged`` the sum of ``arrays``; False where there is no plan for them."""
        contexts = [array.context for array in arrays]
        plan = self.plan(contexts, merged.context, merged.size, merged.dtype.itemsize)
        if plan is None:
            return False
        room = self._room_for(key, plan, merged, contexts)
        self._launch(plan.push, contexts, arrays, merged, room, [array.var for array in arrays], [merged], priority)
        return True

    def pull(self, key: Key, stored: NDArray, arrays: Sequence[NDArray], priority: int) -> bool:
        """Push the operation that copies ``stored`` to every array; False where there is no plan for that."""
        contexts = [array.context for array in arrays]
        if any(array.var is stored.var or array.var.failure is not None for array in arrays):
            return False  # one that failed shares its fate with nobody
        plan = self.plan(contexts, stored.context, stored.size, stored.dtype.itemsize)
        if plan is None:
            return False
        room = self._room_for(key, plan, stored)
        self._launch(plan.pull, contexts, arrays, stored, room, [stored.var], arrays, priority)
        return True

    def forget(self) -> None:
        """Give back all memory in which gradients arrive."""
        self._room.clear()
        self._home.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of that memory."""
        return sum(array.nbytes for room in list(self._room.values()) for array in list(room.values()))

    @staticmethod
    def bytes_of(plan: Plan, itemsize: int, *, pulls_only: bool = False) -> int:
        """What :attr:`nbytes` will count for one array."""
        if pulls_only:
            return itemsize * plan.pull.hosted
        return itemsize * (sum(plan.push.inboxes) + max(plan.push.hosted, plan.pull.hosted))

    def _room_for(
        self, key: Key, plan: Plan, like: NDArray, contexts: Sequence[Context] | None = None
    ) -> dict[int, NDArray]:
        """Room of a push, or, without contexts, of a pull, which only needs host memory."""
        hosted = plan.pull.hosted if contexts is None else max(plan.push.hosted, plan.pull.hosted)
        wanted = {} if contexts is None else {p: (n, contexts[p]) for p, n in enumerate(plan.push.inboxes) if n}
        if hosted:
            wanted[-1] = hosted, cpu_pinned(0)
        room = self._room.setdefault(key, {})
        home, summed = self._home.get(key, (like.context, False))
        if home != like.context and not (summed and contexts is None):
            room.clear()  # it was for pulls from where the stored value was before the first push
            home = like.context
        self._home[key] = home, summed or contexts is not None
        for place, (size, where) in wanted.items():
            known = room.get(place)
            if known is None or known.context != where or known.size < size:
                room[place] = empty((size,), ctx=where, dtype=like.dtype)
        if contexts is not None:
            for place in room.keys() - wanted.keys():
                del room[place]
        return {place: room[place] for place in wanted}

    def _launch(
        self,
        program: Program,
        contexts: Sequence[Context],
        arrays: Sequence[NDArray],
        whole: NDArray,
        room: dict[int, NDArray],
        reads: Sequence[Var],
        writes: Sequence[NDArray],
        priority: int,
    ) -> None:
        runner = self._runners.get(tuple(contexts))
        if runner is None:
            runner = self._runners[tuple(contexts)] = Runner(contexts)
        lookup = _lookup(list(arrays), whole, room)
        home = list(contexts).index(whole.context)
        reads, wrote = dedupe(reads, [array.var for array in [*writes, *room.values()]])
        get_engine().push(
            holding([*arrays, whole, *room.values()], lambda: runner.run(program, home, lookup)),
            reads,
            wrote,
            whole.context,
            prop=FnProperty.GPU_PRIORITIZED,
            priority=priority,
            name="KVStoreExchange",
        )


def _lookup(arrays: list[NDArray], whole: NDArray, room: dict[int, NDArray]) -> Callable[[Piece], RawArray]:
    def find(piece: Piece) -> RawArray:
        if piece.room is Room.VALUE:
            array = arrays[piece.place]
        elif piece.room is Room.WHOLE:
            array = whole
        else:
            array = room[piece.place]
        elements: RawArray = array.raw().reshape(-1)[piece.first : piece.end]
        return elements

    return find
