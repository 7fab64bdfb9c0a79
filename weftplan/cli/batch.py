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

    Bytes are nearly linear in the batch, so that the straight line through the two batches between which the answer
    lies is nearly right, and five to seven plans are enough. Where two such guesses together do not halve what is
    open, the next is the middle, so that the search ends after some 75 plans whatever the curve.

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
    before = 0
    fits, fails = 1, LARGEST + 1
    widths: list[int] = []
    while fails - fits > 1:
        if fails > LARGEST:  # nothing has failed yet: do not jump to the middle of nowhere
            guess = min(_line(known, before, fits, budget) + 1, 64 * fits) if before else 3
        elif len(widths) >= 2 and 2 * (fails - fits) > widths[-2]:
            guess = (fits + fails) // 2
            widths.clear()
        else:
            guess = _line(known, fits, fails, budget)
        guess = min(max(guess, fits + 1), fails - 1)
        if fails <= LARGEST:
            widths.append(fails - fits)
        known[guess] = total(guess)
        if known[guess] <= budget:
            before, fits = fits, guess
        else:
            fails = guess
    return fits, known[fits]


def _line(known: dict[int, int], first: int, second: int, budget: int) -> int:
    """The batch at which the line through two known ones meets the budget."""
    slope = (known[second] - known[first]) / (second - first)
    return LARGEST if slope <= 0 else first + int((budget - known[first]) / slope)
