"""A process of a job: runs a script or a module as ``python`` does, and records its exit.

Exit functions cannot see the status, and one of them notifies the other processes of a store that this process leaves.
So this module notes the result first (:mod:`weftplan.support.program_end`), and writes it into the job's record, which
``weftplan launch`` reads. The process exits if its parent, mpiexec, has exited for any reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import TypeAlias

from weftplan.cli.launch import record
from weftplan.support import program_end

_LOOK_S = 1.0
"""Seconds between two polls of the parent, on systems that do not notify of its exit."""

_PR_SET_PDEATHSIG = 1

TELL_HOST = "_WEFTPLAN_TELL_HOST"
"""Environment variable of jobs with a file of hosts; each host's first process then says how many run there."""


def main(arguments: list[str]) -> None:
    """Run ``RECORD MODE PROGRAM...``.

    RECORD is the file of the job's record, or ``-``. In the MODE ``recovers`` other processes may continue after a
    failure; in ``restarts`` mpiexec ends them. PROGRAM is a script or ``-m MODULE``, and its arguments.
    """
    file, mode, *program = arguments
    end_with_parent()
    if os.environ.get(TELL_HOST) and os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") == "0":
        local_size, size = (os.environ[f"OMPI_COMM_WORLD_{name}"] for name in ("LOCAL_SIZE", "SIZE"))
        sys.stderr.write(f"weftplan launch: {local_size} of {size} ranks on {socket.gethostname()}\n")
    if file != "-" and mode == "recovers":
        program_end.status_is_told.append(True)
    if file != "-":
        program_end.when_lost.append(lambda: record.note_loss(file))
    sys.excepthook = _without_this_module(sys.excepthook)
    error: BaseException | None = None
    try:
        if program[0] == "-m":
            sys.argv[:] = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            _run_script(program)
    except BaseException as raised:
        error = raised
        raise
    finally:
        end = program_end.End.of(error)
        program_end.note(end)
        if file != "-":
            with contextlib.suppress(OSError):
                record.write(file, end)


def _run_script(program: list[str]) -> None:
    path = program[0]
    sys.argv[:] = program
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    sys.modules["__main__"] = module
    with io.open_code(os.path.abspath(path)) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


ExceptHook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]
"""A function such as ``sys.excepthook``."""


def _without_this_module(show: ExceptHook) -> ExceptHook:
    """Return an excepthook that shows only the program's own frames, as if ``python`` had started it."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        files = {__file__, runpy.__file__, f"<frozen {runpy.__name__}>"}
        while trace is not None and trace.tb_frame.f_code.co_filename in files:
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    return hook


def end_with_parent() -> None:
    """Make this process exit when its parent exits for any reason."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0:
            if os.getppid() != parent:  # the parent has exited meanwhile
                os._exit(1)
            return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, name="weftplan-parent", daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])
