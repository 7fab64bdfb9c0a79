"""Deferred Ctrl-C on the main thread: it is raised after the block, or immediately if the block takes long."""

import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from weftplan.engine.shield import NEVER, PATIENCE_NS, clock, shield, shielded, signals_deferred, undisturbed


@pytest.fixture(autouse=True)
def handler():
    """Install Python's own SIGINT handler during the test, whatever the shell has set."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_interrupt_is_raised_after_the_block():
    """A Ctrl-C inside a block raises KeyboardInterrupt after the block has finished."""
    done = []

    def work():
        with shielded():
            signal.raise_signal(signal.SIGINT)
            done.append(shield.held)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True]
    assert not shield.held


def test_without_an_interrupt_nothing_is_raised():
    """A block without an interrupt raises nothing, even if an earlier block was interrupted."""
    with pytest.raises(KeyboardInterrupt), shielded():
        signal.raise_signal(signal.SIGINT)
    with shielded():
        pass


def test_long_block_is_interrupted():
    """An interrupt is raised immediately if a user function has run longer than PATIENCE_NS.

    While ``clock.since`` is NEVER, no user function runs, and the interrupt is deferred.
    """
    done = []

    def work():
        with shielded():
            clock.since = NEVER
            signal.raise_signal(signal.SIGINT)
            done.append(1)
            clock.since = time.perf_counter_ns() - PATIENCE_NS - 1
            signal.raise_signal(signal.SIGINT)
            done.append(2)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1]
    with shielded():  # a later block does not raise the first block's interrupt
        pass


def test_other_threads_do_not_change_the_clock():
    """The clock of another thread's block does not change how long the main thread defers an interrupt."""
    done = []

    def other():
        with shielded():
            clock.since = NEVER

    def work():
        with shielded():
            clock.since = time.perf_counter_ns() - PATIENCE_NS - 1
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(60)
            signal.raise_signal(signal.SIGINT)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == []


def test_inner_section_restarts_the_time():
    """An inner block restarts the time: it defers an interrupt although the outer block has taken long.

    The outer block then raises the interrupt, or defers it if it has not taken long.
    """
    done = []

    def work():
        with shielded():
            clock.since = time.perf_counter_ns() - PATIENCE_NS - 1
            with shielded():
                signal.raise_signal(signal.SIGINT)
                done.append(1)
                clock.since = NEVER
            done.append(2)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1]
    with shielded():
        with shielded():
            signal.raise_signal(signal.SIGINT)
        assert shield.held  # the outer block has not taken long, so it defers the interrupt
        shield.held = False


def test_restored_shield_works_again():
    """If code reinstalls the shield's handler after its block, a later block still defers KeyboardInterrupt."""
    with shielded():
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGINT, previous)
    done = []

    def work():
        with shielded():
            signal.raise_signal(signal.SIGINT)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_nested_shield_and_other_threads_are_no_ops():
    """A nested block, or a block on another thread, does not change the signal handler."""
    inside = []
    with shielded():
        with shielded():
            pass
        assert signal.getsignal(signal.SIGINT) is shield

    def other():
        with shielded():
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(60)
    assert inside == [signal.default_int_handler]


def test_handler_installed_inside_stays():
    """A handler that the code inside a block installs stays installed after it."""
    seen = []
    with shielded():
        signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    signal.raise_signal(signal.SIGINT)
    assert seen == [1]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_shield_restored_later_is_transparent():
    """The shield's handler, if restored after its block has ended, raises KeyboardInterrupt immediately."""
    with shielded():
        saved = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, saved)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("disposition", [signal.SIG_IGN, signal.SIG_DFL])
def test_system_handlers_are_not_replaced(disposition):
    """A block does not replace SIG_IGN and SIG_DFL, because they raise nothing."""
    signal.signal(signal.SIGINT, disposition)
    with shielded():
        assert signal.getsignal(signal.SIGINT) is disposition
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_unbroken_section_is_never_interrupted():
    """An ``undisturbed`` section is never interrupted, however long it takes; the interrupt is raised after it."""
    done = []

    def work():
        with shielded():
            clock.since = time.perf_counter_ns() - 2 * PATIENCE_NS
            with undisturbed:
                signal.raise_signal(signal.SIGINT)
                with undisturbed:
                    done.append(1)
            done.append(2)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1]
    with shielded():
        since = clock.since
        with undisturbed, undisturbed:
            signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))
        assert clock.since == since


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="the system has no such signal")
def test_all_handlers_are_deferred():
    """``signals_deferred`` calls every handler after its block, the next also if one raises, and restores them."""
    seen = []

    def raising(number, frame):
        seen.append(number)
        raise ValueError("handler")

    before = [signal.signal(number, raising) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    try:
        with pytest.raises(ValueError, match="handler"), signals_deferred():  # noqa: PT012
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR2)
            assert seen == []
        assert seen == [signal.SIGUSR1, signal.SIGUSR2]
        assert signal.getsignal(signal.SIGUSR1) is signal.getsignal(signal.SIGUSR2) is raising
        with pytest.raises(KeyboardInterrupt), signals_deferred():
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in zip((signal.SIGUSR1, signal.SIGUSR2), before, strict=True):
            signal.signal(number, handler)


def test_handler_may_submit_while_the_first_engine_is_made():
    """A handler that submits while the first engine is being made gets that engine; it neither recurses nor waits."""
    text = """
        import signal
        from weftplan import engine
        from weftplan.engine import factory

        done, create, made = [], factory.create, []
        signal.signal(signal.SIGINT, lambda *_: engine.submit(done.append, 1))

        def disturbed(*kind):
            signal.raise_signal(signal.SIGINT)
            made.append(create(*kind))
            signal.raise_signal(signal.SIGINT)
            return made[-1]

        factory.create = disturbed
        assert engine.get() is made[0]
        engine.wait()
        assert (len(made), done) == (1, [1, 1])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
