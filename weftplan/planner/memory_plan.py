"""A memory plan with what one asks of it: frozen data, which any thread may read.

The figures and arrays are those of ``layout.py``. Words, tables and pictures are made elsewhere and asked for here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weftplan.errors import PlanError
from weftplan.planner import plan_file
from weftplan.planner.amounts import amount, bytes_of
from weftplan.planner.batch import largest_fitting
from weftplan.planner.buffer_table import Alive, Bar
from weftplan.planner.hooks import hook
from weftplan.planner.layout import Layout


@dataclass(frozen=True, eq=False, kw_only=True)
class MemoryPlan(Layout):
    """Who lives where, when, in words, tables and pictures; the figures and arrays are those of :class:`.Layout`."""

    again: Callable[..., MemoryPlan] | None = field(default=None, repr=False)
    """Plans the same question once more with another ``batch`` or ``budget``; None for a plan read from a file."""

    def __repr__(self) -> str:
        return (
            f"<MemoryPlan {amount(self.total)} in all, {amount(self.peak)} planned, "
            f"{len(self.labels.steps)} steps, strategy {self.strategy}>"
        )

    def __str__(self) -> str:
        return self.summary()

    def batch_max(self, budget: int | str, *, recompute: bool = False) -> int:
        """The largest batch with which the same question fits a budget.

        Args:
            budget: as for :func:`weftplan.planner.plan`.
            recompute: let the planner compute forward results again for it, as a budget does. Each batch size that is
                tried then takes seconds for deep networks.

        Raises:
            BudgetError: not even one sample fits; its ``smallest`` is what one sample needs.
            PlanError: the plan was read from a file or taken from an executor.

        >>> from weftplan import models
        >>> models.get("mlp").plan(data=(32, 784)).batch_max("4 MB")
        700
        """
        if self.again is None:
            raise PlanError("batch_max needs a plan that symbol.plan(...) has just made; this one has no network")
        return largest_fitting(self.again, bytes_of(budget, self.contexts[0]), recompute=recompute)[0]

    @property
    def left_out(self) -> str:
        """What none of the figures contains, in words."""
        return str(hook("left_out")(self))

    def timeline(self, device: int | None = None) -> NDArray[np.int64]:
        """Bytes alive at each step, on one device (an index of :attr:`contexts`) or in all."""
        found: NDArray[np.int64] = hook("timeline")(self, device)
        return found

    def alive_at_peak(self, limit: int | None = None) -> list[Alive]:
        """The buffers that are alive when most bytes are, the largest first."""
        found: list[Alive] = hook("alive_at_peak")(self, limit)
        return found

    def bars(self, device: int | None = None) -> list[Bar]:
        """The buffers on a device (an index of :attr:`contexts`) or on all, as rectangles of time and address."""
        found: list[Bar] = hook("bars")(self, device)
        return found

    def summary(self, limit: int = 10) -> str:
        """The plan as text, with the ``limit`` largest buffers at the peak."""
        return str(hook("summary")(self, limit))

    def compare(self, other: MemoryPlan) -> str:
        """A table of this plan beside another."""
        return str(hook("compare")(self, other))

    def to_html(self, *, title: str = "memory plan") -> str:
        """One self-contained page: bars over time, the peak, and a table of all buffers to sort and filter."""
        return str(hook("html")(self, title=title))

    def plot(self, path: str | PathLike[str] | None = None, *, title: str = "memory plan") -> Any:
        """Draw the buffers over time with matplotlib.

        Args:
            path: where to save the picture (its ending says the format: svg, png, pdf); None: nowhere.
            title: above the picture.

        Returns:
            The ``matplotlib.figure.Figure``.

        Raises:
            MXNetError: matplotlib is not installed.
        """
        return hook("plot")(self, path, title=title)

    def _repr_html_(self) -> str:
        """The page of :meth:`to_html` in a frame, for notebooks."""
        page = escape(self.to_html(title=repr(self)[1:-1]), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 860px; border: 0" title="memory plan"></iframe>'

    def to_json(self) -> str:
        """The plan as JSON text, which :meth:`from_json` reads back."""
        return plan_file.dumps(self)

    @staticmethod
    def from_json(text: str) -> MemoryPlan:
        """A plan from JSON text. Only its form is checked here; ``planner.validate`` judges what it says.

        Raises:
            FormatError: not a plan, truncated, or written by a newer version.
        """
        return plan_file.loads(text, MemoryPlan)
