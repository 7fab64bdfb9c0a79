"""``weftplan pack FILE.csv``: offsets for the buffers of a CSV file.

``planner.packing`` packs the buffers; the result is checked before it is printed. The command runs on the main thread.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections import Counter
from pathlib import Path
from typing import cast

import click
import numpy as np

from weftplan.cli.options import json_option, number, positive
from weftplan.cli.pack_csv import read_csv
from weftplan.errors import FormatError, listed
from weftplan.planner.packing import check_packing, pack
from weftplan.planner.packing.api import Effort
from weftplan.support.atomic_files import write_text


@click.command("pack")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@number("--capacity", help="The most bytes that the slab may have.")
@number("--alignment", default=1, help="Make every offset a multiple of this many bytes.")
@positive("--time-limit", help="Stop after this many seconds with the best packing found until then.")
@click.option(
    "--effort",
    type=click.Choice(["fast", "normal", "max"]),
    default="normal",
    show_default=True,
    help="How long to search when the lower bound is not reached.",
)
@json_option("Print the packing as one JSON object.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write rows of id,lower,upper,size,offset, the format of MiniMalloc, into this file.",
)
def command(
    file: Path,
    *,
    capacity: int | None,
    alignment: int,
    time_limit: float | None,
    effort: str,
    as_json: bool,
    output: Path | None,
) -> None:
    """Place the buffers of FILE at offsets in one slab that is as small as possible.

    FILE has the columns id,lower,upper,size, as the files of MiniMalloc. Lifetimes are half-open and sizes are in
    bytes. The result is checked by code that the packer does not share. The exit code is 1 when FILE is malformed or
    the packing does not fit --capacity.
    """
    try:
        names, lower, upper, size = read_csv(file)
    except (UnicodeDecodeError, csv.Error) as error:
        raise FormatError(f"{file}: expected CSV text with the columns id,lower,upper,size; got {error}") from error
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise FormatError(f"{file}: ids must differ, or offsets cannot be told apart; given twice: {listed(twice)}")
    began = time.perf_counter()
    packing = pack(lower, upper, size, alignment=alignment, time_limit=time_limit, effort=cast(Effort, effort))
    seconds = time.perf_counter() - began
    check_packing(lower, upper, size, packing.offsets, alignment=alignment)
    fits = capacity is None or packing.peak <= capacity
    offsets = packing.offsets.tolist()
    facts = {
        "buffers": len(names),
        "peak": packing.peak,
        "lower_bound": packing.lower_bound,
        "ratio": packing.ratio,
        "seconds": seconds,
        "capacity": capacity,
        "fits": fits,
    }
    if as_json:
        click.echo(json.dumps({**facts, "offsets": dict(zip(names, offsets, strict=True))}))
    else:
        total = int(np.sum(size)) if len(size) else 0
        click.echo(f"{len(names)} buffers, {total} bytes in all")
        click.echo(f"peak        {packing.peak}")
        click.echo(f"lower bound {packing.lower_bound}   ratio {packing.ratio:.5f}   {seconds:.3f} s")
        if capacity is not None:
            click.echo(f"capacity    {capacity}   {'fits' if fits else f'exceeded by {packing.peak - capacity} bytes'}")
    if output is not None:
        columns = names, lower.tolist(), upper.tolist(), size.tolist(), offsets
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(("id", "lower", "upper", "size", "offset"))
        rows.writerows(zip(*columns, strict=True))
        write_text(output, text.getvalue())
    if not fits:
        raise click.exceptions.Exit(1)
