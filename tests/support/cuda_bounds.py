"""Bounds of kernels: time to issue their instructions and time to move their bytes, for an H100 and an H200.

    python -m tests.support.cuda_bounds             # print the table of docs/gpus.md
    python -m tests.support.cuda_bounds --write     # write the table to that file
    python -m tests.support.cuda_bounds --loops     # print the loops of each kernel, for a new row

Instructions are those of the machine code (``nvcc``, ``cuobjdump``), counted without a GPU. Each counts as often as the
loops around it run, which a row of :data:`KERNELS` states for one thread; both sides of a branch count. Bytes are those
that must pass between memory and the GPU at least once. A kernel is bound by bandwidth if a GPU needs less time to
issue its instructions than to move its bytes.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.support import ops_cuda_sources as cuda
from tests.support.pointwise_networks import NETWORKS, groups, planned
from weftplan.kernels.cuda import pointwise
from weftplan.ops.core.cuda_source import text_of


class Gpu(NamedTuple):
    """Instructions and bytes per second of a GPU."""

    instructions: float
    """Instructions per second, counted per thread: a warp instruction counts as 32."""
    bytes: float


GPUS = {
    "H100": Gpu(132 * 4 * 32 * 1.98e9, 3.35e12),
    "H200": Gpu(132 * 4 * 32 * 1.98e9, 4.8e12),
}
"""Rates of SXM cards by their data sheets.

A card has 132 multiprocessors, and each issues four warp instructions a cycle at 1.98 GHz.
"""


@dataclass
class Loop:
    """A loop of a kernel, from instruction ``first`` to ``last``, with its inner loops."""

    first: int
    last: int
    accesses: int
    """Number of loads from and stores to global memory, inner loops included."""
    inner: list[Loop] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Return the number of instructions of one run, without those of inner loops."""
        return self.last - self.first + 1 - sum(one.last - one.first + 1 for one in self.inner)


class Row(NamedTuple):
    """A kernel, and how often its loops run for one thread in a typical call."""

    family: str
    source: str
    kernel: str
    elements: float
    """Number of result elements per thread."""
    nbytes: float
    """Bytes that must be moved per element."""
    loops: Sequence[object]
    """How often each loop runs, in the order of addresses.

    An item is a number, or a pair of a number and the list of the inner loops' numbers. A copy of an unrolled loop that
    does not run counts 0.
    """
    call: str
    """The typical call, as text for the table."""


def loops_of(code: Sequence[tuple[int, str]]) -> list[Loop]:
    """Return the outermost loops of a kernel, which are found by their backward branches."""
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
    """Return a kernel without its padding and the subroutines for rare cases, such as divisions of denormal numbers."""
    calls = [int(match[1], 16) for _, text in code if (match := re.search(r"\bCALL\S* .*?0x([0-9a-f]+)", text))]
    end = min([*calls, code[-1][0] + 16])
    body = [(address, text) for address, text in code if address < end]
    while body and body[-1][1].startswith(("NOP", "BRA")):
        body.pop()
    return body


def instructions(loops: Sequence[Loop], trips: Sequence[object]) -> float:
    """Return the number of instructions of loops; ``trips`` states how often each loop runs."""
    if len(loops) != len(trips):
        raise AssertionError(f"the kernel has {len(loops)} loops {[(one.length, one.accesses) for one in loops]}, "
                             f"but {len(trips)} are described: the compiler or the source has changed")  # fmt: skip
    total = 0.0
    for loop, trip in zip(loops, trips, strict=True):
        times, inner = trip if isinstance(trip, tuple) else (trip, [0.0] * len(loop.inner))
        total += times * (loop.length + instructions(loop.inner, inner))
    return total


def per_element(code: Sequence[tuple[int, str]], row: Row) -> float:
    """Return the number of instructions per element."""
    body = body_of(code)
    loops = loops_of(body)
    once = len(body) - sum(one.last - one.first + 1 for one in loops)
    return (once + instructions(loops, row.loops)) / row.elements


def bounds(count: float, nbytes: float) -> dict[str, float]:
    """Return for each GPU the time to issue ``count`` instructions divided by the time to move ``nbytes`` bytes."""
    return {name: count / gpu.instructions / (nbytes / gpu.bytes) for name, gpu in GPUS.items()}


