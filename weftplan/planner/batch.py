"""Search for the largest batch that fits a budget, by linear interpolation between plans and by bisection, and division
of a larger batch into micro-batches.

The search assumes that bytes grow with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from weftplan.device.amounts import pasteable
from weftplan.errors import BudgetError, PlanError
from weftplan.support.tensor_types import Shape

Shapes = Mapping[str, Shape]

LARGEST = 1 << 24
"""Maximum batch of the search."""


def batch_size(shapes: Shapes) -> int:
    """Return the first dimension of the first shape that has one.

    Raises:
        PlanError: no shape has a dimension.
    """
    for shape in shapes.values():
        if len(shape):
            return int(shape[0])
    raise PlanError("a batch size needs the shape of an input to go into, such as data=(32, 3, 224, 224)")


def fewest_pieces(batch: int, limit: int) -> int:
    """Return the smallest number of equal micro-batches of a batch, each of at most ``limit`` samples (at least 1).

    >>> fewest_pieces(96, 40), fewest_pieces(7, 3)
    (3, 7)
    """
    return next(count for count in range(1, batch + 1) if batch % count == 0 and batch // count <= limit)


def with_batch(shapes: Shapes, batch: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes with another batch size, in every shape that starts with the batch size of the first.

    >>> with_batch({"data": (32, 3, 8, 8), "label": (32,), "table": (7, 2)}, 4)
    {'data': (4, 3, 8, 8), 'label': (4,), 'table': (7, 2)}

    Raises:
        PlanError: there is no shape with a first dimension.
    """
    old = batch_size(shapes)
    return {
        name: (batch, *shape[1:]) if len(shape) and shape[0] == old else tuple(shape) for name, shape in shapes.items()
    }


def largest_batch(total: Callable[[int], int], budget: int) -> tuple[int, int]:
    """Return the largest batch whose total fits, and that total.

    Args:
        total: bytes that a batch needs; expected to rise with the batch.
        budget: available bytes.

    Bytes are nearly linear in the batch, so interpolation between the bounds is nearly exact, and five to seven plans
    are enough. If two interpolations together do not halve the interval, the next guess is its middle; so about 75
    plans are enough for any curve.

    Raises:
        BudgetError: a batch of 1 does not fit; ``smallest`` of the error is its number of bytes.

    >>> largest_batch(lambda batch: 100 + 7 * batch, 1000)
    (128, 996)
    """
    totals = {1: total(1)}
    if totals[1] > budget:
        raise BudgetError(
            f"not even a batch of 1 fits the budget of {budget:,} bytes; the smallest budget that works is "
            f"{pasteable(totals[1])}",
            smallest=totals[1],
        )
    previous = 0
    fits, fails = 1, LARGEST + 1
    widths: list[int] = []
    while fails - fits > 1:
        if fails > LARGEST:  # no upper bound yet: extrapolate, at most by a factor of 64
            guess = min(_line(totals, previous, fits, budget) + 1, 64 * fits) if previous else 3
        elif len(widths) >= 2 and 2 * (fails - fits) > widths[-2]:
            guess = (fits + fails) // 2
            widths.clear()
        else:
            guess = _line(totals, fits, fails, budget)
        guess = min(max(guess, fits + 1), fails - 1)
        if fails <= LARGEST:
            widths.append(fails - fits)
        totals[guess] = total(guess)
        if totals[guess] <= budget:
            previous, fits = fits, guess
        else:
            fails = guess
    return fits, totals[fits]


def _line(totals: dict[int, int], smaller: int, larger: int, budget: int) -> int:
    """Return the batch at which the line through two measured batches meets the budget."""
    slope = (totals[larger] - totals[smaller]) / (larger - smaller)
    return LARGEST if slope <= 0 else smaller + int((budget - totals[smaller]) / slope)


class HasBytes(Protocol):
    """A plan, with the bytes that count against a budget."""

    @property
    def counted(self) -> int:
        """Bytes that count against a budget."""
        ...


P = TypeVar("P", bound=HasBytes)


def largest_fitting(
    make_plan: Callable[..., P],
    budget: int,
    *,
    recompute: bool,
    tried: Callable[[int, int], object] = lambda batch, nbytes: None,
) -> tuple[int, P]:
    """Return the largest batch whose plan fits, and that plan.

    Args:
        make_plan: plans for the keyword arguments ``batch`` and ``budget``.
        budget: available bytes.
        recompute: whether plans may recompute forward results to fit.
        tried: called with every batch of the search and the fewest bytes that it needs.

    Raises:
        BudgetError: a batch of 1 does not fit.
    """
    plans: dict[int, P] = {}

    def need(batch: int) -> int:
        """Return the fewest bytes that a batch needs."""
        try:
            plans[batch] = make_plan(batch=batch, budget=1 if recompute else None)
            nbytes = int(plans[batch].counted)
        except BudgetError as error:
            if error.smallest is None:
                raise
            nbytes = error.smallest
        tried(batch, nbytes)
        return nbytes

    batch, _ = largest_batch(need, budget)
    return batch, make_plan(batch=batch, budget=budget) if recompute else plans[batch]
