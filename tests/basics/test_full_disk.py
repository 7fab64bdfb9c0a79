"""A full disk: results are printed before the error, errors name the file, and no partial file remains."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import weftplan as mx
from weftplan.cli import main
from weftplan.convert import save_safetensors
from weftplan.planner import MemoryPlan
from weftplan.support.atomic_files import put, replacing, write_text

PACKAGE = Path(mx.__file__).parent
ROOM = 64 << 10

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 64 KiB with 4 KiB free, and return its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "none", str(folder)], capture_output=True, timeout=100
    )
    if mounted.returncode:
        pytest.skip("only root can make a small file system")
    try:
        (folder / "filler").write_bytes(bytes(ROOM - 4096))
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=100)


def network() -> mx.sym.Symbol:
    """Return a network whose weights are larger than the disk."""
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=300), name="softmax")


def large_plan() -> MemoryPlan:
    """Return a plan whose page and JSON are larger than the disk."""
    return mx.models.get("resnet18").plan(data=(1, 3, 224, 224))


def trained_module() -> mx.mod.Module:
    """Return a module with parameters and momenta larger than the disk."""
    module = mx.mod.Module(network())
    data = mx.io.NDArrayIter(np.zeros((4, 200), np.float32), np.zeros(4), 4)
    module.fit(data, num_epoch=1, optimizer_params={"learning_rate": 0.1, "momentum": 0.9})
    return module


def deep_symbol() -> mx.sym.Symbol:
    """Return a symbol whose JSON is larger than the disk."""
    symbol = mx.sym.Variable("data")
    for number in range(2000):
        symbol = mx.sym.relu(symbol, name=f"relu{number}")
    return symbol


def write_index(path: Path) -> None:
    """Write records whose index is larger than the disk; the records go to /dev/null."""
    record = mx.recordio.MXIndexedRecordIO(path, os.devnull, "w", key_type=str)
    for number in range(200):
        record.write_idx(f"{number:0400}", b"x")
    record.close()


WRITERS: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: write_text(path, "x" * ROOM),
    "put": lambda path: put(os.fspath(path), bytes(ROOM)),
    "nd.save": lambda path: mx.nd.save(path, mx.nd.zeros((ROOM,))),
    "symbol": lambda path: deep_symbol().save(path),
    "states": lambda path: trained_module().save_optimizer_states(path),
    "parameters": lambda path: trained_module().save_params(path),
    "safetensors": lambda path: save_safetensors(path, trained_module().get_params()[0], {}),
    "plot_network": lambda path: mx.viz.plot_network(deep_symbol()).save(os.fspath(path)),
    "index": write_index,
    "plan picture": lambda path: large_plan().plot(path, title="a plan"),
    "snapshot page": lambda path: mx.storage.snapshot().to_html(path),
}


@pytest.mark.parametrize("present", [False, True])
@pytest.mark.parametrize("case", WRITERS)
def test_a_file_is_whole_or_as_before(case: str, present: bool, disk: Path):
    """On a full disk a writer raises with the file's name; an existing file keeps its content, and no file is added."""
    path = disk / "target.svg"
    if present:
        path.write_bytes(b"as before")
    with pytest.raises(OSError, match=re.escape(os.fspath(path))) as caught:
        WRITERS[case](path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, os.fspath(path))
    assert sorted(os.listdir(disk)) == ["filler", *(["target.svg"] if present else [])]
    assert not present or path.read_bytes() == b"as before"


def test_errors_name_the_file():
    """An error in a special file gets the file's name; an error with another file or without errno is unchanged."""
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"), replacing("/dev/full") as file:
        file.write(b"x")
    for error in (FileNotFoundError(2, "gone", "other"), OSError("words alone")):
        with pytest.raises(OSError, match=re.escape(str(error))) as caught, replacing("/dev/null"):
            raise error
        assert caught.value is error


def test_every_writer_is_atomic():
    """Only the listed modules write files directly; other modules use the atomic writer."""
    appending = {
        "data/recordio.py",
        "training/fit/events.py",
        "support/atomic_files.py",
        "compat/test_utils.py",
    }
    ways = re.compile(
        r"\.write_(text|bytes)\(|\bopen\([^)]*[\"'][wax]b?[\"']|np\.save\w*\((?!held|buffer)|savefig\((?!file)"
    )
    writers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if ways.search(path.read_text(encoding="utf-8"))
    }
    assert writers == {*appending, "support/atomic_files.py", "compat/test_utils.py"}


