"""Dense convolutions by compiled products: forward, gradient of the data, gradient of the weight, on given buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from weftplan.ops.compiled import product, tables
from weftplan.ops.compiled.jit import Entry, library
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
    made: Callable[[Sizes, int], tables.KernelArguments],
    s: Sizes,
    dtype: Any,
    target: Target | None,
    changed: Mapping[str, int] = MappingProxyType({}),
    **arrays: Any,
) -> None:
    """Call a compiled function with a plan of loops, in which the addresses of ``arrays`` (0 for None) are filled, and
    words that are not as planned."""
    target = _target(target)
    places = {name: 0 if array is None else address(array) for name, array in arrays.items()}
    words = made(s, target.lanes(s.itemsize)).filled(**changed, **places)  # a name: it must live as long as the call
    entries(dtype, target)[entry](address(words))


def _gather(
    made: Callable[[Sizes, int], tables.KernelArguments],
    parts: Sequence[tuple[Sizes, Mapping[str, Any]]],
    bands: Bands,
    x: Any,
    packed: Any,
    padded: Any,
    target: Target | None,
    changed: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Call ``gather`` for each part of the result's channels, with what of weight, bias and result belongs to it."""
    first = parts[0][0]
    # The copy of all images that the first part has made is there for the others.
    kept = bands.copies and bands.count == 1 and first.batch <= first.side_by_side
    for number, (s, arrays) in enumerate(parts):
        if number and kept:
            x, changed = padded, {**changed, "copies": 0}
        dtype = arrays["y"].dtype
        _run("gather", made, s, dtype, target, changed, x=x, packed=packed, padded=padded, **arrays)


def forward(
    s: Sizes, x: Any, weight: Any, bias: Any, y: Any, packed: Any, padded: Any, target: Target | None = None
) -> None:
    """``y`` = windows of ``x`` times ``weight`` plus ``bias`` unless None."""
    some = filters_at_once(s)
    parts: list[tuple[Sizes, Mapping[str, Any]]] = [(s, {"w": weight, "bias": bias, "y": y})]
    if some < s.filters:
        parts = [
            (
                replace(s, filters=min(some, s.filters - k), whole=s.filters),
                {"w": weight[k:], "bias": None if bias is None else bias[k:], "y": y[:, k:]},
            )
            for k in range(0, s.filters, some)
        ]
    _gather(tables.forward, parts, forward_bands(s), x, packed, padded, target)


def data_gradient(
    s: Sizes, ograd: Any, weight: Any, dgrad: Any, packed: Any, padded: Any, target: Target | None = None
) -> None:
    """``dgrad``: the gradient with respect to the image."""
    some = channels_at_once(s)
    parts: list[tuple[Sizes, Mapping[str, Any]]] = [(s, {"w": weight, "y": dgrad})]
    changed: dict[str, int] = {}
    if some < s.channels:
        dgrad.fill(0)  # a part that clears places which nobody reads would clear those of the parts before it
        changed = {"clears": 0}
        parts = [
            (
                replace(s, channels=min(some, s.channels - k), whole=s.channels),
                {"w": weight[:, k:], "y": dgrad[:, k:]},
            )
            for k in range(0, s.channels, some)
        ]
    _gather(tables.data, parts, data_bands(s), ograd, packed, padded, target, changed)


def weight_gradient(
    s: Sizes, data: Any, ograd: Any, wgrad: Any, packed: Any, padded: Any, target: Target | None = None
) -> None:
    """``wgrad``: the gradient with respect to the weight."""
    _run("weights", tables.weight, s, data.dtype, target, x=data, dy=ograd, dw=wgrad, packed=packed, padded=padded)
