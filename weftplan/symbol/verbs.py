"""Symbol verbs that higher layers provide: bind, plan, evaluate.

``verbs.pyi`` next to this file declares their types for type checkers and editors, with names of higher layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weftplan.ops.core.schema import Shape
from weftplan.support import slots
from weftplan.support.progress import watching


class Verbs:
    """Methods of a symbol that higher layers provide."""

    __slots__ = ()

    def bind(
        self, ctx: Any, args: Any, args_grad: Any = None, grad_req: Any = "write", *more: Any, **kwargs: Any
    ) -> Any:
        """Bind to the caller's arrays: see :func:`weftplan.executor.bind`; ``more`` follows in its order.

        Args:
            ctx: the device.
            args: arrays of all arguments, as a list in the order of ``list_arguments()`` or by name.
            args_grad: arrays that take the gradients, in the same forms; None: no gradients.
            grad_req: ``write``, ``add`` or ``null``, for all arguments, as a list or by name.
            *more: ``aux_states``, ``group2ctx`` and ``shared_exec``, in this order.
            **kwargs: the same by name, and the other arguments of :func:`weftplan.executor.bind`.
        """
        return slots.BIND.get()(self, ctx, args, args_grad, grad_req, *more, **kwargs)

    def simple_bind(self, ctx: Any, grad_req: Any = "write", *more: Any, **kwargs: Any) -> Any:
        """Bind to newly allocated arrays: see :func:`weftplan.executor.simple_bind`; ``more`` as for bind.

        Args:
            ctx: the device.
            grad_req: ``write``, ``add`` or ``null``, for all arguments, as a list or by name.
            *more: ``type_dict``, ``stype_dict`` and ``group2ctx``, in this order.
            **kwargs: shapes of inputs by name, and the other arguments of
                :func:`weftplan.executor.simple_bind`.
        """
        return slots.SIMPLE_BIND.get()(self, ctx, grad_req, *more, **kwargs)

    def eval(self, ctx: Any = None, **kwargs: Any) -> Any:
        """Bind to arrays given by name, run forward once, and return the outputs."""
        from weftplan.device.context import current_context

        return self.bind(ctx or current_context(), kwargs, grad_req="null").forward()

    def plan(self, shapes: Mapping[str, Shape] | None = None, **kwargs: object) -> Any:
        """Plan the memory for these shapes without allocating any: see :mod:`weftplan.planner`."""
        with watching("planning within the budget", long=kwargs.get("budget") is not None):
            return slots.PLAN_SYMBOL.get()(self, shapes or {}, **kwargs)

    def _repr_svg_(self) -> str:
        """Return a picture of the graph, which notebooks show."""
        svg: str = slots.DRAW_SYMBOL.get()(self)._repr_svg_()
        return svg
