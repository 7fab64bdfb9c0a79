"""Pushing of kernels with their arrays to the engine.

The memory of the arrays is looked up when the operation runs, because the chunk of a result allocates it only then.
This module keeps no state; any thread that may push may call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, final

from weftplan import device, engine
from weftplan.device.base import Device
from weftplan.device.context import Context
from weftplan.engine import FnProperty
from weftplan.engine.var import Var
from weftplan.errors import OutOfMemoryError
from weftplan.ndarray.memory import joint_allocation
from weftplan.ndarray.memory.release import dead, sweep
from weftplan.support.slots import MAKE_ROOM


class Operand(Protocol):
    """An argument of a kernel: a :class:`KernelValue`, or an array, whose memory is looked up when it runs."""

    @property
    def ready(self) -> object:
        """The result of :meth:`raw`, or None if it is still to be looked up."""
        ...

    def raw(self) -> object:
        """Return the object that the kernel gets."""
        ...


@final
class KernelValue:
    """An operand that a kernel gets unchanged, among arrays: a number or a NumPy array."""

    __slots__ = ("ready",)

    def __init__(self, value: object) -> None:
        self.ready: Any = value

    def raw(self) -> object:
        """Return the value."""
        return self.ready


def work(ctx: Context, kernel: Callable[..., object], operands: list[Operand]) -> Callable[[], object]:
    """Return an operation's function on ``ctx``, which calls ``kernel`` with the raw arrays of ``operands``.

    That function empties ``operands`` if it fails. Each operand has a method ``raw`` and an attribute ``ready``: the
    result of ``raw``, or None.
    """
    if ctx.device_type != "cpu":
        ctx_device = device.get(ctx)
        if ctx_device.asynchronous:
            kernel = partial(_launch, ctx_device, kernel)
    return computing(kernel, operands)


def computing(kernel: Callable[..., object], operands: list[Operand]) -> Callable[[], object]:
    """Return an operation's function, which calls ``kernel`` with the raw arrays of ``operands``.

    While arrays may be offloaded, it allocates their memory jointly.
    """
    if MAKE_ROOM.value is None:
        return partial(compute, kernel, operands)
    return partial(compute, partial(_call_jointly, kernel), [KernelValue(operands)])


def compute(kernel: Callable[..., object], operands: list[Operand]) -> None:
    """Call ``kernel`` with the raw arrays of ``operands``; empty the list if it fails."""
    # The var holds the error, whose traceback holds the frames. So drop the arrays from them, or each array would keep
    # itself and the other arrays alive.
    try:
        kernel(*[operand.raw() if (ready := operand.ready) is None else ready for operand in operands])
    except OutOfMemoryError as error:
        operands.clear()
        raise error.with_traceback(None)  # noqa: B904
    except BaseException:
        operands.clear()
        raise


def _call_jointly(kernel: Callable[..., object], operands: list[Operand]) -> None:
    """Call ``kernel`` with the raw arrays of ``operands``, allocated jointly; empty the list if it fails."""
    try:
        joint_allocation.run(partial(_raws, operands), partial(_call, kernel))
    except BaseException:
        operands.clear()
        raise


def holding(arrays: Sequence[Operand], fn: Callable[..., object]) -> Callable[..., object]:
    """Wrap ``fn`` for an operation that looks up the raw arrays of ``arrays`` itself.

    While arrays may be offloaded, ``fn`` is called with all of them in memory, and they stay there until it returns.
    """
    return fn if MAKE_ROOM.value is None else partial(_holding, list(arrays), fn)


def _holding(arrays: list[Operand], fn: Callable[..., object], *args: object, **kwargs: object) -> object:
    result = None

    def use(raws: list[object]) -> None:
        nonlocal result
        del raws
        result = fn(*args, **kwargs)

    joint_allocation.run(partial(_raws, arrays), use)
    return result


def _raws(operands: list[Operand]) -> list[object]:
    return [operand.raw() if (ready := operand.ready) is None else ready for operand in operands]


def _call(kernel: Callable[..., object], raws: list[object]) -> None:
    kernel(*raws)


def _launch(target_device: Device, kernel: Callable[..., object], *raws: object) -> None:
    """Enqueue the kernel on a device; the host has already allocated its memory."""
    target_device.launch(partial(kernel, *raws))


class _Inheriting:
    """The function of an operation that reads or partly overwrites vars that hold a failure, and inherits it."""

    __slots__ = ("fn", "inherits")

    def __init__(self, fn: Callable[..., object], inherits: Sequence[Var]) -> None:
        self.fn = fn
        self.inherits = inherits

    def __call__(self) -> object:
        return self.fn()


def keep_failures(fn: Callable[..., object], variables: Sequence[Var]) -> Callable[..., object]:
    """Wrap ``fn`` for an operation that overwrites ``variables`` only in part, so that it clears no failure."""
    failed = [var for var in variables if var.failure is not None]
    return _Inheriting(fn, failed) if failed else fn


def push_kernel(
    kernel: Callable[..., object],
    operands: list[Operand],
    reads: Sequence[Var],
    writes: Sequence[Var],
    ctx: Context,
    *,
    prop: FnProperty = FnProperty.NORMAL,
    priority: int = 0,
    name: str | None = None,
    enqueues: bool = False,
) -> None:
    """Push :func:`work` after removing duplicates among the vars.

    Args:
        reads, writes: vars; a var in both counts as written.
        enqueues: on a device with streams the kernel enqueues its work itself.
    """
    if engine.get().has_failed:
        reads = (*reads, *(var for var in _vars_of_parts(operands) if var in writes))
    if (make_room := MAKE_ROOM.value) is not None:
        reads = (*reads, *make_room(ctx, operands))
    fn = computing(kernel, operands) if enqueues else work(ctx, kernel, operands)
    _push(fn, reads, writes, ctx, prop, priority, name)


def _vars_of_parts(operands: Sequence[Any]) -> Iterator[Var]:
    """Yield the vars of arrays that are only a part of their chunk, whose single var orders all of it."""
    for operand in operands:
        chunk = getattr(operand, "chunk", None)
        if chunk is not None and operand.size * operand.np_dtype.itemsize < chunk.nbytes:
            yield chunk.var


def push(
    fn: Callable[[], object],
    reads: Sequence[Var],
    writes: Sequence[Var],
    ctx: Context,
    *,
    prop: FnProperty = FnProperty.NORMAL,
    priority: int = 0,
    name: str | None = None,
) -> None:
    """Push ``fn``, which uses only memory that is already allocated; on an asynchronous device, launch it there."""
    ctx_device = device.get(ctx)
    if ctx_device.asynchronous:
        fn = partial(ctx_device.launch, fn)
    _push(fn, reads, writes, ctx, prop, priority, name)


def _push(
    fn: Callable[[], object],
    reads: Sequence[Var],
    writes: Sequence[Var],
    ctx: Context,
    prop: FnProperty,
    priority: int,
    name: str | None,
) -> None:
    if dead.queue:
        sweep()
    if len(reads) + len(writes) > 1:
        if engine.get().has_failed:
            fn = keep_failures(fn, [var for var in writes if var in reads])
        reads, writes = engine.dedupe(reads, writes)
    engine.get().push(fn, reads, writes, ctx, prop=prop, priority=priority, name=name)
