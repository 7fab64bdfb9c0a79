"""A program that fails does not leave: the others stop, and a restarted job has the bits of an unbroken one."""

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
    "terminated": ("os.kill(os.getpid(), signal.SIGTERM)", "rank 1 died"),
}


@pytest.mark.parametrize("store", ["dist_sync", "dist_device_sync"])
@pytest.mark.parametrize("end", ENDS)
def test_the_others_hear_of_a_failure(tmp_path: Path, end: str, store: str):
    """They get an error that names the rank and its error, and never a sum of fewer processes."""
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
            heard = os.path.join(os.environ["FOLDER"], "heard")
            open(heard + str(rank), "w").close()
            while not all(os.path.exists(heard + str(other)) for other in (0, 2)):
                time.sleep(0.01)  # a status of the failed rank counts as two ends, which ends the job
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        ok=False,
        FOLDER=str(tmp_path),
        STORE=store,
        WEFTPLAN_KVSTORE_TIMEOUT="20",
    )
    assert sorted(done.stdout.split("\n")[:-1]) == ["heard 0", "heard 2"], done.stdout + done.stderr


@pytest.mark.parametrize("end", ["exception", "status", "killed"])
def test_a_failure_is_an_error_of_dist_async(tmp_path: Path, end: str):
    """Also of keys that other servers have; the advice is one that this store can follow."""
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
            folder = os.environ["FOLDER"]
            open(os.path.join(folder, f"told {{rank}}"), "w").close()
            until = time.monotonic() + 20  # its death would end the other survivor, too
            while sum(name.startswith("told") for name in os.listdir(folder)) < 2 and time.monotonic() < until:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        ok=False,
        FOLDER=str(tmp_path),
        STORE="dist_async",
        WEFTPLAN_KVSTORE_TIMEOUT="20",
    )
    assert sorted(done.stdout.split("\n")[:-1]) == ["heard 0", "heard 2"], done.stdout + done.stderr


def test_the_others_may_go_on_after_an_exception(tmp_path: Path):
    """After recover() their sums are those of two processes, and the failed one has ended meanwhile."""
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


TRAINING = """
import hashlib, os, signal, sys
import numpy as np
import weftplan as mx
from weftplan.training.data.worker_share import PartOfBatchIter

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
    """Run ``weftplan launch`` to its end."""
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


def trained(folder: Path, statement: str, restarts: int) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Return the job of :data:`TRAINING` whose rank 1 runs ``statement`` once, and the weights at its ends."""
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(TRAINING.replace("STATEMENT", statement))
    done = launched(folder, "-n", "2", "--restarts", str(restarts), str(script), str(folder / "run"))
    return done, [line for line in done.stdout.split("\n") if line.startswith("weights")]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the final weights of a job without failures."""
    done, weights = trained(tmp_path_factory.mktemp("whole") / "job", "pass", 0)
    assert done.returncode == 0, done.stderr
    assert len(weights) == 2
    assert len(set(weights)) == 1
    return weights


@pytest.mark.parametrize("end", ["exception", "status", "_exit", "_exit 0", "killed", "terminated"])
def test_a_restarted_job_has_the_bits_of_an_unbroken_one(tmp_path: Path, unbroken: list[str], end: str):
    """Every way to fail counts for --restarts, and no step was made with sums of fewer processes."""
    done, weights = trained(tmp_path / "job", ENDS[end][0], 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert weights == unbroken, done.stderr
    told = ENDS[end][1] if "by" in ENDS[end][1] else "rank 1 ended in the middle of its program"
    assert f"weftplan launch: {told}" in done.stderr
    assert "restart 1 of 1" in done.stderr


@pytest.mark.parametrize("end", ["exception", "status", "_exit", "killed"])
def test_without_restarts_a_failure_ends_the_job(tmp_path: Path, end: str):
    """No rank comes to its end, the job's status is not 0, and the rank is named."""
    done, weights = trained(tmp_path / "job", ENDS[end][0], 0)
    assert done.returncode == (3 if end == "status" else 1), done.stderr
    assert weights == []
    told = ENDS[end][1] if "by" in ENDS[end][1] else "rank 1 ended in the middle of its program"
    assert f"weftplan launch: {told}" in done.stderr
