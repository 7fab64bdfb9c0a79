"""``weftplan doctor``: what is installed, who has how many threads, how everything is set and what that does here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from weftplan import config
from weftplan.cli.diagnosis import diagnose


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@click.option("--markdown", is_flag=True, help="Print the table of variables as docs/environment.md has it.")
def command(*, as_json: bool, markdown: bool) -> None:
    """Show what is installed, who has how many threads, and every variable with its value, origin and effect.

    The exit code is 1 when a variable has an illegal value.
    """
    if markdown:
        click.echo(environment_markdown(), nl=False)
        return
    found = diagnose()
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _print(found, Console())
    if found["problems"]:
        raise click.exceptions.Exit(1)


def environment_markdown() -> str:
    """The page docs/environment.md: generated, so it cannot disagree with the table in the code."""
    lines = [
        "# Environment variables",
        "",
        "Made by `python -m weftplan.cli.doctor --markdown`; do not edit. `weftplan doctor` shows the values in force.",
        "",
        "An unset or empty variable has its default. A bad value is an error where the variable is read, naming the",
        "variable, the value and what is legal. A misspelt name warns at `import weftplan` with the nearest name.",
        "Read *process*: once, when the object that it shapes is first made, and a later change warns that it is too",
        "late. Read *bind*: at every bind. Read *construct*: whenever an object that it shapes is made.",
    ]
    for group in dict.fromkeys(variable.group for variable in config.table()):
        lines += ["", f"## {group}", "", "| variable | default | legal | read | meaning | effect here |"]
        lines += ["|---|---|---|---|---|---|"]
        for variable in config.table():
            if variable.group == group:
                names = " or ".join(f"`{name}`" for name in (variable.name, *variable.aliases))
                default = variable.default_from or variable.default
                cells = (names, f"`{default}`", variable.legal, variable.when.value, variable.meaning, variable.effect)
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _print(found: dict[str, Any], console: Console) -> None:
    python, cupy, mpi = found["python"], found["cupy"], found["mpi"]
    console.print(_pairs("weftplan", _summary(found, python, cupy, mpi)))
    contexts = Table("context", "usable", "free", "total", "note", title="contexts (first of each type)")
    for row in found["contexts"]:
        contexts.add_row(
            row["context"],
            "yes" if row["usable"] else "no",
            _gib(row["free_bytes"]),
            _gib(row["total_bytes"]),
            Text(row["note"]),
        )
    console.print(contexts)
    threads = Table("who", "threads", "per", "set by", title="who has how many threads")
    for row in found["threads"]:
        threads.add_row(row["who"], "BAD" if row["count"] is None else str(row["count"]), row["per"], row["set_by"])
    console.print(threads)
    console.print(found["load"]["note"], markup=False, highlight=False)
    variables = Table(Column("variable", overflow="fold"), "value", "origin", "effect here", title="variables")
    for row in found["variables"]:
        bad, changed = row["error"] is not None, row["origin"] != "default"
        variables.add_row(
            row["name"],
            "BAD" if bad else str(row["value"]),
            row["origin"],
            row["effect"],
            style="red" if bad else "bold" if changed else "",
        )
    console.print(variables)
    for unknown in found["unknown_variables"]:
        hint = f": did you mean {unknown['nearest']}?" if unknown["nearest"] else ""
        console.print(f"unknown variable {unknown['name']}, ignored{hint}", style="yellow", markup=False)
    for warning in found["warnings"]:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    for problem in found["problems"]:
        console.print(f"problem: {problem}", style="red", markup=False)


def _summary(found: dict[str, Any], python: Any, cupy: Any, mpi: Any) -> Iterable[tuple[str, str]]:
    gil = "" if python["gil"] else ", free-threaded"
    yield "weftplan", found["weftplan"]
    yield "Python", f"{python['implementation']} {python['version']}{gil} at {python['executable']}"
    yield "platform", f"{found['platform']}, {found['cpus']} usable CPUs"
    yield "NumPy", found["numpy"]["version"]
    for pool in found["numpy"]["blas"]:
        runs = f", runs as {pool['architecture']}" if pool["architecture"] else ""
        yield f"  {pool['api']}", f"{pool['library']} {pool['version'] or ''}, {pool['threads']} threads{runs}"
    if cupy["version"]:
        yield "CuPy", f"{cupy['version']}, CUDA {cupy['cuda_runtime']}, {cupy['gpus']} GPUs {cupy['note']}"
        for name, state in cupy["libraries"].items():
            yield f"  {name}", state
        for index, row in enumerate(cupy["peers"]):
            reached = ", ".join(f"gpu({other})" for other, there in enumerate(row) if there and other != index)
            yield f"  gpu({index}) reaches", reached or "no other GPU without the host"
    else:
        yield "CuPy", cupy["note"]
    yield "MPI", f"mpi4py {mpi['version']}, openmpi {mpi['library']} {mpi['note']}" if mpi["version"] else mpi["note"]
    yield "optional", ", ".join(f"{name} {version or '-'}" for name, version in found["optional"].items())
    yield "engine", str(found["engine"])
    yield "kernels", _kernels(found["kernels"])


def _kernels(kernels: dict[str, Any]) -> str:
    if kernels["target"] is None:
        return f"NumPy's alone: {kernels['note']}"
    place = kernels["cache"] or "nowhere: compiled in each process"
    if kernels["cache_note"]:
        place = f"nowhere: {kernels['cache_note']}"
    forward = ", ".join(name for name in kernels["operators"] if not name.startswith("_backward"))
    return f"compiled for {kernels['target']} with {kernels['note']}; {forward}; kept in {place}"


def _pairs(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(title=title, show_header=False)
    for name, value in rows:
        table.add_row(name, Text(value))  # a Text, since "[cuda12]" would be taken for markup
    return table


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:.1f} GiB"


if __name__ == "__main__":
    command()
