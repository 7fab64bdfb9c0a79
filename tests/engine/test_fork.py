"""A fork while another thread's push is on its way."""

import os
import warnings

import pytest

from weftplan import engine


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_queue_made_between_stop_and_fork():
    """A push that passed the gate makes a queue after stop(): the child does not wake its worker, which is not there.

    1. stop() takes the queues away  2. a late push makes a new one, whose worker runs it and parks  3. the fork
    """
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    var, stop = eng.new_variable(), eng.stop

    def stop_then_late_push():
        stop()
        eng.push(lambda: None, (), [var])
        eng._wait_idle()

    eng.stop = stop_then_late_push
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        done = eng.statistics().queues == ()
        os._exit(0 if done else 1)
    assert os.waitpid(pid, 0)[1] == 0
    del eng.stop
    eng.push(lambda: None, (), [var])
    eng.wait_for_var(var)
    assert var.version == 2
    eng.stop()
