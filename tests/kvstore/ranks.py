"""Runs a piece of Python in several real processes under Open MPI, on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.stress.hosts import Hosts
from weftplan.cli.launch import mpiexec_command
from weftplan.kvstore.distributed.mpi import environment

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
    """Skip the test where there is no MPI beside this Python; the extra ``test`` installs one."""
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
    command = mpiexec_command(count, None, (str(script),))
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
        os.killpg(child.pid, signal.SIGKILL)  # the ranks, too: they would be left behind
        if hosts is not None:
            hosts.end()
        told, errors = child.communicate()
        pytest.fail(f"no end after {timeout} s: {told}{errors}")
    assert not ok or child.returncode == 0, told + errors
    return subprocess.CompletedProcess(child.args, child.returncode, told, errors)
