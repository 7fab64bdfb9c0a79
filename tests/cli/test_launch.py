"""``weftplan launch``: the mpiexec command line, and training over several processes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.test_train import FEW
from tests.kvstore.ranks import need_mpi
from weftplan.cli import main
from weftplan.cli.launch.command import command
from weftplan.cli.launch.mpiexec import mpiexec_command
from weftplan.cli.launch.record import Record
from weftplan.cli.train import tasks as train_tasks
from weftplan.kvstore.distributed.transport.mpi import TCP, environment

ROOT = Path(__file__).parents[2]


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Programs run in this Python; options after the program are the program's; a host file is passed on."""
    need_mpi()
    hosts = tmp_path / "hosts"
    hosts.write_text("one\ntwo\n")
    result = mpiexec_command(3, hosts, ("train.py", "-n", "7"))
    rank = [sys.executable, "-m", "weftplan.cli.launch.rank", "-", "recovers"]
    assert result[-10:] == ["-n", "3", *rank, "train.py", "-n", "7"]
    assert "btl" not in result  # no restriction to shared memory
    assert result[result.index("--hostfile") + 1] == str(hosts)
    alone = mpiexec_command(1, None, ("weftplan", "doctor"))
    assert alone[-8:] == [*rank, "-m", "weftplan", "doctor"]
    assert alone[alone.index("btl") + 1] == "self,sm"
    module = CliRunner().invoke(command, ["-n", "2", "--dry-run", "-m", "json.tool", "--help"])
    assert module.output.endswith(f"{' '.join(rank)} -m json.tool --help\n")
    shown = CliRunner().invoke(command, ["-n", "2", "--dry-run", "hostname", "--help"])
    assert shown.exit_code == 0
    assert shown.output.endswith("-n 2 hostname --help\n")


@pytest.mark.parametrize("own", [None, "put"])
def test_tcp_flags(monkeypatch: pytest.MonkeyPatch, own: str | None):
    """Open MPI's btl_tcp_flags is set to send by TCP in pieces, unless the user has set it."""
    need_mpi()
    monkeypatch.delenv(TCP, raising=False)
    if own is not None:
        monkeypatch.setenv(TCP, own)
    actual = mpiexec_command(2, None, ("weftplan",))
    place = actual.index("btl_tcp_flags")
    assert actual[place - 1 : place + 2] == ["--mca", "btl_tcp_flags", own or "send,inplace"]
    assert environment()[TCP] == actual[place + 1]


def test_without_mpiexec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Without mpiexec the error names the package to install; a missing -n is a usage error."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    failed = CliRunner().invoke(command, ["-n", "2", "x.py"])
    assert failed.exit_code == 1
    assert "pip install 'weftplan[mpi]'" in failed.output
    assert CliRunner().invoke(command, ["x.py"]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-np", "3", "hostname"], " -n 3 hostname"),
        (["-n3", "hostname"], " -n 3 hostname"),
        (["--nproc", "2", "x.py"], "no option '--nproc'"),
        (["-n", "2", "--host", "x.py"], "no option '--host'"),
        (["x.py"], "give -n, the number of processes"),
    ],
    ids=" ".join,
)
def test_options_of_other_launchers(arguments: list[str], words: str):
    """``-np`` means ``-n``; an option that launch does not have is named before any process starts."""
    need_mpi()
    done = CliRunner().invoke(command, ["--dry-run", *arguments])
    assert words in " ".join(done.output.split()), done.output
    assert done.exit_code == (0 if "hostname" in arguments else 2)


@pytest.mark.parametrize("shares", [True, False])
def test_silent_ranks_beside_a_failure(tmp_path: Path, shares: bool):
    """Mpiexec ends the others of a program that fails before it starts MPI, so they are not told as failures."""
    file = tmp_path / "record"
    file.write_text(json.dumps({"rank": 1, "status": 2, "why": "sys.exit(2)", "shares": shares, "late": []}) + "\n")
    silent = ["rank 0 ended in the middle of its program, by a signal or os._exit"] * shares
    assert Record(file).failures(2, set()) == [*silent, "rank 1 ended by sys.exit(2)"]


@pytest.mark.parametrize("name", ["missing.py", "no-such-program"])
def test_a_program_that_is_not_there_is_named_once(name: str):
    """A missing program exits with 2 before any process starts; the error names it once."""
    need_mpi()
    failed = CliRunner().invoke(command, ["-n", "2", name])
    assert failed.exit_code == 2
    assert failed.output.count(repr(name)) == 1


