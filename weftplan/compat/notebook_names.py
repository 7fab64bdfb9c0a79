"""``mx.notebook``: the name of the module with callbacks for notebooks."""

from weftplan.compat import notebook as callback

__all__ = ["callback"]
