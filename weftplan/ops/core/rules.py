"""Building blocks of operator declarations: shape, dtype and gradient rules, backward operators.

Shape and dtype rules work in both directions: they merge the known facts about inputs and outputs, and raise if two
facts contradict each other. They never mutate the lists that are passed to them.

Backward operators need no inference. Output k of a ``_backward_*`` node has the shape and dtype of forward input
``grad_inputs[k]``, which the planner reads from the forward node. So their rules (:func:`pass_shape`,
:func:`pass_dtype`) return their arguments; a backward kernel that needs a shape reads it from its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftplan.errors import DTypeError, ShapeError, shape_text
from weftplan.ops.core.floats import is_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.schema import (
    DType,
    DTypeRule,
    EntryRef,
    GradientBuilder,
    GradientRule,
    InplacePair,
    Kernel,
    Op,
    Param,
    Params,
    Shape,
    TensorSpec,
    aligned,
)

Shapes = list[Shape | None]
DTypes = list[DType | None]


def is_known(shape: Shape | None) -> bool:
    """Return whether the rank and every dimension of a shape are known (not 0).

    >>> is_known((2, 3)), is_known((2, 0)), is_known(None)
    (True, False, False)
    """
    return shape is not None and 0 not in shape


def merge_shape(a: Shape | None, b: Shape | None, what: str) -> Shape | None:
    """Return the merger of two partly known shapes of a tensor (None: unknown; 0: unknown dimension).

    Raises:
        ShapeError: the shapes contradict each other; the message begins with ``what``.

    >>> merge_shape((0, 3), (2, 0), "lhs and rhs")
    (2, 3)
    """
    if a is None or a == b:
        return b
    if b is None:
        return a
    if len(a) != len(b):
        raise ShapeError(f"{what}: shapes {shape_text(a)} and {shape_text(b)} differ in rank")
    merged = []
    for position, (x, y) in enumerate(zip(a, b, strict=True)):
        if x != y and x != 0 and y != 0:
            shapes = f"shapes {shape_text(a)} and {shape_text(b)}"
            raise ShapeError(f"{what}: {shapes} differ in dimension {position} ({x} and {y})")
        merged.append(x or y)
    return tuple(merged)


def merge_dim(a: int, b: int, what: str) -> int:
    """Return the dimension that is known from ``a`` or ``b`` (0: unknown).

    Raises:
        ShapeError: both are known and differ; the message begins with ``what``.

    >>> merge_dim(0, 4, "columns")
    4
    """
    if a != b and a != 0 and b != 0:
        raise ShapeError(f"{what}: expected equal sizes, got {a} and {b}")
    return a or b


def merge_dtype(a: DType | None, b: DType | None, what: str) -> DType | None:
    """Return the dtype that is known from ``a`` or ``b`` (None: unknown).

    Raises:
        DTypeError: both are known and differ; the message begins with ``what``.
    """
    if a is None or b is None:  # must be tested first: in NumPy float64 equals None
        return b if a is None else a
    if a == b:
        return a
    raise DTypeError(f"{what}: dtypes {a} and {b} differ; cast one of them (Cast)")


def normalize_axis(axis: int, ndim: int, what: str = "axis") -> int:
    """Return the nonnegative number of ``axis``, which counts from the end if negative.

    Raises:
        ShapeError: a tensor of ``ndim`` dimensions has no such axis; the message begins with ``what``.

    >>> normalize_axis(-1, 3)
    2
    """
    if not -ndim <= axis < ndim:
        raise ShapeError(f"{what} {axis} is out of range for {ndim} dimensions: expected {-ndim} to {ndim - 1}")
    return axis % ndim


# ---------------------------------------------------------------------------------------------- shape and dtype rules


def same_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    """Infer the same shape for all inputs and outputs; raise ShapeError if known shapes differ."""
    merged: Shape | None = None
    for position, shape in enumerate(ins):
        merged = merge_shape(merged, shape, f"input {position} against the inputs before it")
    for position, shape in enumerate(outs):
        merged = merge_shape(merged, shape, f"output {position} against the inputs")
    return [merged] * len(ins), [merged] * len(outs)


def same_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    """Infer the same dtype for all inputs and outputs; raise DTypeError if known dtypes differ."""
    merged: DType | None = None
    for position, dtype in enumerate(ins):
        merged = merge_dtype(merged, dtype, f"input {position} against the inputs before it")
    for position, dtype in enumerate(outs):
        merged = merge_dtype(merged, dtype, f"output {position} against the inputs")
    return [merged] * len(ins), [merged] * len(outs)


def floats_only(name: str, rule: DTypeRule = same_dtype) -> DTypeRule:
    """Return a dtype rule: ``rule``, with a DTypeError if the first input of operator ``name`` is not a float."""

    def infer(params: Params, ins: DTypes, outs: DTypes) -> tuple[Sequence[DType | None], Sequence[DType | None]]:
        new = rule(params, ins, outs)
        dtype = new[0][0]
        if dtype is not None and not is_float(dtype):
            raise DTypeError(f"{name} expects floats, got {dtype}: cast it to float32 first (Cast, astype)")
        return new

    return infer


def pass_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    """Infer nothing. This rule is for backward operators, whose shapes the planner reads from the forward node."""
    return ins, outs


def pass_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    """Infer nothing. This rule is for backward operators, whose dtypes the planner reads from the forward node."""
    return ins, outs


def broadcast_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    """Infer shapes by NumPy's broadcasting rule for two inputs.

    An unknown dimension of one input is inferred from the output and the other input if only one value is possible.
    """
    lhs, rhs = ins
    out = outs[0]
    if lhs is None or rhs is None:
        return ins, outs
    rank = max(len(lhs), len(rhs))
    if out is None:
        out = (0,) * rank
    elif len(out) != rank:
        raise ShapeError(f"broadcasting {lhs} and {rhs} gives {rank} dimensions, but the output has shape {out}")
    new = ([1] * (rank - len(lhs)) + list(lhs), [1] * (rank - len(rhs)) + list(rhs), list(out))
    for axis in range(rank):
        new[0][axis], new[1][axis], new[2][axis] = _broadcast_dim(
            new[0][axis], new[1][axis], new[2][axis], f"broadcasting {lhs} and {rhs} to {out}: axis {axis - rank}"
        )
    return [tuple(new[0][rank - len(lhs) :]), tuple(new[1][rank - len(rhs) :])], [tuple(new[2])]


def _broadcast_dim(a: int, b: int, out: int, what: str) -> tuple[int, int, int]:
    for dim in (a, b):
        if dim > 1:
            if out not in (0, dim):
                raise ShapeError(f"{what}: sizes {a} and {b} do not give {out}; expected equal sizes or 1")
            out = dim
    if a == 1 and b == 1:
        if out > 1:
            raise ShapeError(f"{what}: sizes 1 and 1 do not give {out}")
        out = 1
    elif out == 1:
        a = b = 1
    elif a == 1 and b == 0:
        b = out
    elif b == 1 and a == 0:
        a = out
    return a, b, out


# ------------------------------------------------------------------------------------------------------ gradient rules


def zero_gradient(builder: GradientBuilder) -> list[EntryRef | None]:
    """Return no gradient for any input; this is the gradient rule of rounding, comparisons, indices and so on."""
    return [None] * builder.num_inputs


def same_gradient(builder: GradientBuilder) -> list[EntryRef | None]:
    """Return the incoming gradient itself as the gradient of every input, without a new node."""
    return [builder.ograd()] * builder.num_inputs


def grad(
    op: str,
    *uses: str,
    into: Sequence[int] | None = None,
    params: Params | Callable[[Params], Params] | None = None,
) -> GradientRule:
    """Return a gradient rule that adds one node, whose outputs are the gradients of inputs.

    Args:
        op: name of the node's operator.
        uses: its inputs in order: ``"g0"`` gradient of output 0, ``"x1"`` forward input 1, ``"y0"`` forward output 0.
        into: for each output of the node, the forward input whose gradient it is (default: 0, 1, …); all other inputs
            get no gradient.
        params: parameters of the node, or a function that returns them from the forward parameters; None: the forward
            parameters.

    Raises:
        ValueError: an item of ``uses`` has another form.
    """
    for use in uses:
        if use[0] not in "gxy" or not use[1:].isdigit():
            raise ValueError(f"gradient by {op}: {use!r} is not g<k>, x<k> or y<k>")
    fetched = [(use[0], int(use[1:])) for use in uses]

    def rule(builder: GradientBuilder) -> list[EntryRef | None]:
        chosen = params(builder.params) if callable(params) else params
        gradients = builder.node(
            op,
            [
                builder.ograd(k) if kind == "g" else builder.input(k) if kind == "x" else builder.output(k)
                for kind, k in fetched
            ],
            chosen,
        )
        if into is None:
            return [*gradients, *[None] * (builder.num_inputs - len(gradients))]
        result: list[EntryRef | None] = [None] * builder.num_inputs
        for entry, position in zip(gradients, into, strict=True):
            result[position] = entry
        return result

    return rule


def backward(
    forward: str,
    kernel: Kernel,
    inputs: tuple[str, ...] | Callable[[Params], tuple[str, ...]],
    *,
    name: str | None = None,
    grad_inputs: tuple[int, ...] | Callable[[Params], tuple[int, ...]] = (0,),
    params: tuple[Param, ...] = (),
    inplace: tuple[InplacePair, ...] | Callable[[Params], tuple[InplacePair, ...]] = (),
    ignored_inputs: tuple[int, ...] | Callable[[Params], tuple[int, ...]] = (),
    aux: tuple[int, ...] = (),
    random: bool = False,
    workspace: Callable[[Params, Sequence[TensorSpec], Sequence[TensorSpec]], int] | None = None,
    registers: bool = True,
) -> Op:
    """Register and return the operator ``name``, by default ``_backward_<forward>``, that computes gradients.

    Its output k is the gradient of input ``grad_inputs[k]`` of ``forward``. If the gradient rule passes the forward
    parameters to the node, ``params`` must be those of the forward operator. ``registers``: False: only return it, for
    a caller that registers several operators or none.
    """

    def names_of(indices: tuple[int, ...]) -> tuple[str, ...]:
        return ("output",) if len(indices) == 1 else tuple(f"output{k}" for k in range(len(indices)))

    # Passes over a graph read the names of every node, so constant names are computed here, once.
    names: tuple[str, ...] | Callable[[Params], tuple[str, ...]]
    if callable(grad_inputs):
        gradients = grad_inputs
        names = lambda values: names_of(gradients(values))  # noqa: E731
    else:
        names = names_of(grad_inputs)
    op = Op(
        name=name or f"_backward_{forward.lstrip('_')}",
        forward=kernel,
        infer_shape=pass_shape,
        infer_dtype=pass_dtype,
        params=params,
        inputs=inputs,
        outputs=names,
        inplace=inplace,
        ignored_inputs=ignored_inputs,
        aux=aux,
        random=random,
        workspace=workspace,
        backward_of=forward,
        grad_inputs=grad_inputs,
        doc=f"Gradients of {forward}.",
    )
    return register(op) if registers else op


def take_bytes(*specs: TensorSpec | tuple[Shape, DType]) -> int:
    """Return the workspace bytes of a kernel that takes one scratch array of each shape and dtype.

    >>> import numpy as np
    >>> take_bytes(((2, 3), np.dtype("float32")), ((100,), np.dtype("float64")))
    896
    """
    return sum(aligned(TensorSpec(*spec).nbytes) for spec in specs)


ADDITIVE_INPLACE = (InplacePair(0, 0), InplacePair(1, 0))
"""In-place pairs of binary elementwise operators: the output may take the memory of either input."""
UNARY_INPLACE = (InplacePair(0, 0),)
IDENTITY_INPLACE = (InplacePair(0, 0, identity=True),)
"""In-place pair of operators whose output *is* the input (Reshape, _copy, …)."""
