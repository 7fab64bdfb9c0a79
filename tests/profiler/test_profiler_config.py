"""The profiler's keys, its states around running operations, and traces of earlier pushes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

import weftplan as mx
from weftplan import engine, profiler
from weftplan.errors import ParameterError
from weftplan.profiler.recorder import recorder

KEYS = {
    "profile_all": True,
    "profile_symbolic": False,
    "profile_imperative": False,
    "profile_memory": False,
    "profile_api": True,
    "profile_process": "server",
    "aggregate_stats": True,
    "continuous_dump": True,
    "dump_period": 0.5,
}
"""MXNet's keys except ``filename``, with values other than the defaults."""


@pytest.fixture
def threaded(tmp_path: Path):
    """Yield the process-wide engine, with one worker.

    The profiler is stopped and empty, and writes to ``tmp_path / "trace.json"``.
    """
    before_config, result = dict(profiler._config), engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    recorder.clear()
    profiler.set_config(filename=tmp_path / "trace.json")
    with engine.using(result):
        yield result
        profiler.set_state("stop")
    profiler._config.clear()
    profiler._config.update(before_config)
    recorder.clear()
    result.stop()


def dumped(tmp_path: Path) -> list[dict]:
    """Dump the trace and return its events."""
    profiler.dump()
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_taken(threaded, tmp_path: Path, key: str):
    """With each key alone, and with all keys, operations are recorded and the file is written."""
    profiler.set_config(**{key: KEYS[key]})
    profiler.set_state("run", profile_process="worker")
    threaded.push(lambda: None, name="work")
    assert [e["name"] for e in dumped(tmp_path) if e.get("cat") == "operation"] == ["work"]
    profiler.set_config(**KEYS)
    profiler.set_state("run")
    threaded.push(lambda: None, name="again")
    assert [e["name"] for e in dumped(tmp_path) if e.get("cat") == "operation"] == ["again"]


@pytest.mark.parametrize(
    ("keys", "sampled"),
    [
        ({"profile_memory": True, "profile_all": False}, True),
        ({"profile_memory": False, "profile_all": True}, True),
        ({"profile_memory": False, "profile_all": False}, False),
    ],
)
def test_live_bytes_only_when_asked(threaded, keys, sampled):
    """profile_memory or profile_all starts the sampler of live bytes, in run and in resume.

    Without both there is no thread and no counter.
    """
    profiler.set_config(**keys)
    kept = mx.nd.ones((10,))
    kept.wait_to_read()

    def sampler() -> bool:
        return any(thread.name == "weftplan-profiler" for thread in threading.enumerate())

    profiler.set_state("run")
    assert sampler() == sampled
    profiler.pause()
    assert not sampler()
    profiler.resume()
    assert sampler() == sampled
    profiler.set_state("stop")
    assert bool(recorder.memory) == sampled


def test_live_bytes_in_between(threaded):
    """Live bytes are sampled repeatedly while the profiler runs, not only at both ends."""
    kept = mx.nd.ones((10,))
    kept.wait_to_read()
    profiler.set_state("run")
    end = time.monotonic() + 60
    while len({sample.when_ns for sample in recorder.memory}) < 5:
        assert time.monotonic() < end
        time.sleep(0.001)
    profiler.set_state("stop")
    times = [sample.when_ns for sample in recorder.memory if sample.counter == "live bytes cpu(0)"]
    assert times == sorted(times)
    del kept


def test_an_unknown_key_changes_nothing(threaded):
    """If a key is unknown, the valid keys of the call are not applied either."""
    before = dict(profiler._config)
    with pytest.raises(ParameterError, match=r"unknown \['profile_everything'\];.* known: filename, profile_all"):
        profiler.set_config(filename="elsewhere", profile_everything=True)
    assert profiler._config == before


def test_state_changes_out_of_order(threaded):
    """A stopped profiler ignores pause and resume; a repeated run keeps the records; a repeated stop does nothing."""
    profiler.pause()
    profiler.resume()
    assert profiler.state() == "stop"
    assert threaded.tracer is None
    profiler.set_state("run")
    threaded.push(lambda: None, name="one")
    threaded.wait_for_all()
    profiler.set_state("run")
    threaded.push(lambda: None, name="two")
    profiler.set_state("stop")
    profiler.set_state("stop")
    assert [record[0] for record in recorder.operations] == ["one", "two"]


