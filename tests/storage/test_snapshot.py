"""Recording of pool events, and the snapshot in the format of PyTorch's memory viewer and as an HTML page."""

import gc
import json
import pickle
import re

import pytest

import weftplan as mx
from tests.storage.small_devices import MIB, Room
from weftplan import device, engine, storage
from weftplan.errors import MXNetError, OutOfMemoryError
from weftplan.ndarray.memory.release import drain
from weftplan.report.memory_html import timeline
from weftplan.storage import AutoGrowth, NaiveBestFit, NaivePool, PoisonResource, RawResource, RoundPool
from weftplan.storage.recording import address_of, recorded

MAKERS = {
    "raw": RawResource,
    "naive": NaivePool,
    "round": RoundPool,
    "growth": lambda place: AutoGrowth(place, chunk=MIB),
    "best fit": lambda place: NaiveBestFit(place, first=MIB),
    "poison": lambda place: PoisonResource(AutoGrowth(place)),
}


@pytest.fixture
def recording():
    """Record pool events during the test."""
    storage.record()
    yield
    storage.stop_recording()


def check_viewer(found):
    """Check what PyTorch's ``_memory_viz`` assumes about a snapshot; raise AssertionError otherwise."""
    for segment in found["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at, "blocks lie side by side"
            assert block["state"] in ("active_allocated", "inactive")
            assert 0 <= block["requested_size"] <= block["size"]
            assert all(set(frame) == {"name", "filename", "line"} for frame in block["frames"])
            at += block["size"]
        assert at == segment["address"] + segment["total_size"], "blocks fill their segment"
        active = sum(block["size"] for block in segment["blocks"] if block["state"] == "active_allocated")
        assert segment["allocated_size"] == active
        assert segment["stream"] == 0
        assert 0 <= segment["device"] < len(found["device_traces"])
    for entries in found["device_traces"]:
        live, asked = {}, set()
        for entry in entries:
            where = entry["addr"]
            if entry["action"] == "alloc":
                assert where not in live, "an address is handed out once"
                live[where] = entry["size"]
            elif entry["action"] == "free_requested":
                asked.add(where)
                assert live.pop(where, entry["size"]) == entry["size"]
            elif entry["action"] == "free_completed":
                asked.remove(where)
            elif entry["action"] == "oom":
                assert entry["device_free"] >= 0
            else:
                assert entry["action"] in ("segment_alloc", "segment_free")


@pytest.mark.parametrize("maker", MAKERS)
def test_a_snapshot_shows_every_byte_of_a_pool(maker, recording, tmp_path):
    """A snapshot's blocks cover the segments with names and sizes, and its events are the calls made on the pool.

    The saved file is a pickle of the snapshot's dictionary.
    """
    ctx = mx.cpu(9140)
    with storage.using(MAKERS[maker](Room(context=ctx))) as pool:
        held = [pool.allocate(n, name=f"array at train.py:{n}") for n in (1000, 5000, 300_000, 0, 2_000_000)]
        pool.free(held.pop(1))
        pool.free(pool.allocate(5000))
        shot = storage.snapshot()
        now = pool.statistics()
        at = shot.contexts.index(ctx)
        shape = shot.as_dict()
        check_viewer(shape)
        mine = [segment for segment in shape["segments"] if segment["device"] == at]
        assert sum(segment["total_size"] for segment in mine) == now.reserved_bytes
        assert sum(segment["allocated_size"] for segment in mine) == now.allocated_bytes
        assert sum(segment["requested_size"] for segment in mine) == now.requested_bytes
        lines = {frame["line"] for segment in mine for block in segment["blocks"] for frame in block["frames"]}
        assert lines == {1000, 300_000, 2_000_000}
        starts = {address_of(allocation.raw) for allocation in held if allocation.nbytes}
        assert starts <= {block["address"] for segment in mine for block in segment["blocks"]}
        actions = [entry["action"] for entry in shape["device_traces"][at]]
        assert actions.count("alloc") == 5
        assert actions.count("free_requested") == actions.count("free_completed") == 2
        path = tmp_path / "memory.pickle"
        shot.save(path)
        assert pickle.loads(path.read_bytes()) == shape
        for allocation in held:
            pool.free(allocation)
        pool.empty_cache()
        sizes = dict.fromkeys(("segment_alloc", "segment_free"), 0)
        for event in recorded():
            if event.context == ctx and event.action in sizes:
                sizes[event.action] += event.nbytes
        assert sizes["segment_alloc"] - sizes["segment_free"] == pool.statistics().reserved_bytes


def test_viewer_check_detects_a_gap():
    """``check_viewer`` raises for a segment whose blocks leave a gap, so the tests can fail."""
    block = {"address": 0, "size": 10, "requested_size": 10, "state": "inactive", "frames": []}
    segment = {"address": 0, "total_size": 20, "allocated_size": 0, "blocks": [block], "stream": 0, "device": 0}
    with pytest.raises(AssertionError, match="fill"):
        check_viewer({"segments": [segment], "device_traces": [[]]})


def test_failed_request_is_recorded(recording):
    """A failed request is recorded as ``oom``, with the requested bytes and the device's free bytes."""
    ctx = mx.cpu(9141)
    with storage.using(NaivePool(Room(MIB, context=ctx))) as pool:
        with pytest.raises(OutOfMemoryError):
            pool.allocate(MIB + 1)
        entry = next(event for event in recorded() if event.context == ctx)
        assert (entry.action, entry.nbytes, entry.address) == ("oom", MIB + 1, MIB)
        check_viewer(storage.snapshot().as_dict())


def test_recording_starts_and_stops(recording):
    """Recording starts and stops on request, keeps the last ``events`` events; a bad number raises MXNetError."""
    pool = NaivePool(device.get(mx.cpu(9142)))
    pool.free(pool.allocate(100))
    assert [event.action for event in recorded()] == ["segment_alloc", "alloc", "free"]
    storage.record(events=2)
    for _ in range(5):
        pool.free(pool.allocate(100))
    assert [event.action for event in recorded()] == ["alloc", "free"]
    storage.stop_recording()
    pool.free(pool.allocate(100))
    assert recorded() == []
    for wrong in (0, -1, 1.5, True, "many"):
        with pytest.raises(MXNetError, match="integer >= 1, got"):
            storage.record(events=wrong)


def test_reuse_of_dead_memory_is_recorded(recording):
    """If a small array reuses the memory of a dead one, the free and the allocation are recorded by name."""
    ctx = mx.cpu(9144)
    with engine.using(engine.create("ThreadedEngine")), storage.using(NaivePool(device.get(ctx))):
        x = mx.nd.ones((16,), ctx=ctx)
        for _ in range(2):
            storage.record()
            first = mx.nd.exp(x)
            mx.nd.waitall()
            del first
            mx.nd.square(x).wait_to_read()
            mx.nd.waitall()
        events = [event for event in recorded() if event.context == ctx and event.action != "segment_alloc"]
        assert [(event.action, event.name) for event in events] == [
            ("alloc", "exp"),
            ("free", "exp"),
            ("alloc", "square"),
            ("free", "square"),
        ]
        assert len({(event.address, event.nbytes) for event in events}) == 1
        check_viewer(storage.snapshot().as_dict())
        drain()


def test_curve_ends_with_the_present_figures(recording):
    """The timeline, computed backwards from the statistics, is right although recording started late."""
    pool = AutoGrowth(Room())
    before = pool.allocate(640)
    storage.record()
    held = pool.allocate(6400)
    pool.free(before)
    now = pool.statistics()
    points = timeline(recorded(), now.allocated_bytes, now.reserved_bytes)
    assert [point[1:] for point in points] == [[640, 7040], [7040, 7040], [6400, 7040]]
    pool.free(held)


def test_page_is_self_contained_and_names_functions(recording, tmp_path):
    """The HTML page needs no other file and names each array's function and line."""
    ctx = mx.cpu(9143)
    with storage.using(NaivePool(device.get(ctx))):
        x = mx.nd.zeros((100, 100), ctx=ctx)
        x.wait_to_read()
        text = storage.snapshot().to_html(tmp_path / "memory.html")
        assert (tmp_path / "memory.html").read_text() == text
        assert not re.search(r"https?://|src=|@DATA@|@SETTINGS@", text)
        data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.S)[1])
        mine = next(one for one in data["devices"] if one["name"] == "cpu(9143)")
        assert any("zeros at" in name and "test_snapshot.py" in name for name, _, _ in mine["holders"])
        assert mine["timeline"]
        del x
        gc.collect()
        mx.nd.waitall()
