"""Dense convolutions by compiled matrix products: the forward pass and both gradients, in caller-provided buffers.

``kernels/compiled/scratch.py`` decides how a pass is cut into parts for idle cores. Each part has its own scratch room;
a buffer contains the rooms of all parts, one after another.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from weftplan.kernels.compiled import offset_tables, product
from weftplan.kernels.compiled.jit import Entry, library
from weftplan.kernels.compiled.parts import count, in_parts
from weftplan.kernels.compiled.replay import Call, holding, in_sequence, nothing
from weftplan.kernels.compiled.scratch import (
    Cut,
    Scratch,
    channels_at_once,
    copied_once,
    data_cut,
    data_scratch,
    filters_at_once,
    forward_cut,
    forward_scratch,
    tile,
    weight_rows,
    weight_scratch,
)
from weftplan.kernels.compiled.size_table import Bands, ConvSizes, data_bands, forward_bands
from weftplan.kernels.compiled.target import Target, host
from weftplan.ops.core.schema import DType
from weftplan.support.addresses import address
from weftplan.support.array_types import RawArray
from weftplan.support.core_sharing import split, split_in_rooms

FEW_PACKED = 1 << 20
"""Minimum bytes of packed weights per part if several cores pack them; they take a fifth of a millisecond."""


def entries(dtype: DType, target: Target) -> dict[str, Entry]:
    """Return the compiled functions for ``dtype`` by name: ``gather`` and ``weights``, for float16 also ``narrow``."""
    scalar, halves = "double" if dtype.itemsize == 8 else "float", dtype.itemsize == 2
    return library(
        f"convolution-{'half' if halves else scalar}",
        lambda machine: product.functions(scalar, machine, halves=halves),
        ("gather", "weights", *(("narrow",) if halves else ())),
        target,
    )


def _target(target: Target | None) -> Target:
    machine = host() if target is None else target
    assert isinstance(machine, Target)
    return machine


_Slice = tuple[ConvSizes, int]
"""A slice of a result's channels: (its sizes, its first channel)."""


@functools.lru_cache(maxsize=1024)
def _slices(s: ConvSizes, slice_channels: int, *, forward: bool) -> list[_Slice]:
    """Cut a result's channels into slices of ``slice_channels`` channels; the last slice may be smaller.

    The result is the output if ``forward``, else the gradient of the data.
    """
    every = s.filters if forward else s.channels
    if slice_channels == every:
        return [(s, 0)]

    def part(count: int) -> ConvSizes:
        return (
            replace(s, filters=count, all_channels=every) if forward else replace(s, channels=count, all_channels=every)
        )

    return [
        (part(min(slice_channels, every - first_channel)), first_channel)
        for first_channel in range(0, every, slice_channels)
    ]


