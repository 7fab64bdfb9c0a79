"""``weftplan scale``: what is predicted, what it is called, and bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import weftplan as mx
from tests.kvstore.ranks import need_mpi
from weftplan import models
from weftplan.cli import main
from weftplan.errors import KVStoreError
from weftplan.kvstore.scaling import measure


def scale(*args: object) -> Result:
    """Run the command; an exception that is no message fails the test."""
    return CliRunner().invoke(main, ["scale", *map(str, args)], catch_exceptions=False)


def figures(*args: object) -> dict[str, Any]:
    """The command's JSON."""
    result = scale(*args, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_curve_of_workers() -> None:
    """Powers of two between the ends, every gradient of a parameter, and steps that grow with the workers."""
    found = figures("-m", "lenet", "-n", "1..100", "-t", "10gbe")
    assert [row["workers"] for row in found["steps"]] == [1, 2, 4, 8, 16, 32, 64, 100]
    planned = models.get("lenet").plan(models.input_shapes("lenet"))
    assert found["gradient_bytes"] == planned.external_bytes["gradients"]
    times = [row["seconds"] for row in found["steps"]]
    assert times == sorted(times)
    assert times[0] == found["computation_s"]
    assert (found["computation"], found["exchange"]) == ("modelled", "modelled")


def test_every_number_says_what_it_is() -> None:
    """Modelled, or measured by the user."""
    assert "(modelled); exchanges and steps are modelled" in scale("-m", "mlp").output.replace("\n", " ")
    given = figures("-m", "mlp", "-n", "1,3", "--step-ms", 12)
    assert given["computation_s"] == pytest.approx(0.012)
    assert given["computation"].startswith("measured by you")
    assert given["steps"][0]["algorithm"] == "none"


def test_the_picture() -> None:
    """A bar for each number of workers, as long as the step is computation."""
    bars = [line for line in scale("-m", "vgg16", "-n", "1,64", "-t", "10gbe").output.splitlines() if "█" in line]
    assert [bar.split()[0] for bar in bars] == ["1", "64"]
    assert bars[0].count("█") == 40 > bars[1].count("█")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-m", "mlq"), "did you mean 'mlp'"),
        (("-m", "mlp", "-n", "4..1"), "a rising list"),
        (("-m", "mlp", "-n", "0"), "a rising list"),
        (("-m", "mlp", "-n", "many"), "a rising list"),
        (("-m", "mlp", "-t", "token ring"), "unknown link 'token ring'"),
        (("-m", "mlp", "--step-ms", "0"), "x>0"),
        (("-m", "mlp", "--measure-step"), "--measure-step belongs to --topology measured"),
        (("-m", "mlp", "-t", "measured", "--measure-step", "--step-ms", "3"), "given instead of --step-ms"),
    ],
)
def test_bad_input(args: tuple[str, ...], words: str) -> None:
    """A message that says what was expected."""
    result = scale(*args)
    assert result.exit_code == 2
    assert words in result.output


def test_measured_links():
    """In a job the links are those between its processes; the command says so, and one process is told what to do."""
    need_mpi()
    command = ["scale", "-m", "mlp", "-n", "1,2,4096", "-t", "measured", "--measure-step", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "weftplan", "launch", "-n", "2", "weftplan", *command],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["links"]["how"] == "measured between 2 processes"
    assert found["computation"].startswith("measured in 2 processes at once")
    assert found["links"]["bandwidth"] > 0
    assert found["links"]["latency"] >= 0  # in memory that both share it is part of the fixed cost
    # What an exchange of one key takes is shared between the two; on a busy machine the key may take all of it.
    assert found["links"]["fixed"] >= 0 <= found["links"]["per_key"]
    assert found["links"]["fixed"] + found["links"]["per_key"] > 0
    assert found["links"]["per_byte"] == 0  # it is part of the bandwidth
    alone, pair, many = (row["seconds"] for row in found["steps"])
    assert alone == found["computation_s"]
    assert alone + found["links"]["fixed"] <= pair * (1 + 1e-12)
    assert pair < many
    with pytest.raises(KVStoreError, match="weftplan launch -n 4 weftplan scale"):
        measure(mx.kv.create("local"))


def test_a_wrong_device_names_its_option() -> None:
    """The message says which option holds what is no device."""
    failed = CliRunner().invoke(main, ["scale", "--model", "mlp", "--device", "foo"])
    assert failed.exit_code == 2
    assert "--device: 'foo' is no device" in failed.output
