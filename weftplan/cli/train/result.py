"""The result of ``weftplan train``: figures of the run in words, and a digest of the weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import click

from weftplan import engine
from weftplan.cli.columns import Column, labelled, output_width, paragraph, table
from weftplan.device.amounts import amount
from weftplan.ndarray import NDArray


def weights_sha256(args: dict[str, NDArray], aux: dict[str, NDArray]) -> str:
    """Return a digest of names, shapes and bits of all parameters and auxiliary states, in name order."""
    digest = hashlib.sha256()
    for name, value in sorted({**args, **aux}.items()):
        host = value.asnumpy()
        digest.update(f"{name}{host.shape}{host.dtype}".encode())
        digest.update(host.tobytes())
    return digest.hexdigest()


def result_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the result as rows of label and value."""
    rows = []
    if "test_accuracy" in result:
        rows.append(("test accuracy", f"{result['test_accuracy']:.4f}"))
    if "test_perplexity" in result:
        rows.append(("test perplexity", f"{result['test_perplexity']:.3f} of {result['characters']} characters"))
        rows.append(("bits per character", f"{result['test_bits_per_character']:.3f}"))
        rows.append(("  by frequency alone", f"{result['unigram_bits_per_character']:.3f}"))
    rows += [
        (key.removesuffix("_per_s") + "/s", f"{value:,.0f}") for key, value in result.items() if key.endswith("_per_s")
    ]
    rows.append(("wall time", f"{result['wall_s']:.1f} s"))
    peak, unshared, bound = (result[k] for k in ("planned_peak_bytes", "unshared_bytes", "lower_bound_bytes"))
    rows.append(("planned peak", f"{amount(peak)} ({peak:,} bytes)"))
    rows.append(("  without sharing", f"{amount(unshared)} ({unshared / max(peak, 1):.2f} times the plan)"))
    rows.append(("  lower bound", f"{amount(bound)} (the plan is {peak / max(bound, 1):.3f} times it)"))
    rows.append(("  allocated", f"{result['allocated_bytes']:,} bytes (planned: {peak:,})"))
    return rows


def say_lines(text: str) -> None:
    """Print a text; on a terminal, in lines that it can show."""
    click.echo("\n".join(line for part in text.split("\n") for line in paragraph(part, output_width())))


def result_lines(rows: Sequence[tuple[str, str]], width: int | None) -> list[str]:
    """Return the lines of the result and of the operations of each queue for ``width`` columns (None: no limit)."""
    queues = engine.get().statistics().queues
    columns = [
        Column("device", [str(queue.context or "any CPU") for queue in queues]),
        Column("queue", [queue.queue for queue in queues]),
        Column("operations", [f"{queue.completed:,}" for queue in queues], right=True),
    ]
    return [*labelled(rows, width), "", *table(columns, width)]
