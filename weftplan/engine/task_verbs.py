"""Task functions of ``weftplan.engine``; ``task_verbs.pyi`` has their types.

Tasks are a layer above the engine and are imported on first use.
"""

from __future__ import annotations

from weftplan.support.lazy_import import late_import

NAMES = ("Task", "as_completed", "future", "map", "submit", "task", "tiles", "var_of", "wait")


def verb(name: str) -> object:
    """Return a class or function of ``weftplan.tasks``."""
    return getattr(late_import("weftplan.tasks"), name)
