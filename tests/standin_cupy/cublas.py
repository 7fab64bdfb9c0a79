"""``cupy.cuda.cublas`` of the stand-in: batched products of matrices given by addresses and strides.

Calls that cuBLAS would refuse raise an error, as do accesses outside of an allocation.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

from tests.standin_cupy.machine import BlasHandle, CUDARuntimeError, ids, machine, thread
from tests.standin_cupy.memory import Memory, enqueue
from tests.standin_cupy.meter import meter
from tests.standin_cupy.streams import capturable, get_current_stream
from weftplan.locks import members

TF32 = 3
_NAMES = {np.float32: "sgemm", np.float64: "dgemm"}


class CUBLASError(RuntimeError):
    """An exception with an error code of cuBLAS."""


def _found(address: int) -> Memory:
    for memory in members(machine.memories):
        if memory.ptr <= address < memory.ptr + memory.size:
            if memory.device_id != thread.device:
                raise CUDARuntimeError("cudaErrorIllegalAddress: memory of another device")
            return memory
    raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")


def _operand(address: int, shape: tuple[int, int, int], strides: tuple[int, int, int], kind: Any) -> Any:
    """Return (array, (memory, first byte, end)) of a batch of matrices."""
    item = np.dtype(kind).itemsize
    memory = _found(address)
    start = address - memory.ptr
    end = start + item * (1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True)))
    if end > memory.size:
        raise CUDARuntimeError(f"cudaErrorIllegalAddress: byte {end} of an allocation of {memory.size}")
    flat = memory.bytes[start:end].view(kind)
    result = np.lib.stride_tricks.as_strided(flat, shape, [step * item for step in strides])
    return result, (memory, start, end)


def use(handle: int, name: str) -> None:
    """Check that a handle belongs to this thread and device.

    Record the product as unreproducible if the handle has run on several streams with workspaces of no fixed size.
    """
    actual = machine.handles.get(handle)
    if actual is None or (actual.thread, actual.device) != (threading.get_ident(), thread.device):
        raise CUBLASError("CUBLAS_STATUS_NOT_INITIALIZED: the handle is of another thread, or of another device")
    actual.streams.add(get_current_stream().key)
    if len(actual.streams) > 1 and not actual.fixed:
        machine.unreproducible.add(name)


def _gemm(kind: Any) -> Any:
    """Return the ``gemmStridedBatched`` call for ``kind``: it checks the handle, then computes or is captured."""

    def call(handle: int, *numbers: int) -> None:
        if handle.__class__ is int:
            use(handle, _NAMES[kind])
        product(handle, *numbers)

    @capturable
    def product(
        handle: int, transa: int, transb: int, m: int, n: int, k: int,
        alpha: int, A: int, lda: int, strideA: int, B: int, ldb: int, strideB: int,
        beta: int, C: int, ldc: int, strideC: int, batchCount: int,
    ) -> None:  # fmt: skip
        numbers = (handle, transa, transb, m, n, k, alpha, A, lda, strideA, B, ldb, strideB, beta, C, ldc, strideC)
        if not all(type(number) is int for number in (*numbers, batchCount)):
            raise TypeError(f"an integer is required: {(*numbers, batchCount)}")
        rows_a, rows_b = (k if transa else m), (n if transb else k)
        wrong = min(m, n, k, batchCount) < 0 or lda < max(1, rows_a) or ldb < max(1, rows_b) or ldc < max(1, m)
        if wrong or transa not in (0, 1) or transb not in (0, 1) or (batchCount > 1 and strideC < n * m):
            raise CUBLASError("CUBLAS_STATUS_INVALID_VALUE")
        one, old = (ctypes.cast(at, ctypes.POINTER(np.ctypeslib.as_ctypes_type(kind)))[0] for at in (alpha, beta))
        a, of_a = _operand(A, (batchCount, m, k), (strideA, lda, 1) if transa else (strideA, 1, lda), kind)
        b, of_b = _operand(B, (batchCount, k, n), (strideB, ldb, 1) if transb else (strideB, 1, ldb), kind)
        c, of_c = _operand(C, (batchCount, m, n), (strideC, 1, ldc), kind)
        enqueue(_NAMES[kind], [of_a, of_b, *[of_c] * bool(old)], [of_c])
        if not meter.dry:
            with np.errstate(all="ignore"):
                actual = one * np.matmul(a, b)
                c[...] = actual + old * c if old else actual

    return call


def _set_math_mode(handle: int, mode: int) -> None:
    if mode not in (0, TF32):
        raise CUBLASError("CUBLAS_STATUS_INVALID_VALUE")
    machine.math_mode = mode


class Cublas:
    """The ``cupy.cuda.cublas`` module."""

    sgemmStridedBatched = staticmethod(_gemm(np.float32))
    dgemmStridedBatched = staticmethod(_gemm(np.float64))
    setMathMode = staticmethod(_set_math_mode)

    @staticmethod
    def getMathMode(handle: int) -> int:
        """Return 0 (default) or 3 (TF32)."""
        return machine.math_mode


def handle() -> int:
    """Return this thread's cuBLAS handle for the current device, as ``cupy.cuda.get_cublas_handle``.

    A new handle allocates its workspaces.
    """
    machine.check()
    machine.library("cuBLAS")
    mine = (threading.get_ident(), thread.device)
    for number, one in list(machine.handles.items()):
        if (one.thread, one.device) == mine:
            return number
    number = next(ids)
    machine.handles[number] = BlasHandle(thread.device)
    return number
