"""Pushing of kernels with their arrays to the engine.

The memory of the arrays is looked up when the operation runs, because the chunk of a result allocates it only then.
This module keeps no state; any thread that may push may call it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from weftplan import device, engine
from weftplan.device.context import Context
from weftplan.engine import FnProperty
from weftplan.errors import OutOfMemoryError
from weftplan.ndarray.memory import joint_allocation
from weftplan.ndarray.memory.release import dead, sweep
from weftplan.support.slots import MAKE_ROOM


class Value:
    """Something that a kernel gets as it is, among arrays: a number, an array of NumPy."""

    __slots__ = ("ready",)

    def __init__(self, value: Any) -> None:
        self.ready = value

    def raw(self) -> Any:
        """The value."""
        return self.ready


def work(ctx: Context, kernel: Callable[..., object], operands: list[Any]) -> Callable[[], object]:
    """The function of an operation on ``ctx``: ``kernel`` of the raw arrays of ``operands``; it empties the list if it
    fails. Each operand has a method ``raw`` and an attribute ``ready``: what ``raw`` gives, or None."""
    if ctx.device_type != "cpu":
        place = device.get(ctx)
        if place.asynchronous:
            kernel = partial(_launch, place, kernel)
    return computing(kernel, operands)


def computing(kernel: Callable[..., object], operands: list[Any]) -> Callable[[], object]:
    """The function of an operation: ``kernel`` of the raw arrays of ``operands``, of which it has all or none while
    arrays may wait elsewhere."""
    if MAKE_ROOM.value is None:
        return partial(compute, kernel, operands)
    return partial(compute, partial(_together, kernel), [Value(operands)])


def compute(kernel: Callable[..., object], operands: list[Any]) -> None:
    """``kernel`` of the raw arrays of ``operands``; empties the list when it fails."""
    # The error is kept by the var, and by its frames keeps what they have: without the arrays, or each would keep
    # itself, its memory and that of the others.
    try:
        kernel(*[operand.raw() if (ready := operand.ready) is None else ready for operand in operands])
    except OutOfMemoryError as error:
        operands.clear()
        raise error.with_traceback(None)  # noqa: B904
    except BaseException:
        operands.clear()
        raise


def _together(kernel: Callable[..., object], operands: list[Any]) -> None:
    """``kernel`` of the raw arrays of all ``operands``, or of none while others go first; empties the list when it
    fails, as :func:`compute` does with its own."""
    try:
        joint_allocation.run(partial(_raws, operands), partial(_call, kernel))
    except BaseException:
        operands.clear()
        raise


def holding(arrays: Sequence[Any], fn: Callable[..., object]) -> Callable[..., object]:
    """``fn`` for an operation that looks up the raw arrays of ``arrays`` itself: while arrays may wait elsewhere it is
    called when all of them are in memory, and they stay there until it returns."""
    return fn if MAKE_ROOM.value is None else partial(_holding, list(arrays), fn)


def _holding(arrays: list[Any], fn: Callable[..., object], *args: Any, **kwargs: Any) -> Any:
    result = None

    def use(raws: list[Any]) -> None:
        nonlocal result
        del raws
        result = fn(*args, **kwargs)

    joint_allocation.run(partial(_raws, arrays), use)
    return result


def _raws(operands: list[Any]) -> list[Any]:
    return [operand.raw() if (ready := operand.ready) is None else ready for operand in operands]


def _call(kernel: Callable[..., object], raws: list[Any]) -> None:
    kernel(*raws)


def _launch(place: Any, kernel: Callable[..., object], *raws: Any) -> None:
    """Enqueue the kernel on a device whose memory has been taken on the host's time."""
    place.launch(partial(kernel, *raws))


class _Inheriting:
    """The function of an operation that reads old values, or overwrites them in part, of vars that hold a failure."""

    __slots__ = ("fn", "inherits")

    def __init__(self, fn: Callable[..., object], inherits: Sequence[Any]) -> None:
        self.fn = fn
        self.inherits = inherits

    def __call__(self) -> object:
        return self.fn()


def keep_failures(fn: Callable[..., object], variables: Sequence[Any]) -> Callable[..., object]:
    """``fn`` for an operation that writes ``variables`` without overwriting all of them: it heals none."""
    failed = [var for var in variables if var.failure is not None]
    return _Inheriting(fn, failed) if failed else fn


def push_kernel(
    kernel: Callable[..., object],
    operands: list[Any],
    reads: Sequence[Any],
    writes: Sequence[Any],
    ctx: Context,
    *,
    prop: FnProperty = FnProperty.NORMAL,
    priority: int = 0,
    name: str | None = None,
) -> None:
    """Push :func:`work`, with duplicates among the vars settled.

    Args:
        reads, writes: vars; one in both counts as written.
    """
    if engine.get().has_failed:
        reads = (*reads, *(array.var for array in operands if _is_part(array) and array.var in writes))
    if (room := MAKE_ROOM.value) is not None:
        reads = (*reads, *room(ctx, operands))
    _push(work(ctx, kernel, operands), reads, writes, ctx, prop, priority, name)


def _is_part(operand: Any) -> bool:
    """True for an array that is a part of its chunk, which one var orders as a whole."""
    chunk = getattr(operand, "chunk", None)
    return chunk is not None and operand.size * operand.dtype.itemsize < chunk.nbytes


def push(
    fn: Callable[[], object],
    reads: Sequence[Any],
    writes: Sequence[Any],
    ctx: Context,
    *,
    prop: FnProperty = FnProperty.NORMAL,
    priority: int = 0,
    name: str | None = None,
) -> None:
    """Push ``fn``, which touches memory that is there already, launched on the device of ``ctx``; as
    :func:`push_kernel`."""
    place = device.get(ctx)
    if place.asynchronous:
        fn = partial(place.launch, fn)
    _push(fn, reads, writes, ctx, prop, priority, name)


def _push(
    fn: Callable[[], object],
    reads: Sequence[Any],
    writes: Sequence[Any],
    ctx: Context,
    prop: FnProperty,
    priority: int,
    name: str | None,
) -> None:
    if dead:
        sweep()
    if len(reads) + len(writes) > 1:
        if engine.get().has_failed:
            fn = keep_failures(fn, [var for var in writes if var in reads])
        reads, writes = engine.dedupe(reads, writes)
    engine.get().push(fn, reads, writes, ctx, prop=prop, priority=priority, name=name)
