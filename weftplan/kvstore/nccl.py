"""The store ``nccl``: sums over GPUs by NVIDIA's library, through ``cupy.cuda.nccl``.

A push reduces the arrays of all GPUs to the one that has least to sum so far, a pull broadcasts from there; each is one
engine operation, in which every GPU has a stream. NCCL chooses ways and the order of additions by itself. It hangs
where two threads give the same communicators work in different orders, so they take turns. A call whose arrays are not
on several GPUs, each named once, is done as by ``device``. Gradients are not compressed.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from weftplan import device
from weftplan.device.context import Context
from weftplan.engine import FnProperty, dedupe
from weftplan.engine import get as get_engine
from weftplan.errors import DeviceError, KVStoreError
from weftplan.kvstore.keys import Key
from weftplan.kvstore.on_device import KVStoreDevice
from weftplan.locks import Lock, free_in_children
from weftplan.ndarray import NDArray
from weftplan.ndarray.pushing import holding

_INSTALL = "`pip install nvidia-nccl-cu12` (or -cu13, as CuPy's wheel), or use mx.kv.create('device')"


def library() -> ModuleType:
    """``cupy.cuda.nccl``, with NCCL loaded.

    Raises:
        KVStoreError: there is no GPU, or the library is missing; says what to install.
    """
    try:
        device.get(device.gpu(0))
    except DeviceError as error:
        raise KVStoreError(f"kvstore 'nccl' sums on NVIDIA GPUs: {error}") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns where the library is missing; the error below says it
        try:
            found = importlib.import_module("cupy.cuda.nccl")
        except ImportError as error:
            raise KVStoreError(f"kvstore 'nccl' needs NCCL ({error}): {_INSTALL}") from error
    if not found.available:
        raise KVStoreError(f"kvstore 'nccl' needs NCCL, which CuPy cannot load: {_INSTALL}")
    return found


class _Clique:
    """The communicators of some GPUs, and a stream on each."""

    def __init__(self, nccl: ModuleType, contexts: Sequence[Context]) -> None:
        self._nccl = nccl
        self._devices = [device.get(context) for context in contexts]
        self._streams: list[Any] = [place.new_stream() for place in self._devices]
        self._members = nccl.NcclCommunicator.initAll([context.device_id for context in contexts])

    def run(self, home: int, call: Callable[[Any, int, int], None]) -> None:
        """``call(member, place, address of its stream)`` for every GPU, as one group, between what the current stream
        has now and what it gets later."""
        current = device.current_stream()
        main = self._devices[home].new_stream() if current is None else current
        begin = main.record()
        self._nccl.groupStart()
        try:
            for place, (member, stream) in enumerate(zip(self._members, self._streams, strict=True)):
                stream.wait(begin)
                with stream:
                    call(member, place, stream.handle.ptr)
        finally:
            self._nccl.groupEnd()
        for stream in self._streams:
            main.wait(stream.record())
        if current is None:
            main.synchronize()


class KVStoreNccl(KVStoreDevice):
    """Sums on GPUs by NCCL."""

    def __init__(self, name: str = "nccl") -> None:
        self._nccl = library()
        super().__init__(name)
        self._cliques: dict[tuple[Context, ...], _Clique] = {}
        self._order = free_in_children(Lock())
        """Held while work is given to NCCL."""

    def set_gradient_compression(self, compression_params: Mapping[str, object]) -> None:
        """Not with NCCL, as in MXNet.

        Raises:
            KVStoreError: always.
        """
        del compression_params
        raise KVStoreError("gradient compression is not for a store 'nccl': use mx.kv.create('device')")

    def buffer_bytes(
        self, arrays: Sequence[tuple[int, int]], contexts: Sequence[Context], *, updates: bool
    ) -> dict[str, int]:
        """As of ``device``, without staging copies; what NCCL keeps for itself is not known."""
        found = super().buffer_bytes(arrays, contexts, updates=updates)
        return {**found, "staging": 0} if self._takes(contexts, contexts[0]) else found

    @staticmethod
    def _takes(contexts: Sequence[Context], home: Context) -> bool:
        """Whether NCCL is for these contexts."""
        several = 2 <= len(set(contexts)) == len(contexts)
        return several and home in contexts and all(context.device_type == "gpu" for context in contexts)

    def _fill(self, key: Key, arrays: list[NDArray], merged: NDArray, priority: int) -> None:
        contexts = [array.context for array in arrays]
        if not merged.size or not self._takes(contexts, merged.context):
            super()._fill(key, arrays, merged, priority)
            return
        home, kind, total = contexts.index(merged.context), self._kind(key, merged), self._nccl.NCCL_SUM

        def reduce(member: Any, place: int, stream: int) -> None:
            target = merged.raw().data.ptr if place == home else 0
            member.reduce(arrays[place].raw().data.ptr, target, merged.size, kind, total, home, stream)

        self._launch(contexts, home, reduce, arrays, [merged], priority)

    def _pull(self, groups: list[tuple[Key, list[NDArray]]], priority: int) -> None:
        for key, arrays in groups:
            stored = self._stored[key]
            contexts = [array.context for array in arrays]
            alone = any(array.var is stored.var or array.var.failure is not None for array in arrays)
            if alone or not stored.size or not self._takes(contexts, stored.context):
                super()._pull([(key, arrays)], priority)
                continue
            self._spread_by_nccl(key, stored, arrays, contexts, priority)

    def _spread_by_nccl(
        self, key: Key, stored: NDArray, arrays: list[NDArray], contexts: list[Context], priority: int
    ) -> None:
        home, kind = contexts.index(stored.context), self._kind(key, stored)

        def broadcast(member: Any, place: int, stream: int) -> None:
            source = stored.raw().data.ptr if place == home else 0
            member.broadcast(source, arrays[place].raw().data.ptr, stored.size, kind, home, stream)

        self._launch(contexts, home, broadcast, [stored], arrays, priority)

    def _kind(self, key: Key, array: NDArray) -> int:
        found = getattr(self._nccl, f"NCCL_{array.dtype.name.upper()}", None)
        if found is None:
            raise KVStoreError(f"key {key!r} holds {array.dtype}, which NCCL does not sum; use mx.kv.create('device')")
        number: int = found
        return number

    def _launch(
        self,
        contexts: Sequence[Context],
        home: int,
        call: Callable[[Any, int, int], None],
        reads: Sequence[NDArray],
        writes: Sequence[NDArray],
        priority: int,
    ) -> None:
        clique = self._cliques.get(tuple(contexts))
        if clique is None:
            clique = self._cliques[tuple(contexts)] = _Clique(self._nccl, contexts)

        def run() -> None:
            for array in [*reads, *writes]:
                array.raw()  # takes memory that is due: inside a group CUDA could wait for the group
            with self._order:
                clique.run(home, call)

        read, wrote = dedupe([array.var for array in reads], [array.var for array in writes])
        get_engine().push(
            holding([*reads, *writes], run),
            read,
            wrote,
            contexts[home],
            prop=FnProperty.GPU_PRIORITIZED,
            priority=priority,
            name="KVStoreNccl",
        )