def compiled(texts: dict[str, str]) -> dict[tuple[str, str], list[tuple[int, str]]]:
    """Return the machine code {(source, kernel): [(address, instruction), …]} of all kernels in the sources."""
    by_name = {}
    with tempfile.TemporaryDirectory() as folder:
        for label, text in texts.items():
            for name, code in cuda.sass(text, folder).items():
                by_name[label, name] = code
    return by_name


_NORM, _ROWS, _LABELS = "batch_norm._SOURCE float32", "softmax._ROWS float32", "softmax._LABELS float32 float32"
_LAYER, _DROP = "layer_norm._SOURCE float32", "dropout._SOURCE float32"
_PIECES = "32 x 64 x 112 x 112, of which a thread has 49 elements"
_LINES = "4,096 rows of 1,024, 64 threads each"
_WIDTHS = "4,096 rows of 1,000, 32 threads each"
KERNELS = [
    Row("normalisation", _NORM, "piece_sums", 49, 4, [49, 10], _PIECES),
    Row("normalisation", _NORM, "piece_squares", 49, 4, [0, 2, 0, 49, 10], _PIECES),
    Row("normalisation", _NORM, "normalize", 49, 8, [0, 0, 0, 0, 0, 2, 0, 0, 2, 0, 49], _PIECES),
    Row("normalisation", _NORM, "piece_products", 49, 8, [49, 10, 10], _PIECES),
    Row("normalisation", _NORM, "normalize_back", 49, 12, [0, 0, 0, 0, 2, 0, 0, 2, 0, 0, 49], _PIECES),
    Row("normalisation", _LAYER, "normalize_rows", 16, 8, [16, 6, 16, 6, 16, 0], _LINES),
    Row("normalisation", _LAYER, "normalize_rows_back", 16, 12, [16, 0, 6, 6, 16, 0], _LINES),
    Row("normalisation", _LAYER, "sum_over_rows", 128, 8, [0, 128, 5], _LINES),
    Row("pooling", "pooling.2x2.0 float32", "pool_largest", 4, 20, [(4, [0])], "2x2, stride 2"),
    Row("pooling", "pooling.3x3.0 float32", "pool_largest", 4, 20, [(4, [0])], "3x3, stride 2"),
    Row("pooling", "pooling.2x2.0 float32", "find_largest", 4, 20, [(4, [0])], "2x2, stride 2"),
    Row("pooling", "pooling.3x3.0 float32", "find_largest", 4, 20, [(4, [0])], "3x3, stride 2"),
    Row("pooling", "pooling.2x2.0 float32", "pool_back", 8, 6, [(0, [0]), 1, 1, 1, 1], "2x2, stride 2"),
    Row("pooling", "pooling.3x3.0 float32", "pool_back", 8, 6, [(0, [0]), 1.5, 1.5, 1.5, 1.5, 1.5], "3x3, stride 2"),
    Row("pooling", "pooling.2x2.1 float32", "pool_sum", 4, 20, [(4, [0])], "2x2, stride 2"),
    Row("pooling", "pooling.3x3.1 float32", "pool_sum", 4, 20, [(4, [0])], "3x3, stride 2"),
    Row("pooling", "pooling.2x2.1 float32", "spread_back", 8, 5, [(0, [0]), 1, 1, 1, 1], "2x2, stride 2"),
    Row("pooling", "pooling.3x3.1 float32", "spread_back", 8, 5, [(0, [0]), 1.5, 1.5, 1.5, 1.5, 1.5], "3x3, stride 2"),
    Row("pooling", "pooling._WHOLE float32", "pool_whole", 6.125, 4, [6.125, 3], "images of 7 x 7, 8 threads each"),
    Row("softmax", _ROWS, "softmax_rows", 31.25, 8, [31.25, 5, 8, 5, 8, 0], _WIDTHS),
    Row("softmax", _ROWS, "softmax_rows_back", 31.25, 12, [31.25, 0, 5, 0, 31.25], _WIDTHS),
    Row("softmax", _ROWS, "softmax_columns", 21, 8, [21, 21, 21, 0], "21 classes of each pixel"),
    Row("softmax", _ROWS, "softmax_columns_back", 21, 12, [21, 0, 0, 21], "21 classes of each pixel"),
    Row("softmax", _LABELS, "subtract_labels", 8, 8, [0, 0, 0, 2, 0, 0, 0, 0], "labels to be ignored"),
    Row("softmax", _LABELS, "fill_with", 1, 4, [], "any"),
    Row("elementwise", _DROP, "drop", 8, 9, [0, 8], "in training"),
    Row("elementwise", _DROP, "drop_back", 1, 9, [], "in training"),
]
"""Kernels in float32, with typical calls; for batch norm the kernels for few large channels."""
PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "gpus.md"
BEGIN, END = "<!-- bounds: python -m tests.support.cuda_bounds --write -->\n", "\n<!-- end of bounds -->"
FILES = ("batch_norm", "layer_norm", "pooling", "softmax", "dropout")
"""Files whose kernels should be bound by memory bandwidth."""
ABOVE = {("H200", "pointwise"): 1.3}
"""Allowed ratios above 1 of issue time to memory time, by GPU and kernel.

Fused formulas with several exponentials and logarithms per element exceed 1.
"""


