"""bind, forward, backward: a planned graph on the engine.

Importing this package teaches symbols to bind: it fills the hook that :mod:`weftplan.symbol` keeps for that.
"""

from weftplan.executor.binding import bind, simple_bind
from weftplan.executor.executor import Executor
from weftplan.support import slots

slots.BIND.fill(bind)
slots.SIMPLE_BIND.fill(simple_bind)

__all__ = ["Executor", "bind", "simple_bind"]


def __dir__() -> list[str]:
    return sorted(__all__)
