"""The call cache: resolved operator calls, reused when ``nd.exp(a)`` gets an array like an earlier one.

The classes and values of a call's arguments, with the shapes and dtypes of its arrays, determine everything except the
numbers. So the outcome of the first such call is cached under them, separately for every function, and a repeated call
only makes the result. Small operations run on the calling thread if that changes no order (``engine.run_inline``). All
others are pushed, and so are calls that write an existing array: ``out=``, the state of an optimizer. Only the common
case is cached: NumPy arrays in, one array out, no random numbers.

The caches are dictionaries that any thread may use; two threads may resolve the same call, with the same outcome.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from weftplan.ndarray.array import NDArray
from weftplan.ndarray.calls.call_arguments import understood
from weftplan.ndarray.calls.invoke import call_settled, invoke, push_call, push_into
from weftplan.ndarray.calls.resolved_call import SettledCall, may_share, settled
from weftplan.ndarray.small_calls import MAX_BYTES, SmallWork, run_inline
from weftplan.ops.core import registry
from weftplan.ops.core.node_call import bare_call
from weftplan.ops.core.schema import Op, TensorSpec
from weftplan.support import slots
from weftplan.support.slots import ARRAY_CHUNK

_MAX_CACHED = 256
"""Maximum number of cached calls of one function."""
_NAMED = object()
"""Separates positional arguments from named arguments in a key."""
_PLAIN = frozenset((int, bool, str, type(None)))
_BY_TEXT = frozenset((float, tuple))
"""Classes whose equal values may have different meanings: 0.0 and -0.0, (1,) and (True,)."""


class Repeated:
    """A cached call.

    Attributes:
        plan: the resolved call.
        order: positions of the operator's inputs among the arrays of the call; None: in the same order.
        is_complete: whether ``small`` is set. It is set when the call is repeated, because many calls, such as those of
            an optimizer whose rate changes, never are.
        small: the inline operation if the arrays are small, else None.
    """

    __slots__ = ("is_complete", "op", "order", "plan", "small")

    def __init__(self, op: Op, plan: SettledCall, order: tuple[int, ...] | None) -> None:
        self.op = op
        self.plan = plan
        self.order = order
        self.is_complete = False
        self.small: SmallWork | None = None

    def complete(self, arrays: Sequence[NDArray]) -> None:
        """Set ``small`` for the operator's inputs."""
        plan, op = self.plan, self.op
        nbytes, shape, dtype = plan.outputs[0]
        if nbytes + sum(array.nbytes for array in arrays) <= MAX_BYTES and not plan.ignored:
            specs = [TensorSpec(array.shape, array.np_dtype) for array in arrays]
            kernel_call = bare_call(plan.kernel, plan.params, specs, [TensorSpec(shape, dtype)], plan.workspace)
            self.small = SmallWork(kernel_call, op.name, shape, dtype, nbytes, plan.workspace)
        self.is_complete = True


Calls: TypeAlias = "dict[tuple[object, ...], Repeated | None]"
"""The cached calls of one function; None for a call that is never cached."""


