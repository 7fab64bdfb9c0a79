"""Argument words and tables of the compiled depthwise kernels, computed from sizes, and their calls.

Tables are computed once per size, cached and never changed, so any thread may use them.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product as every

import numpy as np

from weftplan.kernels.compiled.copies import PAD
from weftplan.kernels.compiled.depthwise import implementation as depthwise
from weftplan.kernels.compiled.depthwise.implementation import PASS, SLACK, VECTOR_BYTES
from weftplan.kernels.compiled.jit import Entry, library
from weftplan.kernels.compiled.offset_tables import KernelArguments, Scaling, scaling_words
from weftplan.kernels.compiled.parts import count, in_parts
from weftplan.kernels.compiled.replay import Call, holding
from weftplan.kernels.compiled.size_table import ConvSizes
from weftplan.kernels.compiled.target import Target
from weftplan.ops.core.schema import DType
from weftplan.support.addresses import address
from weftplan.support.array_types import RawArray


def takes(s: ConvSizes) -> bool:
    """Return whether these kernels compute a convolution: they need one filter per channel and strides of 1 or 2."""
    if (
        s.halves
        or s.channels != 1
        or s.filters != 1
        or s.groups == 1
        or s.image[0] != 1
        or s.kernel[0] != 1
        or s.pad[0]
    ):
        return False
    return _level(s).stride[1:] in ((1, 1), (2, 2))


def _level(s: ConvSizes) -> ConvSizes:
    """Return ``s`` with its vertical stride set to the horizontal if image and kernel have one row and no padding."""
    if s.image[1] == s.kernel[1] == 1 and not s.pad[1]:
        return replace(s, stride=(1, s.stride[2], s.stride[2]))
    return s


FEW = 1 << 20
"""Minimum multiplications of a part."""


def _lanes(s: ConvSizes) -> int:
    return VECTOR_BYTES // s.itemsize


@functools.lru_cache(maxsize=1024)
def scratch(s: ConvSizes) -> int:
    """Return the scratch bytes of all parts, enough for each of the three passes."""
    s = _level(s)
    return parts(s) * max(sum(plan_bytes(plan)) for plan in (forward(s), data(s), weight(s)))


def parts(s: ConvSizes) -> int:
    """Return the number of parts, which are ranges of channels."""
    return count(s.batch * s.groups * s.taps * s.pixels, FEW, s.groups)


def plan_bytes(plan: KernelArguments) -> tuple[int, int, int]:
    """Return the bytes of (the copy of a plane, its separated even and odd columns, the sums of a weight gradient)."""
    pad = plan.tables[0]
    get = {name: int(value) for name, value in zip(PASS, plan.words, strict=True)}
    rows, columns = int(pad[PAD.index("to_height")]), int(pad[PAD.index("to_width")])
    size = int(plan.tables[1][-1])  # the entry after the last tap holds the bytes of an element
    copied = -(-rows * columns * size // VECTOR_BYTES) * VECTOR_BYTES + SLACK
    separated = 2 * get["phase"] + SLACK if get["apart"] else 0
    return copied, separated, get["taps"] * VECTOR_BYTES


def _plan(
    s: ConvSizes, source: tuple[int, int], to: tuple[int, int], lead: tuple[int, int], row_stride: int,
    taps: list[tuple[int, int, int]], rows: int, columns: int, *, separates: bool, counts: list[int] | None = None,
) -> KernelArguments:  # fmt: skip
    """Return the arguments of one pass, without addresses of arrays.

    Args:
        source: extents of a plane that is copied.
        to: extents of the padded copy.
        lead: number of zero rows and columns before the plane.
        row_stride: rows of the copy between the windows of adjacent output rows.
        taps: (row, column, index in the kernel) of each tap, in the padded copy.
        rows, columns: extents of a result plane.
        separates: whether even and odd columns are separated.
        counts: the first tap of each phase and the end of the last, for a data gradient of stride 2; else None.
    """
    size, lanes = s.itemsize, _lanes(s)
    width = -(-to[1] // (2 * lanes)) * 2 * lanes if separates else to[1]
    pitch = width * size // (2 if separates else 1)
    phase = to[0] * pitch
    pad = np.array([{"depth": 1, "height": source[0], "width": source[1], "to_depth": 1, "to_height": to[0],
                     "to_width": width, "lead_width": lead[1]}.get(name, 0) for name in PAD], np.int64)  # fmt: skip
    table = np.array(
        [
            (row * pitch + ((column % 2) * phase + column // 2 * size if separates else column * size), index * size)
            for row, column, index in taps
        ]
        + [(0, size)],
        np.int64,
    ).reshape(-1)
    starts = np.array(counts or [0], np.int64)
    values = {
        "images": s.batch, "last": s.groups, "rows": rows, "columns": columns,
        "row_step": row_stride * pitch, "taps": s.taps, "tap_table": address(table), "pad": address(pad),
        "lead": lead[0], "apart": int(separates), "pitch": pitch, "pad_rows": to[0], "phase": phase,
        "counts": address(starts),
    }  # fmt: skip
    return KernelArguments(PASS, np.array([values.get(name, 0) for name in PASS], np.int64), [pad, table, starts])


def _kernel(s: ConvSizes) -> list[tuple[int, int, int]]:
    """Return (row, column, index in the kernel) of each tap."""
    return [(i, j, i * s.kernel[2] + j) for i, j in every(range(s.kernel[1]), range(s.kernel[2]))]


@functools.lru_cache(maxsize=1024)
def forward(s: ConvSizes) -> KernelArguments:
    """Return the arguments of the forward pass, without the addresses of arrays."""
    taps = [(i * s.dilate[1], j * s.dilate[2], index) for i, j, index in _kernel(s)]
    plan = _plan(
        s, s.image[1:], s.padded[1:], s.pad[1:], s.stride[1], taps, s.grid[1], s.grid[2], separates=s.stride[2] == 2
    )
    image, grid = (a * b * s.itemsize for a, b in (s.image[1:], s.grid[1:]))
    return _between(plan, s.groups, image, grid)


def _between(plan: KernelArguments, channels: int, x: int, y: int) -> KernelArguments:
    """Return ``plan`` for images of ``channels`` channels, with source planes of ``x`` and results of ``y`` bytes."""
    return plan.filled(x_image=channels * x, x_channel=x, y_image=channels * y, y_channel=y)


def weight(s: ConvSizes) -> KernelArguments:
    """Return the arguments of the weight gradient, which are those of the forward pass."""
    return forward(s)


@functools.lru_cache(maxsize=1024)
def data(s: ConvSizes) -> KernelArguments:
    """Return the arguments of the image gradient, without the addresses of arrays."""
    image, grid = (a * b * s.itemsize for a, b in (s.image[1:], s.grid[1:]))
    if s.stride[1:] == (1, 1):
        reach = [d * (k - 1) for d, k in zip(s.dilate[1:], s.kernel[1:], strict=True)]
        taps = [(reach[0] - i * s.dilate[1], reach[1] - j * s.dilate[2], index) for i, j, index in _kernel(s)]
        taps.reverse()  # as in the forward pass, the first tap reads the first position
        lead = (reach[0] - s.pad[1], reach[1] - s.pad[2])
        to = (s.image[1] + reach[0], s.image[2] + reach[1])
        plan = _plan(s, s.grid[1:], to, lead, 1, taps, s.image[1], s.image[2], separates=False)
        return _between(plan, s.groups, grid, image)
    # Tap i of output a + moved reads image position 2a + parity, with 2 · moved = parity + pad - i · dilate.
    moved: list[list[list[tuple[int, int]]]] = []
    for axis in (1, 2):
        of = [
            (i, parity, parity + s.pad[axis] - i * s.dilate[axis]) for parity in (0, 1) for i in range(s.kernel[axis])
        ]
        moved.append([[(i, twice // 2) for i, p, twice in of if p == parity and twice % 2 == 0] for parity in (0, 1)])
    leads, extents = [], []
    for axis, parities in zip((1, 2), moved, strict=True):
        steps = [step for parity in parities for _, step in parity] or [0]
        leads.append(-min(steps))
        extents.append(-(-s.image[axis] // 2) + max(steps) - min(steps))
    taps, counts = [], [0]
    for row_parity, column_parity in every((0, 1), (0, 1)):
        for (i, row), (j, column) in every(moved[0][row_parity], moved[1][column_parity]):
            taps.append((row + leads[0], column + leads[1], i * s.kernel[2] + j))
        counts.append(len(taps))
    plan = _plan(
        s,
        s.grid[1:],
        (extents[0], extents[1]),
        (leads[0], leads[1]),
        1,
        taps,
        s.image[1],
        s.image[2],
        separates=False,
        counts=counts,
    )
    return _between(plan, s.groups, grid, image)


def entries(dtype: DType, target: Target | None = None) -> dict[str, Entry]:
    """Return the compiled functions for elements of ``dtype``, by name."""
    scalar = "float" if dtype.itemsize == 4 else "double"
    return library(
        f"depthwise-{scalar}",
        lambda _: depthwise.functions(scalar),
        ("forward", "forward1", "forward2", "data_by_two", "data_by_two_of_nine", "weights", "weights1", "weights2"),
        target,
    )


def run(
    name: str, s: ConvSizes, plan: KernelArguments, x: RawArray, w: RawArray, y: RawArray, buffer: RawArray,
    target: Target | None = None,
    **more: int,
) -> Call:  # fmt: skip
    """Return a call of one pass, in ``buffer``, scratch of :func:`scratch` bytes.

    Args:
        name: ``forward``, ``data_by_two`` or ``weights``; a 3x3 kernel gets the special function if there is one.
        x: the array whose planes are copied with padding.
        w: the weight, or its gradient.
        y: the array of the planes that are not copied.
        more: further argument words.
    """
    if s.kernel[1:] == (3, 3) and s.dilate[1:] == (1, 1):
        if name != "data_by_two":
            name += str(s.stride[1])
        elif all(pad % 2 for pad in s.pad[1:]):
            name += "_of_nine"
    copied, separated, sums = plan_bytes(plan)
    begin = address(buffer)
    arguments = plan.filled(
        x=address(x),
        w=address(w),
        y=address(y),
        buffer=begin,
        second=begin + copied,
        sums=begin + copied + separated,
        **more,
    )
    moves = dict.fromkeys(("buffer", "second", "sums"), copied + separated + sums)
    call = in_parts(entries(x.dtype, target)[name], arguments, s.groups, parts(s), moves=moves)
    return holding(call, x, w, y, buffer)


def forward_call(
    s: ConvSizes, x: RawArray, weight: RawArray, bias: RawArray | None, y: RawArray, buffer: RawArray,
    target: Target | None = None, *,
    scaling: Scaling | None = None, relu: bool = False,
) -> Call:  # fmt: skip
    """Return a call that convolves each channel of ``x`` with its filter into ``y``.

    The call then adds ``bias`` and applies the scale and shift ``scaling``, each unless None, and a relu if ``relu``.
    """
    more = {"bias": 0 if bias is None else address(bias), "relu": int(relu), **scaling_words(scaling)}
    return holding(run("forward", s, forward(_level(s)), x, weight, y, buffer, target, **more), bias, scaling)


def data_call(
    s: ConvSizes, ograd: RawArray, weight: RawArray, dgrad: RawArray, buffer: RawArray, target: Target | None = None
) -> Call:
    """Return a call that computes the gradient of the image."""
    s = _level(s)
    name = "forward" if s.stride[1:] == (1, 1) else "data_by_two"
    return run(name, s, data(s), ograd, weight, dgrad, buffer, target)


def weight_call(
    s: ConvSizes, x: RawArray, ograd: RawArray, wgrad: RawArray, buffer: RawArray, target: Target | None = None
) -> Call:
    """Return a call that computes the gradient of the weight."""
    return run("weights", s, weight(_level(s)), x, wgrad, ograd, buffer, target)
