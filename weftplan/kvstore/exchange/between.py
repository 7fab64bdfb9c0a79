"""The way of summing over links between devices, with its plans, streams and receive buffers.

A bucket is one engine operation. For each key it enqueues a program that sums all gradients on one device, the key's
*home*; then the optimizer's step at the home; then a program that copies the new value to all devices. A device's
*position* is its index in the list of contexts. Callers of these methods have the store's lock; the operations run on
any engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from weftplan import config
from weftplan.device.context import Context, cpu_pinned
from weftplan.device.links import HOST
from weftplan.kvstore.exchange.choice import Chooser, ExchangePlan
from weftplan.kvstore.exchange.program import BufferKind, ExchangeProgram, Piece
from weftplan.kvstore.exchange.runner import Runner
from weftplan.kvstore.exchange.ways import TreeRule
from weftplan.kvstore.keys import Key
from weftplan.kvstore.stages import Stage, on_device
from weftplan.kvstore.ways_of_summing import Item
from weftplan.ndarray import NDArray, empty
from weftplan.support.array_types import RawArray


class Exchange(NamedTuple):
    """A program and its arrays.

    Attributes:
        program: the steps.
        arrays: the pushed array, or the array to fill, of each device.
        total: the sum, or the stored value, at the home.
        buffers: receive buffers by position; host memory under ``HOST``.
    """

    program: ExchangeProgram
    arrays: Sequence[NDArray]
    total: NDArray
    buffers: Mapping[int, NDArray]


class Between:
    """The way of summing over links between the devices of one process."""

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
        self._buffers: dict[Key, dict[int, NDArray]] = {}
        """Buffers of each key: receive buffers by position, and host memory under ``HOST``."""
        self._home: dict[Key, tuple[Context, bool]] = {}
        """(context, True) of a key's sum; before its first push (context, False) of its stored value."""

    def plan(self, contexts: Sequence[Context], home: Context, elements: int, itemsize: int) -> ExchangePlan | None:
        """Return the plan for an array of ``elements`` summed at ``home``; None if it is not exchanged over links.

        It is exchanged over links only if the contexts are several distinct GPUs, or several distinct simulated
        devices, ``home`` is one of them, and there are elements.
        """
        if home not in contexts or self._chooser.links(contexts) is None:
            return None
        return self._chooser.plan(contexts, list(contexts).index(home), elements, itemsize)

    def reaches(self, stored: NDArray, out: NDArray) -> bool:
        """Return True: :meth:`takes` has checked all arrays of a key before."""
        del stored, out
        return True

    def takes(self, item: Item) -> bool:
        """Return whether the arrays of a key can be exchanged over links.

        The arrays to push and to fill must be on the same distinct devices, and none may be the stored value.
        """
        for arrays in (item.arrays, item.outs):
            if not arrays:
                continue
            home = item.stored if arrays is item.outs and not item.arrays else item.total
            if any(array.chunk.var is item.stored.chunk.var for array in arrays):
                return False
            contexts = [array.context for array in arrays]
            if self.plan(contexts, home.context, home.size, home.np_dtype.itemsize) is None:
                return False
        if not item.arrays or not item.outs:
            return bool(item.arrays or item.outs)
        return _contexts(item.arrays) == _contexts(item.outs)

    def stages(self, items: Sequence[Item], steps: Sequence[Stage], priority: int) -> list[Stage]:
        """Return one stage that sums all keys, does the optimizer's ``steps`` at the homes, and copies values out."""
        del priority
        head_arrays = items[0].arrays or items[0].outs
        contexts = _contexts(head_arrays)
        runner = self._runners.get(contexts)
        if runner is None:
            runner = self._runners[contexts] = Runner(contexts)
        reads: list[NDArray] = []
        writes: list[NDArray] = []
        pushes: list[Exchange] = []
        pulls: list[Exchange] = []
        local: list[Stage] = list(steps)
        for item in items:
            source = item.stored
            if not steps and item.total is not item.stored:
                local.append(_copy_stage(item.total, item.stored))
                source = item.total
            if item.arrays:
                plan = self._plan_of(item.arrays, item.total)
                buffers = self._buffers_for(item.key, plan, item.total, contexts)
                pushes.append(Exchange(plan.push, item.arrays, item.total, buffers))
                reads += item.arrays
                writes += [item.total, *buffers.values()]
            if item.outs:
                plan = self._plan_of(item.outs, source)
                if item.arrays:
                    buffers = {position: array for position, array in buffers.items() if position == HOST}
                else:
                    buffers = self._buffers_for(item.key, plan, item.stored)
                    reads.append(item.stored)
                pulls.append(Exchange(plan.pull, item.outs, source, buffers))
                writes += [*item.outs, *(() if item.arrays else buffers.values())]
        for stage in local:
            reads += stage.operands
            writes += stage.operands
        run = partial(_run, runner, [*reads, *writes], pushes, local, pulls)
        # All exchanges run on contexts[0], hence on one queue, in the order of the pushes: they share wires.
        return [Stage("KVStoreExchange", run, reads, writes, contexts[0], repeatable=False)]

    def _plan_of(self, arrays: Sequence[NDArray], total: NDArray) -> ExchangePlan:
        contexts = [array.context for array in arrays]
        plan = self.plan(contexts, total.context, total.size, total.np_dtype.itemsize)
        assert plan is not None, "asked of arrays that `takes` accepts"
        return plan

    def forget(self) -> None:
        """Drop all buffers."""
        self._buffers.clear()
        self._home.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(array.nbytes for buffers in list(self._buffers.values()) for array in list(buffers.values()))

    @staticmethod
    def bytes_of(plan: ExchangePlan, itemsize: int, *, pulls_only: bool = False) -> int:
        """Return the bytes of the buffers for an array; if ``pulls_only``, of those that pulls need."""
        if pulls_only:
            return itemsize * plan.pull.hosted
        return itemsize * (sum(plan.push.inboxes) + max(plan.push.hosted, plan.pull.hosted))

    def _buffers_for(
        self, key: Key, plan: ExchangePlan, like: NDArray, contexts: Sequence[Context] | None = None
    ) -> dict[int, NDArray]:
        """Return the buffers of a key by position, allocated or enlarged as needed, for a push or a pull.

        Args:
            key: the key.
            plan: the plan of the exchange.
            like: the array at the home; its context and dtype are used.
            contexts: context of each device, for a push; None for a pull, which needs no receive buffers.
        """
        hosted = plan.pull.hosted if contexts is None else max(plan.push.hosted, plan.pull.hosted)
        needed = {} if contexts is None else {p: (n, contexts[p]) for p, n in enumerate(plan.push.inboxes) if n}
        if hosted:
            needed[HOST] = hosted, cpu_pinned(0)
        buffers = self._buffers.setdefault(key, {})
        home, summed = self._home.get(key, (like.context, False))
        if home != like.context and not (summed and contexts is None):
            buffers.clear()  # the home has moved; old buffers were for pulls before the first push
            home = like.context
        self._home[key] = home, summed or contexts is not None
        for position, (size, context) in needed.items():
            buffer = buffers.get(position)
            if buffer is None or buffer.context != context or buffer.size < size:
                buffers[position] = empty((size,), ctx=context, dtype=like.np_dtype)
        if contexts is not None:
            for position in buffers.keys() - needed.keys():
                del buffers[position]
        return {position: buffers[position] for position in needed}