def call(cache: Calls, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NDArray | list[NDArray]:
    """Call ``nd.<name>(*args, **kwargs)``, from the cache if possible.

    Args:
        cache: the cached calls of this function.
    """
    arrays: list[NDArray] = []
    reads = []
    context = None
    target: NDArray | None = None
    same_context = True
    parts: list[Any] = []
    for value in args:
        kind = value.__class__
        if kind is NDArray:
            arrays.append(value)
            parts.append(value.dims)
            parts.append(value.np_dtype)
            chunk = value.chunk
            reads.append(chunk.var)
            if chunk.context is not context:
                same_context = context is None or (same_context and context == chunk.context)
                context = chunk.context
        elif kind in _PLAIN:
            parts += (kind, value)
        elif kind in _BY_TEXT:
            parts += (kind, repr(value))
        else:
            return call_settled(name, args, kwargs)
    if kwargs:
        parts.append(_NAMED)
        for key, value in kwargs.items():
            kind = value.__class__
            if kind in _PLAIN:
                parts += (key, kind, value)
            elif kind is NDArray:
                parts += (key, value.dims, value.np_dtype)
                chunk = value.chunk
                if chunk.context is not context:
                    same_context = context is None or (same_context and context == chunk.context)
                    context = chunk.context
                if key == "out":
                    target = value
                else:
                    arrays.append(value)
                    reads.append(chunk.var)
            elif kind in _BY_TEXT:
                parts += (key, kind, repr(value))
            else:
                return call_settled(name, args, kwargs)
    form = tuple(parts)
    cached = cache.get(form)
    if cached is None:
        return (
            call_settled(name, args, kwargs) if form in cache else _first_call(cache, form, name, args, kwargs, arrays)
        )
    if not same_context or context is None or context.device_type != "cpu":
        return call_settled(name, args, kwargs)
    if cached.order is not None:
        arrays = [arrays[i] for i in cached.order]
    if not cached.is_complete:
        cached.complete(arrays)
    if target is not None:
        if all(may_share(cached.plan, i, 0, array, target) for i, array in enumerate(arrays)):
            push_into(cached.op, cached.plan, arrays, target, context, cached.small)
            return target
        return call_settled(name, args, kwargs)
    if cached.small is not None:
        result = run_inline(cached.small, arrays, NDArray, context, reads)
        if result is not None:
            return result
    nbytes, shape, dtype = cached.plan.outputs[0]
    chunk = ARRAY_CHUNK.get()(context, nbytes, delay_alloc=True, name=cached.op.name, prompt=False)
    out = NDArray(chunk, shape, dtype)
    push_call(cached.op, cached.plan, arrays, out, context)
    return out


def _first_call(
    cache: Calls, form: tuple[object, ...], name: str, args: Sequence[object], kwargs: Mapping[str, object],
    arrays: Sequence[NDArray],
) -> NDArray | list[NDArray]:  # fmt: skip
    """Make a call that is not cached, and cache it."""
    op = registry.get(name)
    inputs, params, out, ctx, is_train = understood(op, args, kwargs)
    results = invoke(op, inputs, params, out, ctx=ctx, is_train=is_train)
    repeated = None
    order = _order(inputs, arrays, any(value.__class__ is NDArray for value in kwargs.values()))
    targets = () if out is None else (out,)
    usual = arrays and order is not None and not is_train and ctx is None and (out is None or out.__class__ is NDArray)
    usual = usual and (out is not None or not op.aux)
    if usual and not op.random and not op.single and arrays[0].context.device_type == "cpu":
        plan = settled(op, inputs, params, targets)
        if len(plan.outputs) == 1:
            repeated = Repeated(op, plan, None if order == tuple(range(len(inputs))) else order)
    if len(cache) >= _MAX_CACHED:
        cache.clear()
    cache[form] = repeated
    return results[0] if len(results) == 1 else results


def _order(inputs: Sequence[NDArray], arrays: Sequence[NDArray], named: bool) -> tuple[int, ...] | None:
    """Return the positions of the operator's inputs among the arrays of a call, some of them ``named``.

    Return None if they are ambiguous, since the same array may be passed for several inputs.
    """
    positions = {id(array): i for i, array in enumerate(arrays)}
    if len(inputs) != len(arrays) or (named and len(positions) != len(arrays)):
        return None
    if all(operand is other for operand, other in zip(inputs, arrays, strict=True)):
        return tuple(range(len(inputs)))
    if not named or any(id(array) not in positions for array in inputs):
        return None
    return tuple(positions[id(array)] for array in inputs)


_methods: dict[str, Calls] = {}
"""Cached calls of operators as array methods, by operator."""


def _call_method(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> NDArray | list[NDArray]:
    return call(_methods.setdefault(name, {}), name, args, kwargs)


slots.ARRAY_OPERATOR.fill(_call_method)
