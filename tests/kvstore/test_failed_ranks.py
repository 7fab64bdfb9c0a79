"""Ranks that fail: the other ranks get an error, and a restarted job ends with the expected weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kvstore.ranks import need_mpi, run_ranks

ROOT = Path(__file__).parents[2]

ENDS = {
    "exception": ("raise OSError('cannot read image 17')", "rank 1 ended by OSError: cannot read image 17"),
    "status": ("sys.exit(3)", "rank 1 ended by sys.exit(3)"),
    "text": ("raise SystemExit('no images')", "rank 1 ended by sys.exit: no images"),
    "close": ("fail_and_close()", "rank 1 ended by OSError: cannot read"),
    "_exit": ("os._exit(1)", "rank 1 died"),
    "_exit 0": ("os._exit(0)", "rank 1 died"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 died"),
    "terminated": (
        "signal.signal(signal.SIGTERM, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGTERM)",
        "rank 1 died",
    ),
}


@pytest.mark.parametrize("store", ["dist_sync", "dist_device_sync"])
@pytest.mark.parametrize("end", ENDS)
def test_the_others_hear_of_a_failure(tmp_path: Path, end: str, store: str):
    """The other ranks get an error that names the rank and its failure, and never a sum over fewer processes."""
    statement, words = ENDS[end]
    done = run_ranks(
        tmp_path,
        3,
        f"""
        def fail_and_close():
            try:
                raise OSError("cannot read")
            finally:
                kv.close()

        kv.init("w", mx.nd.zeros((3,)))
        try:
            for step in range(200):
                if step == 5 and rank == 1:
                    {statement}
                kv.push("w", mx.nd.ones((3,)))
                assert value("w").tolist() == [3, 3, 3], value("w")
        except WorkerLostError as error:
            assert {words!r} in str(error), error
            print("heard", rank, flush=True)
            meet("heard", [0, 2])  # with an exit status, the launcher takes a failed rank for two and ends the job
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        ok=False,
        STORE=store,
        WEFTPLAN_KVSTORE_TIMEOUT="20",
    )
    assert sorted(done.stdout.split("\n")[:-1]) == ["heard 0", "heard 2"], done.stdout + done.stderr


@pytest.mark.parametrize("end", ["exception", "status", "killed"])
def test_a_failure_is_an_error_of_dist_async(tmp_path: Path, end: str):
    """In ``dist_async`` the other ranks get an error that describes the failure and does not advise ``recover``."""
    statement, words = ENDS[end]
    done = run_ranks(
        tmp_path,
        3,
        f"""
        kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
        kv.init(0, mx.nd.zeros((4,)))  # on the server of rank 0
        kv.barrier()
        try:
            for step in range(10**6):
                if step == 5 and rank == 1:
                    {statement}
                kv.push(0, mx.nd.ones((4,)))
                value(0, (4,))
        except WorkerLostError as error:
            assert {words!r} in str(error) and "recover" not in str(error), error
            print("heard", rank, flush=True)
            meet("heard", [0, 2])  # the exit of one survivor would end the other one, too
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        ok=False,
        STORE="dist_async",
        WEFTPLAN_KVSTORE_TIMEOUT="20",
    )
    assert sorted(done.stdout.split("\n")[:-1]) == ["heard 0", "heard 2"], done.stdout + done.stderr


def test_the_others_may_go_on_after_an_exception(tmp_path: Path):
    """After an exception on rank 1 the others recover and sum over two processes; the job exits with status 1."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, sys, time
import weftplan as mx
kv = mx.kv.create("dist_sync")
pid = os.path.join({str(tmp_path)!r}, "pid")
kv.init("w", mx.nd.zeros((3,)))
out = mx.nd.empty((3,))
if kv.rank == 1:
    open(pid, "w").write(str(os.getpid()))
    raise OSError("cannot read image 17")
kv.push("w", mx.nd.ones((3,)))
try:
    kv.pull("w", out=out)
    out.wait_to_read()
except mx.base.WorkerLostError:
    assert kv.recover() == 2
until = time.monotonic() + 20
while os.path.exists("/proc/" + open(pid).read()) and time.monotonic() < until:
    time.sleep(0.01)
assert time.monotonic() < until
kv.push("w", mx.nd.ones((3,)))
kv.pull("w", out=out)
print("went on", out.asnumpy().tolist(), flush=True)
""")
    done = launched(tmp_path, "-n", "3", str(script))
    assert done.stdout.count("went on [2.0, 2.0, 2.0]") == 2, done.stdout + done.stderr
    assert done.returncode == 1
    assert "weftplan launch: rank 1 ended by OSError: cannot read image 17" in done.stderr


LEAVING = """
import sys
import numpy as np
import weftplan as mx

kv = mx.kv.create("dist_sync")
data = mx.io.NDArrayIter(np.ones((40, 4), "f4"), np.zeros(40, "f4"), batch_size=4)
net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4), name="softmax")