def _contexts(arrays: Sequence[NDArray]) -> tuple[Context, ...]:
    return tuple([array.context for array in arrays])


def _copy_stage(source: NDArray, target: NDArray) -> Stage:
    """Return a stage that copies ``source`` to ``target`` within one device."""

    def kernel(raws: Sequence[RawArray]) -> None:
        raws[1][...] = raws[0]

    return Stage("KVStoreCopy", on_device(source.context, kernel), [source], [target], source.context)


def _run(
    runner: Runner,
    arrays: Sequence[NDArray],
    pushes: Sequence[Exchange],
    local: Sequence[Stage],
    pulls: Sequence[Exchange],
    raws: Sequence[RawArray],
) -> None:
    """Enqueue the pushes, the stages at the homes, and the pulls; ``raws`` are the raw arrays of ``arrays``."""
    raw_of = {id(array): raw for array, raw in zip(arrays, raws, strict=True)}
    with runner.lanes() as lanes:
        programs = {
            id(push.total): lanes.program(push.program, _lookup(push, raw_of), number=number)
            for number, push in enumerate(pushes)
        }
        # Events order the work of each array: its stages wait for its push program, its pull program for its stages.
        for stage in local:
            predecessors = [event for array in stage.operands for event in programs.get(id(array), ())]
            operands = [raw_of[id(array)] for array in stage.operands]
            event = lanes.launch(stage.context, partial(stage.run, operands), predecessors)
            for array in stage.operands:
                programs[id(array)] = [event]
        for number, pull in enumerate(pulls):
            lanes.program(pull.program, _lookup(pull, raw_of), programs.get(id(pull.total), ()), number=number)


def _lookup(exchange: Exchange, raw_of: Mapping[int, RawArray]) -> Callable[[Piece], RawArray]:
    def find(piece: Piece) -> RawArray:
        if piece.buffer is BufferKind.VALUE:
            array = exchange.arrays[piece.position]
        elif piece.buffer is BufferKind.TOTAL:
            array = exchange.total
        else:
            array = exchange.buffers[piece.position]
        elements: RawArray = raw_of[id(array)].reshape(-1)[piece.begin : piece.end]
        return elements

    return find
