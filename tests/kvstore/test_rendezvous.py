"""``Gathering`` detects which processes of this host have arrived and which have exited, without MPI."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from weftplan.kvstore.distributed.transport.rendezvous import Gathering

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="socket names without a file exist on Linux only")

OTHER = """
import os, sys
from weftplan.kvstore.distributed.transport.rendezvous import Gathering
os.environ["OMPI_COMM_WORLD_RANK"] = sys.argv[1]
place = Gathering("test")
print("here", place.missing(), flush=True)
sys.stdin.readline()
os._exit(5)
"""


def test_missing_and_ended_ranks(monkeypatch: pytest.MonkeyPatch):
    """A rank is missing until it creates the same ``Gathering``; the second check after its exit reports the exit."""
    for name, value in (("SIZE", "3"), ("RANK", "0"), ("LOCAL_SIZE", "3")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("PMIX_NAMESPACE", f"test of {time.monotonic_ns()}")
    here = Gathering("test")
    assert (here.missing(), here.size, here.local_size) == ([1, 2], 3, 3)
    command = [sys.executable, "-c", OTHER, "2"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as second:
        assert second.stdin is not None
        assert second.stdout is not None
        assert second.stdout.readline() == "here [1]\n"
        elsewhere = Gathering("another place")
        assert elsewhere.missing() == [1, 2]
        elsewhere.close()
        assert here.missing() == [1]
        assert here.ended() == here.ended() == set()
        second.stdin.write("\n")
        second.stdin.close()
        assert second.wait(timeout=60) == 5
    assert [here.ended(), here.ended()] == [set(), {2}]
    here.close()
    assert (here.missing(), here.ended()) == ([], set())


def test_without_a_launcher_no_rank_is_missing(monkeypatch: pytest.MonkeyPatch):
    """Without a launcher no other process is missing, and none has ended."""
    monkeypatch.delenv("PMIX_NAMESPACE", raising=False)
    place = Gathering("test")
    assert (place.missing(), place.ended()) == ([], set())
