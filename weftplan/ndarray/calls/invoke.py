"""Invocation of registered operators on arrays, such as ``nd.FullyConnected(x, w, b, num_hidden=10)``.

The calling thread parses the arguments (``call_arguments.py``) and resolves the call (``resolved_call.py``). Then it
pushes one engine operation that reads the inputs and writes the outputs and auxiliary inputs. Any thread that may push
may call this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from weftplan import device, engine
from weftplan.device.context import Context, current_context
from weftplan.errors import DeviceError, DTypeError
from weftplan.ndarray.array import NDArray, fresh
from weftplan.ndarray.calls.call_arguments import understood
from weftplan.ndarray.calls.resolved_call import SettledCall, may_share, settled
from weftplan.ndarray.errstate import quietly
from weftplan.ndarray.memory.chunk import take
from weftplan.ndarray.pushing import Operand, compute, computing, push_kernel
from weftplan.ndarray.randomness.seeds import next_key
from weftplan.ndarray.small_calls import SmallWork, write_inline
from weftplan.ops.core import registry, tiling
from weftplan.ops.core.node_call import NodeCall
from weftplan.ops.core.schema import Op
from weftplan.support.array_types import RawArray
from weftplan.support.slots import ARRAY_CHUNK, MAKE_ROOM


def invoke(
    op: str | Op,
    inputs: Sequence[NDArray],
    params: Mapping[str, object] | None = None,
    out: NDArray | Sequence[NDArray] | None = None,
    *,
    ctx: Context | None = None,
    is_train: bool = False,
) -> list[NDArray]:
    """Push one call of an operator; return its visible outputs.

    Args:
        op: the operator or its name.
        inputs: arrays, in the operator's order, auxiliary states included.
        params: parameters as text or Python values.
        out: existing arrays to write, one per visible output; they may be inputs.
        ctx: the context of an operator without inputs (default: the current context).
        is_train: select the training behaviour of operators that have one.

    Raises:
        UnknownOperatorError, ParameterError: bad operator or parameters, or the wrong number of inputs or outputs.
        ShapeError, DTypeError: inputs that do not fit, or shapes that cannot be inferred.
        DeviceError: inputs on different contexts.
    """
    if not isinstance(op, Op):
        op = registry.get(op)
    targets = [] if out is None else [out] if isinstance(out, NDArray) else _arrays_of(op, out)
    context = _context_of(op, inputs, ctx, targets)
    plan = settled(op, inputs, params or {}, targets, context.device_type == "gpu")
    outputs, copied = _outputs_into(op, plan, inputs, targets, context)
    target_device = device.get(context)
    read = [array for i, array in enumerate(inputs) if i not in plan.ignored] if plan.ignored else inputs
    writes = [a.chunk.var for a in outputs]
    independent = not targets and not op.aux
    if not independent:
        writes += [inputs[i].var for i in op.mutated(plan.params)]
        writes += [target.var for target in targets]
    scratch: list[NDArray] = []
    if plan.workspace and (target_device.asynchronous or MAKE_ROOM.value is not None):
        # In a chunk, so that it is freed only after the device has finished, and allocated jointly with the others.
        scratch.append(_workspace(op, plan, context))
        writes.append(scratch[0].var)
    key = next_key(context) if op.random else (0, 0)
    kernel = _Kernel(op, plan, target_device, len(inputs), tuple(copied), key, is_train, engine.debug_enabled())
    operands: list[Operand] = [*read, *outputs, *copied.values(), *scratch]
    reads = tuple([a.chunk.var for a in read])
    if independent and not target_device.asynchronous and MAKE_ROOM.value is None:
        # New arrays have no readers, and a var that is read twice counts once.
        engine.get().push(partial(compute, kernel, operands), reads, tuple(writes), context, name=op.name)
    else:
        push_kernel(kernel, operands, reads, writes, context, name=op.name)
    return targets if targets else outputs[: plan.visible]


@dataclass(frozen=True, slots=True)
class _Kernel:
    """The kernel of one call on raw arrays.

    The arrays are the inputs that are not ignored, all outputs, copy targets of some outputs, and the workspace if it
    is an array.
    """

    op: Op
    plan: SettledCall
    place: Any
    inputs: int
    copied: tuple[int, ...]
    """Outputs that are copied to the caller's arrays."""
    key: tuple[int, int]
    is_train: bool
    guarded: bool

    def __call__(self, *raws: RawArray) -> None:
        op, plan = self.op, self.plan
        following = iter(raws)
        raw_in = [None if i in plan.ignored else next(following) for i in range(self.inputs)]
        raw_out = [next(following) for _ in plan.outputs]
        targets = [(next(following), raw_out[k]) for k in self.copied]
        workspace, borrowed = next(following, None), None
        if plan.workspace and workspace is None:
            resource, borrowed = take(self.place.context, plan.workspace, f"{op.name} workspace")
            workspace = borrowed.raw
        try:
            call = NodeCall(
                op,
                plan.kernel,
                plan.params,
                self.place.xp,
                raw_in,
                raw_out,
                workspace=workspace,
                guarded=self.guarded,
            )
            run = call.bound(is_train=self.is_train, random_key=self.key)
            quietly(tiling.bound(tiling.of(self.place.context.device_type), run))
            for target, value in targets:
                target[...] = value
        finally:
            if borrowed is not None:
                resource.free(borrowed)


