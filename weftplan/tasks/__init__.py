"""Tasks on plain arrays: functions that the engine orders by their array arguments.

They are also available as ``weftplan.engine.submit``, ``task``, ``wait``, …. Any thread may call them.
"""

from weftplan.tasks.arrays import tiles, var_of
from weftplan.tasks.handle import Task, as_completed
from weftplan.tasks.schedule import future, submit, task, wait
from weftplan.tasks.schedule import submit_each as map

__all__ = ["Task", "as_completed", "future", "map", "submit", "task", "tiles", "var_of", "wait"]
