"""The largest batch that fits a number of bytes."""

from __future__ import annotations

from collections.abc import Callable

from weftplan.errors import BudgetError

LARGEST = 1 << 24
"""Batches are not searched beyond this."""


def largest_batch(total: Callable[[int], int], budget: int) -> tuple[int, int]:
    """The largest batch whose total fits, and that total.

    Args:
        total: bytes that a batch needs; expected to rise with the batch.
        budget: bytes that there are.

    Bytes are nearly linear in the batch, so that a straight line through two known points is nearly right; every
    second guess is the middle of what is still open, so that the search ends after some 50 plans whatever the curve.

    Raises:
        BudgetError: not even one sample fits; its ``smallest`` is what one sample needs.

    >>> largest_batch(lambda batch: 100 + 7 * batch, 1000)
    (128, 996)
    """
    known = {1: total(1)}
    if known[1] > budget:
        raise BudgetError(
            f"not even a batch of 1 fits the budget of {budget:,} bytes; the smallest budget that works is {known[1]}",
            smallest=known[1],
        )
    fits, fails = 1, LARGEST + 1
    use_line = True
    while fails - fits > 1:
        guess = _line(known, fits, budget) if use_line else (fits + fails) // 2
        if fails > LARGEST:  # nothing has failed yet: do not jump to the middle of nowhere
            guess = min(_line(known, fits, budget) + 1, 64 * fits)
        guess = min(max(guess, fits + 1), fails - 1)
        known[guess] = total(guess)
        if known[guess] <= budget:
            fits = guess
        else:
            fails = guess
        use_line = not use_line
    return fits, known[fits]


def _line(known: dict[int, int], fits: int, budget: int) -> int:
    """Where the line through the largest known batch that fits and its nearest known neighbour meets the budget."""
    others = [batch for batch in known if batch != fits]
    if not others:
        return 2 * fits
    other = min(others, key=lambda batch: abs(batch - fits))
    slope = (known[fits] - known[other]) / (fits - other)
    return LARGEST if slope <= 0 else fits + int((budget - known[fits]) / slope)
