"""Killed launchers, stores of one process, and scripts under ``weftplan launch``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import weftplan as mx
from tests.kvstore.ranks import need_mpi, run_ranks
from tests.kvstore.test_failed_ranks import ROOT, launched
from weftplan.cli.launch.mpiexec import mpiexec_command
from weftplan.errors import KVStoreError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


def is_running(process: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("killed", ["launch", "mpiexec"])
@pytest.mark.parametrize("store", ["local", "dist_sync"])
def test_ranks_end_with_what_has_started_them(tmp_path: Path, store: str, killed: str):
    """After SIGKILL of ``weftplan launch`` or of its mpiexec, every rank exits."""
    need_mpi()
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, time
import weftplan as mx
kv = mx.kv.create({store!r})
print("rank", os.getpid(), os.getppid(), flush=True)
time.sleep(100)
""")
    command = [sys.executable, "-m", "weftplan", "launch", "-n", "2", str(script)]
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as job:
        assert job.stdout is not None
        ranks = [job.stdout.readline().split() for _ in range(2)]
        assert [line[0] for line in ranks] == ["rank", "rank"], ranks
        (mpiexec,) = {int(line[2]) for line in ranks}
        os.kill(job.pid if killed == "launch" else mpiexec, signal.SIGKILL)
        processes = [int(line[1]) for line in ranks] + [mpiexec]
        until = time.monotonic() + 30
        while left := [process for process in processes if is_running(process)]:
            if time.monotonic() > until:
                for process in left:
                    os.kill(process, signal.SIGKILL)
                pytest.fail(f"still there: {left} of {processes}")
            time.sleep(0.05)


HUNG = """
import os, signal, sys, time
import weftplan as mx
when, how = sys.argv[1:]
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])

def hang():
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "deaf" else signal.SIG_DFL)
    time.sleep(100)

if when == "start" and rank == 1:
    hang()
kv = mx.kv.create("dist_sync")
kv.init("w", mx.nd.zeros((4,)))
for step in range(6):
    if step == 3 and rank == 2 and when == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 3 and rank == 1:
        hang()
    kv.push("w", mx.nd.ones((4,)))
    kv.barrier()
print("over", flush=True)
"""


@pytest.mark.parametrize(
    ("when", "how", "number"),
    [
        ("fit", "stopped", "SIGTERM"),
        ("fit", "hung", "SIGTERM"),
        ("fit", "deaf", "SIGKILL"),
        ("start", "stopped", "SIGTERM"),
        ("killed", "hung", "SIGTERM"),
    ],
)
def test_a_rank_that_keeps_the_job_is_ended(tmp_path: Path, when: str, how: str, number: str):
    """When all ranks but a hung one have ended, the launcher ends it and says so; the job's status is the others'."""
    script = tmp_path / "script.py"
    script.write_text(HUNG)
    done = launched(tmp_path, "-n", "3", str(script), when, how, WEFTPLAN_KVSTORE_TIMEOUT="3")
    assert done.returncode == 1, done.stderr
    assert f"rank 1 did not answer, and the others have ended: ended by {number}" in done.stderr, done.stderr
    assert "rank 1 ended in the middle" not in done.stderr
    assert ("rank 2 ended in the middle" in done.stderr) is (when == "killed")


def test_a_rank_that_recovers_alone_goes_on(tmp_path: Path):
    """A rank that recovers is not ended, although it is the last one and the others ended by the same loss."""
    script = tmp_path / "script.py"
    script.write_text("""
import os, signal, time
import weftplan as mx
kv = mx.kv.create("dist_sync")
rank = kv.rank
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    kv.barrier()
except mx.base.WorkerLostError:
    if rank == 0:
        raise
while rank == 1 and kv.num_workers > 1:
    try:
        kv.recover()
        kv.barrier()
    except mx.base.WorkerLostError:
        pass
time.sleep(6)
print("over", flush=True)
""")
    done = launched(tmp_path, "-n", "3", str(script), WEFTPLAN_KVSTORE_TIMEOUT="2")
    assert done.stdout.count("over") == 1, done.stderr
    assert "did not answer" not in done.stderr


def test_a_late_rank_goes_on_while_others_run(tmp_path: Path):
    """The launcher ends no rank that comes late but before the end of the others' time."""
    script = tmp_path / "script.py"
    script.write_text(HUNG.replace("time.sleep(100)", "time.sleep(1)"))
    done = launched(tmp_path, "-n", "2", str(script), "fit", "hung", WEFTPLAN_KVSTORE_TIMEOUT="30")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("over") == 2
    assert "ended by" not in done.stderr


