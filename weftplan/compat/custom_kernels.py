"""Operators of custom nodes: the planner's view of a user's property, and the calls of user code.

User code runs in an engine operation. It receives NDArrays over the operation's memory, whose vars are new: it may push
operations on them, and on any other array, and wait for them (:func:`weftplan.engine.user_code`). The engine operation
ends when all that user code has pushed on its arrays is done, because their memory is then planned for other results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from weftplan import device, engine
from weftplan.device.context import Context, cpu, gpu
from weftplan.errors import DTypeError, MXNetError, ShapeError
from weftplan.ndarray import NDArray
from weftplan.ndarray.memory.chunk import Chunk, nothing
from weftplan.ops.core.params import p_str
from weftplan.ops.core.rules import DTypes, Shapes, is_known, merge_dtype, merge_shape, pass_dtype, pass_shape
from weftplan.ops.core.schema import EntryRef, GradientBuilder, Op, OpContext, Param, Params
from weftplan.profiler.python_operators import recorded
from weftplan.support.array_types import DTypeLike, RawArray

_NAME = "Custom"


class Property(Protocol):
    """The interface of a CustomOpProp."""

    def list_arguments(self) -> list[str]: ...
    def list_outputs(self) -> list[str]: ...
    def list_auxiliary_states(self) -> list[str]: ...
    def infer_shape(self, in_shape: list[Any]) -> Any: ...
    def infer_type(self, in_type: list[Any]) -> Any: ...
    def declare_backward_dependency(self, out_grad: Any, in_data: Any, out_data: Any) -> Any: ...
    def create_operator(self, ctx: Any, in_shapes: list[Any], in_dtypes: list[Any]) -> Any: ...


class Declared:
    """A node's property and its declarations."""

    def __init__(self, kind: str, prop: Property, settings: tuple[str, ...]) -> None:
        self.kind = kind
        self.prop = prop
        self.settings = settings
        self.arguments = tuple(prop.list_arguments())
        self.outputs = tuple(prop.list_outputs())
        self.states = tuple(prop.list_auxiliary_states())
        if not self.outputs:
            raise MXNetError(f"operator Custom ({kind}): list_outputs() names no output")
        counts = (len(self.outputs), len(self.arguments), len(self.outputs))
        ends = [sum(counts[: k + 1]) for k in range(3)]
        groups = [list(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]
        used = {int(number) for number in prop.declare_backward_dependency(*groups)}
        self.needed = [[k for k, number in enumerate(group) if number in used] for group in groups]
        """The output gradients, inputs and outputs that backward reads."""

    @property
    def is_loss(self) -> bool:
        """Return whether the gradient is independent of the output gradients."""
        return not self.needed[0]

    def object(self, state: dict[Any, Any], ctx: Context, arrays: Sequence[NDArray]) -> Any:
        """Return the operator object of an executor for these inputs; its forward and backward part share it."""
        shapes, dtypes = tuple(a.shape for a in arrays), tuple(a.np_dtype for a in arrays)
        key = (self, ctx, shapes, dtypes)
        operator = state.get(key)
        if operator is None:
            types = [dtype.type for dtype in dtypes]
            operator = state[key] = self.prop.create_operator(ctx, [list(s) for s in shapes], types)
        return operator


def _facts(declared: Declared, answer: object, what: str) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the lists that infer_shape or infer_type has returned, with missing auxiliary states as None."""
    if not isinstance(answer, (tuple, list)) or len(answer) not in (2, 3):
        raise MXNetError(f"operator Custom ({declared.kind}): {what} must return two or three lists, got {answer!r}")
    ins, outs = list(answer[0]), list(answer[1])
    aux = list(answer[2]) if len(answer) == 3 else []
    for part, names, which in ((ins, declared.arguments, "inputs"), (outs, declared.outputs, "outputs")):
        if len(part) != len(names):
            raise MXNetError(
                f"operator Custom ({declared.kind}): {what} says {len(part)} {which}, there are {len(names)}: {names}"
            )
    return ins, outs, aux + [None] * (len(declared.states) - len(aux))


def _as_shape(value: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if value is None or not len(value) else tuple(int(dim) for dim in value)


def _combined(kind: type[Exception]) -> type[Exception] | None:
    """Return a class derived from ``kind`` and :class:`MXNetError`; None if Python cannot create it."""
    try:
        return type(kind.__name__, (MXNetError, kind), {"__module__": kind.__module__})
    except TypeError:
        return None


@contextmanager
def _raising_ours() -> Iterator[None]:
    """Make exceptions of user code an MXNetError too, as in MXNet, and keep their own class."""
    try:
        yield
    except MXNetError:
        raise
    except Exception as error:
        kind = _combined(type(error))
        try:
            raised = kind(*error.args) if kind is not None else None
        except Exception:  # its constructor takes other arguments
            raised = None
        if raised is None:
            raise MXNetError(f"{type(error).__name__}: {error}") from error
        raised.__dict__.update(error.__dict__)
        raise raised.with_traceback(error.__traceback__) from error.__cause__


@contextmanager
def _running(kind: str, context: Context, arrays: Sequence[NDArray], targets: Sequence[NDArray]) -> Iterator[None]:
    """Run user code on these arrays, then wait until it has written ``targets`` and no operation uses the arrays."""
    target_device = device.get(context)
    if target_device.asynchronous:
        target_device.synchronize()  # the inputs are ordered before this thread's stream, user code runs on any
    with engine.user_code() as current:
        try:
            with recorded(kind), _raising_ours():
                yield
                for target in targets:
                    current.wait_for_var(target.var)
        finally:
            over = current.new_order()
            held = [array.var for array in (*arrays, *targets)]
            current.push(nothing, (), (*held, over), prop=engine.FnProperty.NO_SKIP, name="end of user code")
            current.wait_for_var(over)


def forward_op(declared: Declared, backward: Op) -> Op:
    """Return the forward operator of the node."""
    count = len(declared.arguments)

    def infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
        try:
            answer = declared.prop.infer_shape([list(shape or ()) for shape in ins[:count]])
        except Exception as error:
            if not all(is_known(shape) for shape in ins[:count]):
                return ins, outs  # it needs a shape that is not known yet
            raise ShapeError(f"operator Custom ({declared.kind}): infer_shape raised {error!r}") from error
        inferred, outputs, states = (list(map(_as_shape, part)) for part in _facts(declared, answer, "infer_shape"))
        what = f"operator Custom ({declared.kind})"
        merged = [merge_shape(a, b, what) for a, b in zip(ins, [*inferred, *states], strict=True)]
        return merged, [merge_shape(a, b, what) for a, b in zip(outs, outputs, strict=True)]

    def infer_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
        head = next((dtype for dtype in ins[:count] if dtype is not None), None)
        if count and head is None:
            return ins, outs
        try:
            answer = declared.prop.infer_type([(dtype or head).type for dtype in ins[:count]])  # type: ignore[union-attr]
        except Exception as error:
            if count:
                raise DTypeError(f"operator Custom ({declared.kind}): infer_type raised {error!r}") from error
            answer = [], [np.float32] * len(outs), [np.float32] * len(declared.states)
        inferred, outputs, states = (
            [None if t is None else np.dtype(t) for t in part] for part in _facts(declared, answer, "infer_type")
        )
        what = f"operator Custom ({declared.kind})"
        merged = [merge_dtype(a, b, what) for a, b in zip(ins, [*inferred, *states], strict=True)]
        return merged, [merge_dtype(a, b, what) for a, b in zip(outs, outputs, strict=True)]

    def kernel(ctx: OpContext, params: Params, inputs: Sequence[RawArray], outputs: Sequence[RawArray | None]) -> None:
        context = _context_of(ctx.xp)
        arrays = [_wrap(context, raw) for raw in inputs]
        targets, reqs = _targets(context, outputs, ctx.output_shapes, arrays[0].dtype if arrays else np.float32)
        with _running(declared.kind, context, arrays, targets):
            computing = declared.object(ctx.executor_state, context, arrays[:count])
            computing.forward(
                is_train=ctx.is_train, req=reqs, in_data=arrays[:count], out_data=targets, aux=arrays[count:]
            )

    def gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
        grads, ins, outs = declared.needed
        reads = [builder.ograd(k) for k in grads] + [builder.input(k) for k in ins] + [builder.output(k) for k in outs]
        reads += [builder.input(count + k) for k in range(len(declared.states))]
        return [*builder.node(backward, reads), *[None] * len(declared.states)]

    return Op(
        name=_NAME,
        forward=kernel,
        infer_shape=infer_shape,
        infer_dtype=infer_dtype,
        params=(Param("op_type", p_str), *(Param(name, p_str) for name in declared.settings)),
        inputs=(*declared.arguments, *declared.states),
        aux=tuple(range(count, count + len(declared.states))),
        outputs=declared.outputs,
        gradient=gradient if count else None,
        random=True,  # user code may be anything: never merge two nodes
        loss=declared.is_loss,
        needs_training=lambda params: True,
        single=True,
        doc="An operator registered with mx.operator.register.",
    )


def backward_op(declared: Declared) -> Op:
    """Return the gradient operator: it reads the arrays in ``declared.needed``, and the auxiliary states."""
    grads, ins, outs = declared.needed
    ends = [len(grads), len(grads) + len(ins), len(grads) + len(ins) + len(outs)]

    def kernel(ctx: OpContext, params: Params, inputs: Sequence[RawArray], outputs: Sequence[RawArray | None]) -> None:
        context = _context_of(ctx.xp)
        arrays = [_wrap(context, raw) for raw in inputs]
        out_grad, in_data = arrays[: ends[0]], arrays[ends[0] : ends[1]]
        targets, reqs = _targets(context, outputs, ctx.output_shapes, np.float32)
        with _running(f"_backward_{declared.kind}", context, arrays, targets):
            likes = in_data if len(in_data) == len(declared.arguments) else targets
            computing = declared.object(ctx.executor_state, context, likes)
            computing.backward(
                req=reqs,
                out_grad=out_grad,
                in_data=in_data,
                out_data=arrays[ends[1] : ends[2]],
                in_grad=targets,
                aux=arrays[ends[2] :],
            )

    names = (
        *(f"ograd{k}" for k in grads),
        *(declared.arguments[k] for k in ins),
        *(declared.outputs[k] for k in outs),
        *declared.states,
    )
    return Op(
        name=f"_backward_{_NAME}",
        forward=kernel,
        infer_shape=pass_shape,
        infer_dtype=pass_dtype,
        inputs=names,
        outputs=tuple(f"{name}_grad" for name in declared.arguments),
        backward_of=_NAME,
        grad_inputs=tuple(range(len(declared.arguments))),
        single=True,
        doc="Gradients of an operator registered with mx.operator.register.",
    )


def _context_of(xp: ModuleType) -> Context:
    return cpu(0) if xp is np else gpu(int(xp.cuda.Device().id))


def _wrap(ctx: Context, raw: RawArray) -> NDArray:
    """Return the memory of ``raw`` as an array with a var of its own."""
    return NDArray(Chunk.wrap(ctx, raw.reshape(-1).view(np.uint8)), tuple(raw.shape), raw.dtype)


def _targets(
    ctx: Context, raws: Sequence[RawArray | None], shapes: Sequence[Sequence[int]], dtype: DTypeLike
) -> tuple[list[NDArray], list[str]]:
    """Return arrays to write and their grad_req. They are zeroed, so that unwritten elements are deterministic."""
    targets, reqs = [], []
    for position, raw in enumerate(raws):
        if raw is None:  # the result is unused; user code may write it regardless
            shape = tuple(shapes[position]) if shapes else (1,)
            targets.append(NDArray(Chunk(ctx, math.prod(shape) * np.dtype(dtype).itemsize), shape, np.dtype(dtype)))
            reqs.append("null")
        else:
            raw.fill(0)
            targets.append(_wrap(ctx, raw))
            reqs.append("write")
    return targets, reqs
