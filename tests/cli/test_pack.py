"""``weftplan pack``: peak, bound and offsets of a trace, exit codes, and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from weftplan.cli import main
from weftplan.cli.pack import command


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    """Write a trace of three buffers: a and b overlap in time, c comes later. The lower bound of the peak is 30."""
    path = tmp_path / "trace.csv"
    path.write_text("id,lower,upper,size\na,0,2,10\nb,1,3,20\nc,3,5,25\n", encoding="utf-8")
    return path


def test_prints_peak_and_bound(csv: Path) -> None:
    """The output has the peak and says that it fits the capacity."""
    result = CliRunner().invoke(command, [str(csv), "--capacity", "30"])
    assert result.exit_code == 0
    assert "peak        30" in result.output
    assert "fits" in result.output


def test_exit_code_when_it_does_not_fit(csv: Path) -> None:
    """A capacity below the bound gives exit code 1 and the number of missing bytes."""
    result = CliRunner().invoke(command, [str(csv), "--capacity", "29"])
    assert result.exit_code == 1
    assert "exceeded by 1 bytes" in result.output


def test_an_output_that_cannot_be_written(csv: Path) -> None:
    """If --output cannot be written, the packing is still printed, then the reason, and the exit code is 1."""
    result = CliRunner().invoke(main, ["pack", str(csv), "--output", "/nowhere/at/all.csv"])
    assert result.exit_code == 1
    assert "peak" in result.output
    assert "Error: /nowhere/at/all.csv: there is no folder /nowhere/at; create it, or give" in result.output


@pytest.mark.parametrize("content", [b"\xc9\x00\xff" * 20, b"id,lower,upper,size\n" + b"x" * 200_000])
def test_a_file_that_is_no_table(content: bytes, tmp_path: Path) -> None:
    """A file that is no CSV gives exit code 1; the error names the expected columns."""
    path = tmp_path / "weights.params"
    path.write_bytes(content)
    result = CliRunner().invoke(main, ["pack", str(path)])
    assert result.exit_code == 1
    assert "weights.params: expected CSV text with the columns id,lower,upper,size; got " in result.output


def test_an_id_that_is_given_twice(tmp_path: Path) -> None:
    """A repeated id gives exit code 1 and is named."""
    path = tmp_path / "twice.csv"
    path.write_text("id,lower,upper,size\na,0,2,10\na,1,3,5\nb,1,3,5\n")
    result = CliRunner().invoke(main, ["pack", str(path), "--json"])
    assert result.exit_code == 1
    assert "ids must differ, or offsets cannot be told apart; given twice: ['a']" in result.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_output_that_cannot_be_printed(csv: Path) -> None:
    """If stdout is full, the error states the reason; if its reader has gone, the command exits with 1 silently."""
    command_line = [sys.executable, "-m", "weftplan", "pack", str(csv), "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command_line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    gone = subprocess.run(command_line, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=100)
    os.close(writer)
    assert (gone.returncode, gone.stderr) == (1, "")


def test_json_and_file_hold_the_same_offsets(csv: Path, tmp_path: Path) -> None:
    """--json prints the offsets by id, and --output writes the same offsets as CSV."""
    out = tmp_path / "offsets.csv"
    result = CliRunner().invoke(command, [str(csv), "--json", "--output", str(out)])
    facts = json.loads(result.output)
    assert (facts["peak"], facts["lower_bound"], facts["fits"]) == (30, 30, True)
    header, *rows = (line.split(",") for line in out.read_text(encoding="utf-8").splitlines())
    assert header == ["id", "lower", "upper", "size", "offset"]
    assert {row[0]: int(row[4]) for row in rows} == facts["offsets"]


def test_output_can_be_read_again(tmp_path: Path) -> None:
    """An id with a comma and a quote is quoted in the output, which the command reads."""
    first, second, third = (tmp_path / f"{k}.csv" for k in range(3))
    first.write_text('id,lower,upper,size\n"b, ""c""",0,2,10\na,1,3,20\n', encoding="utf-8")
    for source, target in ((first, second), (second, third)):
        assert CliRunner().invoke(main, ["pack", str(source), "--output", str(target)]).exit_code == 0
    assert third.read_text() == second.read_text()
    assert '"b, ""c""",0,2,10,' in second.read_text()