def test_a_pipe_gets_plain_lines_and_a_store_of_one_process_a_warning():
    """Output to a pipe has no escape sequences; the store ``device`` in two processes gives one warning."""
    need_mpi()
    options = ("train", "--network", "mlp", "--epochs", "1", "--devices", "1", "--kvstore", "device")
    job = [sys.executable, "-m", "weftplan", "launch", "-n", "2", "weftplan", *options]
    ran = subprocess.run(job, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "test accuracy" in ran.stdout
    assert "\x1b" not in ran.stdout
    assert (ran.stdout + ran.stderr).count("exchanges nothing between the 2 processes of this job") == 1


def json_in_process(*arguments: str) -> dict[str, object]:
    """Run a command in this process and return its JSON."""
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def run_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a subprocess, check that it succeeds, and return it with its output."""
    done = subprocess.run(
        [sys.executable, "-m", "weftplan", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_dist_sync_without_launch():
    """``dist_sync`` without ``weftplan launch`` trains alone; a line says so and names the command."""
    need_mpi()
    if importlib.util.find_spec("sklearn") is None:
        pytest.skip("needs scikit-learn")
    told = run_command("train", "--network", "mlp", "--epochs", "1", "--kvstore", "dist_sync").stdout
    assert "kvstore dist_sync of this process alone (weftplan launch starts several)" in " ".join(told.split())


def test_digits_over_processes_and_over_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Four processes, four devices, and one device with four micro-batches give the same weight bits."""
    need_mpi()
    if importlib.util.find_spec("sklearn") is None:
        pytest.skip("needs scikit-learn")
    arguments = ("train", "--network", "mlp", "--epochs", "1", "--json")
    monkeypatch.setattr(train_tasks, "load_digits", train_tasks.load_digits)  # restored after the test
    exec(FEW, {})
    devices = json_in_process(*arguments, "--devices", "4", "--kvstore", "device")
    pieces = json_in_process(*arguments, "--devices", "1", "--micro-batches", "4")
    script = tmp_path / "few.py"
    script.write_text(f"{FEW}\nfrom weftplan.cli import main\n\nmain()\n")
    processes = json.loads(
        run_command("launch", "-n", "4", script, *arguments, "--devices", "1", "--kvstore", "dist_sync").stdout
    )
    assert processes["workers"] == 4
    assert processes["weights_sha256"] == devices["weights_sha256"] == pieces["weights_sha256"]
    assert processes["test_accuracy"] == devices["test_accuracy"]


DYING = """
import os, signal, sys
import numpy as np
import weftplan as mx
from weftplan.data.worker_share import PartOfBatchIter

def train(store, part, contexts, **settings):
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="f"), name="softmax")
    module = mx.mod.Module(net, context=contexts)
    module.fit(part, kvstore=store, num_epoch=4, optimizer_params={"learning_rate": 0.1, "momentum": 0.9}, **settings)
    return module.get_params()[0]["f_weight"].asnumpy().tobytes()

def batches():
    mx.random.seed(5)
    data = np.random.default_rng(0).standard_normal((64, 6)).astype("f4")
    return mx.io.NDArrayIter(data, np.arange(64) % 3, batch_size=16)

folder, store = sys.argv[1], mx.kv.create("dist_sync")

def end(param):
    once = os.path.join(folder, "died")
    if store.rank == 1 and (param.epoch, param.nbatch) == (2, 1) and not os.path.exists(once):
        open(once, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

part = PartOfBatchIter(batches(), rank=store.rank, num_workers=store.num_workers)
weights = train(store, part, mx.cpu(), batch_end_callback=end, checkpoint=folder + "/run", every=1, resume=True)
assert weights == train(mx.kv.create("device"), batches(), [mx.cpu(0), mx.cpu(1)])
print("same bits")
"""


def test_a_job_that_is_started_again_ends_with_the_same_bits(tmp_path: Path):
    """If a process is killed, all restart from the newest checkpoint and end with the bits of an unbroken run."""
    need_mpi()
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    done = run_command("launch", "-n", "2", "--restarts", "1", script, tmp_path)
    assert done.stderr.count("restart 1 of 1") == 1
    assert done.stdout.count("same bits") == 2
    assert len(list(tmp_path.glob("run-step*.safetensors"))) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_no_process_outlives_the_command(tmp_path: Path):
    """If a process fails, ``launch`` ends the others before it exits with the process's code."""
    need_mpi()
    script, mark = tmp_path / "uneven.py", tmp_path / "process"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "mark = pathlib.Path(sys.argv[1])\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
        "    while not mark.exists() or not mark.read_text(): time.sleep(0.01)\n"
        "    sys.exit(4)\n"
        "mark.write_text(str(os.getpid()))\n"
        "time.sleep(100)\n"
    )
    arguments = [sys.executable, "-m", "weftplan", "launch", "-n", "2", str(script), str(mark)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4, done.stderr
    with contextlib.suppress(OSError):  # a zombie has no environment
        assert not Path("/proc", mark.read_text(), "environ").read_bytes()
