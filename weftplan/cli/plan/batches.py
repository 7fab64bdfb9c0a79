"""The largest batch that fits (``weftplan plan --batch-max``), and micro-batches of a larger batch.

The module plans and prints progress; it is stateless. It runs on the main thread, and Ctrl-C ends a search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from weftplan.device.amounts import amount
from weftplan.planner import MemoryPlan
from weftplan.planner.batch import fewest_pieces, largest_fitting
from weftplan.support.command_start import INTERRUPTED
from weftplan.support.progress import Progress

Make = Callable[..., MemoryPlan]
"""Planner of the network; keywords are those of :func:`weftplan.planner.plan`, ``batch`` changes the batch size."""


def largest(make: Make, budget: int, progress: Progress, *, recompute: bool) -> tuple[int, MemoryPlan]:
    """Return the largest batch that fits, and its plan. After Ctrl-C, report the best result so far.

    Raises:
        BudgetError: not even one sample fits.
    """
    best = 0

    def tried(batch: int, nbytes: int) -> None:
        nonlocal best
        if nbytes <= budget:
            best = max(best, batch)
        progress.say(f"batch {batch} needs {amount(nbytes)}; the largest that fits so far is {best}")

    repeat = make().again
    assert repeat is not None
    try:
        return largest_fitting(repeat, budget, recompute=recompute, tried=tried)
    except KeyboardInterrupt:
        if best:
            click.echo(f"interrupted: batch {best} is the largest found so far that fits {budget:,} bytes", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None


def micro_batches(
    make: Make,
    requests: str | Mapping[str, str],
    batch: int,
    budget: int,
    progress: Progress,
    *,
    recompute: bool,
    devices: int,
) -> tuple[int, MemoryPlan]:
    """Return the fewest equal pieces of a batch that each fit, and the plan of a piece.

    Args:
        make: plans the network.
        requests: grad_req of each gradient; if there are several pieces, gradients are accumulated.
        batch: samples of a step.
        budget: most bytes.
        recompute: whether forward results may be recomputed to fit.
        devices: devices that share each piece.

    Raises:
        BudgetError: not even one sample fits.
    """
    repeat = make().again
    assert repeat is not None
    max_batch, plan = largest(make, budget, progress, recompute=recompute)
    if max_batch >= batch:
        return 1, plan if max_batch == batch else repeat(batch=batch, budget=budget if recompute else None)
    added: Any = "add" if isinstance(requests, str) else {n: "add" if r == "write" else r for n, r in requests.items()}
    max_batch, _ = largest(lambda **how: make(grad_req=added, **how), budget, progress, recompute=recompute)
    pieces = fewest_pieces(batch, max_batch)
    if batch // pieces < devices:
        raise click.ClickException(
            f"a batch of {batch} fits {budget:,} bytes in {pieces} micro-batches of {batch // pieces}, which "
            f"{devices} devices cannot share: use fewer devices, or another batch"
        )
    summed = make(grad_req=added).again
    assert summed is not None
    return pieces, summed(batch=batch // pieces, budget=budget if recompute else None)


def what_to_type(batch: int, pieces: int, budget: str) -> str:
    """Return the answer in words, with the arguments for ``fit``."""
    if pieces == 1:
        return f"batch {batch} fits {budget} at once"
    return (
        f"batch {batch} fits {budget} in {pieces} micro-batches of {batch // pieces}, whose gradients are summed "
        f"before one update: type fit(…, micro_batches={pieces}), or weftplan train --batch-size {batch} "
        f"--micro-batches {pieces}"
    )
