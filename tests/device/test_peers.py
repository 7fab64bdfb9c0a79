"""Copies between GPUs: direct if peer access works, else through page-locked memory; traces name the route."""

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


def copy_over_gpus(context, count=BIG):
    """Copy an array from gpu(0) over gpu(1) and gpu(2) to the host; return the copy and the original."""
    values = np.arange(count, dtype=np.float32)
    x = mx.nd.array(values, ctx=context(0)) + 1
    return x.as_in_context(context(1)).as_in_context(context(2)).asnumpy(), values + 1


@pytest.mark.parametrize("where", GPUS)
def test_copies_are_exact(where):
    """A copy over three GPUs has the original's bytes, by any route."""
    with place(where) as context:
        actual, wanted = copy_over_gpus(context)
    np.testing.assert_array_equal(actual, wanted)


def test_peers_copy_directly():
    """Peer access of a pair is enabled and checked once; each later copy is one direct launch."""
    with place("standin") as context:
        actual, wanted = copy_over_gpus(context)
        np.testing.assert_array_equal(actual, wanted)
        assert {(0, 1), (1, 2)} <= machine.peers
        meter.reset()
        copy_over_gpus(context)
        assert meter.launches["memcpy peer"] == 2
        assert way(context(0), context(1)) == PEER


@pytest.mark.parametrize("why", ["off", "apart", "corrupt"])
def test_non_peers_copy_through_the_host(monkeypatch, why):
    """Without peer access, values pass through page-locked memory in pieces and are equal.

    Peer access is missing if it is switched off, if the driver refuses it, or if its check brings other bytes.
    """
    texts = {"off": "MXNET_ENABLE_GPU_P2P is off", "apart": "the driver offers no peer access",
             "corrupt": "a check of peer access brought other bytes"}  # fmt: skip
    with place("standin") as context:
        if why == "off":
            monkeypatch.setattr(config, "_first_values", {})
            monkeypatch.setenv("MXNET_ENABLE_GPU_P2P", "0")
        elif why == "apart":
            machine.apart |= {(0, 1), (1, 2)}
        else:
            machine.corrupt |= {(0, 1), (1, 2)}
        copy_over_gpus(context, 10)
        meter.reset()
        actual, wanted = copy_over_gpus(context)
        np.testing.assert_array_equal(actual, wanted)
        assert not meter.launches["memcpy peer"]
        assert meter.launches["memcpy HtoD"] >= 6
        assert way(context(0), context(1)) == texts[why]
        assert not interconnect([context(0), context(1)]).peers(0, 1)


@pytest.mark.shows("MXNET_ENABLE_GPU_P2P")
@pytest.mark.parametrize(("setting", "text"), [("1", "(peer access)"), ("0", "(through the host)")])
def test_a_trace_says_which(monkeypatch, setting, text):
    """The name of a copy in a trace contains its route."""
    monkeypatch.setattr(config, "_first_values", {})
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


def test_reused_page_locked_memory_waits_for_copies(monkeypatch):
    """A stream that reuses the handle of a destroyed stream reuses its page-locked memory after pending copies."""
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


def test_new_stream_reuses_no_temporaries():
    """A stream that reuses the handle of a destroyed stream does not reuse its temporaries.

    Work of the old stream may still use them.
    """
    with place("standin") as context:
        gpu = device.get(context(0))
        stream = gpu.new_stream()
        handle = stream.handle.ptr
        with stream:
            first = gpu.temporaries.allocate(512).ptr
            assert gpu.temporaries.allocate(512).ptr == first  # on one stream freed memory is reused
        del stream
        gc.collect()
        stream = gpu.new_stream()
        assert stream.handle.ptr == handle
        with stream:
            assert gpu.temporaries.allocate(512).ptr != first
        assert gpu.temporaries.release() == 1024