def fused() -> list[tuple[str, Row, str]]:
    """Return (name, row, source) of each kernel of fused elementwise nodes in the tests' networks."""
    results = []
    for name, (make, shape) in NETWORKS.items():
        for k, group in enumerate(groups(planned(make(), shape).graph)):
            lanes = pointwise.lanes_of(group)
            kernel = pointwise.kernel_of(group, (True,) * len(group.results), lanes)
            arrays = sum(not group.broadcasts(one) for one in range(len(group.inputs))) + len(group.results)
            row = Row("elementwise", "", "pointwise", lanes, arrays * group.dtype.itemsize, [], name)
            results.append((f"{name} {k}", row, text_of(kernel.code, T=group.dtype)))
    return results


def measured() -> dict[str, list[tuple[Row, float]]]:
    """Return each row with its instructions per element, by family; of fused nodes only the vector kernels."""
    sources = {
        label: text for label, text in cuda.texts(every=False).items() if any(label == one.source for one in KERNELS)
    }
    code = compiled(sources)
    by_name: dict[str, list[tuple[Row, float]]] = {}
    for row in KERNELS:
        by_name.setdefault(row.family, []).append((row, per_element(code[row.source, row.kernel], row)))
    rows = [one for one in fused() if one[1].elements > 1]
    code = compiled({name: text for name, _, text in rows})
    for name, row, _ in rows:
        body = body_of(code[name, "pointwise"])
        loops = loops_of(body)  # the loop for the last elements of an array does not count
        count = len(body) - sum(one.last - one.first + 1 for one in loops)
        by_name["elementwise"].append((row, count / row.elements))
    return by_name


def table(found: dict[str, list[tuple[Row, float]]]) -> str:
    """Return the table of bounds in Markdown, with the largest ratio of each kernel and call."""
    lines = ["| kernel | call | instructions | bytes | H100 | H200 |", "|---|---|---|---|---|---|"]
    for rows in found.values():
        worst: dict[tuple[str, str], tuple[Row, float]] = {}
        for row, count in rows:
            key = (row.kernel, row.call)
            if key not in worst or count / row.nbytes > worst[key][1] / worst[key][0].nbytes:
                worst[key] = row, count
        for row, count in worst.values():
            ratios = bounds(count, row.nbytes).values()
            shown = " | ".join(f"{ratio:.2f}" for ratio in ratios)
            lines.append(f"| `{row.kernel}` | {row.call} | {count:.0f} | {row.nbytes:g} | {shown} |")
    return "\n".join(lines)


def show_loops(loops: Sequence[Loop], depth: int = 1) -> None:
    """Print loops with their inner loops indented, one per line."""
    for one in loops:
        print("  " * depth, f"{one.length} instructions, {one.accesses} accesses")
        show_loops(one.inner, depth + 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.loops:
        chosen = {label: text for label, text in cuda.texts(every=False).items() if label.split(".")[0] in FILES}
        for (label, name), code in compiled(chosen).items():
            body = body_of(code)
            loops = loops_of(body)
            print(label, name, "once", len(body) - sum(one.last - one.first + 1 for one in loops))
            show_loops(loops)
    elif given.write:
        begin, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{begin}{BEGIN}\n{table(measured())}\n{END}{rest.split(END)[1]}")
    else:
        print(table(measured()))
