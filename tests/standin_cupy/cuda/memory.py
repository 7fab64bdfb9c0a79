"""Memory that the threads of a launch read and write, with checks of bounds and races between threads.

After a thread writes a cell, another thread of its block may access the cell only after ``__syncthreads()``, and a
thread of another block never. The same holds for a write after another thread's read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Lanes = Any
"""An array with one element per thread."""


_SEVERAL = 1 << 40
"""A number above every thread's.

``_SEVERAL + block`` stands for several threads of a block, and ``2 * _SEVERAL`` for threads of several blocks.
"""


class KernelError(AssertionError):
    """An error for a kernel that accesses memory out of bounds, or whose threads race."""


class Cells:
    """Flat memory; ``what`` names it in errors.

    Args:
        tracked: whether races are detected; False for memory that no thread writes, or that only one thread accesses.
        length: number of elements of one copy, if each thread or block has its own copy of the array.
    """

    def __init__(self, values: np.ndarray, what: str, *, tracked: bool = False, length: int | None = None) -> None:
        self.values = values
        self.what = what
        self.tracked = tracked
        self.length = length
        self.writer: Any = None
        self.wrote: Any = None
        self.reader: Any = None
        self.read_at: Any = None

    def _check(self, where: Lanes, verb: str) -> None:
        if where.size and (where.min() < 0 or where.max() >= self.values.size):
            raise KernelError(
                f"a thread {verb} element {int(where.min())} to {int(where.max())} of {self.what}, which has "
                f"{self.values.size}"
            )

    def _refuse(self, other: Lanes, when: Lanes, lanes: Lanes, epoch: Lanes, threads: int, text: str) -> None:
        block = np.where(other >= _SEVERAL, other - _SEVERAL, other // threads)
        clash = (other >= 0) & (other != lanes) & ((block != lanes // threads) | (when >= epoch))
        if clash.any():
            k = int(np.argmax(clash))
            whom = "several threads" if other[k] >= _SEVERAL else f"thread {int(other[k])}"
            raise KernelError(f"race on {self.what}: thread {int(lanes[k])} {text} {whom}")

    def load(self, where: Lanes, lanes: Lanes, epoch: Lanes, threads: int) -> Lanes:
        """Return the elements at ``where``, read by the threads ``lanes``."""
        self._check(where, "reads")
        if self.tracked:
            if self.writer is not None:
                self._refuse(self.writer[where], self.wrote[where], lanes, epoch, threads, "reads what was written by")
            if self.reader is None:
                self.reader = np.full(self.values.size, -1, np.int64)
                self.read_at = np.full(self.values.size, -1, np.int64)
            self._note(where, lanes, epoch, threads)
        return self.values[where]

    def _note(self, where: Lanes, lanes: Lanes, epoch: Lanes, threads: int) -> None:
        """Record the readers: one thread, several threads of one block, or several blocks."""
        before, when = self.reader[where], self.read_at[where]
        self.reader[where] = lanes
        self.read_at[where] = epoch
        block = lanes // threads
        home = np.where(before >= _SEVERAL, before - _SEVERAL, before // threads)
        others = (before >= 0) & (before != lanes) & ((home != block) | (when >= epoch))
        lost = self.reader[where] != lanes
        shared = others | lost
        if shared.any():
            self.reader[where[shared]] = _SEVERAL + block[shared]
            last = self.reader[where]
            apart = (others & (home != block)) | ((last >= _SEVERAL) & (last - _SEVERAL != block))
            self.reader[where[apart]] = _SEVERAL + _SEVERAL

    def store(self, where: Lanes, values: Lanes, lanes: Lanes, epoch: Lanes, threads: int) -> None:
        """Write ``values`` to the elements at ``where``, by the threads ``lanes``."""
        self._check(where, "writes")
        if self.tracked:
            if self.writer is None:
                self.writer = np.full(self.values.size, -1, np.int64)
                self.wrote = np.full(self.values.size, -1, np.int64)
            self._refuse(self.writer[where], self.wrote[where], lanes, epoch, threads, "overwrites what was written by")
            if self.reader is not None:
                self._refuse(
                    self.reader[where], self.read_at[where], lanes, epoch, threads, "overwrites what is read by"
                )
            self.writer[where], self.wrote[where] = lanes, epoch
            if (self.writer[where] != lanes).any():
                raise KernelError(f"race on {self.what}: several threads write one element")
        self.values[where] = values

    def add(self, where: Lanes, values: Lanes) -> Lanes:
        """Do ``atomicAdd`` on integers, thread by thread; return the old values."""
        self._check(where, "adds to")
        if self.values.dtype.kind == "f":
            raise KernelError(f"atomicAdd on {self.what}, which holds floats: their sum would have no fixed order")
        order = np.argsort(where, kind="stable")
        before = np.empty(where.shape, self.values.dtype)
        for k in order:
            before[k] = self.values[where[k]]
            self.values[where[k]] += values[k]
        return before


class Pointer:
    """A position in :class:`Cells` for each thread; a const pointer does not allow writes."""

    def __init__(self, cells: Cells, offset: Lanes, *, const: bool = False) -> None:
        self.cells = cells
        self.offset = offset
        self.const = const

    def aligned(self, nbytes: int) -> Pointer:
        """Check that every address is a multiple of ``nbytes``, as the kernel promises; return the same pointer."""
        values = self.cells.values
        if ((values.ctypes.data + self.offset * values.itemsize) % nbytes).any():
            raise KernelError(f"{self.cells.what} is not aligned to {nbytes} bytes, as the kernel says")
        return self