def test_dump_goes_on_when_not_finished(threaded, tmp_path: Path):
    """``dump(finished=False)`` writes the records so far, and recording continues."""
    profiler.set_state("run")
    threaded.push(lambda: None, name="one")
    threaded.wait_for_all()
    threaded.stop()  # a wait may return before the recorder is notified
    profiler.dump(finished=False)
    assert profiler.state() == "run"
    assert '"one"' in (tmp_path / "trace.json").read_text()
    threaded.push(lambda: None, name="two")
    assert {e["name"] for e in dumped(tmp_path) if e.get("cat") == "operation"} == {"one", "two"}
    assert profiler.state() == "stop"


def test_an_operation_that_was_pushed_before_the_start(threaded, tmp_path: Path):
    """An operation pushed before the profiler's start counts as pushed at its own start.

    The counter of waiting operations never drops below 0.
    """
    begun, gate = threading.Event(), threading.Event()
    threaded.push(lambda: (begun.set(), gate.wait(60)), name="before")
    for _ in range(3):
        threaded.push(lambda: None, name="old")
    assert begun.wait(60)
    profiler.set_state("run")
    gate.set()
    events = dumped(tmp_path)
    levels = [e["args"]["value"] for e in events if e["name"] == "operations waiting"]
    assert min(levels) == 0 == levels[-1]
    slices = [e for e in events if e.get("cat") == "operation" and e["name"] == "old"]
    assert [e["args"]["waited_us"] for e in slices] == [0, 0, 0]


@pytest.mark.parametrize("how", ["push", "priority", "push_async", "operator", "delete"])
def test_how_long_an_operation_waited(threaded, tmp_path: Path, how: str):
    """An operation's wait lasts from its push to its start, and the trace's arrow begins at the push."""
    begun, gate = threading.Event(), threading.Event()
    profiler.set_state("run")
    var = threaded.new_variable()
    threaded.push(lambda: (begun.set(), gate.wait(60)), [], [var], name="held")
    assert begun.wait(60)
    if how == "push_async":
        threaded.push_async(lambda done: done(), name="behind")
    elif how == "operator":
        threaded.push(threaded.new_operator(lambda: None, name="behind"))
    elif how == "delete":
        threaded.delete_variable(var)
    else:
        threaded.push(lambda: None, name="behind", priority=how == "priority")
    time.sleep(0.05)
    gate.set()
    events = dumped(tmp_path)
    (behind,) = (e for e in events if e.get("cat") == "operation" and e["name"] in ("behind", "DeleteVariable"))
    assert behind["args"]["waited_us"] > 40_000
    (start,) = (e for e in events if e["ph"] == "s" and e["id"] == behind["args"]["id"])
    assert behind["ts"] - start["ts"] == pytest.approx(behind["args"]["waited_us"], abs=1)


def test_a_recording_ends_with_stop(threaded):
    """stop waits for a running operation; an operation pushed during a pause is not recorded."""
    begun, gate = threading.Event(), threading.Event()
    profiler.set_state("run")
    threaded.push(lambda: (begun.set(), gate.wait(60)), name="slow")
    assert begun.wait(60)
    threading.Timer(0.05, gate.set).start()
    profiler.set_state("stop")
    assert [record[0] for record in recorder.operations] == ["slow"]
    assert recorder.operations[0][6] - recorder.operations[0][5] > 10_000_000
    profiler.set_state("run")
    profiler.pause()
    threaded.push(lambda: None, name="unseen")
    threaded.wait_for_all()
    profiler.set_state("stop")
    assert recorder.operations == []


def test_many_contexts(threaded, tmp_path: Path):
    """Twelve contexts are twelve processes of the trace, each named once, next to those of pushes and users."""
    profiler.set_state("run")
    for i in range(12):
        threaded.push(lambda: None, (), [], mx.cpu(i), name=f"on cpu({i})")
    profiler.Event("mine").start()
    events = dumped(tmp_path)
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert len(names) == 14
    for e in events:
        if e.get("cat") == "operation":
            assert e["name"] == f"on {names[e['pid']]}"


def test_rows_of_users(threaded):
    """The table lists users' spans by domain, next to operations, but no instants or counters."""
    profiler.set_state("run")
    domain = profiler.Domain("mine")
    for _ in range(3):
        with domain.new_task("load"):
            pass
    with profiler.Event("alone"):
        pass
    domain.new_marker("here").mark()
    domain.new_counter("images", 5)
    threaded.push(lambda: None, name="work")
    profiler.set_state("stop")
    table = json.loads(profiler.dumps(format="json"))["Time"]
    counts = {domain: {name: row["Count"] for name, row in rows.items()} for domain, rows in table.items()}
    assert counts == {"mine": {"load": 3}, "event": {"alone": 1}, "operator": {"work": 1}}
