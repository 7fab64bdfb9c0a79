"""Inline execution of small operations on the calling thread, without a queue.

Handing an operation to a worker takes longer than work on a few hundred numbers. Where nobody writes what such work
reads, and nobody has what it writes yet, no order can be seen: the caller does it, without telling anybody, and then
asks inside the region whether that was so all the time. If it was, the engine counts an operation that was pushed and
completed at that moment. Otherwise nothing has happened, and the caller pushes the work as any other.

What others have (:func:`write_at_once`) is written inside the region, where nobody can begin to use it.

What only starts something, and is ended by somebody else later, begins in the same way (:func:`begin`): it is pending
then, as if it had been pushed and had found a worker at once. Nothing else is ever pending here. A signal handler or a
destructor that comes in between may push and wait as anywhere else, Ctrl-C leaves nothing half done, and an error is
only found: the operation that is pushed then raises it again, on a worker, and it is kept on the vars as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

from weftplan.engine.failure import Failure
from weftplan.engine.operation import DetailedBlock, FnProperty, searchable
from weftplan.engine.sites import push_site

if TYPE_CHECKING:
    from weftplan.engine.types import Threads
    from weftplan.engine.var import Var


T = TypeVar("T")


def at_once(engine: Threads, reads: Sequence[Var], work: Callable[..., T], *args: object) -> T | None:
    """Call ``work(*args)`` now, if it reads nothing but what ``reads`` order and writes nothing that anybody else has.

    It may be called again by whoever pushes it afterwards, and may find nonsense where another thread begins to write.

    Returns:
        What the work returns, which is not None: it has run, as an operation that was pushed by this call. None: it is
        still to be pushed.
    """
    if engine._unusual or (engine._careful and (engine._any_failure or engine._debug or engine._shutdown)):
        return None
    region = engine._region
    requests, token = region.requests, region.token
    if requests or region.gate is not None:
        return None
    versions = 0
    for var in reads:
        if var.write is not None or var.engine is not engine or var.events is not None:
            return None
        versions += var.version
    try:
        result = work(*args)
    except Exception:
        return None
    done = None
    try:
        try:
            del token[0]
        except KeyError:  # another thread is inside
            return None
        try:
            # What this thread has pushed is admitted when there is no request; versions grow only.
            if not requests and not engine._any_failure:
                for var in reads:
                    if var.write is not None:
                        break
                    versions -= var.version
                else:
                    if not versions:
                        region.seq += 1
                        region.completed += 1
                        done = result
        finally:
            token[0] = 1
    finally:
        if requests:  # they came while nobody else could get in
            region.apply(engine)
    return done


def write_at_once(engine: Threads, work: Callable[[], object], reads: Sequence[Var], writes: Sequence[Var]) -> bool:
    """Call ``work()`` now, if all that it reads and writes is idle; see :meth:`Region.write_alone`.

    An error is only found, and what was written then is written again by the operation that the caller pushes. Ctrl-C
    pushes one here, so nothing stays half written: ``work`` may run twice, and has the same result then.

    Returns:
        True: it has run, as an operation that was pushed by this call. False: it is still to be pushed.
    """
    if engine._unusual or (engine._careful and (engine._any_failure or engine._debug or engine._shutdown)):
        return False
    try:
        return engine._region.write_alone(engine, work, reads, writes)
    except Exception:
        return False
    except BaseException:
        engine.push(work, tuple(reads), tuple(writes), name="written again after an interrupt")
        raise


def begin(
    engine: Threads, fn: Callable[..., object], reads: Sequence[Var], writes: Collection[Var], name: str, inner: int = 0
) -> Callable[..., None] | None:
    """Begin an asynchronous operation of the package on this thread, if all its vars, none of which comes twice, are
    idle: as if ``push_async(fn, …)`` had been called with ``FnProperty.NO_SKIP`` and had found a worker at once.

    ``fn`` is not called: the caller, who holds Ctrl-C back until the operation is in good hands, does what it does.

    Args:
        inner: so many callers, at least, are functions of the package: whoever looks for the line of the push passes
            them over.

    Returns:
        What ends the operation: ``on_complete(error=None)``, to be called once, with Ctrl-C held back, by whatever
        thread. None: nothing is done, and it is to be pushed.
    """
    if engine._unusual or (engine._careful and (engine._any_failure or engine._debug or engine._shutdown)):
        return None
    region = engine._region
    op = DetailedBlock(fn, reads, searchable(writes), name, push_site(2 + inner), None, FnProperty.NO_SKIP)
    op.asynchronous = True
    if not region.begin(engine, op):
        return None

    def on_complete(error: BaseException | None = None) -> None:
        if error is not None or not region.end(engine, op):
            engine._complete(op, None if error is None else Failure.of(op, error))

    return on_complete