def _arrays_of(op: Op, out: object) -> list[NDArray]:
    if not isinstance(out, list | tuple) or not all(isinstance(target, NDArray) for target in out):
        raise DTypeError(f"{op.name}: out must be an NDArray or a list of them, got {type(out).__name__}")
    return list(out)


def _context_of(op: Op, inputs: Sequence[NDArray], ctx: Context | None, targets: Sequence[NDArray]) -> Context:
    for position, array in enumerate(inputs):
        if not isinstance(array, NDArray):
            raise DTypeError(f"{op.name}: input {position} must be an NDArray, got {type(array).__name__}")
    if not inputs:
        if ctx is None:
            return targets[0].context if targets else current_context()
        return ctx
    context = inputs[0].context
    for array in inputs:
        if array.context != context:
            contexts = ", ".join(str(a.context) for a in inputs)
            raise DeviceError(
                f"{op.name}: all inputs must be on one context, they are on {contexts}; use as_in_context"
            )
    return context


def push_call(op: Op, plan: SettledCall, inputs: Sequence[NDArray], out: NDArray, context: Context) -> None:
    """Push a call on a host's arrays that writes one new array, and is neither random nor has states."""
    read = [array for i, array in enumerate(inputs) if i not in plan.ignored] if plan.ignored else inputs
    kernel = _Kernel(op, plan, device.get(context), len(inputs), (), (0, 0), False, engine.debug_enabled())
    reads = tuple([array.chunk.var for array in read])  # a var that is read twice counts once
    scratch: list[NDArray] = []
    if (make_room := MAKE_ROOM.value) is not None:
        if plan.workspace:
            scratch.append(_workspace(op, plan, context))
        reads = (*dict.fromkeys(reads), *make_room(context, [*read, out, *scratch]))
    engine.get().push(computing(kernel, [*read, out, *scratch]), reads, (out.chunk.var,), context, name=op.name)


def _workspace(op: Op, plan: SettledCall, context: Context) -> NDArray:
    return fresh(context, (plan.workspace,), np.dtype(np.uint8), f"{op.name} workspace")


def push_into(
    op: Op, plan: SettledCall, inputs: Sequence[NDArray], target: NDArray, context: Context,
    small: SmallWork | None,
) -> None:  # fmt: skip
    """Push a call on a host's arrays that writes ``target``, and the states of the operator among ``inputs``.

    Args:
        target: the written array; each input may share memory with it, by :func:`may_share`.
        small: the inline form of the operation if it is small.
    """
    read = [array for i, array in enumerate(inputs) if i not in plan.ignored] if plan.ignored else inputs
    states = op.mutated(plan.params)
    written = [target, *[inputs[i] for i in states]]
    if (
        small is not None
        and getattr(plan.kernel, "elementwise", False)
        and write_inline(small.kernel, read, written, states, plan.workspace)
    ):
        return
    work: Callable[..., object]
    if small is None or engine.debug_enabled():
        work = _Kernel(op, plan, device.get(context), len(inputs), (), (0, 0), False, engine.debug_enabled())
    elif plan.workspace:
        work = partial(_with_scratch, partial(quietly, small.kernel), context, plan.workspace, op.name)
    else:
        work = partial(quietly, small.kernel)
    writes = [array.chunk.var for array in written]
    push_kernel(work, [*read, target], [array.chunk.var for array in read], writes, context, name=op.name)


def _with_scratch(work: Callable[..., object], context: Context, nbytes: int, name: str, *raws: object) -> None:
    resource, borrowed = take(context, nbytes, f"{name} workspace")
    try:
        work(*raws, borrowed.raw)
    finally:
        resource.free(borrowed)


def _outputs_into(
    op: Op, plan: SettledCall, inputs: Sequence[NDArray], targets: Sequence[NDArray], context: Context
) -> tuple[list[NDArray], dict[int, NDArray]]:
    """Return arrays for the kernel to write, and copy targets for some of them.

    A target that shares memory with an input the kernel may still read is written through a temporary, unless the
    operator declares that pair as inplace.
    """
    outputs: list[NDArray] = []
    copied: dict[int, NDArray] = {}
    for k, (nbytes, shape, dtype) in enumerate(plan.outputs):
        if k < len(targets):
            target = targets[k]
            if target.context != context:
                raise DeviceError(f"{op.name}: out is on {target.context}, the inputs on {context}; use as_in_context")
            if all(may_share(plan, i, k, array, target) for i, array in enumerate(inputs)):
                outputs.append(target)
                continue
            copied[k] = target
        outputs.append(
            NDArray(ARRAY_CHUNK.get()(context, nbytes, delay_alloc=True, name=op.name, prompt=False), shape, dtype)
        )
    return outputs, copied


def call_settled(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> NDArray | list[NDArray]:
    """Call ``nd.<name>(*args, **kwargs)``; return an array, or a list if there are several visible outputs."""
    op = registry.get(name)
    inputs, named, out, ctx, is_train = understood(op, args, kwargs)
    results = invoke(op, inputs, named, out, ctx=ctx, is_train=is_train)
    return results[0] if len(results) == 1 else results
