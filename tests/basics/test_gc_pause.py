"""Python's cyclic garbage collector is paused while a graph is loaded or bound, and only then."""

import gc
import os
import subprocess
import sys
import threading

import pytest

import weftplan as mx
from weftplan.executor.binding import simple_bind
from weftplan.support.gc_pause import resting
from weftplan.symbol import json_io


def activation_chain(length):
    """Return a symbol of ``length`` activations, one after another."""
    x = mx.sym.Variable("data")
    for k in range(length):
        x = mx.sym.Activation(x, act_type="tanh", name=f"a{k}")
    return x


@pytest.fixture
def collector_frames():
    """Make the collector run after every ten objects; return the set of code objects during which it ran."""
    interrupted = set()

    def started(phase, _):
        frame = sys._getframe(1)
        while phase == "start" and frame is not None:
            interrupted.add(frame.f_code)
            frame = frame.f_back

    before = gc.get_threshold()
    gc.callbacks.append(started)
    gc.set_threshold(10, 5, 5)
    yield interrupted
    gc.set_threshold(*before)
    gc.callbacks.remove(started)


def test_no_collection_during_load_and_bind(collector_frames):
    """The collector does not run during ``load_json`` and ``simple_bind``, although it runs elsewhere."""
    text = activation_chain(60).tojson()
    mx.sym.load_json(text).simple_bind(mx.cpu(), data=(2, 3))
    assert collector_frames, "the collector starts elsewhere"
    assert simple_bind.__wrapped__.__code__ not in collector_frames
    assert json_io.loads.__wrapped__.__code__ not in collector_frames
    assert gc.isenabled()


def test_collector_resumes_after_an_error():
    """After a bind that raises, the collector is enabled."""
    with pytest.raises(mx.MXNetError):
        activation_chain(2).simple_bind(mx.cpu())
    assert gc.isenabled()


def test_disabled_collector_stays_disabled():
    """A collector that the user has disabled stays disabled after a bind."""
    gc.disable()
    try:
        activation_chain(2).simple_bind(mx.cpu(), data=(2, 3))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_collector_resumes_after_concurrent_calls():
    """After two overlapping pauses the collector is enabled, whichever ends first."""
    for first_ends_first in (True, False):
        begun, may_end = threading.Event(), threading.Event()

        @resting
        def slow(begun=begun, may_end=may_end):
            begun.set()
            assert may_end.wait(60)

        thread = threading.Thread(target=slow)
        thread.start()
        assert begun.wait(60)

        @resting
        def other(thread=thread, may_end=may_end, first_ends_first=first_ends_first):
            if first_ends_first:
                may_end.set()
                thread.join()

        other()
        may_end.set()
        thread.join()
        assert gc.isenabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_child_has_the_collector_enabled():
    """A child that is forked during a pause has the collector enabled."""
    script = (
        "import gc, os\n"
        "from weftplan.support.gc_pause import resting\n"
        "@resting\n"
        "def fork():\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        os._exit(0 if gc.isenabled() else 1)\n"
        "    return os.waitpid(child, 0)[1], gc.isenabled()\n"
        "print(fork(), gc.isenabled())\n"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout == "(0, False) True\n", shown.stderr
