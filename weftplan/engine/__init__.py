"""The dependency engine: functions run when what they read and write allows. Any thread may push, and may wait.

>>> from weftplan import engine
>>> e = engine.create("ThreadedEngine")
>>> a, b = e.new_variable("a"), e.new_variable("b")
>>> out = []
>>> e.push(lambda: out.append("write a"), [], [a])
>>> e.push(lambda: out.append("read a, write b"), [a], [b])
>>> e.wait_for_var(b)
>>> out
['write a', 'read a, write b']
>>> e.stop()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from weftplan.engine.core import Engine, Tracer
from weftplan.engine.factory import create, debug_enabled, get, nested, set_engine, set_tracer, using
from weftplan.engine.inspection import QueueStatistics, Statistics
from weftplan.engine.operation import FnProperty, Operator, OprBlock, dedupe
from weftplan.engine.simulator import Simulator
from weftplan.engine.var import Var
from weftplan.support.lazy_import import late_import

__all__ = [
    "Engine",
    "FnProperty",
    "Operator",
    "OprBlock",
    "QueueStatistics",
    "Simulator",
    "Statistics",
    "Task",
    "Tracer",
    "Var",
    "as_completed",
    "bulk",
    "create",
    "debug_enabled",
    "dedupe",
    "future",
    "get",
    "map",
    "nested",
    "set_bulk_size",
    "set_engine",
    "set_tracer",
    "submit",
    "task",
    "tiles",
    "using",
    "var_of",
    "wait",
]

Task: type
submit: Callable[..., Any]
map: Callable[..., Iterator[Any]]
as_completed: Callable[..., Iterator[Any]]
task: Callable[..., Callable[[Callable[..., Any]], Callable[..., Any]]]
tiles: Callable[..., Any]
wait: Callable[..., None]
future: Callable[[Any], Future[Any]]
var_of: Callable[..., Var]
_TASKS = ("Task", "as_completed", "future", "map", "submit", "task", "tiles", "var_of", "wait")
"""Of the layer above (``weftplan.tasks``), which is imported when one of them is first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _TASKS:
        raise AttributeError(f"module 'weftplan.engine' has no attribute {name!r}")
    value = globals()[name] = getattr(late_import("weftplan.tasks"), name)
    return value


def __dir__() -> list[str]:
    return __all__


def set_bulk_size(size: int) -> int:
    """Set the calling thread's bulk size on the process-wide engine; returns the old one."""
    return get().set_bulk_size(size)


def bulk(size: int) -> AbstractContextManager[None]:
    """``with engine.bulk(15):`` collects up to 15 plain pushes of this thread into one operation."""
    return get().bulk(size)
