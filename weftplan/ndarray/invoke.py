"""Calling a registered operator on arrays: ``nd.FullyConnected(x, w, b, num_hidden=10)``.

Parameters, shapes and dtypes are settled on the calling thread, so their errors are raised at the call; what was
settled is kept per (operator, parameters, shapes, dtypes). Then one engine operation is pushed that reads the inputs
and writes the outputs and auxiliary inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from weftplan import config, device, engine
from weftplan.device.context import Context, current_context
from weftplan.errors import DeviceError, DTypeError, ParameterError, ShapeError, own
from weftplan.ndarray import chunk as chunks
from weftplan.ndarray import pushing
from weftplan.ndarray.array import NDArray, fresh
from weftplan.ndarray.chunk import take
from weftplan.ndarray.errstate import quietly
from weftplan.ndarray.pushing import compute, computing, push_kernel
from weftplan.ndarray.seeds import next_key
from weftplan.ops import grain, implementations, registry
from weftplan.ops.cuda import tuning
from weftplan.ops.node_call import NodeCall
from weftplan.ops.schema import DType, InplacePair, Kernel, Op, Shape, TensorSpec

_MOST_PLANS = 4096


@dataclass(frozen=True, slots=True)
class SettledCall:
    """Everything about a call that depends only on operator, parameters, shapes and dtypes."""

    params: Mapping[str, Any]
    outputs: tuple[tuple[int, Shape, DType], ...]
    """Bytes, shape and dtype of each output."""
    visible: int
    ignored: frozenset[int]
    inplace: tuple[InplacePair, ...]
    kernel: Kernel
    workspace: int


_plans: dict[Any, SettledCall] = {}


def invoke(
    op: str | Op,
    inputs: Sequence[NDArray],
    params: Mapping[str, Any] | None = None,
    out: NDArray | Sequence[NDArray] | None = None,
    *,
    ctx: Context | None = None,
    is_train: bool = False,
) -> list[NDArray]:
    """Push one call of an operator; returns its visible outputs.

    Args:
        op: the operator or its name.
        inputs: arrays, in the operator's order, auxiliary states included.
        params: parameters as text or Python values.
        out: arrays to write instead of new ones, one per visible output; they may be inputs.
        ctx: where an operator without inputs runs (default: the current context).
        is_train: training behaviour of operators that have one.

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
    place = device.get(context)
    read = [array for i, array in enumerate(inputs) if i not in plan.ignored] if plan.ignored else inputs
    writes = [a.chunk.var for a in outputs]
    independent = not targets and not op.aux
    if not independent:
        writes += [inputs[i].var for i in op.aux]
        writes += [target.var for target in targets]
    scratch: list[NDArray] = []
    if plan.workspace and (place.asynchronous or pushing.make_room is not None):
        # Kept by a chunk, so that it is freed only after the device has finished with it, and taken with the others.
        scratch.append(_workspace(op, plan, context))
        writes.append(scratch[0].var)
    key = next_key(context) if op.random else (0, 0)
    kernel = _Kernel(op, plan, place, len(inputs), tuple(copied), key, is_train, engine.debug_enabled())
    operands = [*read, *outputs, *copied.values(), *scratch]
    reads = tuple([a.chunk.var for a in read])
    if independent and not place.asynchronous and pushing.make_room is None:
        # What is new is read by nobody, and a read twice counts once.
        engine.get().push(partial(compute, kernel, operands), reads, tuple(writes), context, name=op.name)
    else:
        push_kernel(kernel, operands, reads, writes, context, name=op.name)
    return targets if targets else outputs[: plan.visible]


@dataclass(frozen=True, slots=True)
class _Kernel:
    """The work of one call, on raw arrays: the inputs that are not ignored, all outputs, what some of those are copied
    to, and the workspace where it is an array."""

    op: Op
    plan: SettledCall
    place: Any
    inputs: int
    copied: tuple[int, ...]
    """Outputs that are copied to where the caller wants them."""
    key: tuple[int, int]
    is_train: bool
    guarded: bool

    def __call__(self, *raws: Any) -> None:
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
            quietly(grain.bound(grain.of(self.place.context.device_type), run))
            for target, value in targets:
                target[...] = value
        finally:
            if borrowed is not None:
                resource.free(borrowed)


