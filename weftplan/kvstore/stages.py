"""Stages of an exchange, and the engine operation that runs some of them one after the other.

A stage reads and writes arrays of one device, or of all devices that links join. The sum of a bucket, its optimizer
step and the copies to the caller are three stages, and usually one operation. Small operations on arrays in host memory
run inline: waking a worker takes longer than they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import is_
from weakref import ref

from weftplan import device
from weftplan.device.context import HOST_MEMORY, Context
from weftplan.engine import FnProperty
from weftplan.engine import get as get_engine
from weftplan.engine.var import Var
from weftplan.errors import KVStoreError
from weftplan.ndarray import NDArray
from weftplan.ndarray.pushing import push_kernel
from weftplan.support.array_types import RawArray
from weftplan.support.slots import MAKE_ROOM

HOST = HOST_MEMORY
"""Device types whose memory every CPU thread can read and write."""

INLINE = 1 << 18
"""Bytes, read and written, of an operation that runs inline: some microseconds of work."""

SMALL = 1 << 18
"""Bytes written by an operation that needs no worker with priority: it is over before such a worker is awake."""

Work = Callable[[Sequence[RawArray]], object]


class Stage:
    """A step of an exchange.

    Args:
        name: of the operation that begins with it.
        run: called with the raw arrays of ``reads`` and ``writes``. On a device with streams it enqueues its work on
            the current stream, or on streams that the current one waits for.
        reads, writes: arrays.
        context: the device where it runs.
        repeatable: running it twice gives the same result.
        urgent: other devices wait for it; a worker with priority runs it, unless it is small.
    """

    __slots__ = ("context", "name", "nbytes", "operands", "read_vars", "repeatable", "run", "urgent", "write_vars")

    def __init__(
        self,
        name: str,
        run: Work,
        reads: Sequence[NDArray],
        writes: Sequence[NDArray],
        context: Context,
        *,
        repeatable: bool = True,
        urgent: bool = True,
    ) -> None:
        self.urgent = urgent
        self.name, self.run, self.context, self.repeatable = name, run, context, repeatable
        self.operands = [*reads, *writes]
        self.read_vars = dict.fromkeys([array.chunk.var for array in reads])
        self.write_vars = dict.fromkeys([array.chunk.var for array in writes])
        self.nbytes = sum([array.chunk.nbytes for array in writes])


class Joint:
    """Stages as one operation.

    Attributes:
        repeatable: running all of them twice gives the same result.
    """

    __slots__ = ("nbytes", "operands", "reads", "repeatable", "steps", "writes")

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.operands: list[NDArray] = []
        self.nbytes, self.repeatable = 0, True
        reads: dict[Var, None] = {}
        writes: dict[Var, None] = {}
        for stage in stages:
            self.operands += stage.operands
            self.nbytes += stage.nbytes
            reads |= stage.read_vars
            self.repeatable = self.repeatable and stage.repeatable and reads.keys().isdisjoint(stage.write_vars)
            writes |= stage.write_vars
        if not reads.keys().isdisjoint(writes):
            reads = {var: None for var in reads if var not in writes}
        self.steps = [(stage.run, len(stage.operands)) for stage in stages]
        self.reads, self.writes = tuple(reads), tuple(writes)

    def is_small(self) -> bool:
        """Return whether this is a few microseconds of work on the host that may run twice."""
        if not self.repeatable:
            return False
        size = 0
        for array in self.operands:
            raw = array.ready
            if raw is None or array.chunk.context.device_type not in HOST:
                return False
            size += raw.nbytes
            if size > INLINE:
                return False
        return True

    def run_inline(self, operands: Sequence[NDArray]) -> bool:
        """Run small stages on this thread if no operation uses their arrays; False: nothing is done.

        Args:
            operands: the arrays, in the order of :attr:`operands`.
        """
        if MAKE_ROOM.value is not None:
            return False
        return get_engine().write_inline(partial(_run_ready, self.steps, operands), self.reads, self.writes)


class Repeated:
    """A call whose stages have run inline. It runs them again with the same arrays, and keeps none of them alive."""

    __slots__ = ("_joint", "_own", "_places", "_refs", "small", "version")

    def __init__(self, stages: Sequence[Stage], arrays: Sequence[NDArray], version: int) -> None:
        places = {id(array): place for place, array in enumerate(arrays)}
        self._joint, self.version = Joint(stages), version
        self.small = self._joint.is_small()
        self._own = [None if id(array) in places else array for array in self._joint.operands]
        self._places = [places.get(id(array), 0) for array in self._joint.operands]
        self._joint.operands = []
        self._refs = [ref(array) for array in arrays]

    def run(self, arrays: object) -> bool:
        """Run the stages if these, of a user, are its arrays; False: nothing is done."""
        if arrays.__class__ is not list and arrays.__class__ is not tuple:
            arrays = (arrays,)
        current: Sequence[NDArray] = arrays
        if len(current) != len(self._refs):
            return False
        for one, array in zip(self._refs, current, strict=True):
            if one() is not array:
                return False
        operands = [current[place] if own is None else own for own, place in zip(self._own, self._places, strict=True)]
        return self._joint.run_inline(operands)


def on_device(context: Context, kernel: Work) -> Work:
    """Return the work of a stage that calls ``kernel`` on the device ``context``: as one launch, if it has streams."""
    if context.device_type in HOST:
        return kernel
    place = device.get(context)

    def launch(raws: Sequence[RawArray]) -> None:
        place.launch(partial(kernel, raws))

    return launch if place.asynchronous else kernel


def has_failed(arrays: Iterable[NDArray]) -> bool:
    """Return whether an array holds a failure, so that it must share an operation with no other key."""
    return get_engine().has_failed and any(array.var.failure is not None for array in arrays)


def launch(stages: Sequence[Stage], priority: int = 0, *, inline: int = 0) -> None:
    """Push the stages as one operation, or run them inline. While arrays may be offloaded, each is its own operation.

    Args:
        stages: run in this order; at least one.
        priority: of the operation.
        inline: bytes up to which the thread that finds the operation ready runs it, in no queue.
    """
    if len(stages) > 1 and MAKE_ROOM.value is not None:
        for stage in stages:
            launch([stage], priority, inline=inline)
        return
    joint = Joint(stages)
    where, host = stages[0].context, stages[0].context.device_type in HOST
    if host and not priority and joint.is_small() and joint.run_inline(joint.operands):
        return
    written = joint.nbytes
    if not host:
        prop = FnProperty.GPU_PRIORITIZED
    elif written <= inline:
        prop = FnProperty.ASYNC
    else:
        prop = FnProperty.CPU_PRIORITIZED if stages[0].urgent and (priority or written > SMALL) else FnProperty.NORMAL
    push_kernel(
        partial(_run, joint.steps),
        [*joint.operands],
        joint.reads,
        joint.writes,
        where,
        prop=prop,
        priority=priority,
        name=stages[0].name,
        enqueues=True,
    )


def copy(source: NDArray, target: NDArray, priority: int) -> None:
    """Push ``target[...] = source`` as an operation of its own; a copy onto itself is nothing."""
    if source.var is target.var:
        return
    if source.context.device_type not in HOST or target.context.device_type not in HOST:
        source.copyto(target, priority=priority)
        return

    def fill(source: RawArray, target: RawArray) -> None:
        target[...] = source

    variables = (source.var,), (target.var,)
    push_kernel(fill, [source, target], *variables, target.context, priority=priority, name="KVStoreCopy")


def copy_to_all(source: NDArray, targets: Sequence[NDArray], priority: int) -> None:
    """Copy to every target in an operation of its own: a target that has failed shares its fate with none."""
    for target in targets:
        copy(source, target, priority)


def _run_ready(steps: Sequence[tuple[Work, int]], operands: Sequence[NDArray]) -> None:
    # Only now can no thread move or free the bytes. Without bytes this is an error, and the operation is pushed.
    raws = [array.ready for array in operands]
    if any(map(is_, raws, repeat(None))):
        raise KVStoreError("an array has no bytes now")
    _run(steps, *raws)


def _run(steps: Sequence[tuple[Work, int]], *raws: RawArray) -> None:
    end = 0
    for run, count in steps:
        begin, end = end, end + count
        run(raws[begin:end])
