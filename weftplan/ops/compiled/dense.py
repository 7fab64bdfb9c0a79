"""Dense convolutions by compiled products: forward, gradient of the data, gradient of the weight, on given buffers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weftplan.ops.compiled import product, tables
from weftplan.ops.compiled.jit import Entry, library
from weftplan.ops.compiled.product import GATHER
from weftplan.ops.compiled.sizes import (
    Bands,
    Sizes,
    channels_at_once,
    data_bands,
    filters_at_once,
    forward_bands,
)
from weftplan.ops.compiled.tables import address
from weftplan.ops.compiled.target import Target, host
from weftplan.ops.schema import DType


def entries(dtype: DType, target: Target) -> dict[str, Entry]:
    """The compiled functions ``gather`` and ``weights`` for elements of ``dtype``."""
    scalar = "float" if dtype.itemsize == 4 else "double"
    return library(
        f"convolution-{scalar}",
        lambda one: product.functions(scalar, one),
        ("gather", "weights"),
        target,
    )


def _target(target: Target | None) -> Target:
    found = host() if target is None else target
    assert isinstance(found, Target)
    return found


def _run(
    entry: str,
    make: Callable[[Sizes, int], tables.KernelArguments],
    s: Sizes,
    dtype: Any,
    target: Target | None,
    **arrays: Any,
) -> None:
    """Call a compiled function with a plan of loops, in which the addresses of ``arrays`` (0 for None) are filled."""
    target = _target(target)
    places = {name: 0 if array is None else address(array) for name, array in arrays.items()}
    words = make(s, target.lanes(s.itemsize)).filled(**places)  # has a name, since it must live as long as the call
    entries(dtype, target)[entry](address(words))


_X, _COPIES, _CLEARS = (GATHER.index(name) for name in ("x", "copies", "clears"))
_Slice = tuple[Sizes, int, int, int]
"""(sizes, first channel, channels, how many such slices one behind the other)."""


@functools.lru_cache(maxsize=1024)
def _slices(s: Sizes, some: int, *, forward: bool) -> list[_Slice]:
    """The slices in which the channels of a result are computed: those of ``some`` channels, and the rest."""
    every = s.filters if forward else s.channels
    if some == every:
        return [(s, 0, every, 1)]

    def part(count: int) -> Sizes:
        return replace(s, filters=count, whole=every) if forward else replace(s, channels=count, whole=every)

    full, rest = divmod(every, some)
    found = [(part(some), 0, some, full)]
    return [*found, (part(rest), full * some, rest, 1)] if rest else found


def _gather(
    make: Callable[[Sizes, int], tables.KernelArguments],
    slices: Sequence[_Slice],
    bands: Bands,
    steps: Mapping[str, int],
    target: Target | None,
    *,
    relu: bool = False,
    **arrays: Any,
) -> None:
    """Call ``gather`` for each slice; ``steps``: bytes of weight, result and bias from one channel to the next."""
    target = _target(target)
    s = slices[0][0]
    call = entries(arrays["x"].dtype, target)["gather"]
    places = {name: 0 if array is None else address(array) for name, array in arrays.items()}
    # The copy of all images that the first slice has made serves the others.
    kept = bands.copies and bands.count == 1 and s.batch <= s.side_by_side
    for part, first, channels, count in slices:
        begin = {name: place + first * steps.get(name, 0) if place else 0 for name, place in places.items()}
        words = make(part, target.lanes(s.itemsize)).filled(
            **begin, relu=int(relu)
        )  # has a name: it must live as long as the calls
        moves = [(GATHER.index(name), channels * step) for name, step in steps.items() if places[name]]
        if part.whole:
            words[_CLEARS] = 0  # it would clear other slices, too
        for number in range(count):
            if kept and (first or number):
                words[_X], words[_COPIES] = places["padded"], 0
            call(address(words))
            for index, step in moves:
                words[index] += step


def forward(
    s: Sizes, x: Any, weight: Any, bias: Any, y: Any, packed: Any, padded: Any, target: Target | None = None, *,
    relu: bool = False,
) -> None:  # fmt: skip
    """``y`` = windows of ``x`` times ``weight`` plus ``bias`` unless None; with ``relu`` nothing below 0."""
    steps = {"w": s.channels * s.taps * s.itemsize, "y": s.pixels * s.itemsize, "bias": s.itemsize}
    slices = _slices(s, filters_at_once(s), forward=True)
    _gather(tables.forward, slices, forward_bands(s), steps, target, relu=relu,
            x=x, w=weight, bias=bias, y=y, packed=packed, padded=padded)  # fmt: skip


def data_gradient(
    s: Sizes, ograd: Any, weight: Any, dgrad: Any, packed: Any, padded: Any, target: Target | None = None
) -> None:
    """``dgrad``: the gradient with respect to the image."""
    steps = {"w": s.taps * s.itemsize, "y": math.prod(s.image) * s.itemsize}
    slices = _slices(s, channels_at_once(s), forward=False)
    if len(slices) > 1 or slices[0][3] > 1:
        dgrad.fill(0)  # some places may be read by no window, and a slice does not clear them
    _gather(tables.data, slices, data_bands(s), steps, target,
            x=ograd, w=weight, y=dgrad, packed=packed, padded=padded)  # fmt: skip


def weight_gradient(
    s: Sizes, data: Any, ograd: Any, wgrad: Any, packed: Any, padded: Any, target: Target | None = None
) -> None:
    """``wgrad``: the gradient with respect to the weight."""
    _run("weights", tables.weight, s, data.dtype, target, x=data, dy=ograd, dw=wgrad, packed=packed, padded=padded)
