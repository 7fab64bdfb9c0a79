"""Holding Ctrl-C back on the main thread: it comes afterwards, or at once when that takes long; handlers stay."""

import signal
import threading
import time

import pytest

from weftplan.engine.shield import NEVER, PATIENCE_NS, clock, shield, shielded, undisturbed


@pytest.fixture(autouse=True)
def handler():
    """Python's own, whatever the shell has set; it is there again afterwards."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_comes_after_the_block():
    """And the block is finished."""
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
    """Nor is one of an earlier block remembered."""
    with pytest.raises(KeyboardInterrupt), shielded():
        signal.raise_signal(signal.SIGINT)
    with shielded():
        pass


def test_what_takes_long_is_interrupted():
    """A user's function that hangs must be stoppable; where ``since`` is NEVER, it is not a user's function."""
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
    with shielded():  # the one that was held back has been raised with it
        pass


def test_other_threads_do_not_touch_the_clock():
    """What they run while they wait, without a shield, does not change how long the main thread holds back."""
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


def test_an_inner_part_begins_anew():
    """In what takes long already: the inner part holds back, at its end the interrupt comes, in the outer part."""
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
        assert shield.held  # the outer part has not taken long: it is finished first
        shield.held = False


def test_a_shield_that_was_put_back_shields_again():
    """A shielded function that restores, later, what it found."""
    with shielded():
        found = signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGINT, found)
    done = []

    def work():
        with shielded():
            signal.raise_signal(signal.SIGINT)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_inside_another_and_on_other_threads_it_does_nothing():
    """The outer one decides; other threads get no signals."""
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


def test_a_handler_that_is_installed_meanwhile_stays():
    """The function under the shield may set its own."""
    seen = []
    with shielded():
        signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    signal.raise_signal(signal.SIGINT)
    assert seen == [1]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_shield_that_is_put_back_later_is_transparent():
    """A function that saves and restores the handler may do so when the shield is down."""
    with shielded():
        saved = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, saved)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("disposition", [signal.SIG_IGN, signal.SIG_DFL])
def test_handlers_of_the_system_are_left_alone(disposition):
    """They raise nothing."""
    signal.signal(signal.SIGINT, disposition)
    with shielded():
        assert signal.getsignal(signal.SIGINT) is disposition
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_what_must_not_be_broken_off_is_not():
    """However long the whole has taken; the interrupt comes behind it."""
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
