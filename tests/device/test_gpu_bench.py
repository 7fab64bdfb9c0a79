"""The benchmark for GPUs finishes without a GPU and reports the measurements that were not possible."""

import argparse
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

BENCH = pathlib.Path(__file__).parents[2] / "bench" / "bench_gpu.py"
PARTS = ("correctness", "copies", "graphs", "allocations")


def test_the_bench_ends_on_the_stand_in(tmp_path):
    """On the stand-in, counts meet their goals, and times are reported as not measured, in table and JSON."""
    path = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCH), "--standin", "--every", "80", "--json", str(path), "--only", *PARTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    parts = json.loads(path.read_text())["parts"]
    assert tuple(parts) == PARTS
    assert json.loads(path.read_text())["machine"]["card"].startswith("none: the stand-in")
    rows = [row for part in parts.values() for row in part["rows"]]
    marked = [row for row in rows if "not measured" in str(row["value"])]
    assert marked
    assert all(row.get("met") for row in rows if row.get("goal") and row not in marked), rows
    for row in rows:
        assert row["what"] in done.stdout


@pytest.fixture
def bench(monkeypatch):
    """The benchmark script as a module."""
    monkeypatch.setattr(sys, "path", [str(BENCH.parent), *sys.path])
    spec = importlib.util.spec_from_file_location("bench_gpu", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ARGS = argparse.Namespace(standin=True, every=80, seconds=60.0)
ROW = {"what": "something", "value": 1, "goal": 1, "met": True}


@pytest.mark.parametrize(
    ("end", "why"),
    [("os.abort()", "exit -6"), ("sys.exit('no such card')", "exit 1: no such card"), ("time.sleep(1000)", "killed")],
)
def test_a_part_that_dies_keeps_its_rows(bench, monkeypatch, tmp_path, end, why):
    """If a part crashes or hangs, its earlier rows are reported, followed by a row with the reason."""
    script = tmp_path / "part.py"
    lines = [json.dumps({"machine": {"card": "some"}}), "a library says something", json.dumps({"row": ROW})]
    script.write_text(f"import os, sys, time\nprint({chr(10).join(lines)!r}, flush=True)\n{end}\n")
    monkeypatch.setattr(bench, "__file__", str(script))
    monkeypatch.setattr(bench, "START", 0.4 if why == "killed" else 60.0)
    facts, part = bench.apart("copies", ARGS, 0.1)
    *rows, last = part["rows"]
    assert why in last["value"]
    assert last["met"] is False
    if why != "killed":  # the killed part may have printed nothing
        assert (facts, rows) == ({"card": "some"}, [ROW])


def test_a_part_that_raises_keeps_its_rows(bench, monkeypatch, capsys):
    """If a part raises, its earlier rows are reported, followed by a row with the exception."""

    def broken(args, context, clock, rows):
        rows.append(ROW)
        raise ZeroDivisionError("of something")

    monkeypatch.setitem(bench.PARTS, "copies", broken)
    bench.alone("copies", ARGS)
    report = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["row"]["value"] for line in report if "row" in line] == [1, "ZeroDivisionError: of something"]
    assert report[-1] == {"cut": False}


def test_part_without_time_measures_nothing(bench, capsys):
    """A part whose time is over measures nothing more and reports this."""
    bench.alone("correctness", argparse.Namespace(**{**vars(ARGS), "seconds": -1.0}))
    report = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert report[-1] == {"cut": True}
    assert report[-2]["row"]["value"].startswith("0 of ")
