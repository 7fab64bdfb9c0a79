"""Inline execution of small operations on the calling thread, without a queue.

Passing an operation to a worker costs more than arithmetic on a few hundred elements. If the inputs have no pending
write and no other code has seen the outputs, the order is not observable. The caller then runs the work optimistically
and validates inside the region: if the inputs are unchanged, the engine counts one completed operation. Otherwise the
attempt has no effect, and the caller pushes the work.

* :func:`run_inline` is the optimistic path, for outputs that no other code has seen.
* :func:`write_inline` writes shared vars, inside the region, where no thread can start to use them.
* :func:`begin` starts an asynchronous operation, which another thread completes later. It is pending meanwhile, as if
  pushed.

Signal handlers and destructors that interrupt this code may push and wait as usual. Ctrl-C leaves nothing half done. An
error is discarded: the pushed operation raises it again on a worker and records it on its vars.
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


def run_inline(engine: Threads, reads: Sequence[Var], work: Callable[..., T], *args: object) -> T | None:
    """Call ``work(*args)`` now if its inputs are idle. It may write only memory that no other code has seen.

    The caller may have to repeat the work by pushing it. The work may read inconsistent data if another thread writes
    meanwhile.

    Returns:
        The result of the work, which is not None; None if the caller must push it.
    """
    if engine._detours or (engine._careful and (engine._any_failure or engine._debug or engine._shutdown)):
        return None
    region = engine._region
    requests, token = region.requests, region.token
    # A request may be a write of an input that this thread has pushed.
    if requests or region.gate is not None:
        return None
    versions = 0
    for var in reads:
        if var.write is not None or var.engine is not engine or var.events is not None:
            return None
        versions += var.version
    try:
        # Optimistic: inputs may change meanwhile. An error is discarded, because the pushed operation raises it again.
        result = work(*args)
    except Exception:
        return None
    accepted = None
    try:
        try:
            del token[0]
        except KeyError:  # another thread is inside
            return None
        try:
            # Without requests, all pushes of this thread are admitted. Versions only grow, so an equal sum means no
            # write.
            if not requests and not engine._any_failure:
                for var in reads:
                    if var.write is not None:
                        break
                    versions -= var.version
                else:
                    if not versions:
                        region.seq += 1
                        region.completed += 1
                        accepted = result
        finally:
            token[0] = 1
    finally:
        if requests:  # requests that arrived while this thread held the token
            region.apply(engine)
    return accepted


def write_inline(engine: Threads, work: Callable[[], object], reads: Sequence[Var], writes: Sequence[Var]) -> bool:
    """Call ``work()`` now if all its vars are idle; False: push it. See :meth:`Region.write_alone`.

    ``work`` may run twice with the same result: after an error the caller pushes it, after Ctrl-C this function.
    """
    if engine._detours or (engine._careful and (engine._any_failure or engine._debug or engine._shutdown)):
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
    """Start an asynchronous package operation on this thread if all its vars are idle and distinct.

    The effect equals ``push_async(fn, …)`` with ``FnProperty.NO_SKIP`` and an idle worker. ``fn`` is not called: the
    caller does its work, and holds Ctrl-C back until a thread is responsible for the completion.

    Args:
        inner: number of package frames above the caller, which the search for the push site skips.

    Returns:
        ``on_complete(error=None)``, to be called once from any thread, with Ctrl-C held back; None if the caller must
        push the operation.
    """
    if engine._detours or (engine._careful and (engine._any_failure or engine._debug or engine._shutdown)):
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
