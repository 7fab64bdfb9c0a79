"""The profiler: records, the trace file, the aggregate table, and MXNet's functions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import weftplan as mx
from weftplan import device, engine, profiler, storage
from weftplan.errors import MXNetError, ParameterError
from weftplan.profiler.recorder import recorder


def events(tmp_path: Path) -> list[dict]:
    """Dump the trace and return its events."""
    profiler.dump()
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document["displayTimeUnit"] == "ms"
    return document["traceEvents"]


class TestTrace:
    """The trace file, which Perfetto opens."""

    def test_operations(self, driver, tmp_path: Path):
        """Each operation is one slice with name and id, inside a named process and thread.

        Slices are in an order that the vars allow, and an arrow leads from the push of each operation to its start.
        """
        a, b = driver.new_variable(), driver.new_variable()
        profiler.set_state("run")
        for i in range(20):
            driver.push(lambda: sum(range(100)), [a] if i % 2 else [], [b] if i % 2 else [a], name=f"step {i}")
        seen = events(tmp_path)
        slices = [e for e in seen if e["ph"] == "X" and e["cat"] == "operation"]
        assert sorted(e["name"] for e in slices) == sorted(f"step {i}" for i in range(20))
        meta = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in seen if e["ph"] == "M"}
        for one in slices:
            assert one["dur"] > 0
            assert meta["process_name", one["pid"], 0] == "cpu(0)"
            assert ("thread_name", one["pid"], one["tid"]) in meta
        starts = {e["id"]: e for e in seen if e["ph"] == "s"}
        ends = {e["id"]: e for e in seen if e["ph"] == "f"}
        assert set(starts) == set(ends) == {e["args"]["id"] for e in slices}
        by_id = {e["args"]["id"]: e for e in slices}
        for ident, one in by_id.items():
            assert starts[ident]["ts"] <= ends[ident]["ts"] == one["ts"]
        of_a = sorted((e for e in slices if int(e["name"][5:]) % 2 == 0), key=lambda e: e["args"]["id"])
        for earlier, later in pairwise(of_a):
            assert earlier["ts"] + earlier["dur"] <= later["ts"] + 1e-3

    def test_slices_of_one_worker_do_not_overlap(self, driver, tmp_path: Path):
        """Each worker has a track, and the operations of a track do not overlap."""
        profiler.set_state("run")
        for _ in range(200):
            driver.push(lambda: None, [], [driver.new_variable()])
        tracks = defaultdict(list)
        for e in events(tmp_path):
            if e["ph"] == "X" and e["cat"] == "operation":
                tracks[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
        assert sum(map(len, tracks.values())) == 200
        for track in tracks.values():
            track.sort()
            assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(track))

    def test_waiting_counter(self, driver, tmp_path: Path):
        """The counter of waiting operations is never negative and ends at 0."""
        var = driver.new_variable()
        profiler.set_state("run")
        for _ in range(50):
            driver.push(lambda: None, [], [var])
        levels = [e["args"]["value"] for e in events(tmp_path) if e["name"] == "operations waiting"]
        assert len(levels) == 100
        assert min(levels) == 0 == levels[-1]
        assert max(levels) >= 1

    def test_live_bytes(self, driver, tmp_path: Path):
        """The first and the last sample of live bytes are the bytes in use at the start and at the end."""
        # A new resource, because arrays of other tests may still release their bytes.
        with storage.using(storage.RawResource(device.get(mx.cpu()))) as resource:
            first = mx.nd.zeros((1000,))
            first.wait_to_read()
            profiler.set_state("run")
            held = mx.nd.ones((250_000,))
            held.wait_to_read()
            profiler.set_state("stop")
            live = resource.statistics().requested_bytes
        values = [e["args"]["value"] for e in events(tmp_path) if e["name"] == "live bytes cpu(0)"]
        assert min(e["args"]["value"] for e in events(tmp_path) if e["name"] == "memory of this process") > 1 << 20
        assert values[0] == first.nbytes
        assert values[-1] == live == first.nbytes + held.nbytes

    def test_user_objects(self, driver, tmp_path: Path):
        """Users' spans, instants and counters are in the trace, under their domain."""
        profiler.set_state("run")
        domain = profiler.Domain("mine")
        with domain.new_task("load"):
            pass
        frame = domain.new_frame("batch")
        frame.start()
        frame.stop()
        with profiler.Event("alone"):
            domain.new_marker("here").mark("global")
        counter = domain.new_counter("images", 5)
        counter += 2
        counter -= 4
        counter.set_value(10)
        seen = events(tmp_path)
        spans = {(e["cat"], e["name"]) for e in seen if e["ph"] == "X" and e["pid"] == 2}
        assert spans == {("mine", "load"), ("mine", "batch"), ("event", "alone")}
        assert [(e["name"], e["s"]) for e in seen if e["ph"] == "i"] == [("here", "g")]
        assert [e["args"]["value"] for e in seen if e["name"] == "mine:images"] == [5, 7, 3, 10]

    def test_contexts_are_processes(self, driver, tmp_path: Path):
        """Operations on two contexts are in two process rows."""
        profiler.set_state("run")
        for ctx in (mx.cpu(0), mx.cpu(1)):
            driver.push(lambda: None, [], [driver.new_variable()], ctx)
        names = {e["args"]["name"] for e in events(tmp_path) if e["ph"] == "M" and e["name"] == "process_name"}
        assert {"cpu(0)", "cpu(1)"} <= names

    def test_dump_is_whole_or_not_at_all(self, driver, tmp_path: Path):
        """If the file cannot be written, dump raises and leaves no temporary file."""
        profiler.set_config(filename=tmp_path / "nowhere" / "trace.json")
        with pytest.raises(FileNotFoundError):
            profiler.dump()
        assert list(tmp_path.iterdir()) == []


