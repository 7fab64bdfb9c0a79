"""The dependency engine: runs functions in an order that their reads and writes of vars allow.

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

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from weftplan.engine import task_verbs
from weftplan.engine.core import Engine, Tracer
from weftplan.engine.factory import create, debug_enabled, get, nested, set_engine, set_tracer, user_code, using
from weftplan.engine.inspection import QueueStatistics, Statistics
from weftplan.engine.operation import FnProperty, Operator, OprBlock, dedupe
from weftplan.engine.simulator import Simulator
from weftplan.engine.var import Var

if TYPE_CHECKING:
    from weftplan.engine.task_verbs import Task, as_completed, future, map, submit, task, tiles, var_of, wait

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
    "user_code",
    "using",
    "var_of",
    "wait",
]


def __getattr__(name: str) -> object:
    if name not in task_verbs.NAMES:
        raise AttributeError(f"module 'weftplan.engine' has no attribute {name!r}")
    value = globals()[name] = task_verbs.verb(name)
    return value


def __dir__() -> list[str]:
    return __all__


def set_bulk_size(size: int) -> int:
    """Set the calling thread's bulk size on the process-wide engine and return the old one."""
    return get().set_bulk_size(size)


def bulk(size: int) -> AbstractContextManager[None]:
    """Collect up to ``size`` plain pushes of this thread into one operation: ``with engine.bulk(15):``."""
    return get().bulk(size)
