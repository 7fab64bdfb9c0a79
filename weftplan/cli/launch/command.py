"""``weftplan launch -n 4 script.py``: processes of a distributed kvstore, by Open MPI's ``mpiexec``.

A signal that ends this command ends the job: mpiexec receives it once, and this command waits while mpiexec ends the
processes. If this command is killed, the kernel notifies mpiexec (on Linux). If mpiexec is killed, its processes exit
(``rank.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import click

from weftplan.cli.launch import job_processes
from weftplan.cli.launch.elastic import Supervisor
from weftplan.cli.launch.job_folder import job_folder
from weftplan.cli.launch.mpiexec import interpreted, is_python, mpiexec_command
from weftplan.cli.launch.record import Record, trained_alone
from weftplan.cli.options import WholeNumber
from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.transport.mpi import environment


@click.command(
    "launch",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Start the processes of a distributed kvstore.",
)
@click.option("-n", "-np", "--workers", type=WholeNumber(min=1), help="The number of processes; required.")
@click.option(
    "--hostfile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with one host on each line, as mpiexec reads it. Without it all processes run on this machine.",
)
@click.option(
    "--restarts",
    type=WholeNumber(min=0),
    default=0,
    show_default=True,
    help="How often to start all processes again when one has died. PROGRAM is to go on from its newest checkpoint.",
)
@click.option(
    "--elastic",
    is_flag=True,
    help="Start only the lost process again; it joins the others. --restarts limits how often. On one machine.",
)
@click.option("--dry-run", is_flag=True, help="Print the command instead of running it.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    workers: int | None, hostfile: Path | None, restarts: int, elastic: bool, dry_run: bool, program: tuple[str, ...]
) -> None:
    """Run PROGRAM in several processes that share a kvstore 'dist_sync'.

    PROGRAM is a Python script with its arguments, `-m` with a module, or `weftplan` with a command of its own:

    \b
        weftplan launch -n 4 train.py --epochs 3
        weftplan launch -n 4 -m package.train --epochs 3
        weftplan launch -n 4 weftplan train --kvstore dist_sync

    More processes than cores are allowed. When a process dies, the others go on. What they do then is theirs to decide
    (docs/distributed.md). With --restarts the death of a process ends the others, and all of them start again:

    \b
        weftplan launch -n 4 --restarts 3 weftplan train \\
            --kvstore dist_sync --checkpoint run/a --resume

    With --elastic the others keep their processes and their memory. They wait for a replacement of the lost one, and
    train on from the begin of the epoch, or from the last checkpoint, with the weights of a run without a loss:

    \b
        weftplan launch -n 4 --restarts 3 --elastic weftplan train \\
            --kvstore dist_sync
    """
    if program[0].startswith("-") and program[0] != "-m":
        raise click.UsageError(f"launch has no option {program[0]!r}; -n is the number of processes")
    if workers is None:
        raise click.UsageError("give -n, the number of processes")
    if elastic:
        raise click.exceptions.Exit(_run_elastic(workers, hostfile, restarts, dry_run, program))
    recovers = not restarts
    arguments = mpiexec_command(workers, hostfile, program, recovers=recovers)
    if hostfile is None:
        _check_exists(program[0])
    if dry_run:
        click.echo(" ".join(arguments))
        return
    status = 0
    with job_folder() as folder:
        for start in range(restarts + 1):
            file = folder / f"ends{start}"
            file.touch()
            arguments = mpiexec_command(workers, hostfile, program, recovers=recovers, record=str(file), session=folder)
            status, ended_by, stopped = _run(arguments, file)
            if ended_by:
                raise click.exceptions.Exit(128 + ended_by)
            record = Record(file)
            status = status or record.status
            if not status:
                if record.trained_alone(workers):
                    _tell(trained_alone(workers))
                break
            judged = stopped if hostfile is None and is_python(program) else None
            for line in record.failures(workers, judged):
                _tell(line)
            if start < restarts:
                _tell(f"the job ended with status {status}; restart {start + 1} of {restarts}")
    raise click.exceptions.Exit(status)


def _run_elastic(workers: int, hostfile: Path | None, restarts: int, dry_run: bool, program: tuple[str, ...]) -> int:
    """Run the job with replacements of lost processes; return its status."""
    for wrong, advice in (
        (hostfile is not None, "all processes run on this machine: leave out --hostfile, or --elastic"),
        (not restarts, "give --restarts, the number of lost processes that are replaced"),
        (not is_python(program), "only a Python script (*.py), -m with a module, or `weftplan` can be replaced"),
    ):
        if wrong:
            raise click.UsageError(f"--elastic: {advice}")
    _check_exists(program[0])
    if dry_run:
        click.echo(f"{workers} times: {' '.join(interpreted(program, '-', recovers=False))}")
        return 0
    supervisor = Supervisor(workers, program, restarts, _tell)
    with _passing_on(lambda number: supervisor.stop(number)):
        try:
            return supervisor.run()
        except KVStoreError as error:
            raise click.ClickException(str(error)) from error


def _tell(text: str) -> None:
    click.echo(f"weftplan launch: {text}", err=True)


_PR_SET_PDEATHSIG = 1

_ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def _run(arguments: Sequence[str], file: Path) -> tuple[int, int, set[int]]:
    """Run mpiexec, whose ranks write their ends to ``file``.

    Returns:
        Its status, the number of the signal that ended this command or 0, and the ranks that were ended here.
    """
    # On a terminal mpiexec stays in the process group of this command. There it can read typed input, and Ctrl-C and
    # hang-ups reach it directly.
    in_group = os.isatty(0)
    received: list[int] = []
    job: subprocess.Popen[bytes] | None = None

    def pass_on(number: int) -> None:
        received.append(number)
        if job is not None and not (in_group and number != signal.SIGTERM):
            job.send_signal(number)

    with _passing_on(pass_on):
        started = subprocess.Popen(
            arguments,
            env={**os.environ, **environment()},
            process_group=None if in_group else 0,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        job = started
        if received:  # during its start
            job.send_signal(received[0])
        status, hung = job_processes.wait(started, file, _tell)
        # A process that exits with a status other than 0 without ending MPI counts twice (Open MPI 5.0.11), so mpiexec
        # may exit while others run. Their output has no reader any more, and a restart would meet them.
        processes, _ = job_processes.end(started.pid)
        return status, received[0] if received else 0, hung | processes


@contextlib.contextmanager
def _passing_on(pass_on: Callable[[int], None]) -> Iterator[None]:
    """Call ``pass_on`` for every signal that is to end this command."""

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        pass_on(number)

    previous = [(number, signal.signal(number, handle)) for number in _ENDING]
    try:
        yield
    finally:
        for number, handler in previous:
            signal.signal(number, handler)


def _end_with_parent() -> None:
    """Arrange, in mpiexec before it starts, that it and the job end if this command is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _check_exists(name: str) -> None:
    """Raise BadParameter for a script or program that is not on this machine: once, not in every process."""
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise click.BadParameter(f"there is no script {name!r} in {os.getcwd()}", param_hint="PROGRAM")
    elif name not in ("weftplan", "-m") and shutil.which(name) is None:
        raise click.BadParameter(
            f"there is no program {name!r}; expected a Python script (*.py), -m with a module, `weftplan` with a "
            f"command, or a program on the PATH",
            param_hint="PROGRAM",
        )
