"""``mx.profiler``: recording of operations, with their times, workers and live memory.

>>> import tempfile, os
>>> import weftplan as mx
>>> path = os.path.join(tempfile.mkdtemp(), "trace.json")
>>> mx.profiler.set_config(filename=path)
>>> mx.profiler.set_state("run")
>>> (mx.nd.ones((2, 2)) + 1).wait_to_read()
>>> mx.profiler.set_state("stop")
>>> mx.profiler.dump()
>>> os.path.exists(path)
True

Open the file at https://ui.perfetto.dev or in chrome://tracing. Off, the profiler costs the engine one branch.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import Any

from weftplan import config, engine
from weftplan.errors import ParameterError, did_you_mean
from weftplan.profiler import aggregate
from weftplan.profiler.objects import Counter, Domain, Event, Frame, Marker, Task
from weftplan.profiler.recorder import recorder
from weftplan.profiler.trace_file import write_trace
from weftplan.support import slots
from weftplan.support.package_log import log

__all__ = [
    "Counter",
    "Domain",
    "Event",
    "Frame",
    "Marker",
    "Task",
    "dump",
    "dump_profile",
    "dumps",
    "pause",
    "profiler_set_config",
    "profiler_set_state",
    "resume",
    "set_config",
    "set_state",
    "state",
    "to_html",
]

_MEMORY = 8
"""Bit of ``MXNET_PROFILER_MODE`` for samples of live bytes."""
_SETTINGS = {
    "filename": "profile.json",
    "profile_all": False,
    "profile_symbolic": True,
    "profile_imperative": True,
    "profile_memory": bool(config.process("MXNET_PROFILER_MODE") & _MEMORY),
    "profile_api": False,
    "profile_process": "worker",
    "aggregate_stats": False,
    "continuous_dump": False,
    "dump_period": 1.0,
}
_config: dict[str, Any] = dict(_SETTINGS)


class _Recording:
    """The state of the recording."""

    def __init__(self) -> None:
        self.state = "stop"
        self.named_by = 0
        """Identifier of the process that named the file; this process writes it at exit unless it has been dumped."""
        self.dumped = True


_recording = _Recording()


def set_config(**kwargs: object) -> None:
    """Configure the recording and its output, with MXNet's keys.

    Args:
        filename: path of the trace, written by :func:`dump`. A path set here is also written at process exit
            if there are records that have not been dumped.
        profile_memory, profile_all: sample live bytes (``profile_all`` enables everything); the default of
            ``profile_memory`` is bit 8 of ``MXNET_PROFILER_MODE``.
        aggregate_stats: accepted for :func:`dumps`, which works regardless.
        profile_symbolic, profile_imperative, profile_api, continuous_dump, dump_period, profile_process: accepted;
            every engine operation is recorded in any case, and :func:`dump` writes the file.

    Raises:
        ParameterError: an unknown key, or a file name that is no path.
    """
    unknown = [key for key in kwargs if key not in _SETTINGS]
    if unknown:
        hint = did_you_mean(unknown[0], _SETTINGS)
        raise ParameterError(f"profiler.set_config: unknown {unknown}; {hint}known: {', '.join(_SETTINGS)}")
    name = kwargs.get("filename", _config["filename"])
    if not isinstance(name, (str, os.PathLike)) or not os.fspath(name):
        raise ParameterError(f"profiler.set_config: filename must be the path of a file, got {name!r}")
    _config.update(kwargs)
    if "filename" in kwargs:
        _recording.named_by = os.getpid()


def profiler_set_config(mode: str = "symbolic", filename: str = "profile.json") -> None:
    """Call :func:`set_config` under its old name; every operation is recorded in any mode."""
    set_config(filename=filename, **{f"profile_{mode}": True})


def state() -> str:
    """Return ``run``, ``pause`` or ``stop``."""
    return _recording.state


def set_state(state: str = "stop", profile_process: str = "worker") -> None:
    """Change the state: ``run`` starts a new recording, ``stop`` ends it after all pending operations.

    The recording covers the engine that is process-wide at the time of the call.

    Raises:
        ParameterError: another word.
        BaseException: on ``stop``, the failure of an operation that no thread has waited for.
    """
    if state not in ("run", "stop"):
        raise ParameterError(f"profiler state must be 'run' or 'stop', got {state!r}")
    if state == "run" and _recording.state == "stop":
        recorder.clear()
    if state == "run":
        recorder.start(memory=bool(_config["profile_memory"] or _config["profile_all"]))
        _recording.dumped = False
    else:
        try:
            if _recording.state != "stop":
                engine.get().wait_for_all()
        finally:  # a failed operation raises here, after the end of the recording
            recorder.stop()
            _recording.state = "stop"
    _recording.state = state


profiler_set_state = set_state


def pause(profile_process: str = "worker") -> None:
    """Pause the recording; :func:`resume` continues it."""
    if _recording.state == "run":
        recorder.stop()
        _recording.state = "pause"


def resume(profile_process: str = "worker") -> None:
    """Continue after :func:`pause`."""
    if _recording.state == "pause":
        recorder.start(memory=bool(_config["profile_memory"] or _config["profile_all"]))
        _recording.state = "run"


def dump(finished: bool = True, profile_process: str = "worker") -> None:
    """Write the trace to the configured file; ``finished`` also stops the profiler."""
    if finished and _recording.state != "stop":
        set_state("stop")
    write_trace(recorder, Path(os.fspath(_config["filename"])))
    _recording.dumped = True


def dump_profile() -> None:
    """Call :func:`dump` under its old name."""
    dump()


def start_at_import() -> None:
    """Start a recording that is written at exit, for ``MXNET_PROFILER_AUTOSTART``."""
    set_config(filename=_config["filename"])
    set_state("run")


@atexit.register
def _dump_at_exit() -> None:
    """Write an undumped recording at exit: MXNet's own examples end with ``set_state("stop")``."""
    if _recording.named_by == os.getpid() and not _recording.dumped:
        recorder.stop()  # without a wait: the engine may have shut down
        try:
            dump(finished=False)
        except OSError as error:
            log.warning("the profile was not written: %s", error)


def dumps(reset: bool = False, format: str = "table", sort_by: str = "total", ascending: bool = False) -> str:
    """Return the aggregate table as text (``table``) or JSON (``json``).

    Args:
        reset: clear the recording afterwards.
        sort_by: total, avg, min, max or count.

    Raises:
        ParameterError: an unknown format or sort key.
    """
    if format not in ("table", "json"):
        raise ParameterError(f"profiler.dumps: format must be 'table' or 'json', got {format!r}")
    table = aggregate.rows(recorder, sort_by=sort_by, ascending=ascending)
    text = aggregate.as_text(table) if format == "table" else aggregate.as_json(table)
    if reset:
        recorder.clear()
    return text


def to_html(*, title: str = "what ran when") -> str:
    """Return the recording as an HTML page: one lane per worker, live bytes, and operations by time.

    The page needs no network and no other viewer. A running profiler keeps recording.
    """
    return slots.PROFILER_PAGE.get()(recorder, title=title)


def __dir__() -> list[str]:
    return sorted(__all__)
