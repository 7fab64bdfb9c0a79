"""Gradients of sums and differences, elementwise and broadcasting.

Those of other binary operators are formulas (:mod:`weftplan.ops.core.gradient_kernel`).
"""

from __future__ import annotations

from weftplan.ops.core.forms import kernel
from weftplan.ops.core.kernels import reduce_to
from weftplan.ops.core.schema import Kernel, Params
from weftplan.support.array_types import ArrayModule, RawArray


def sum_backward(sign: int) -> Kernel:
    """Return the backward kernel of lhs + rhs (``sign`` 1) or lhs - rhs (-1).

    It sums the output gradient to each input's shape and multiplies the right gradient by ``sign``.
    """

    @kernel(formula=lambda p, g: (g, -g if sign < 0 else g))
    def compute(xp: ArrayModule, p: Params, g: RawArray, lhs: RawArray | None, rhs: RawArray | None) -> None:
        # Left before right: a left gradient in g's memory leaves g unchanged, a right one may change it.
        if lhs is not None:
            reduce_to(xp, g, lhs)
        if rhs is not None:
            if sign < 0 and rhs.shape == g.shape:
                xp.negative(g, out=rhs)
            else:
                reduce_to(xp, g, rhs)
                if sign < 0:
                    xp.negative(rhs, out=rhs)

    return compute