class TestStates:
    """The states and functions run, pause, resume and stop."""

    def test_only_between_run_and_stop(self, driver):
        """Nothing is recorded before run, during a pause, or after stop; a new run clears the records."""

        def one(name: str) -> None:
            driver.push(lambda: None, [], [driver.new_variable()], name=name)
            driver.wait_for_all()

        def names() -> list[str]:
            return [record[0] for record in recorder.operations]

        one("before")
        profiler.set_state("run")
        assert profiler.state() == "run"
        one("recorded")
        profiler.pause()
        assert profiler.state() == "pause"
        one("paused")
        profiler.resume()
        one("resumed")
        profiler.set_state("stop")
        one("after")
        assert names() == ["recorded", "resumed"]
        profiler.set_state("run")
        assert names() == []
        assert driver.tracer is not None
        profiler.set_state("stop")
        assert driver.tracer is None

    def test_stop_takes_the_tracer_off_the_engine_that_got_it(self, driver):
        """stop removes the tracer from the engine that got it, even if another engine is in use."""
        profiler.set_state("run")
        with engine.using(engine.create("NaiveEngine")) as second:
            profiler.set_state("stop")
            assert second.tracer is None
        assert driver.tracer is None

    def test_a_failure_at_stop(self, driver):
        """stop raises an operation's unraised failure, but the profiler has stopped."""
        if driver.kind == "NaiveEngine":
            pytest.skip("raises at the push")
        profiler.set_state("run")
        driver.push(lambda: 1 / 0, [], [driver.new_variable()], name="bad")
        with pytest.raises(ZeroDivisionError):
            profiler.set_state("stop")
        assert profiler.state() == "stop"
        assert driver.tracer is None
        assert [record[0] for record in recorder.operations] == ["bad"]

    def test_no_thread_is_left(self, driver):
        """The sampler thread of live bytes ends with the recording."""
        profiler.set_state("run")
        assert any(thread.name == "weftplan-profiler" for thread in threading.enumerate())
        profiler.set_state("stop")
        assert not any(thread.name == "weftplan-profiler" for thread in threading.enumerate())


