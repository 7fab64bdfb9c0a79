"""Elastic jobs: the launcher replaces a lost rank, and the final weights are those of a job without a loss."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_launch_ends import is_running
from tests.kvstore.elastic_jobs import BATCHES, EPOCHS, Job, run_job
from tests.kvstore.ranks import need_mpi
from tests.kvstore.test_failed_ranks import ROOT, launched

RANKS = 3


@pytest.fixture(scope="module")
def expected_weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of weights and optimizer states of an ``mpiexec`` job without a loss."""
    done = run_job(tmp_path_factory.mktemp("whole") / "job", RANKS, {})
    assert done.status == 0, done.errors
    assert len(done.weights) == RANKS
    (weights,) = set(done.weights.values())
    return weights


def check_replacements(done: Job, lost: int) -> str:
    """Check that a job has finished with ``lost`` replacements and no other start, and return its digest of weights."""
    assert done.status == 0, done.output + done.errors
    assert done.ends == lost
    assert done.starts == RANKS + lost, done.output + done.errors
    assert done.errors.count("starts again and joins the others") == lost, done.errors
    assert len(done.weights) == RANKS
    (weights,) = set(done.weights.values())
    return weights


def test_an_elastic_job_without_a_loss(tmp_path: Path, expected_weights: str):
    """An elastic job, which exchanges over sockets and shared memory, gives the weights of an MPI job."""
    done = run_job(tmp_path / "job", RANKS, {}, restarts=1)
    assert check_replacements(done, 0) == expected_weights
    assert done.survivors == RANKS


def test_lost_ranks_are_replaced(tmp_path: Path, expected_weights: str):
    """Ranks 0 and 1 end in five ways and are replaced; rank 2 keeps its process.

    The weights are those of a job without a loss, and the launcher reports each kind of end.
    """
    ends = {"1 0 2": "raise", "0 1 0": "os._exit", "1 1 3": "later", "0 2 1": "SIGKILL", "1 3 2": "sys.exit"}
    done = run_job(tmp_path / "job", RANKS, ends, restarts=len(ends))
    assert check_replacements(done, len(ends)) == expected_weights
    assert done.survivors == 1
    for words in ("OSError: cannot read image 17", "os._exit(4)", "sys.exit(3)", "the signal SIGKILL"):
        assert f"ended by {words}" in done.errors, done.errors


def test_two_ranks_at_once_and_a_replacement(tmp_path: Path, expected_weights: str):
    """Two ranks end at the same batch, rank 2 for the second time; the weights are those of a job without a loss.

    Shared memory is off.
    """
    ends = {"1 1 3": "SIGKILL", "2 1 3": "raise", "2 1 1": "os._exit"}
    done = run_job(tmp_path / "job", RANKS, ends, restarts=3, WEFTPLAN_KVSTORE_SHARED_MEMORY="0")
    assert check_replacements(done, 3) == expected_weights


