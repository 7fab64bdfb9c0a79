"""add_n, the sum of any number of tensors, and helpers for operators with variadic inputs."""

from __future__ import annotations

from functools import lru_cache, reduce
from operator import add

from weftplan.ops.core.formula_kernel import FormulaKernel
from weftplan.ops.core.params import p_inputs, p_int
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import same_dtype, same_shape
from weftplan.ops.core.schema import EntryRef, GradientBuilder, InplacePair, Op, Param, Params


def numbered_inputs(params: Params) -> tuple[str, ...]:
    """Return the input names arg0, arg1, … of an operator with num_args inputs."""
    return numbered("arg", params["num_args"])


@lru_cache(maxsize=16)
def numbered(stem: str, count: int) -> tuple[str, ...]:
    """Return (``stem0``, ``stem1``, …), cached because every access to a node's names calls this.

    >>> numbered("output", 2)
    ('output0', 'output1')
    """
    return tuple(f"{stem}{k}" for k in range(count))


def p_count(value: object) -> int:
    """Return ``value`` as a count, an integer of at least 1.

    >>> p_count("3")
    3
    """
    count = p_int(value)
    if count < 1:
        raise ValueError("expected at least 1")
    return count


NUM_ARGS = Param("num_args", p_inputs, doc="number of inputs (filled in when composing)")


def _add_n_gradient(builder: GradientBuilder) -> list[EntryRef | None]:
    return [
        builder.node(
            "_copy", [builder.ograd()], {}, suffix=f"in{k}_backward" if builder.num_inputs > 1 else "backward"
        )[0]
        for k in range(builder.num_inputs)
    ]


register(
    Op(
        name="add_n",
        forward=FormulaKernel(lambda p, *terms: reduce(add, terms), None, overlaps=(0,)),
        infer_shape=same_shape,
        infer_dtype=same_dtype,
        params=(NUM_ARGS,),
        inputs=numbered_inputs,
        variadic="num_args",
        gradient=_add_n_gradient,
        inplace=(InplacePair(0, 0),),
        aliases=("ElementWiseSum",),
        doc="The sum of all inputs, from the first to the last.",
    )
)
