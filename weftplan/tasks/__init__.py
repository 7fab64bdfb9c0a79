"""Tasks on plain arrays: functions that the engine orders by the arrays that they get.

They are offered as ``weftplan.engine.submit``, ``task``, ``wait``, ``future`` and ``var_of``, too. Any thread may call
them.
"""

from weftplan.tasks.arrays import var_of
from weftplan.tasks.schedule import future, submit, task, wait

__all__ = ["future", "submit", "task", "var_of", "wait"]