def _arrays_of(op: Op, out: Any) -> list[NDArray]:
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
            where = ", ".join(str(a.context) for a in inputs)
            raise DeviceError(f"{op.name}: all inputs must be on one context, they are on {where}; use as_in_context")
    return context


def push_call(op: Op, plan: SettledCall, inputs: Sequence[NDArray], out: NDArray, context: Context) -> None:
    """Push a call on a host's arrays that writes one new array, and is neither random nor has states."""
    read = [array for i, array in enumerate(inputs) if i not in plan.ignored] if plan.ignored else inputs
    kernel = _Kernel(op, plan, device.get(context), len(inputs), (), (0, 0), False, engine.debug_enabled())
    reads = tuple([array.chunk.var for array in read])  # one read twice counts once
    scratch: list[NDArray] = []
    if pushing.make_room is not None:
        if plan.workspace:
            scratch.append(_workspace(op, plan, context))
        reads = (*dict.fromkeys(reads), *pushing.make_room(context, [*read, out, *scratch]))
    engine.get().push(computing(kernel, [*read, out, *scratch]), reads, (out.chunk.var,), context, name=op.name)


def _workspace(op: Op, plan: SettledCall, context: Context) -> NDArray:
    return fresh(context, (plan.workspace,), np.dtype(np.uint8), f"{op.name} workspace")


def push_into(
    op: Op, plan: SettledCall, inputs: Sequence[NDArray], target: NDArray, context: Context,
    work: Callable[..., object] | None,
) -> None:  # fmt: skip
    """Push a call on a host's arrays that writes ``target``, and the states of the operator among ``inputs``.

    Args:
        target: what each input may share memory with, by :func:`may_share`.
        work: what computes it from the raw inputs, the raw result and the workspace; None: the plan's kernel.
    """
    read = [array for i, array in enumerate(inputs) if i not in plan.ignored] if plan.ignored else inputs
    if work is None or engine.debug_enabled():
        work = _Kernel(op, plan, device.get(context), len(inputs), (), (0, 0), False, engine.debug_enabled())
    elif plan.workspace:
        work = partial(_with_scratch, work, context, plan.workspace, op.name)
    writes = [target.chunk.var, *[inputs[i].chunk.var for i in op.aux]]
    push_kernel(work, [*read, target], [array.chunk.var for array in read], writes, context, name=op.name)


def _with_scratch(work: Callable[..., object], context: Context, nbytes: int, name: str, *raws: Any) -> None:
    resource, borrowed = take(context, nbytes, f"{name} workspace")
    try:
        work(*raws, borrowed.raw)
    finally:
        resource.free(borrowed)


def settled(
    op: Op, inputs: Sequence[NDArray], params: Mapping[str, Any], targets: Sequence[NDArray], on_gpu: bool = False
) -> SettledCall:
    """What a call depends on but the numbers; kept for calls like it."""
    if op.single:
        return _settle(op, inputs, params, targets, on_gpu)
    key: Any = (
        op.name,
        on_gpu,
        tuple((name, params[name], _apart(params[name])) for name in sorted(params)),
        tuple((a.shape, a.dtype) for a in inputs),
        tuple((a.shape, a.dtype) for a in targets) if targets else None,
    )
    try:
        plan = _plans.get(key)
    except TypeError:  # a parameter that cannot be hashed, such as a list
        key, plan = None, None
    if plan is None:
        plan = _settle(op, inputs, params, targets, on_gpu)
        if key is not None:
            if len(_plans) >= _MOST_PLANS:
                _plans.clear()
            _plans[key] = plan
    return plan


def _apart(value: Any) -> Any:
    """What tells ``value`` from equal ones of other meaning: 1 from True and 1.0, 0.0 from -0.0, also in tuples."""
    return repr(value) if isinstance(value, tuple | float | np.floating) else value.__class__