@pytest.fixture(scope="module")
def weights_of_two_fits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the digests of programs with two ``fit``, on one store and on two, without a loss."""
    digests = {}
    for store in ("first", "new"):
        done = run_job(tmp_path_factory.mktemp(store) / "job", RANKS, {}, restarts=1, stores=("first", store))
        (digests[store],) = set(done.weights.values())
    return digests


@pytest.mark.parametrize("store", ["first", "new"])
def test_each_fit_survives_a_loss(tmp_path: Path, store: str, weights_of_two_fits: dict[str, str]):
    """A lost rank joins in the first ``fit``; after a loss in the second all ranks start again, once for each loss."""
    ends = {"1 1 2": "SIGKILL", f"0 {EPOCHS + 1} 3": "raise", f"2 {EPOCHS + 2} 0": "os._exit"}
    done = run_job(tmp_path / "job", RANKS, ends, restarts=3, stores=("first", store), WEFTPLAN_KVSTORE_TIMEOUT="600")
    assert done.status == 0, done.output + done.errors
    assert done.errors.count("rank 1 starts again and joins the others; restart 1 of 3") == 1, done.errors
    assert re.findall("so all start again; restart (.) of 3", done.errors) == ["2", "3"]
    assert done.starts == RANKS + 1 + 2 * RANKS, done.output + done.errors
    assert set(done.weights.values()) == {weights_of_two_fits[store]}


def test_own_sums_before_fit_start_all_again(tmp_path: Path, expected_weights: str):
    """A replacement cannot repeat sums that the program makes before ``fit``, so after a loss all ranks start again."""
    done = run_job(tmp_path / "job", RANKS, {"1 1 2": "SIGKILL"}, restarts=1, own_sum=True)
    assert done.status == 0, done.output + done.errors
    assert "so all start again; restart 1 of 1" in done.errors
    assert set(done.weights.values()) == {expected_weights}


@pytest.mark.parametrize("every", [None, 4])
def test_ranks_return_to_the_last_checkpoint(tmp_path: Path, every: int | None, expected_weights: str):
    """After a loss all ranks return to the last checkpoint: the start of an epoch, or a batch if ``every`` is set."""
    fit: dict[str, Any] = {"checkpoint": str(tmp_path / "run"), "every": every}
    done = run_job(tmp_path / "job", RANKS, {"0 2 4": "SIGKILL"}, restarts=1, fit=fit)
    assert check_replacements(done, 1) == expected_weights
    place = (2, 0) if every is None else (2, 16 - 2 * BATCHES)
    assert f"all ranks train on from epoch {place[0]}, {place[1]} batches of it" in done.errors
    names = sorted(path.name for path in tmp_path.glob("run*"))
    assert names[-1] == f"run-step{EPOCHS * BATCHES:08d}.safetensors", names


def test_the_bound_on_losses(tmp_path: Path):
    """If more ranks are lost than ``--restarts`` allows, the job exits with the status of the last lost rank."""
    done = run_job(tmp_path / "job", RANKS, {"1 0 2": "raise", "1 0 3": "sys.exit"}, restarts=1)
    assert done.status == 3, done.errors
    assert done.weights == {}
    assert "rank 1 ended by sys.exit(3)" in done.errors


def test_a_loss_before_training_starts_all_again(tmp_path: Path):
    """If a rank is lost before any rank has a state of training, all ranks start again."""
    script = tmp_path / "script.py"
    script.write_text("""
import os, sys
import weftplan as mx
kv = mx.kv.create("dist_sync")
if kv.rank == 1 and not os.path.exists("failed"):
    open("failed", "w").close()
    sys.exit(5)
kv.init("w", mx.nd.ones((3,)))
kv.push("w", mx.nd.ones((3,)))
out = mx.nd.empty((3,))
kv.pull("w", out=out)
sys.stdout.write(f"sum {out.asnumpy().tolist()}\\n")
""")
    done = launched(tmp_path, "-n", "2", "--elastic", "--restarts", "1", str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum [2.0, 2.0, 2.0]") == 2, done.stdout + done.stderr
    assert "no process can join the others now, so all start again; restart 1 of 1" in done.stderr


def test_a_replacement_sums_nothing_before_it_joins(tmp_path: Path):
    """A replacement that pushes before it has joined in ``Module.fit`` raises an error, and the job fails."""
    script = tmp_path / "script.py"
    script.write_text("""
import os, sys
import weftplan as mx
kv = mx.kv.create("dist_sync")
kv.set_joinable(True)
kv.init("w", mx.nd.ones((3,)))
out = mx.nd.empty((3,))
for step in range(100):
    if kv.rank == 1 and step == 3 and not os.path.exists("failed"):
        open("failed", "w").close()
        os._exit(1)
    if step == 3 and kv.rank == 0:
        print("waits for", kv.reform(has_state=True), flush=True)
    kv.push("w", mx.nd.ones((3,)))
    kv.pull("w", out=out)
    out.wait_to_read()
""")
    done = launched(tmp_path, "-n", "2", "--elastic", "--restarts", "1", str(script))
    assert done.returncode == 1
    assert "rank 1 replaces a lost rank, and joins the others in Module.fit" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--elastic"], "--elastic: give --restarts"),
        (["--elastic", "--restarts", "1", "--hostfile", "script.py"], "--elastic: all processes run on this machine"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, arguments: list[str], words: str):
    """``--elastic`` without ``--restarts``, or with ``--hostfile``, exits with status 2 and names the option."""
    (tmp_path / "script.py").write_text("")
    done = launched(tmp_path, "-n", "2", *arguments, "script.py")
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split()), done.stderr


def test_features_that_no_replacement_can_have(tmp_path: Path):
    """Elastic jobs refuse features whose state is lost with a rank.

    These are ``dist_async``, compression, ``recover``, data without ``state()``, and stores in child processes.
    """
    script = tmp_path / "script.py"
    script.write_text("""
