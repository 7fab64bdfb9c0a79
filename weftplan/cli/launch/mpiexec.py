"""The command line of Open MPI's ``mpiexec`` for the processes of a job."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import click

from weftplan.cli.launch.rank import TELL_HOST
from weftplan.kvstore.distributed.transport.mpi import environment

SINGLE_HOST = ("btl", "self,sm")
"""Transports within one host: without TCP, because with it every process would listen on all networks."""


def mpiexec_command(
    workers: int,
    hostfile: Path | None,
    program: tuple[str, ...],
    *,
    recovers: bool = True,
    record: str = "-",
    session: Path | None = None,
) -> list[str]:
    """Return the command that starts ``program`` in ``workers`` processes.

    Args:
        workers: the number of processes.
        hostfile: names of hosts, as mpiexec reads them; without it all processes run on this machine.
        program: a script, ``-m`` with a module, ``weftplan`` with a command, or any program; and its arguments.
        recovers: the other processes continue if one dies; otherwise its death ends all of them.
        record: the file to which Python programs append their exits, or ``-``.
        session: a folder of this job alone, for mpiexec's own files on this machine. By default they are in
            ``ompi.PID`` below the temporary folder. A killed mpiexec leaves them there, and a later one to which the
            system gives the same number does not start (Open MPI 5.0.11).

    Raises:
        click.ClickException: there is no mpiexec.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise click.ClickException("there is no mpiexec: pip install 'weftplan[mpi]'")
    command = [mpiexec, "--map-by", f"{'slot' if hostfile is None else _mapping(hostfile)}:OVERSUBSCRIBE"]
    if recovers:
        command += ["--with-ft", "ulfm"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-run-as-root")
    settings = [(name.removeprefix("OMPI_MCA_"), value) for name, value in environment().items()]
    if hostfile is None and "OMPI_MCA_btl" not in os.environ:
        settings.append(SINGLE_HOST)
    if session is not None:
        settings.append(("prte_local_tmpdir_base", str(session)))
    for name, value in settings:
        command += ["--mca", name, value]
    if not sys.stdout.isatty():  # mpiexec gives processes terminals of its own, but a pipe is to hold plain lines
        command += ["-x", "TERM=dumb"]
    if hostfile is not None:
        command += ["--hostfile", str(hostfile), "-x", f"{TELL_HOST}=1"]
    return [*command, "-n", str(workers), *interpreted(program, record, recovers=recovers)]


def _mapping(hostfile: Path) -> str:
    """Return the name of Open MPI's rule that maps ranks to hosts.

    ``slot`` fills the slots of a host before it goes on, ``node`` takes the hosts in turn. Open MPI 5 would fill the
    first host without a rule, and takes the number of cores for slots that the file does not name.
    """
    lines = [line.partition("#")[0] for line in hostfile.read_text().splitlines()]
    return "slot" if any(re.search(r"\bslots\s*=", line) for line in lines) else "node"


def interpreted(program: tuple[str, ...], record: str, *, recovers: bool) -> list[str]:
    """Return the command of one process: ``rank.py`` runs scripts, modules and this package's command in this Python.

    Any other program runs as it is.
    """
    rank = [sys.executable, "-m", "weftplan.cli.launch.rank", record, "recovers" if recovers else "restarts"]
    if is_python(program):
        return [*rank, *(["-m", *program] if program[0] == "weftplan" else program)]
    return list(program)


def is_python(program: tuple[str, ...]) -> bool:
    """Return whether a program is a script or a module, whose exit is recorded."""
    return program[0].endswith(".py") or program[0] in ("-m", "weftplan")