def _settle(
    op: Op, inputs: Sequence[NDArray], params: Mapping[str, Any], targets: Sequence[NDArray], on_gpu: bool
) -> SettledCall:
    if op.variadic is not None and op.variadic not in params:
        params = {**params, op.variadic: len(inputs)}
    parsed = registry.parse_params(op, params)
    names = op.input_names(parsed)
    if len(inputs) != len(names):
        raise ParameterError(
            f"{op.name}: expected {len(names)} inputs ({', '.join(names) or 'none'}), got {len(inputs)}"
        )
    for name, array in zip(names, inputs, strict=True):
        if 0 in array.shape:
            raise ShapeError(f"{op.name}: input {name} has shape {array.shape}; operators do not take empty arrays")
    count, visible = op.num_outputs(parsed), op.num_visible_outputs(parsed)
    if targets and len(targets) not in (visible, count):
        raise ParameterError(f"{op.name}: out= needs {visible} arrays, got {len(targets)}")
    given: list[Shape | None] = [a.shape for a in inputs]
    kinds: list[DType | None] = [a.dtype for a in inputs]
    known = [*(t.shape for t in targets), *[None] * (count - len(targets))]
    known_kinds = [*(t.dtype for t in targets), *[None] * (count - len(targets))]
    try:
        ins, outs = op.infer_shape(parsed, list(given), list(known))
        in_kinds, out_kinds = op.infer_dtype(parsed, list(kinds), list(known_kinds))
    except (ShapeError, DTypeError) as error:
        shown = ", ".join(f"{name}: {a.shape} {a.dtype}" for name, a in zip(names, inputs, strict=True))
        raise type(error)(f"{op.name}({shown}): {error}") from own(error)
    for name, array, shape, dtype in zip(names, inputs, ins, in_kinds, strict=True):
        if shape is not None and shape != array.shape:
            raise ShapeError(f"{op.name}: input {name} must have shape {shape}, got {array.shape}")
        if dtype is not None and dtype != array.dtype:
            raise DTypeError(f"{op.name}: input {name} must be {dtype}, got {array.dtype}; use astype")
    specs = []
    for name, shape, dtype in zip(op.output_names(parsed), outs, out_kinds, strict=True):
        if shape is None or 0 in shape:
            raise ShapeError(f"{op.name}: the shape of output {name} cannot be told from the inputs (known: {shape})")
        specs.append(TensorSpec(tuple(shape), np.dtype(np.float32) if dtype is None else np.dtype(dtype)))
    for target, spec in zip(targets, specs, strict=False):
        if target.shape != spec.shape or target.dtype != spec.dtype:
            raise ShapeError(f"{op.name}: out has {target.shape} {target.dtype}, the result {spec.shape} {spec.dtype}")
    sources = [TensorSpec(a.shape, a.dtype) for a in inputs]
    # A host computes single calls by NumPy: compiled kernels are for plans.
    mode = "numpy"
    if on_gpu:
        tuning.read_with(config.get)
        mode = config.get("WEFTPLAN_KERNELS")
    chosen = implementations.choose(op, parsed, sources, specs, mode, on="gpu" if on_gpu else "host").implementation
    with grain.using(grain.of("gpu" if on_gpu else "cpu")):
        scratch = chosen.workspace(parsed, sources, specs)
    return SettledCall(
        params=parsed,
        outputs=tuple((spec.nbytes, spec.shape, spec.dtype) for spec in specs),
        visible=visible,
        ignored=frozenset(op.ignored(parsed)),
        inplace=tuple(op.inplace_pairs(parsed)),
        kernel=chosen.kernel,
        workspace=scratch,
    )


def _outputs_into(
    op: Op, plan: SettledCall, inputs: Sequence[NDArray], targets: Sequence[NDArray], context: Context
) -> tuple[list[NDArray], dict[int, NDArray]]:
    """Arrays for the kernel to write, and where to copy some of them after it.

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
            NDArray(chunks.ArrayChunk(context, nbytes, delay_alloc=True, name=op.name, prompt=False), shape, dtype)
        )
    return outputs, copied


def may_share(plan: SettledCall, i: int, k: int, array: NDArray, target: NDArray) -> bool:
    """True when writing ``target`` as output ``k`` cannot spoil input ``i``."""
    if i in plan.ignored or array.chunk is not target.chunk:
        return True
    if array.offset >= target.offset + target.nbytes or target.offset >= array.offset + array.nbytes:
        return True
    same = array.offset == target.offset and array.nbytes == target.nbytes
    return same and any(pair.input == i and pair.output == k for pair in plan.inplace)


def call_settled(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``nd.<name>(*args, **kwargs)``: one array, or a list when there are several visible outputs."""
    op = registry.get(name)
    inputs, named, out, ctx, is_train = understood(op, args, kwargs)
    results = invoke(op, inputs, named, out, ctx=ctx, is_train=is_train)
    return results[0] if len(results) == 1 else results