import os, subprocess, sys
import numpy as np
import weftplan as mx

def says(call, *words):
    try:
        call()
    except mx.base.MXNetError as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError(words)

says(lambda: mx.kv.create("dist_async"), "dist_async cannot replace a lost rank")
kv = mx.kv.create("dist_sync")
says(lambda: kv.set_gradient_compression({"type": "2bit", "threshold": 0.5}), "residuals")
says(kv.recover, "--elastic replaces it")

class Endless(mx.io.DataIter):
    provide_data, provide_label = [mx.io.DataDesc("data", (2, 3))], [mx.io.DataDesc("softmax_label", (2,))]
    def next(self):
        return mx.io.DataBatch([mx.nd.ones((2, 3))], [mx.nd.zeros((2,))])
    def reset(self):
        pass

net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4), name="softmax")
says(lambda: mx.mod.Module(net).fit(Endless(2), kvstore=kv, num_epoch=1), "Endless has no state()")
if "child" not in sys.argv:
    child = 'import weftplan as mx; mx.kv.create("dist_sync")'
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
    assert "started or forked this one" in done.stderr, done.stderr
sys.stdout.write("refused\\n")
""")
    done = launched(tmp_path, "-n", "2", "--elastic", "--restarts", "1", str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused") == 2, done.stdout + done.stderr


SLEEPERS = """
import os, subprocess, sys, time
import weftplan as mx
kv = mx.kv.create("dist_sync")
child = os.fork() if kv.rank == 1 else 0
if child or kv.rank == 0:
    sys.stdout.write(f"rank {os.getpid()} {os.getppid()}\\n")
time.sleep(100)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_job(tmp_path: Path, number: signal.Signals):
    """SIGTERM, SIGINT or SIGKILL to the launcher ends all ranks."""
    need_mpi()
    script = tmp_path / "script.py"
    script.write_text(SLEEPERS)
    with subprocess.Popen(
        [sys.executable, "-m", "weftplan", "launch", "-n", "2", "--elastic", "--restarts", "1", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as job:
        assert job.stdout is not None
        ranks = [job.stdout.readline().split() for _ in range(2)]
        assert {int(line[2]) for line in ranks} == {job.pid}
        job.send_signal(number)
        assert job.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
        until = time.monotonic() + 30
        while any(is_running(int(line[1])) for line in ranks):
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_rank_whose_children_live_on_is_lost(tmp_path: Path, expected_weights: str):
    """The others notice the exit of a rank whose forked child lives on, because the child closes its connections."""
    done = run_job(tmp_path / "job", RANKS, {"1 1 1": "fork"}, restarts=1, WEFTPLAN_KVSTORE_TIMEOUT="600")
    assert check_replacements(done, 1) == expected_weights
    assert not (tmp_path / "job" / "waited").exists()


def rank_processes(launcher: int) -> dict[int, int]:
    """Return the process ids of the running ranks that ``launcher``, a process id, has started, by rank."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = dict(
                part.split(b"=", 1) for part in (folder / "environ").read_bytes().split(b"\0") if b"=" in part
            )
            if variables.get(b"_WEFTPLAN_ELASTIC_STARTER") == str(launcher).encode():
                processes[int(variables[b"OMPI_COMM_WORLD_RANK"])] = int(folder.name)
    return processes


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_the_example_of_the_document(tmp_path: Path):
    """The script of docs/distributed.md prints the same weights with and without a killed rank."""
    need_mpi()
    section = (ROOT / "docs" / "distributed.md").read_text().partition("## Elastic jobs")[2]
    (example,) = re.findall(r"^```python skip\n(.*?)^```$", section.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(example)
    ends = []
    for killed in (False, True):
        with subprocess.Popen(
            [sys.executable, "-m", "weftplan", "launch", "-n", "2", "--restarts", "1", "--elastic", "train.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as job:
            assert job.stdout is not None
            if killed:
                while (line := job.stdout.readline()) != "epoch 1\n":
                    assert line, job.communicate()
                os.kill(rank_processes(job.pid)[1], signal.SIGKILL)
            output, errors = job.communicate(timeout=100)
        assert job.returncode == 0, errors
        assert ("rank 1 starts again and joins the others" in errors) is killed, errors
        ends += [line for line in output.split("\n") if line.startswith("sum of the weights")]
    assert len(ends) == 4
    assert len(set(ends)) == 1