def run_command(*args: object) -> tuple[str, int]:
    """Run the command line; return (output of both streams, exit code)."""
    done = CliRunner().invoke(main, [str(arg) for arg in args])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output, done.exit_code


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, Path]:
    """Save a checkpoint on another disk; return the paths of its symbol and parameters."""
    trained_module().save_checkpoint(tmp_path / "net", 1)
    return tmp_path / "net-symbol.json", tmp_path / "net-0001.params"


@pytest.mark.parametrize("option", ["--html", "--save", "--picture"])
def test_a_plan_is_printed_first(option: str, disk: Path):
    """The plan is printed, then an error with the file's name, and no partial file remains."""
    output, code = run_command("plan", "resnet18", option, disk / "plan.svg")
    assert code == 1
    assert re.search(rf"planned.*\n[^$]*Error: cannot write {re.escape(str(disk))}/plan\.svg: No space left", output)
    assert os.listdir(disk) == ["filler"]


def test_other_commands_print_first(disk: Path, tmp_path: Path, model: tuple[Path, Path]):
    """inspect, run, convert and pack print their results before the error with the file's name."""
    (tmp_path / "buffers.csv").write_text(
        "id,lower,upper,size\n" + "".join(f"{'b' * 100}{n},{n},{n + 2},8\n" for n in range(900))
    )
    with (disk / "filler").open("ab") as file:
        file.write(bytes(4096))
    np.save(tmp_path / "x.npy", np.zeros((100, 200), np.float32))
    for args, result in (
        (("inspect", *model, "--html", disk / "out"), "fullyconnected"),
        (("run", *model, "--input", tmp_path / "x.npy", "--output", disk / "out"), "softmax_output"),
        (("convert", *model, disk / "out.safetensors"), ""),
        (("pack", tmp_path / "buffers.csv", "--output", disk / "out"), "peak"),
    ):
        output, code = run_command(*args)
        assert code == 1, output
        before, _, after = output.partition("Error: ")
        assert result in before
        assert f"{disk}/out" in after
        assert "No space left on device" in after
        assert os.listdir(disk) == ["filler"]


def test_training_continues_and_prints_its_result(disk: Path, caplog: pytest.LogCaptureFixture):
    """Training continues without space for checkpoints or events, and prints its accuracy before the error."""
    output, code = run_command("train", "--network", "mlp", "--epochs", 2, "--checkpoint", disk / "run", "--every", 20)
    before, _, after = output.partition("Error: ")
    assert code == 1
    assert "test accuracy" in before
    assert f"{disk}/run" in after
    output, code = run_command("train", "--network", "mlp", "--epochs", 2, "--json", "--report", disk / "report")
    before, _, after = output.partition("Error: ")
    assert code == 1
    assert '"test_accuracy"' in before
    assert f"{disk}/report/" in after
    assert [text for text in caplog.messages if "events are no longer written" in text or "could not" in text]
    for path in (disk / "report").iterdir():
        assert path.suffix != ".html"


def test_full_disk_of_standard_output():
    """A full disk for standard output gives exit code 1 and one line of error."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "weftplan", "plan", "lenet"], stdout=full, stderr=subprocess.PIPE,
                              text=True, timeout=200)  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "Error: cannot write the output: No space left on device\n"


def test_failed_close_is_reported_once(disk: Path):
    """A record file that fails to close, and a profile that fails at exit, give one line each and no traceback."""
    code = f"""
import weftplan as mx
second = mx.recordio.MXRecordIO({str(disk / "b.rec")!r}, "w")
second.write(bytes(7000))
record = mx.recordio.MXRecordIO({str(disk / "a.rec")!r}, "w")
try: record.write(bytes(9000))
except OSError as error: print(error)
mx.profiler.set_config(filename={str(disk / "none" / "profile.json")!r})
mx.profiler.set_state("run")
for _ in range(100): mx.nd.zeros((3,)) + 1
mx.profiler.set_state("stop")
try: record.close()
except OSError as error: print(error)
del record, second
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0
    assert set(done.stdout.splitlines()) == {f"[Errno 28] No space left on device: '{disk}/a.rec'"}
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert [line.partition(": ")[0] for line in done.stderr.splitlines()] == [
        f"{disk}/b.rec was not closed",
        "the profile was not written",
    ]