class TestTable:
    """The aggregate table, ``dumps()``."""

    def test_rows(self, driver):
        """The table has one row per name with its count; minimum, average and maximum agree with the total."""
        profiler.set_state("run")
        for i in range(30):
            driver.push(lambda: None, [], [driver.new_variable()], name="a" if i % 3 else "b")
        profiler.set_state("stop")
        table = json.loads(profiler.dumps(format="json"))
        assert table["Unit"] == {"Time": "ms", "Memory": "kB"}
        assert table["Memory"] == {}
        operations = table["Time"].pop("operator")
        assert table["Time"] == {}
        assert {name: row["Count"] for name, row in operations.items()} == {"a": 20, "b": 10}
        for row in operations.values():
            assert row["Min"] <= row["Avg"] <= row["Max"] <= row["Total"]
            assert row["Avg"] * row["Count"] == pytest.approx(row["Total"])
        lines = profiler.dumps(sort_by="count", ascending=True).splitlines()
        assert [line.split()[0] for line in lines] == ["Name", "b", "a"]
        columns = {"total": "Total", "avg": "Avg", "min": "Min", "max": "Max", "count": "Count"}
        for sort_by, column in columns.items():
            table = json.loads(profiler.dumps(format="json", sort_by=sort_by))["Time"]["operator"]
            durations = [row[column] for row in table.values()]
            assert durations == sorted(durations, reverse=True)
        assert profiler.dumps(reset=True).count("\n") == 3
        assert profiler.dumps().count("\n") == 1

    def test_bad_arguments(self, driver):
        """Errors for bad arguments list the legal values, and nothing changes."""
        with pytest.raises(ParameterError, match="'table' or 'json', got 'xml'"):
            profiler.dumps(format="xml")
        with pytest.raises(ParameterError, match="total, avg, min, max, count"):
            profiler.dumps(sort_by="name")
        with pytest.raises(ParameterError, match="'run' or 'stop', got 'go'"):
            profiler.set_state("go")
        with pytest.raises(ParameterError, match=r"unknown \['colour'\]"):
            profiler.set_config(colour=1, filename="other")
        assert profiler._config["filename"] != "other"
        with pytest.raises(ParameterError, match="'process', 'thread' or 'global', got 'world'"):
            profiler.Domain("d").new_marker("m").mark("world")
        with pytest.raises(MXNetError, match=r"Task 't': stop\(\) before start\(\)"):
            profiler.Domain("d").new_task("t").stop()


def test_tasks_that_overlap(tmp_path: Path):
    """Overlapping tasks share a track only if one lies within the other."""
    profiler.set_config(filename=tmp_path / "trace.json")
    profiler.set_state("run")
    domain = profiler.Domain("d")
    tasks = [domain.new_task(name) for name in "abcd"]
    for task in tasks[:3]:
        task.start()
    with tasks[3]:
        pass
    for task in tasks[:3]:
        task.stop()
    spans = [e for e in events(tmp_path) if e["ph"] == "X" and e["pid"] == 2]
    assert sorted(e["name"] for e in spans) == list("abcd")
    for first, second in ((a, b) for a in spans for b in spans if a is not b and a["tid"] == b["tid"]):
        ends = first["ts"] + first["dur"], second["ts"] + second["dur"]
        apart = ends[0] <= second["ts"] or ends[1] <= first["ts"]
        within = (first["ts"] - second["ts"]) * (ends[0] - ends[1]) <= 0
        assert apart or within, (first, second)
    assert len({e["tid"] for e in spans}) == 3  # a, b and c cannot share one; d lies within any of them


def test_numbers_of_counters(tmp_path: Path):
    """Counters accept NumPy's numbers, omit NaN and infinity, and refuse other values."""
    profiler.set_config(filename=tmp_path / "trace.json")
    profiler.set_state("run")
    counter = profiler.Domain("d").new_counter("loss", np.float32(0.5))
    counter.set_value(float("nan"))
    counter.set_value(np.int64(2))
    counter += np.int32(3)
    counter.decrement(np.float64("inf"))
    for bad in ("7", None, 10**400):
        with pytest.raises(ParameterError, match="Counter 'loss': "):
            counter.set_value(bad)
    profiler.dump()
    text = (tmp_path / "trace.json").read_text()
    seen = json.loads(text, parse_constant=pytest.fail)["traceEvents"]
    assert [e["args"]["value"] for e in seen if e["name"] == "d:loss"] == [0.5, 2, 5]


def test_names_that_are_no_text(tmp_path: Path):
    """Names other than text become text, in the trace and in the table."""
    profiler.set_config(filename=tmp_path / "trace.json")
    profiler.set_state("run")
    domain = profiler.Domain(3)
    with domain.new_task(4), profiler.Event(np.int64(5)):
        domain.new_marker(6).mark()
    assert {e["name"] for e in events(tmp_path) if e["pid"] == 2} >= {"4", "5", "6"}
    assert "3:4" in profiler.dumps()


@pytest.mark.parametrize("name", [None, 3, ""])
def test_a_file_name_that_is_none(name):
    """set_config refuses a filename that is not a path."""
    before = profiler._config["filename"]
    with pytest.raises(ParameterError, match=r"set_config: filename must be the path of a file, got"):
        profiler.set_config(filename=name)
    assert profiler._config["filename"] == before


