"""A signal to ``weftplan launch`` ends its job. A stand-in for mpiexec prints the signals that it gets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MPIEXEC = """
import os, signal, sys
ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
signal.pthread_sigmask(signal.SIG_BLOCK, ends)
print("ready", os.getpid(), flush=True)
number = signal.sigwait(ends)
print("got", int(number), flush=True)
print("again", int(bool(signal.sigtimedwait(ends, 0.3))), flush=True)  # a second signal would orphan the ranks
sys.exit(7)
"""
COMMAND = """
import sys
from weftplan.cli.launch import command as launch
launch.mpiexec_command = lambda *_, **__: [sys.executable, "-c", sys.argv[1]]
launch.command(["-n", "2", "--restarts", "2", "weftplan"])
"""
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals of POSIX")


def start_launch(stdin: int = subprocess.DEVNULL, first: str = "") -> subprocess.Popen[str]:
    """Start the command with the stand-in in a new session; ``first`` is code that runs before it."""
    return subprocess.Popen(
        [sys.executable, "-c", first + COMMAND, MPIEXEC],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("whole", [False, True], ids=["alone", "group"])
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_job(number: signal.Signals, whole: bool):
    """A signal to the command, or to its process group, reaches mpiexec once; the job is not restarted."""
    with start_launch() as process:
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        (os.killpg if whole else os.kill)(process.pid, number)
        told, errors = process.communicate(timeout=60)
    assert (told, errors) == (f"got {int(number)}\nagain 0\n", "")
    assert process.returncode == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(int(ready[1]), 0)


def test_ctrl_c_on_a_terminal():
    """Ctrl-C on a terminal, which signals mpiexec, too, reaches mpiexec once."""
    terminal, ours = os.openpty()
    with start_launch(ours, "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n") as process:
        os.close(ours)
        assert process.stdout is not None
        process.stdout.readline()
        os.write(terminal, b"\x03")
        told, errors = process.communicate(timeout=60)
    os.close(terminal)
    assert (told, errors) == ("got 2\nagain 0\n", "")
    assert process.returncode == 130


def test_a_job_that_ends_by_itself_is_started_again():
    """A job that fails by itself is restarted as often as requested; the exit code is the last job's."""
    with start_launch() as process:
        for _ in range(3):
            assert process.stdout is not None
            mpiexec = int(process.stdout.readline().split()[1])
            os.kill(mpiexec, signal.SIGTERM)
            assert process.stdout.readline() == "got 15\n"
            assert process.stdout.readline() == "again 0\n"
        told, errors = process.communicate(timeout=60)
    assert told == ""
    assert errors.count("the job ended with status 7") == 2
    assert process.returncode == 7