def leave(param):
    if kv.rank == 1 and f"{param.epoch} {param.nbatch}" == sys.argv[1]:
        sys.exit(0)

mx.mod.Module(net).fit(data, kvstore=kv, num_epoch=2, batch_end_callback=leave)
kv.barrier()
print("trained", kv.num_workers)
"""


@pytest.mark.parametrize("arguments", [[], ["--elastic", "--restarts", "1"]], ids=["mpi", "elastic"])
def test_a_rank_that_leaves_fit_is_named_by_the_others(tmp_path: Path, arguments: list[str]):
    """After ``sys.exit(0)`` within ``fit`` the others go on, and each names the rank and the batch on stderr."""
    script = tmp_path / "script.py"
    script.write_text(LEAVING)
    done = launched(tmp_path, "-n", "3", *arguments, str(script), "1 3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["trained 2", "trained 2", ""]
    words = "rank 1 has left in epoch 1, after 4 batches; the other ranks, 2 of them, go on"
    assert done.stderr.count(words) == 2, done.stderr
    done = launched(tmp_path, "-n", "2", *arguments, str(script), "never")
    assert "has left" not in done.stderr, done.stderr


TRAINING = """
import hashlib, os, signal, sys
import numpy as np
import weftplan as mx
from weftplan.data.worker_share import PartOfBatchIter

prefix = sys.argv[1]
kv = mx.kv.create("dist_sync")
mx.random.seed(0)
rng = np.random.default_rng(0)
data = rng.standard_normal((200, 20)).astype("f4")
batches = mx.io.NDArrayIter(data, data[:, :10].argmax(1).astype("f4"), batch_size=20, shuffle=True)
part = PartOfBatchIter(batches, rank=kv.rank, num_workers=kv.num_workers)
net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=10), name="softmax")

def fail(param):
    if kv.rank == 1 and (param.epoch, param.nbatch) == (1, 3) and not os.path.exists(prefix + ".failed"):
        open(prefix + ".failed", "w").close()
        STATEMENT

module = mx.mod.Module(net)
module.fit(part, kvstore=kv, num_epoch=4, batch_end_callback=fail, optimizer_params={"learning_rate": 0.1},
           checkpoint=prefix, every=5, resume=True)
weights = module.get_params()[0]
found = hashlib.sha256(b"".join(weights[key].asnumpy().tobytes() for key in sorted(weights))).hexdigest()
print("weights", kv.num_workers, found, flush=True)
"""


def launched(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``weftplan launch`` with ``arguments`` in ``folder`` and return the finished process.

    ``variables`` are environment variables. The process is killed after 110 s.
    """
    need_mpi()
    return subprocess.run(
        [sys.executable, "-m", "weftplan", "launch", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def run_training(folder: Path, statement: str, restarts: int) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the program ``TRAINING`` on two ranks; rank 1 executes ``statement`` once.

    Returns:
        The finished launcher and the lines with the final weights, one for each rank that reached its end.
    """
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(TRAINING.replace("STATEMENT", statement))
    done = launched(folder, "-n", "2", "--restarts", str(restarts), str(script), str(folder / "run"))
    return done, [line for line in done.stdout.split("\n") if line.startswith("weights")]


@pytest.fixture(scope="module")
def expected_weights(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the lines with the final weights of a job without failures."""
    done, weights = run_training(tmp_path_factory.mktemp("whole") / "job", "pass", 0)
    assert done.returncode == 0, done.stderr
    assert len(weights) == 2
    assert len(set(weights)) == 1
    return weights


@pytest.mark.parametrize("end", ["exception", "status", "_exit", "_exit 0", "killed", "terminated"])
def test_restarted_job_has_the_bits_of_one_without_failures(tmp_path: Path, expected_weights: list[str], end: str):
    """After each kind of failure the launcher restarts the job, which ends with the expected weights."""
    done, weights = run_training(tmp_path / "job", ENDS[end][0], 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights == expected_weights, done.stderr
    told = ENDS[end][1] if "by" in ENDS[end][1] else "rank 1 ended in the middle of its program"
    assert f"weftplan launch: {told}" in done.stderr
    assert "restart 1 of 1" in done.stderr


@pytest.mark.parametrize("end", ["exception", "status", "_exit", "killed"])
def test_without_restarts_a_failure_ends_the_job(tmp_path: Path, end: str):
    """Without restarts no rank reaches its end; the launcher names the failed rank and exits with its status or 1."""
    done, weights = run_training(tmp_path / "job", ENDS[end][0], 0)
    assert done.returncode == (3 if end == "status" else 1), done.stderr
    assert weights == []
    told = ENDS[end][1] if "by" in ENDS[end][1] else "rank 1 ended in the middle of its program"
    assert f"weftplan launch: {told}" in done.stderr
