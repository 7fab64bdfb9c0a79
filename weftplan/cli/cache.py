"""``weftplan cache``: locations and sizes of the on-disk caches, and their removal."""

from __future__ import annotations

import json
from typing import Any

import click

from weftplan.cli.options import json_option
from weftplan.device.amounts import amount
from weftplan.support import user_cache

_WHAT = {"kernels": "compiled kernels and measured times", "plans": "plans of networks"}


@click.command("cache", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--clear", is_flag=True, help="Remove the files; later processes make them again when they need them.")
@json_option("Print one JSON object.")
def command(*, clear: bool, as_json: bool) -> None:
    """Show where compiled kernels and plans are kept, and how much they take.

    The files are in the user's cache folder. WEFTPLAN_KERNEL_CACHE=0 and WEFTPLAN_PLAN_CACHE=0 keep none.
    """
    facts: list[dict[str, Any]] = []
    for kind in user_cache.KINDS:
        folder = user_cache.folder(kind)
        if folder is None:
            continue
        files, nbytes = user_cache.usage(folder)
        if clear:
            user_cache.clear(folder)
        facts.append(
            {"kind": kind, "folder": str(folder), "files": files, "bytes": nbytes, "most_bytes": user_cache.MOST,
             "most_files": user_cache.MAX_FILES, "note": user_cache.obstacle(folder) or "", "cleared": clear}
        )  # fmt: skip
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    if not facts:
        click.echo("nothing is kept: this system has no cache folder for one user alone")
    for fact in facts:
        prefix = "removed " if clear else ""
        held = f"{prefix}{fact['files']:,} files, {amount(fact['bytes'])}"
        click.echo(f"{_WHAT[fact['kind']]}: {held}, in {fact['folder']}")
        if fact["note"]:
            click.echo(f"  nothing can be kept there: {fact['note']}")