def _gather(
    make: Callable[[ConvSizes, int], offset_tables.KernelArguments], s: ConvSizes, slices: Sequence[_Slice],
    bands: Bands, images_per_product: int, cut: Cut, scratch: Scratch, steps: Mapping[str, int],
    target: Target | None, *, relu: bool = False, **arrays: Any,
) -> Call:  # fmt: skip
    """Return a call that runs ``gather`` for every slice, in parts.

    Args:
        make: returns the arguments of a slice, from its sizes and the number of lanes.
        images_per_product: number of images per product.
        scratch: the buffers of all parts.
        steps: by array, the bytes from one channel of the result to the next.
        arrays: the arrays by the names of their argument words; None: null.
    """
    target = _target(target)
    entry = entries(arrays["x"].dtype, target)["gather"]
    addresses = {name: 0 if array is None else address(array) for name, array in arrays.items()}
    packed, padded = scratch.packed // cut.channels, scratch.padded // (cut.channels * cut.images)
    # A part's first slice copies all images; its later slices read the same copy.
    reads_copy = bands.copies and bands.count == 1 and s.batch <= images_per_product

    def arguments(piece: _Slice, part_number: int) -> offset_tables.KernelArguments:
        part, first_channel = piece
        begin = {
            name: begin_at + first_channel * steps.get(name, 0) if begin_at else 0
            for name, begin_at in addresses.items()
        }
        begin["packed"] += part_number * packed
        begin["padded"] += part_number * padded
        if part.all_channels:
            begin["clears"] = 0  # clearing would erase the results of other slices
        return make(part, target.lanes(s.itemsize)).filled(**begin, relu=int(relu))

    if cut.images > 1:
        calls = []
        for piece in slices:
            words = arguments(piece, 0)
            calls.append(_packing(entry, words, piece[0], packed, steps["w"], target.lanes(s.itemsize)))
            computes = words.filled(packs=0)
            calls.append(
                in_parts(entry, computes, s.batch, cut.images, unit=images_per_product, moves={"padded": padded})
            )
        return holding(in_sequence(*calls), *arrays.values())
    slices_each = -(-len(slices) // cut.channels)
    by_slice: dict[tuple[int, int], Call] = {}

    def prepared(number: int, part_number: int) -> Call:
        calls = []
        for later, piece in enumerate(slices[number * slices_each : (number + 1) * slices_each]):
            words = arguments(piece, part_number)
            if reads_copy and later:
                words = words.filled(x=words["padded"], copies=0)
            calls.append(words.ready(entry))
        return in_sequence(*calls)

    def work(number: int, part_number: int) -> None:
        call = by_slice.get((number, part_number))
        if call is None:
            call = by_slice[number, part_number] = prepared(number, part_number)
        call()

    return holding(partial(split_in_rooms, work, -(-len(slices) // slices_each)), *arrays.values())


def _packing(
    entry: Entry, words: offset_tables.KernelArguments, s: ConvSizes, nbytes: int, row_bytes: int, lanes: int
) -> Call:
    """Return a call that packs a slice's weights into ``nbytes`` bytes, in parts of at least :data:`FEW_PACKED` bytes.

    Args:
        words: the arguments of the slice's ``gather``.
        row_bytes: bytes between adjacent rows of the weight.
    """
    rows = words.rows_packed
    parts = count(nbytes, FEW_PACKED, rows // tile(s)) if s.groups == 1 else 1
    if parts == 1:
        return words.filled(last=0).ready(entry)  # packs, and computes nothing
    step = -(-rows // (parts * tile(s))) * tile(s)
    calls = [
        offset_tables.packing(words, first_row, min(step, rows - first_row), row_bytes=row_bytes, lanes=lanes).ready(
            entry
        )
        for first_row in range(0, rows, step)
    ]
    return partial(split, lambda number: calls[number](), len(calls))


def forward(
    s: ConvSizes, x: RawArray, weight: RawArray, bias: Any, y: RawArray, packed: RawArray,
    padded: RawArray | None, target: Target | None = None, *,
    widened: Any = None, scaling: offset_tables.Scaling | None = None, relu: bool = False,
) -> Call:  # fmt: skip
    """Return a call that convolves ``x`` with ``weight`` into ``y``, in the buffers of ``forward_scratch``.

    The call then adds ``bias`` and applies the scale and shift ``scaling``, each unless None, and a relu if ``relu``.
    """
    of_filter = dict.fromkeys(("bias", "scale", "shift"), s.itemsize)
    steps = {"w": s.channels * s.taps * s.stored, "y": s.pixels * s.stored, **of_filter}
    scale, shift = (None, None) if scaling is None else scaling
    slices = _slices(s, filters_at_once(s), forward=True)
    widens = s.halves and bias is not None
    wide_bias = widened.view(np.float32) if widens else bias
    call = _gather(offset_tables.forward, s, slices, forward_bands(s), s.side_by_side, forward_cut(s),
                   forward_scratch(s), steps, target, relu=relu, x=x, w=weight, bias=wide_bias, y=y, packed=packed,
                   padded=padded, scale=scale, shift=shift)  # fmt: skip
    return in_sequence(partial(np.copyto, wide_bias, bias), call) if widens else call


def data_gradient(
    s: ConvSizes,
    ograd: RawArray,
    weight: RawArray,
    dgrad: RawArray,
    packed: RawArray,
    padded: RawArray | None,
    target: Target | None = None,
) -> Call:
    """Return a call that computes ``dgrad``, the gradient of the image, in the buffers of ``data_scratch``."""
    steps = {"w": s.taps * s.stored, "y": math.prod(s.image) * s.stored}
    slices = _slices(s, channels_at_once(s), forward=False)
    call = _gather(offset_tables.data, s, slices, data_bands(s), s.data_side_by_side, data_cut(s), data_scratch(s),
                   steps, target, x=ograd, w=weight, y=dgrad, packed=packed, padded=padded)  # fmt: skip
    # The gradient is 0 at positions that no window reads, and slices do not clear them.
    return call if len(slices) == 1 else in_sequence(partial(dgrad.fill, 0), call)


def weight_gradient(
    s: ConvSizes, data: RawArray, ograd: RawArray, wgrad: RawArray, packed: RawArray, padded: Any,
    target: Target | None = None, *,
    widened: Any = None,
) -> Call:  # fmt: skip
    """Return a call that computes ``wgrad``, the gradient of the weight, in the buffers of ``weight_scratch``."""
    target = _target(target)
    kernels = entries(data.dtype, target)
    entry = kernels["weights"]
    slices = _slices(s, weight_rows(s), forward=True)
    need = weight_scratch(s)
    packs, copies = need.packed // len(slices), need.padded // len(slices)
    x, dy, panels = (address(array) for array in (data, ograd, packed))
    dw = address(widened if s.halves else wgrad)
    row = s.channels * s.taps
    image = address(padded) if need.padded else 0
    once: dict[str, int] = {}
    copy: Call = nothing
    if copied_once(s) and len(slices) > 1:
        # With no group the call only copies. Each row overwrites the previous row's excess, so one thread copies all.
        copy = offset_tables.weight(s, target.lanes(s.itemsize)).filled(x=x, padded=image, groups=0).ready(entry)
        x, copies, once = image, 0, {"copies": 0}
    calls: dict[tuple[int, int], Call] = {}

    def work(number: int, part_number: int) -> None:
        call = calls.get((number, part_number))
        if call is None:
            part, first_filter = slices[number]
            plan = offset_tables.weight(part, target.lanes(s.itemsize))
            dw_at = dw + first_filter * row * s.itemsize
            call = plan.filled(
                **once, x=x, dy=dy + first_filter * s.pixels * s.stored, dw=dw_at,
                packed=panels + part_number * packs, padded=image + part_number * copies,
            ).ready(entry)  # fmt: skip
            if s.halves:
                rounds = offset_tables.narrow(
                    dw_at, address(wgrad) + first_filter * row * s.stored, part.groups * part.filters * row
                )
                call = in_sequence(call, rounds.ready(kernels["narrow"]))
            calls[number, part_number] = call
        call()

    compute = partial(split_in_rooms, work, len(slices))
    return holding(in_sequence(copy, compute), data, ograd, wgrad, packed, padded, widened)
