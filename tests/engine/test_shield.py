"""Deferred Ctrl-C on the main thread: raised after the block, or immediately if the block takes long."""

import signal
import threading
import time

import pytest

from weftplan.engine.shield import NEVER, PATIENCE_NS, clock, shield, shielded, undisturbed


@pytest.fixture(autouse=True)
def handler():
    """Install Python's own handler, whatever the shell has set, and restore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_interrupt_is_raised_after_the_block():
    """The block is finished first."""
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
    """Nor is an interrupt of an earlier block raised."""
    with pytest.raises(KeyboardInterrupt), shielded():
        signal.raise_signal(signal.SIGINT)
    with shielded():
        pass


def test_long_block_is_interrupted():
    """A hanging user function must be interruptible; with ``since`` NEVER the code is no user function."""
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
    with shielded():  # raises the deferred interrupt with it
        pass


def test_other_threads_do_not_change_the_clock():
    """Unshielded operations of waiting threads do not change how long the main thread defers."""
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
    """In a section that already takes long, the inner section defers; then the outer raises the interrupt."""
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
        assert shield.held  # the outer section has not taken long: it is finished first
        shield.held = False


def test_restored_shield_works_again():
    """A shielded function later restores the handler that it had replaced."""
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
    """The outer shield decides; other threads receive no signals."""
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
    """A shielded function may install a handler of its own."""
    seen = []
    with shielded():
        signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    signal.raise_signal(signal.SIGINT)
    assert seen == [1]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_shield_restored_later_is_transparent():
    """A function that saves and restores the handler may do so after the shield has ended."""
    with shielded():
        saved = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, saved)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("disposition", [signal.SIG_IGN, signal.SIG_DFL])
def test_system_handlers_are_not_replaced(disposition):
    """They raise nothing."""
    signal.signal(signal.SIGINT, disposition)
    with shielded():
        assert signal.getsignal(signal.SIGINT) is disposition
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_unbroken_section_is_never_interrupted():
    """However long it takes; the interrupt comes after it."""
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
