"""Runs pieces of Python in several real processes under Open MPI, on this machine."""

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
"""


def need_mpi() -> None:
    """Skip the test if this Python has no MPI; the extra ``test`` installs one."""
    pytest.importorskip("mpi4py")
    if shutil.which("mpiexec", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("no mpiexec beside this Python")


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
    """Run ``body`` after :data:`PRELUDE` in ``count`` processes, on this machine or on emulated hosts; each must end
    well, unless ``ok`` is False."""
    need_mpi()
    script = folder / "ranks.py"
    script.write_text(PRELUDE + textwrap.dedent(body))
    command = mpiexec_command(count, None, (str(script),), one_host=hosts is None)
    child = subprocess.Popen(
        command if hosts is None else hosts.across(command),
        env={**os.environ, **environment(), "OMP_NUM_THREADS": "1", **variables},
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
    """Run ``body`` as :func:`run_ranks` does; all ranks come to its end, or ``ends_well`` of them, where others die."""
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
    """Tests whose pieces of Python run one after the other in one job, each with a store and variables of its own: to
    start processes, to import the package in them and to join them costs a second for each job.

    The job runs when the first of them is asked for, and ends with the first piece that fails.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.bodies = list[tuple[str, str, dict[str, str]]]()
        self._done: tuple[Path, subprocess.CompletedProcess[str]] | None = None

    def runs(self, body: str, **variables: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Return a decorator for a test that first checks that ``body`` passed on every rank of the job.

        The test receives the job's folder as ``folder``; the body finds it as ``FOLDER``.
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
        """Return the folder of the job, and the job."""
        if self._done is None:
            folder = factory.mktemp("job")
            (folder / "bodies.json").write_text(json.dumps(self.bodies))
            self._done = folder, run_ranks(folder, self.count, EACH, ok=False, FOLDER=str(folder))
        return self._done
