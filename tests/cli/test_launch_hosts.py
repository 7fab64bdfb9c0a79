"""``weftplan launch --hostfile`` over emulated hosts, as a user types it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kvstore.ranks import need_mpi
from tests.stress.hosts import emulated
from weftplan.cli.launch.mpiexec import mpiexec_command

ROOT = Path(__file__).parents[2]
SUM = """
import os, socket, sys
import weftplan as mx
kv = mx.kv.create("dist_sync")
kv.init("w", mx.nd.zeros((3000,)))
kv.push("w", mx.nd.full((3000,), 2.0 ** kv.rank))
out = mx.nd.empty((3000,))
kv.pull("w", out=out)
sys.stdout.write(f"rank {kv.rank} {socket.gethostname()} {out.asnumpy().max():g} {kv.shares_memory}\\n")
"""


@pytest.mark.parametrize(
    ("slots", "ranks", "first"),
    [(None, 2, 1), (None, 4, 2), (1, 2, 1), (1, 4, 2), (2, 4, 2), (3, 4, 3)],
    ids=lambda value: str(value),
)
def test_ranks_are_spread_over_the_hosts(tmp_path: Path, slots: int | None, ranks: int, first: int):
    """Two hosts share the ranks, equally or by their slots; a line for each host says how many, and the sums are right.

    More ranks than slots are spread, too.
    """
    need_mpi()
    script = tmp_path / "script.py"
    script.write_text(SUM)
    with emulated(2, slots) as hosts:
        command = [sys.executable, "-m", "weftplan", "launch", "-n", str(ranks), "--hostfile", str(hosts.file)]
        job = subprocess.Popen(
            hosts.on_first([*command, str(script)]),
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = job.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            hosts.end()
            pytest.fail(f"no end after 100 s: {job.communicate()}")
        names = hosts.names
    assert job.returncode == 0, output + errors
    lines = [line.split() for line in output.splitlines() if line.startswith("rank ")]
    assert sorted(int(line[1]) for line in lines) == list(range(ranks))
    where = [line[2] for line in lines]
    assert [where.count(name) for name in names] == [first, ranks - first], output
    assert {tuple(line[3:]) for line in lines} == {(str(2**ranks - 1), "False")}
    for name in names:
        assert f"weftplan launch: {where.count(name)} of {ranks} ranks on {name}\n" in errors


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("one\ntwo\n", "node"),
        ("one slots=2\ntwo slots=1\n", "slot"),
        ("one # slots=2\ntwo\n", "node"),
        ("one slots = 2\n", "slot"),
    ],
)
def test_the_rule_of_the_mapping(tmp_path: Path, text: str, rule: str):
    """Ranks fill slots if the file of hosts has any, and are else spread over the hosts in turn."""
    need_mpi()
    (tmp_path / "hosts").write_text(text)
    command = mpiexec_command(2, tmp_path / "hosts", ("train.py",))
    assert command[command.index("--map-by") + 1] == f"{rule}:OVERSUBSCRIBE"
    assert "--oversubscribe" not in command
