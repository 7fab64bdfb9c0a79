"""The store ``nccl``: sums over GPUs with NVIDIA's NCCL, through ``cupy.cuda.nccl``.

A push reduces the arrays of all GPUs to the GPU with the fewest bytes to sum so far; a pull broadcasts from this GPU.
The keys of a bucket are one engine operation, with one NCCL group of reductions, one of broadcasts, and a stream on
each GPU. NCCL chooses routes and the order of additions. A call whose arrays are not on several distinct GPUs runs as
in ``device``. Gradients are not compressed.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Protocol

from weftplan import device
from weftplan.device.context import Context
from weftplan.errors import DeviceError, KVStoreError
from weftplan.kvstore.on_device import KVStoreDevice
from weftplan.kvstore.stages import Stage
from weftplan.kvstore.ways_of_summing import Item, SumMethod
from weftplan.locks import Lock, free_in_children
from weftplan.ndarray import NDArray
from weftplan.support.array_types import RawArray


class NcclCommunicator(Protocol):
    """The methods of a ``cupy.cuda.nccl`` communicator that this module calls."""

    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int, /
    ) -> None: ...

    def broadcast(self, sendbuf: int, recvbuf: int, count: int, datatype: int, root: int, stream: int, /) -> None: ...


class Pointer(Protocol):
    """The memory pointer of a CuPy array, with the address ``ptr``."""

    ptr: int


class GpuArray(Protocol):
    """The attributes of a CuPy array that NCCL calls need."""

    data: Pointer
    size: int


Call = Callable[[NcclCommunicator, int, int], None]
"""Function of a GPU's communicator, the GPU's index in the clique, and the address of its stream."""
Copy = tuple[int, Any, Any]
"""(index of the GPU, target, source) of a copy within one GPU."""
Step = tuple[int, Callable[[], object]]
"""(index of the GPU, function that enqueues an optimizer's step on the current stream)."""
_INSTALL = "`pip install nvidia-nccl-cu12` (or -cu13, as CuPy's wheel), or use mx.kv.create('device')"


def library() -> ModuleType:
    """Return ``cupy.cuda.nccl``, with NCCL loaded.

    Raises:
        KVStoreError: there is no GPU, or NCCL is missing.
    """
    try:
        device.get(device.gpu(0))
    except DeviceError as error:
        raise KVStoreError(f"kvstore 'nccl' sums on NVIDIA GPUs: {error}") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's warning would repeat the error below
        try:
            module = importlib.import_module("cupy.cuda.nccl")
        except ImportError as error:
            raise KVStoreError(f"kvstore 'nccl' needs NCCL ({error}): {_INSTALL}") from error
    if not module.available:
        raise KVStoreError(f"kvstore 'nccl' needs NCCL, which CuPy cannot load: {_INSTALL}")
    return module


class _Clique:
    """The communicators of a list of GPUs, and a stream on each GPU."""

    def __init__(self, nccl: ModuleType, contexts: Sequence[Context]) -> None:
        self._nccl = nccl
        self.contexts = tuple(contexts)
        self._devices = [device.get(context) for context in contexts]
        self._streams: list[Any] = [member.new_stream() for member in self._devices]
        self._members = nccl.NcclCommunicator.initAll([context.device_id for context in contexts])

    def run(
        self, reduces: Sequence[Call], copies: Sequence[Copy], steps: Sequence[Step], broadcasts: Sequence[Call]
    ) -> None:
        """Enqueue reductions as one group, then copies and steps, then broadcasts as one group.

        All of this runs after the current stream's earlier work and before its later work. Without a current stream,
        wait for it.
        """
        current = device.current_stream()
        # Fork from the main stream to a stream for each GPU, and join at the end: to the engine this is one operation.
        main = self._devices[0].new_stream() if current is None else current
        begin = main.record()
        for stream in self._streams:
            stream.wait(begin)
        self._group(reduces)
        for home, target, source in copies:
            with self._streams[home]:
                self._devices[home].copy(target, source)
        for home, work in steps:
            with self._streams[home]:
                work()
        self._group(broadcasts)
        for stream in self._streams:
            main.wait(stream.record())
        if current is None:
            main.synchronize()

    def _group(self, calls: Sequence[Call]) -> None:
        if not calls:
            return
        self._nccl.groupStart()
        try:
            for index, (member, stream) in enumerate(zip(self._members, self._streams, strict=True)):
                with stream:
                    for call in calls:
                        call(member, index, stream.handle.ptr)
        finally:
            self._nccl.groupEnd()


class ByNccl:
    """The way of summing with NCCL: one group of reductions for a bucket, and one of broadcasts."""

    def __init__(self, nccl: ModuleType) -> None:
        self._nccl = nccl
        self._cliques: dict[tuple[Context, ...], _Clique] = {}
        # NCCL hangs if threads enqueue work on the same communicators in different orders: hold this lock from the
        # first call of an operation to its last.
        self._order = free_in_children(Lock())

    def reaches(self, stored: NDArray, out: NDArray) -> bool:
        """Return True: :meth:`takes` has checked all arrays of a key before."""
        del stored, out
        return True

    def takes(self, item: Item) -> bool:
        """Return whether NCCL can exchange the arrays of a key.

        The arrays to push and to fill must be on the same distinct GPUs, one of them the GPU of the sum. They must have
        elements, and none may be the stored value.
        """
        home, lists = (
            item.total if item.arrays else item.stored,
            [arrays for arrays in (item.arrays, item.outs) if arrays],
        )
        contexts = [[array.context for array in arrays] for arrays in lists]
        if (
            not contexts
            or not home.size
            or any(list_contexts != contexts[0] for list_contexts in contexts)
            or not takes(contexts[0], home.context)
        ):
            return False
        return not any(out.chunk.var is item.stored.chunk.var for out in item.outs)

    def stages(self, items: Sequence[Item], steps: Sequence[Stage], priority: int) -> list[Stage]:
        """Return one stage that does reductions, the optimizer's ``steps`` on the summing GPUs, and broadcasts."""
        del priority
        contexts = tuple([array.context for array in items[0].arrays or items[0].outs])
        reads: list[NDArray] = []
        writes: list[NDArray] = []
        for item in items:
            self._kind(item)
            reads += item.arrays
            if item.outs and not item.arrays:
                reads.append(item.stored)
            if item.arrays:
                writes.append(item.total)
            if item.total is not item.stored:
                writes.append(item.stored)
            writes += item.outs
        for stage in steps:
            writes += stage.operands
        run = partial(self._run, contexts, items, steps, [*reads, *writes])
        return [Stage("KVStoreNccl", run, reads, writes, contexts[0], repeatable=False)]

    def _run(
        self,
        contexts: tuple[Context, ...],
        items: Sequence[Item],
        steps: Sequence[Stage],
        arrays: Sequence[NDArray],
        raws: Sequence[RawArray],
    ) -> None:
        raw_of: dict[int, Any] = {id(array): raw for array, raw in zip(arrays, raws, strict=True)}
        reduces, copies, broadcasts = [], [], []
        for item in items:
            kind = self._kind(item)
            if item.arrays:
                home = contexts.index(item.total.context)
                reduces.append(
                    self._reduction([raw_of[id(a)] for a in item.arrays], raw_of[id(item.total)], home, kind)
                )
                if item.total is not item.stored and not steps:
                    copies.append((home, raw_of[id(item.stored)], raw_of[id(item.total)]))
            if item.outs:
                home = contexts.index(item.stored.context)
                broadcasts.append(self._spread(raw_of[id(item.stored)], [raw_of[id(a)] for a in item.outs], home, kind))
        local = [
            (contexts.index(stage.context), partial(stage.run, [raw_of[id(array)] for array in stage.operands]))
            for stage in steps
        ]
        with self._order:
            clique = self._cliques.get(contexts)
            if clique is None:
                clique = self._cliques[contexts] = _Clique(self._nccl, contexts)
            clique.run(reduces, copies, local, broadcasts)

    def _reduction(self, sources: Sequence[GpuArray], total: GpuArray, home: int, kind: int) -> Call:
        summed = self._nccl.NCCL_SUM

        def reduce(member: NcclCommunicator, position: int, stream: int) -> None:
            target = total.data.ptr if position == home else 0
            member.reduce(sources[position].data.ptr, target, total.size, kind, summed, home, stream)

        return reduce

    @staticmethod
    def _spread(stored: GpuArray, outs: Sequence[GpuArray], home: int, kind: int) -> Call:
        def broadcast(member: NcclCommunicator, position: int, stream: int) -> None:
            source = stored.data.ptr if position == home else 0
            member.broadcast(source, outs[position].data.ptr, stored.size, kind, home, stream)

        return broadcast

    def _kind(self, item: Item) -> int:
        dtype = item.stored.np_dtype
        number: int | None = getattr(self._nccl, f"NCCL_{dtype.name.upper()}", None)
        if number is None:
            raise KVStoreError(f"key {item.key!r} holds {dtype}, which NCCL does not sum; use mx.kv.create('device')")
        return number


def takes(contexts: Sequence[Context], home: Context) -> bool:
    """Return whether NCCL can sum arrays of these contexts at ``home``: distinct GPUs, at least two, including home."""
    several = 2 <= len(set(contexts)) == len(contexts)
    return several and home in contexts and all(context.device_type == "gpu" for context in contexts)


class KVStoreNccl(KVStoreDevice):
    """A store that sums gradients of several GPUs with NCCL."""

    def __init__(self, name: str = "nccl") -> None:
        nccl = library()
        super().__init__(name)
        self._by_nccl = ByNccl(nccl)

    def set_gradient_compression(self, compression_params: Mapping[str, object]) -> None:
        """Raise an error: the store has no compression, as in MXNet.

        Raises:
            KVStoreError: always.
        """
        del compression_params
        raise KVStoreError("gradient compression is not for a store 'nccl': use mx.kv.create('device')")

    def buffer_bytes(
        self, arrays: Sequence[tuple[int, int]], contexts: Sequence[Context], *, updates: bool
    ) -> dict[str, int]:
        """Return the bytes of buffers as ``device`` does, without staging copies; NCCL's own memory is not included."""
        by_purpose = super().buffer_bytes(arrays, contexts, updates=updates)
        return {**by_purpose, "staging": 0} if takes(contexts, contexts[0]) else by_purpose

    def _method(self, item: Item) -> SumMethod:
        return self._by_nccl if self._by_nccl.takes(item) else super()._method(item)