def understood(
    op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any], Any, Context | None, bool]:
    """The arguments of ``nd.<name>`` as inputs, parameters, ``out``, ``ctx`` and ``is_train``.

    Leading arrays are the inputs (a list of arrays counts as its elements where the operator takes any number), then
    parameters follow in the order in which the operator declares them; inputs may also be given by name. ``out``,
    ``ctx``, ``is_train`` and ``name`` (ignored) are understood for every operator.
    """
    named = dict(kwargs)
    out = named.pop("out", None)
    named.pop("name", None)
    is_train = bool(named.pop("is_train", False))
    declared = [param.name for param in op.params]
    ctx = None if "ctx" in declared else named.pop("ctx", None)
    inputs: list[Any] = []
    rest = list(args)
    if op.variadic is not None and len(rest) >= 1 and isinstance(rest[0], list | tuple):
        rest[:1] = list(rest[0])
    while rest and isinstance(rest[0], NDArray):
        inputs.append(rest.pop(0))
    while rest and rest[0] is None and callable(op.inputs) and op.variadic is None:  # an optional input left out
        rest.pop(0)
    if rest and rest[0] is not None and not isinstance(rest[0], str):
        # Text and None may be meant for a parameter all the same; that inputs are missing is told later.
        names = () if callable(op.inputs) else op.inputs
        missing = names[len(inputs) :] if not any(one in named for one in names) else ()
        if missing:
            raise DTypeError(
                f"{op.name}: input {missing[0]} must be an NDArray, got {type(rest[0]).__name__}; make one with "
                f"mx.nd.array"
            )
    for parameter in declared:
        if not rest:
            break
        if parameter not in named and parameter != op.variadic:
            named[parameter] = rest.pop(0)
    if rest:
        raise ParameterError(f"{op.name}: {len(rest)} positional arguments too many: {rest!r}")
    given = {key: named.pop(key) for key in list(named) if isinstance(named[key], NDArray) and key not in declared}
    named = {key: value for key, value in named.items() if value is not None or key in declared}
    if given:
        inputs = _named_inputs(op, inputs, given, named)
    return inputs, named, out, _as_context(op, named.get("ctx", ctx)), is_train


def _named_inputs(op: Op, inputs: list[Any], given: dict[str, NDArray], params: Mapping[str, Any]) -> list[Any]:
    """Positional inputs followed by the named ones, in the operator's order."""
    filled = dict(params)
    if op.variadic is not None:
        filled.setdefault(op.variadic, len(inputs) + len(given))
    names = op.input_names(registry.parse_params(op, filled))
    placed = dict(zip(names, inputs, strict=False))
    for key, array in given.items():
        if key not in names or key in placed:
            raise ParameterError(f"{op.name}: unknown or repeated input {key!r}; the inputs are {', '.join(names)}")
        placed[key] = array
    missing = [name for name in names if name not in placed]
    if missing:
        raise ParameterError(f"{op.name}: missing inputs {', '.join(missing)}")
    return [placed[name] for name in names]


def _as_context(op: Op, ctx: Any) -> Context | None:
    """``ctx`` given as a context or its text, such as ``cpu(1)``; None and empty text: not given."""
    if ctx is None or isinstance(ctx, Context):
        return ctx
    found = re.fullmatch(r"([a-z_]+)(?:\((\d+)\))?|", ctx.strip()) if isinstance(ctx, str) else None
    if found is None:
        raise DeviceError(f"{op.name}: ctx must be a context such as mx.cpu(0) or its text, got {ctx!r}")
    return Context(found[1], int(found[2] or 0)) if found[1] else None
