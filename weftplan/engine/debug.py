"""Watchdog of debug mode: a thread that reports a stalled engine.

It holds its engine weakly and ends with it. It stops nothing; it prints one report per standstill to stderr.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weftplan.engine.types import Core

_SHARE = 4
"""Checks per patience: the report comes between 1 and 1 + 1/_SHARE times the patience after the standstill began."""


def start_watchdog(engine: Core, patience_s: float) -> threading.Thread | None:
    """Start a watchdog for ``engine``. Return None if ``patience_s`` is 0."""
    if patience_s <= 0:
        return None
    collected = threading.Event()  # set when the engine dies, so that the thread ends at once
    reference = weakref.ref(engine, lambda _: collected.set())
    thread = threading.Thread(
        target=_watch, args=(reference, collected, patience_s), name="weftplan-engine-watchdog", daemon=True
    )
    thread.start()
    return thread


def _watch(reference: weakref.ref[Core], collected: threading.Event, patience_s: float) -> None:
    seen, quiet, reported = -1, 0, False
    while not collected.wait(patience_s / _SHARE):
        engine = reference()
        if engine is None:
            return
        finished = engine._region.completed - engine._region.waits  # without requests for reports
        if finished != seen or not engine._region.pending:
            seen, quiet, reported = finished, 0, False
        else:
            quiet += 1
            if quiet >= _SHARE and not reported:
                reported = True
                print(report(engine, patience_s), file=sys.stderr, flush=True)
        del engine  # do not keep it alive while this thread sleeps


def report(engine: Core, patience_s: float) -> str:
    """Return pending operations, the holders of their vars, and stack traces of threads that run operations."""
    lines = [f"weftplan watchdog: no operation has finished for {patience_s:g} s", engine.dump().rstrip()]
    frames = sys._current_frames()
    for number, ident in sorted(dict(engine._running_on).items()):
        frame = frames.get(ident)
        op = engine._region.in_flight.get(number)
        if op is None:
            continue
        if frame is None:
            lines.append(f"operation #{number} {op.label!r} was started by a thread that has ended")
            continue
        name = next((t.name for t in threading.enumerate() if t.ident == ident), str(ident))
        lines.append(f"operation #{number} {op.label!r} runs on thread {name!r}:")
        lines.append("".join(traceback.format_stack(frame)).rstrip())
    return "\n".join(lines)