def test_counter_loses_nothing():
    """Eight threads that each increment a counter 500 times make 4,000."""
    counter = profiler.Domain("d").new_counter("n")

    def count() -> None:
        for _ in range(500):
            counter.increment()

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.value == 4000


def test_names_of_real_operations(tmp_path: Path):
    """Imperative operators and tasks appear under their own names."""
    before = dict(profiler._config)
    profiler.set_config(filename=tmp_path / "trace.json")
    profiler.set_state("run")
    (mx.nd.ones((2, 2)) + 1).wait_to_read()
    out = np.zeros(2)
    engine.submit(np.exp, np.zeros(2), out=out)
    engine.wait(out)
    names = {e["name"] for e in events(tmp_path) if e["ph"] == "X"}
    profiler._config.update(before)
    assert {"exp", "_plus_scalar"} <= names


def test_names_with_colons_are_kept_whole(driver):
    """The JSON separates domains and names even if both contain colons."""
    profiler.set_state("run")
    for domain, name in (("a::b", "c"), ("a", "b::c"), ("a:", "b:c")):
        with profiler.Task(profiler.Domain(domain), name):
            pass
    times = json.loads(profiler.dumps(format="json"))["Time"]
    assert {domain: sorted(names) for domain, names in times.items()} == {"a::b": ["c"], "a": ["b::c"], "a:": ["b:c"]}


AT_EXIT = """
import weftplan as mx
mx.profiler.{config}
mx.profiler.{state}
(mx.nd.ones((2, 2)) + 1).wait_to_read()
{end}
"""


@pytest.mark.parametrize(
    ("config", "state", "end", "written"),
    [
        ("set_config(filename='t.json')", "set_state('run')", "mx.profiler.set_state('stop')", True),
        ("set_config(filename='t.json')", "set_state('run')", "", True),
        ("profiler_set_config(mode='all', filename='t.json')", "profiler_set_state('run')", "", True),
        ("set_config(profile_all=True)", "set_state('run')", "mx.profiler.set_state('stop')", False),
        ("set_config(filename='t.json')", "state()", "", False),
        (
            "set_config(filename='t.json')",
            "set_state('run')",
            "mx.profiler.dump(); import os; os.remove('t.json')",
            False,
        ),
    ],
    ids=["stopped", "running", "old names", "no file named", "nothing recorded", "dumped"],
)
def test_a_named_file_is_written_at_the_end_of_the_process(config, state, end, written, tmp_path: Path):
    """An explicitly named file is written once, at exit if not before, as in MXNet.

    MXNet's examples never call ``dump``.
    """
    code = AT_EXIT.format(config=config, state=state, end=end)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == (["t.json"] if written else [])
    if written:
        assert "_plus_scalar" in (tmp_path / "t.json").read_text()


@pytest.mark.parametrize(("value", "written"), [("1", True), ("0", False)])
@pytest.mark.shows("MXNET_PROFILER_AUTOSTART")
def test_the_profiler_starts_with_the_import(value: str, written: bool, tmp_path: Path):
    """With MXNET_PROFILER_AUTOSTART=1 all operations are recorded, and the trace is written at exit."""
    code = "import weftplan as mx; (mx.nd.ones((2, 2)) + 1).wait_to_read()"
    variables = {**os.environ, "MXNET_PROFILER_AUTOSTART": value}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60, env=variables)
    assert [path.name for path in tmp_path.iterdir()] == (["profile.json"] if written else [])
    if written:
        events = json.loads((tmp_path / "profile.json").read_text())["traceEvents"]
        assert any("plus_scalar" in event["name"] for event in events)


@pytest.mark.parametrize(
    ("mode", "config", "sampled"),
    [("15", "", True), ("8", "", True), ("1", "", False), ("0", "", False), ("7", "profile_memory=True", True)],
)
@pytest.mark.shows("MXNET_PROFILER_MODE")
def test_the_mode_decides_about_memory(mode: str, config: str, sampled: bool, tmp_path: Path):
    """Live bytes are sampled only with the mode's bit 8, unless the program sets profile_memory.

    Operations are recorded in any mode.
    """
    code = (
        f"import weftplan as mx; mx.profiler.set_config(filename='t.json', {config}); mx.profiler.set_state('run'); "
        "(mx.nd.ones((2, 2)) + 1).wait_to_read(); mx.profiler.dump()"
    )
    variables = {**os.environ, "MXNET_PROFILER_MODE": mode}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60, env=variables)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert any("plus_scalar" in event["name"] for event in events)
    assert any("live bytes" in event["name"] for event in events) == sampled
