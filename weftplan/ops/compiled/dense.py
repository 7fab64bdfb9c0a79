"""Dense convolutions by compiled products: forward, gradient of the data, gradient of the weight, on given buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weftplan.ops.compiled import product, tables
from weftplan.ops.compiled.jit import Entry, library
from weftplan.ops.compiled.sizes import Sizes
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


def forward(
    s: Sizes, x: Any, weight: Any, bias: Any, y: Any, packed: Any, padded: Any, target: Target | None = None
) -> None:
    """``y`` = windows of ``x`` times ``weight`` plus ``bias`` unless None."""
    _run("gather", tables.forward, s, x.dtype, target, x=x, w=weight, y=y, bias=bias, packed=packed, padded=padded)


def data_gradient(
    s: Sizes, ograd: Any, weight: Any, dgrad: Any, packed: Any, padded: Any, target: Target | None = None
) -> None:
    """``dgrad``: the gradient with respect to the image."""
    _run("gather", tables.data, s, ograd.dtype, target, x=ograd, w=weight, y=dgrad, packed=packed, padded=padded)


def weight_gradient(
    s: Sizes, data: Any, ograd: Any, wgrad: Any, packed: Any, padded: Any, target: Target | None = None
) -> None:
    """``wgrad``: the gradient with respect to the weight."""
    _run("weights", tables.weight, s, data.dtype, target, x=data, dy=ograd, dw=wgrad, packed=packed, padded=padded)
