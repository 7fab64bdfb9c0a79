"""``cupy.cuda.nccl`` of the stand-in: the calls that weftplan uses, with the signatures of CuPy 14.2.

Calls of a group run at the end of the group, as in NCCL. All members must then have made the same calls in the same
order. Members are added in the order of their ranks; NCCL does not promise this order.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tests.standin_cupy.machine import CUDARuntimeError, machine
from tests.standin_cupy.memory import Memory, enqueue
from tests.standin_cupy.streams import Stream
from weftplan.locks import members

_KINDS = {"INT8": 0, "UINT8": 1, "INT32": 2, "INT64": 4, "FLOAT16": 6, "FLOAT32": 7, "FLOAT64": 8}
NCCL_SUM = 0

_calls: list[tuple[str, NcclCommunicator, dict[str, int]]] = []
_depth = [0]


def _range(address: int, nbytes: int) -> tuple[Memory, int, int]:
    for memory in members(machine.memories):
        if memory.ptr <= address and address + nbytes <= memory.ptr + memory.size:
            return memory, address - memory.ptr, address - memory.ptr + nbytes
    raise CUDARuntimeError(f"cudaErrorIllegalAddress: {nbytes} bytes at {address:#x} are in no allocation")


def _stream(pointer: int) -> Stream:
    return next(stream for stream in members(machine.streams) if stream.ptr == pointer)


class NcclCommunicator:
    """One member of a clique."""

    def __init__(self, ndev: int, commId: Any, rank: int) -> None:
        self.size, self.clique, self.rank, self.device = ndev, commId, rank, -1

    @staticmethod
    def initAll(devices: Any) -> list[NcclCommunicator]:
        """Return one communicator for each device."""
        listed = list(range(devices)) if isinstance(devices, int) else list(devices)
        if len(set(listed)) != len(listed):
            raise RuntimeError("NCCL_ERROR_INVALID_USAGE: a device is listed twice")
        clique = object()
        members = [NcclCommunicator(len(listed), clique, rank) for rank in range(len(listed))]
        for member, device in zip(members, listed, strict=True):
            member.device = device
        return members

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        """Write the sum of all members' ``sendbuf`` to the root's ``recvbuf``."""
        assert op == NCCL_SUM
        self._call("reduce", send=sendbuf, receive=recvbuf, count=count, kind=datatype, root=root, stream=stream)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        """Copy the root's ``sendbuff`` to every member's ``recvbuff``."""
        self._call("broadcast", send=sendbuff, receive=recvbuff, count=count, kind=datatype, root=root, stream=stream)

    def _call(self, name: str, **given: int) -> None:
        assert _depth[0], "several members of one process need a group, or they wait for ever"
        _calls.append((name, self, given))


def groupStart() -> None:
    """Start a group: calls run when it ends."""
    _depth[0] += 1


def groupEnd() -> None:
    """End a group; run its calls when the outermost group ends."""
    _depth[0] -= 1
    calls, _calls[:] = list(_calls), []
    if _depth[0] or not calls:
        return
    rows: dict[int, list[tuple[str, NcclCommunicator, dict[str, int]]]] = {}
    for call in calls:
        rows.setdefault(call[1].rank, []).append(call)
    if len(rows) != calls[0][1].size or len({len(row) for row in rows.values()}) > 1:
        raise RuntimeError("NCCL_ERROR_INVALID_USAGE: members of a group do not make the same call")
    for together in zip(*(rows[rank] for rank in sorted(rows)), strict=True):
        _run(together)


def _run(calls: Sequence[tuple[str, NcclCommunicator, dict[str, int]]]) -> None:
    """Run one call of all members, by rank."""
    names = {(name, member.clique, inputs["count"], inputs["kind"], inputs["root"]) for name, member, inputs in calls}
    if len(names) > 1:
        raise RuntimeError("NCCL_ERROR_INVALID_USAGE: members of a group do not make the same call")
    name, _, inputs = calls[0]
    kind = next(np.dtype(key.lower()) for key, value in _KINDS.items() if value == inputs["kind"])
    nbytes, root = inputs["count"] * kind.itemsize, inputs["root"]
    by_rank = {member.rank: (member, one) for _, member, one in calls}

    def view(address: int) -> Any:
        memory, start, stop = _range(address, nbytes)
        return memory.bytes[start:stop].view(kind)

    for rank, (member, one) in sorted(by_rank.items()):
        stream = _stream(one["stream"])
        assert stream.device_id == member.device, "a stream of another device"
        for side in ("send", "receive"):
            used = name == "reduce" if side == "send" else name == "broadcast"
            if used or rank == root:
                memory = _range(one[side], nbytes)[0]
                assert memory.device_id == member.device, "memory of another device"
        reads = [_range(one["send"], nbytes)] if name == "reduce" or rank == root else []
        writes = [_range(one["receive"], nbytes)] if name == "broadcast" or rank == root else []
        enqueue(f"nccl {name}", reads, writes, stream=stream)
    if name == "reduce":
        total = view(by_rank[0][1]["send"]).copy()
        for rank in range(1, len(by_rank)):
            total += view(by_rank[rank][1]["send"])
        view(by_rank[root][1]["receive"])[:] = total
    else:
        for _, one in by_rank.values():
            view(one["receive"])[:] = view(by_rank[root][1]["send"])


@contextlib.contextmanager
def nccl(*, available: bool = True) -> Iterator[types.ModuleType]:
    """Install the stand-in as ``cupy.cuda.nccl``; ``available`` is the module's attribute."""
    result = types.ModuleType("cupy.cuda.nccl")
    result.__dict__.update(
        available=available,
        NcclCommunicator=NcclCommunicator,
        groupStart=groupStart,
        groupEnd=groupEnd,
        NCCL_SUM=NCCL_SUM,
        **{f"NCCL_{name}": value for name, value in _KINDS.items()},
    )
    before = sys.modules.get(result.__name__)
    sys.modules[result.__name__] = result
    try:
        yield result
    finally:
        if before is None:
            del sys.modules[result.__name__]
        else:
            sys.modules[result.__name__] = before
