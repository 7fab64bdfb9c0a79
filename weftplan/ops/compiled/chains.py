"""Compiled implementation of chains of elementwise nodes: one loop, in parts on idle cores.

It takes chains whose formulas can be recorded, and arrays that are worth the compilation; NumPy computes the others
block by block. Any worker may call it: all it writes is given, and it needs no scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import Any

from weftplan.ops.compiled import elementwise
from weftplan.ops.compiled.target import host
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.schema import Arrays, DType, OpContext, Params
from weftplan.ops.elementwise.formulas import Recorded, recorded
from weftplan.ops.fusion.elementwise import ELEMENTWISE, Chain
from weftplan.support.core_sharing import split

LEAST = 1 << 14
"""Elements: for fewer a compiled loop saves less than it costs to load it."""


@lru_cache(maxsize=256)
def formula_of(chain: Chain, dtype: DType) -> Recorded | None:
    """What a chain computes; None where only NumPy has its functions."""
    calls = []
    for k, link in enumerate(chain.links):
        calls.append((link.op.forward, link.params, link.operands, [chain.inputs + k]))
    return recorded(calls, chain.inputs + len(chain.links), dtype, given=range(chain.inputs))


def _refusal(params: Params, inputs: Specs, outputs: Specs) -> str:
    found = host()
    if isinstance(found, str):
        return found
    if formula_of(params["chain"], outputs[0].dtype) is None:
        return f"{outputs[0].dtype}, or a function whose bits are NumPy's own"
    return ""


def _slower(params: Params, inputs: Specs, outputs: Specs) -> str:
    return "small arrays" if prod(outputs[0].shape) < LEAST else ""


class _Kernel:
    """The loop of a chain; it can be prepared."""

    __slots__ = ()

    def __call__(self, ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        self.prepare(ctx, params, inputs, outputs)()

    def prepare(self, ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> Callable[[], object]:
        """The loop on these arrays."""
        out = outputs[0]
        found = formula_of(params["chain"], out.dtype)
        assert found is not None, params["chain"]
        run = elementwise.compiled(found, out.dtype)
        arrays = [*inputs, *[out] * len(params["chain"].links)]
        parts = elementwise.parts_of(out.size)
        if parts == 1:
            return partial(run, arrays, 0, out.size)
        step = -(-out.size // (parts * elementwise.BORDER)) * elementwise.BORDER

        def part(number: int) -> None:
            run(arrays, number * step, min((number + 1) * step, out.size))

        return partial(split, part, -(-out.size // step))


def _nothing(params: Params, inputs: Specs, outputs: Specs) -> int:
    return 0


_kernel: Any = _Kernel()
provide(
    ELEMENTWISE.name,
    Implementation(name="native", kernel=_kernel, workspace=_nothing, refusal=_refusal, slower=_slower),
)
