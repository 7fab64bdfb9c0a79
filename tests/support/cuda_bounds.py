"""Bounds of kernels: instructions over the issue rate beside bytes over the bandwidth, for an H100 and an H200.

    python -m tests.support.cuda_bounds             # the table of docs/gpus.md
    python -m tests.support.cuda_bounds --loops     # the loops of each kernel, for whoever adds a row

Instructions are those of the machine code (``nvcc``, ``cuobjdump``), counted without a GPU: each counts as often as the
loops around it run, and both sides of a branch count. A row of :data:`KERNELS` says how often that is for one thread.
Bytes are those that have to pass between memory and the GPU at least once. A kernel is bound by its bandwidth if a
GPU needs less time to issue its instructions than to move its bytes.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.support import ops_cuda_sources as cuda


class Gpu(NamedTuple):
    """What a card issues and moves in a second."""

    instructions: float
    """Of single threads: a warp instruction counts as 32."""
    bytes: float


GPUS = {
    "H100": Gpu(132 * 4 * 32 * 1.98e9, 3.35e12),
    "H200": Gpu(132 * 4 * 32 * 1.98e9, 4.8e12),
}
"""SXM cards by their data sheets: 132 multiprocessors, which issue four warp instructions a cycle at 1.98 GHz."""

Trips = "float | tuple[float, list[Trips]]"


@dataclass
class Loop:
    """A loop of a kernel: its instructions from ``first`` to ``last``, and the loops in it."""

    first: int
    last: int
    accesses: int
    """Loads from and stores to global memory."""
    inner: list[Loop] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Instructions of one run, without those of inner loops."""
        return self.last - self.first + 1 - sum(one.last - one.first + 1 for one in self.inner)


class Row(NamedTuple):
    """How one thread of a kernel runs in a typical call."""

    family: str
    source: str
    kernel: str
    elements: float
    """Elements of the result of one thread."""
    nbytes: float
    """Bytes of one element that have to be moved."""
    loops: Sequence[object]
    """How often each loop runs, in the order of addresses: a number, or a pair of a number and the same of its inner
    loops. Of a loop that the compiler has unrolled a copy that does not run counts 0."""
    call: str
    """The call that these numbers are of."""


def loops_of(code: Sequence[tuple[int, str]]) -> list[Loop]:
    """The outermost loops of a kernel, by the branches that go back."""
    place = {address: k for k, (address, _) in enumerate(code)}
    ends: dict[int, int] = {}
    for k, (address, text) in enumerate(code):
        jump = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < address:
            begin = place[int(jump[1], 16)]
            ends[begin] = max(ends.get(begin, 0), k)
    top: list[Loop] = []
    stack: list[Loop] = []
    for begin, end in sorted(ends.items(), key=lambda pair: (pair[0], -pair[1])):
        accesses = sum(bool(re.search(r"\b(LDG|STG)\b", text)) for _, text in code[begin : end + 1])
        one = Loop(begin, end, accesses)
        while stack and stack[-1].last < begin:
            stack.pop()
        (stack[-1].inner if stack else top).append(one)
        stack.append(one)
    return top


def body_of(code: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """A kernel without its padding and without the subroutines of rare cases, such as divisions of denormal numbers."""
    calls = [int(found[1], 16) for _, text in code if (found := re.search(r"\bCALL\S* .*?0x([0-9a-f]+)", text))]
    end = min([*calls, code[-1][0] + 16])
    body = [(address, text) for address, text in code if address < end]
    while body and body[-1][1].startswith(("NOP", "BRA")):
        body.pop()
    return body


def instructions(loops: Sequence[Loop], trips: Sequence[object]) -> float:
    """Instructions in loops that run so often."""
    if len(loops) != len(trips):
        raise AssertionError(f"the kernel has {len(loops)} loops {[(one.length, one.accesses) for one in loops]}, "
                             f"but {len(trips)} are described: the compiler or the source has changed")  # fmt: skip
    total = 0.0
    for loop, trip in zip(loops, trips, strict=True):
        times, inner = trip if isinstance(trip, tuple) else (trip, [0.0] * len(loop.inner))
        total += times * (loop.length + instructions(loop.inner, inner))
    return total


def per_element(code: Sequence[tuple[int, str]], row: Row) -> float:
    """Instructions of one element."""
    body = body_of(code)
    loops = loops_of(body)
    once = len(body) - sum(one.last - one.first + 1 for one in loops)
    return (once + instructions(loops, row.loops)) / row.elements


def bounds(count: float, nbytes: float) -> dict[str, float]:
    """Of each card: the time to issue ``count`` instructions over the time to move ``nbytes`` bytes."""
    return {name: count / gpu.instructions / (nbytes / gpu.bytes) for name, gpu in GPUS.items()}


def compiled(texts: dict[str, str]) -> dict[tuple[str, str], list[tuple[int, str]]]:
    """The machine code of the kernels of sources, by source and name: addresses and instructions."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for label, text in texts.items():
            for name, code in cuda.sass(text, folder).items():
                found[label, name] = code
    return found


KERNELS: list[Row] = []


def show_loops(loops: Sequence[Loop], depth: int = 1) -> None:
    """Print loops, one a line."""
    for one in loops:
        print("  " * depth, f"{one.length} instructions, {one.accesses} accesses")
        show_loops(one.inner, depth + 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", action="store_true")
    given = parser.parse_args()
    texts = {label: text for label, text in cuda.texts(every=False).items()
             if label.startswith(("batch_norm", "layer_norm", "pooling", "softmax", "dropout"))}  # fmt: skip
    if given.loops:
        for (label, name), code in compiled(texts).items():
            body = body_of(code)
            loops = loops_of(body)
            print(label, name, len(body), "once", len(body) - sum(one.last - one.first + 1 for one in loops))
            show_loops(loops)
