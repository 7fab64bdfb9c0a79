"""Executors: ``bind``, ``forward`` and ``backward`` of planned graphs.

Importing this package registers ``bind`` and ``simple_bind`` with :mod:`weftplan.symbol`, which cannot import it.
"""

from weftplan.executor.binding import bind, simple_bind
from weftplan.executor.executor import Executor
from weftplan.support import slots

slots.BIND.fill(bind)
slots.SIMPLE_BIND.fill(simple_bind)

__all__ = ["Executor", "bind", "simple_bind"]


def __dir__() -> list[str]:
    return sorted(__all__)
