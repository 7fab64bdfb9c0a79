"""Run Python code in several MPI processes, on this machine or on emulated hosts."""

from __future__ import annotations

import functools
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stress.hosts import Hosts
from weftplan.cli.launch.mpiexec import mpiexec_command
from weftplan.kvstore.distributed.transport.mpi import environment

PRELUDE = """
import os, signal, sys, time
import numpy as np
import weftplan as mx
from weftplan.errors import KVStoreError, WorkerLostError

kv = mx.kv.create(os.environ.get("STORE", "dist_sync"))
rank, size = kv.rank, kv.num_workers

def value(key, shape=(3,), dtype="float32"):
    out = mx.nd.empty(shape, dtype=dtype)
    kv.pull(key, out=out)
    return out.asnumpy()

def spoil(array, words="no data left"):
    def fail():
        raise ValueError(words)
    mx.engine.get().push(fail, mutable_vars=[array.var])

def says(call, *words):
    try:
        call()
    except KVStoreError as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, (missing, str(error))
        return error
    raise AssertionError("no error")

def meet(name, ranks=range(size)):
    "Wait for the given ranks without MPI: after a barrier of the store another rank may still be inside it."
    mark = os.path.join(os.environ["FOLDER"], f"{name} met by ")
    open(mark + str(rank), "w").close()
    while not all(os.path.exists(mark + str(other)) for other in ranks):
        time.sleep(0.01)
"""


def need_mpi() -> None:
    """Skip the test if this Python has no mpi4py or no mpiexec; the extra ``test`` installs both."""
    pytest.importorskip("mpi4py")
    if shutil.which("mpiexec", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("no mpiexec next to this Python")


def run_ranks(
    folder: Path,
    count: int,
    body: str,
    *,
    timeout: float = 110,
    ok: bool = True,
    hosts: Hosts | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``PRELUDE`` and then ``body`` in ``count`` MPI processes, and return the finished launcher.

    The test fails if the job takes longer than ``timeout`` seconds, or if its exit status is not 0 and ``ok`` is True.
    ``hosts`` are emulated hosts; None runs all processes on this machine. ``variables`` are environment variables.
    """
    need_mpi()
    script = folder / "ranks.py"
    script.write_text(PRELUDE + textwrap.dedent(body))
    command = mpiexec_command(count, None if hosts is None else hosts.file, (str(script),), session=folder)
    child = subprocess.Popen(
        command if hosts is None else hosts.on_first(command),
        env={**os.environ, **environment(), "OMP_NUM_THREADS": "1", "FOLDER": str(folder), **variables},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        told, errors = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # kills the ranks, too, which would outlive it
        if hosts is not None:
            hosts.end()
        told, errors = child.communicate()
        pytest.fail(f"no end after {timeout} s: {told}{errors}")
    assert not ok or child.returncode == 0, told + errors
    return subprocess.CompletedProcess(child.args, child.returncode, told, errors)


def run_to_end(folder: Path, count: int, body: str, *, ends_well: int | None = None, **variables: str) -> None:
    """Run ``body`` with ``run_ranks``, and check that all ranks reach its end.

    If some ranks die on purpose, ``ends_well`` is the number of ranks that must reach the end.
    """
    body = textwrap.dedent(body) + 'print("has come to its end", flush=True)\n'
    done = run_ranks(folder, count, body, ok=ends_well is None, **variables)
    assert done.stdout.count("has come to its end") == (ends_well or count), done.stdout + done.stderr


EACH = """
import contextlib, json, traceback

kv.close()
before = dict(os.environ)
for name, text, variables in json.load(open(os.path.join(os.environ["FOLDER"], "bodies.json"))):
    os.environ.update(variables)
    kv = mx.kv.create(os.environ.get("STORE", "dist_sync"))
    try:
        exec(compile(text, name, "exec"), dict(globals()))
        kv.close()
    except BaseException:
        print(f"{name}, rank {rank}:", traceback.format_exc(), file=sys.stderr, flush=True)
        os._exit(1)
    with contextlib.suppress(Exception):  # of work that failed on purpose
        mx.nd.waitall()
    print("passed", name, flush=True)
    os.environ.clear()
    os.environ.update(before)
"""


class Job:
    """One MPI job that runs the code of several tests, one piece after the other, each with a new store.

    Starting the processes and importing the package takes about a second for each job, so tests share a job. It starts
    when the first of its tests runs, and stops at the first piece of code that fails.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.bodies = list[tuple[str, str, dict[str, str]]]()
        self._done: tuple[Path, subprocess.CompletedProcess[str]] | None = None

    def runs(self, body: str, **variables: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Return a decorator for a test that first checks that ``body`` passed on every rank of the job.

        A test may take the parameters ``folder``, the job's folder, and ``done``, the finished job. The body finds the
        folder in the environment variable ``FOLDER``; ``variables`` are more environment variables of this body.
        """

        def decorate(function: Callable[..., None]) -> Callable[..., None]:
            name = function.__name__
            self.bodies.append((name, textwrap.dedent(body), variables))
            asked = list(inspect.signature(function).parameters)

            def run(tmp_path_factory: pytest.TempPathFactory) -> None:
                folder, done = self.done(tmp_path_factory)
                told = done.stdout.split("\n")
                assert told.count(f"passed {name}") == self.count, done.stdout + done.stderr
                function(**{key: {"folder": folder, "done": done}[key] for key in asked})

            functools.update_wrapper(run, function)
            run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
                [inspect.Parameter("tmp_path_factory", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
            )
            return run

        return decorate

    def done(self, factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
        """Return the folder of the job and the finished job, which runs in the first call."""
        if self._done is None:
            folder = factory.mktemp("job")
            (folder / "bodies.json").write_text(json.dumps(self.bodies))
            self._done = folder, run_ranks(folder, self.count, EACH, ok=False)
        return self._done
