"""Results of ``weftplan run``: printed, and written as arrays, as a table or as JSON."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from weftplan.cli.columns import output_width, paragraph
from weftplan.errors import FormatError, listed
from weftplan.support.array_types import RawArray
from weftplan.support.atomic_files import replacing, write_text

MAX_SHOWN = 100
"""Number of samples that a terminal shows; a pipe and a file get all of them."""


def show(name: str, value: RawArray, top: int, labels: Sequence[str] | None, samples: Sequence[str]) -> None:
    """Print an output: its largest values if it has one row of classes for each sample, else shape and range."""
    summary = f"{name}: {value.dtype} {value.shape}, from {value.min():.6g} to {value.max():.6g}"
    click.echo("\n".join(paragraph(summary, output_width(), indent="  ")))
    if not _has_classes(value):
        return
    shown = samples if not sys.stdout.isatty() else samples[:MAX_SHOWN]
    for sample, _, index, word, number in _largest(value, top, labels, shown):
        text = f"{number:10.6f}" if number == 0 or 1e-4 <= abs(number) < 1e6 else f"{number:10.4g}"
        click.echo(f"  {sample}: {text}  {index:5} {word}".rstrip())
    if len(shown) < len(value):
        click.echo(f"  and {len(value) - len(shown):,} more samples: -o FILE.csv writes all of them")


def write(
    path: Path, results: Mapping[str, RawArray], top: int, labels: Sequence[str] | None, samples: Sequence[str]
) -> None:
    """Write the largest values of each sample as a table (.csv) or as JSON (.json), or else all outputs (.npz).

    Raises:
        FormatError: a table is asked for, but no output has one row of classes for each sample.
    """
    if path.suffix not in (".csv", ".json"):
        held = io.BytesIO()
        arrays: dict[str, Any] = dict(results)  # by the names of outputs, of which none is `allow_pickle`
        np.savez(held, **arrays)
        with replacing(path) as file:
            file.write(held.getvalue())
        return
    rows = [
        {"sample": sample, "output": name, "rank": rank, "class": int(index), "label": word, "value": float(number)}
        for name, value in results.items()
        if _has_classes(value)
        for sample, rank, index, word, number in _largest(value, top, labels, samples)
    ]
    if not rows:
        raise FormatError(
            f"{path}: a {path.suffix} file holds the classes of each sample, but {listed(list(results))} has no row "
            f"of classes for each sample; write the outputs into an .npz file"
        )
    if path.suffix == ".json":
        write_text(path, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        return
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_text(path, text.getvalue())


def _has_classes(value: RawArray) -> bool:
    return bool(value.ndim == 2 and value.shape[1] > 1)


def _largest(
    value: RawArray, top: int, labels: Sequence[str] | None, samples: Sequence[str]
) -> Iterator[tuple[str, int, int, str, float]]:
    """Yield (sample, rank, class, its label, value) of the largest values of each row."""
    for name, row in zip(samples, value, strict=False):
        for rank, index in enumerate(np.argsort(-row, kind="stable")[:top], 1):
            yield name, rank, index, labels[index] if labels is not None and index < len(labels) else "", row[index]
