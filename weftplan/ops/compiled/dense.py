"""Dense convolutions by compiled products: forward, gradient of the data, gradient of the weight, on given buffers."""

from __future__ import annotations

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


def forward(
    s: Sizes, x: Any, weight: Any, bias: Any, y: Any, packed: Any, padded: Any, target: Target | None = None
) -> None:
    """``y`` = windows of ``x`` times ``weight`` plus ``bias`` unless None."""
    target = _target(target)
    words = tables.forward(s, target.lanes(s.itemsize)).filled(
        x=address(x),
        w=address(weight),
        y=address(y),
        bias=0 if bias is None else address(bias),
        packed=address(packed),
        padded=0 if padded is None else address(padded),
    )
    entries(x.dtype, target)["gather"](address(words))


def data_gradient(
    s: Sizes, ograd: Any, weight: Any, dgrad: Any, packed: Any, padded: Any, target: Target | None = None
) -> None:
    """``dgrad``: the gradient with respect to the image."""
    target = _target(target)
    words = tables.data(s, target.lanes(s.itemsize)).filled(
        x=address(ograd),
        w=address(weight),
        y=address(dgrad),
        packed=address(packed),
        padded=0 if padded is None else address(padded),
    )
    entries(ograd.dtype, target)["gather"](address(words))


def weight_gradient(
    s: Sizes, data: Any, ograd: Any, wgrad: Any, packed: Any, padded: Any, target: Target | None = None
) -> None:
    """``wgrad``: the gradient with respect to the weight."""
    target = _target(target)
    words = tables.weight(s, target.lanes(s.itemsize)).filled(
        x=address(data),
        dy=address(ograd),
        dw=address(wgrad),
        packed=address(packed),
        padded=0 if padded is None else address(padded),
    )
    entries(data.dtype, target)["weights"](address(words))
