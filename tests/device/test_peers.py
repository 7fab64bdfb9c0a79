"""Copies between GPUs: directly where a pair has shown that it can, else through page-locked memory; traces say it."""

import gc

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import GPUS, place
from tests.standin_cupy import machine, meter
from weftplan import config, device, profiler
from weftplan.device.interconnect import interconnect, way
from weftplan.device.peers import PEER

BIG = 3_000_001
"""Elements of float32: more than two pieces of the page-locked memory that copies pass through."""


def copied(context, count=BIG):
    """Return a copy from gpu(0) over gpu(1) and gpu(2) back to the host, and the original."""
    values = np.arange(count, dtype=np.float32)
    x = mx.nd.array(values, ctx=context(0)) + 1
    return x.as_in_context(context(1)).as_in_context(context(2)).asnumpy(), values + 1


@pytest.mark.parametrize("where", GPUS)
def test_copies_bring_the_bytes(where):
    """From GPU to GPU to GPU and back, whichever way they go; on one card they stay there."""
    with place(where) as context:
        actual, wanted = copied(context)
    np.testing.assert_array_equal(actual, wanted)


def test_peers_copy_directly():
    """A pair is asked, enabled and checked once; copies are then one launch each."""
    with place("standin") as context:
        actual, wanted = copied(context)
        np.testing.assert_array_equal(actual, wanted)
        assert {(0, 1), (1, 2)} <= machine.peers
        meter.reset()
        copied(context)
        assert meter.launches["memcpy peer"] == 2
        assert way(context(0), context(1)) == PEER


@pytest.mark.parametrize("why", ["off", "apart", "corrupt"])
def test_others_pass_through_the_host(monkeypatch, why):
    """The setting, the driver's answer, and a check that brings other bytes: the same values through page-locked
    memory, piece by piece, without a wait of the host."""
    texts = {"off": "MXNET_ENABLE_GPU_P2P is off", "apart": "the driver offers no peer access",
             "corrupt": "a check of peer access brought other bytes"}  # fmt: skip
    with place("standin") as context:
        if why == "off":
            monkeypatch.setattr(config, "_first", {})
            monkeypatch.setenv("MXNET_ENABLE_GPU_P2P", "0")
        elif why == "apart":
            machine.apart |= {(0, 1), (1, 2)}
        else:
            machine.corrupt |= {(0, 1), (1, 2)}
        copied(context, 10)
        meter.reset()
        actual, wanted = copied(context)
        np.testing.assert_array_equal(actual, wanted)
        assert not meter.launches["memcpy peer"]
        assert meter.launches["memcpy HtoD"] >= 6
        assert way(context(0), context(1)) == texts[why]
        assert not interconnect([context(0), context(1)]).peers(0, 1)


@pytest.mark.shows("MXNET_ENABLE_GPU_P2P")
@pytest.mark.parametrize(("setting", "text"), [("1", "(peer access)"), ("0", "(through the host)")])
def test_a_trace_says_which(monkeypatch, setting, text):
    """The name of the copy has it."""
    monkeypatch.setattr(config, "_first", {})
    monkeypatch.setenv("MXNET_ENABLE_GPU_P2P", setting)
    with place("standin") as context:
        x = mx.nd.ones((3,), ctx=context(0))
        profiler.set_state("run")
        try:
            x.copyto(context(1)).wait_to_read()
        finally:
            profiler.set_state("stop")
        names = [record[0] if isinstance(record, tuple) else record.name for record in profiler.recorder.operations]
        assert any(text in str(name) for name in names), names
        assert device.get(context(0)).peers.way(device.get(context(1)))


def test_page_locked_memory_of_a_stream_that_is_gone_is_waited_for(monkeypatch):
    """CUDA gives a new stream the handle of a destroyed stream: it may take over its page-locked memory, but only after
    the copies that are still in flight."""
    with place("standin") as context:
        machine.apart |= {(0, 1)}
        here, there = device.get(context(0)), device.get(context(1))
        source = here.allocate(64)
        waits = []
        for _ in range(3):
            stream = there.new_stream()
            monkeypatch.setattr(stream.handle, "wait_event", lambda event, stream=stream: waits.append(event))
            handle = stream.handle.ptr
            with stream:
                there.copy(there.allocate(64), source)
            monkeypatch.undo()
            del stream
            gc.collect()
            assert there.new_stream().handle.ptr == handle  # as CUDA does
        assert len(waits) == 2
        assert len(here.peers._free_stages) == 1


def test_a_new_stream_gets_no_temporaries_of_an_old_one():
    """The old one may still work with them, though CUDA has given the new one its handle."""
    with place("standin") as context:
        gpu = device.get(context(0))
        stream = gpu.new_stream()
        handle = stream.handle.ptr
        with stream:
            first = gpu.temporaries.allocate(512).ptr
            assert gpu.temporaries.allocate(512).ptr == first  # on one stream memory goes from hand to hand
        del stream
        gc.collect()
        stream = gpu.new_stream()
        assert stream.handle.ptr == handle
        with stream:
            assert gpu.temporaries.allocate(512).ptr != first
        assert gpu.temporaries.release() == 1024