def test_next_launch_removes_folders_of_killed_launchers(tmp_path: Path):
    """SIGKILL leaves the launcher's folder; the next launch removes it, but not the folder of a job that still runs."""
    script = tmp_path / "script.py"
    script.write_text("import sys, time; print(flush=True); time.sleep(float(sys.argv[1]))")
    command = [sys.executable, "-m", "weftplan", "launch", "-n", "1", "--restarts", "1", "--elastic", str(script)]
    short = tempfile.TemporaryDirectory(prefix="w")  # a socket's path is short
    folder = Path(short.name)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": short.name}

    def start() -> subprocess.Popen[bytes]:
        job = subprocess.Popen([*command, "20"], env=environment, stdout=subprocess.PIPE)
        assert job.stdout is not None
        assert job.stdout.read(1) == b"\n", job.kill()
        job.stdout.close()
        return job

    with short, start() as killed:
        (left,) = folder.glob("weftplan-job-*")
        with start() as running:
            killed.kill()
            killed.wait()
            subprocess.run([*command, "0"], env=environment, check=True)
            there = list(folder.glob("weftplan-job-*"))
            running.terminate()
        assert len(there) == 1
        assert there != [left]
        assert list(folder.glob("weftplan-job-*")) == []


def test_files_of_a_killed_mpiexec_with_the_same_number(tmp_path: Path):
    """A job starts although an mpiexec that was killed has left the files of its number in the temporary folder."""
    need_mpi()
    host = socket.gethostname().partition(".")[0]
    leave = f'mkdir ompi.$$ && touch ompi.$$/pmix.{host}.tool ompi.$$/pmix.{host}.tool.$$ && exec "$@"'
    job = mpiexec_command(1, None, ("echo", "started"), session=tmp_path / "job")
    done = subprocess.run(
        ["sh", "-c", leave, "sh", *job],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "started\n", done.stderr


@pytest.mark.parametrize(("store", "reported"), [("local", True), ("dist_sync", False)])
def test_processes_that_share_no_store_are_reported(tmp_path: Path, store: str, reported: bool):
    """A job of two processes without a distributed store is reported."""
    script = tmp_path / "script.py"
    script.write_text(f"import weftplan as mx\nkv = mx.kv.create({store!r})\n")
    done = launched(tmp_path, "-n", "2", str(script))
    assert done.returncode == 0
    assert ("no process has created a store of several processes" in done.stderr) is reported, done.stderr


@pytest.mark.parametrize("role", ["worker", "server", "scheduler"])
@pytest.mark.parametrize("store", ["dist_sync", "dist_async", "dist_device_sync"])
def test_a_process_of_the_launcher_of_mxnet_is_refused(monkeypatch: pytest.MonkeyPatch, store: str, role: str):
    """Creating a store raises in a process of MXNet's launcher; the error gives the command to use."""
    monkeypatch.setenv("DMLC_ROLE", role)
    monkeypatch.setenv("DMLC_NUM_WORKER", "4")
    with pytest.raises(KVStoreError, match=r"weftplan launch -n 4 script\.py"):
        mx.kv.create(store)


def test_a_script_runs_as_under_python(tmp_path: Path):
    """A script has the arguments, module path, ``__main__``, pickles and traceback that it has under python."""
    (tmp_path / "beside.py").write_text("number = 7\n")
    script = tmp_path / "script.py"
    script.write_text("""
import pickle, sys
import beside
class Point: pass
if __name__ == "__main__":
    assert isinstance(pickle.loads(pickle.dumps(Point())), Point)
    assert sys.modules["__main__"].Point is Point and __file__.endswith("script.py")
    print(sys.argv[1:], beside.number, flush=True)
    raise ValueError("at the end")
""")
    done = launched(tmp_path, "-n", "1", str(script), "--lr", "1")
    assert done.stdout == "['--lr', '1'] 7\n", done.stderr
    frames = [line.split(",")[0].strip() for line in done.stderr.split("\n") if line.startswith("  File")]
    assert frames == [f'File "{script}"'], done.stderr
    assert done.returncode == 1


def test_on_one_host_no_rank_listens_on_the_network(tmp_path: Path):
    """Ranks on one host have no listening TCP socket."""
    run_ranks(
        tmp_path,
        2,
        """
        kv.init("w", mx.nd.zeros((3000,)))
        kv.push("w", mx.nd.ones((3000,)))
        assert (value("w", (3000,)) == 2).all()
        listening = set()
        for table in ("tcp", "tcp6"):
            for line in open(f"/proc/self/net/{table}").read().split("\\n")[1:-1]:
                words = line.split()
                if words[3] == "0A":
                    listening.add(words[9])
        own = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
               if os.path.islink(f"/proc/self/fd/{name}")}
        assert not {inode for inode in listening if f"socket:[{inode}]" in own}
        kv.barrier()
        """,
    )
