"""Names, functions and errors whose own methods raise SystemExit: the engine still reports the operation's error."""

import pytest

from tests.contract.engines import Boom, boom
from tests.support.together import together
from weftplan import engine

KINDS = ("NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator")


def raises(*_):
    """Raise SystemExit; this replaces any method of a user's class."""
    raise SystemExit("raised by a method")


def failing(kind):
    """Return a function that raises ``kind("boom")``."""

    def fail():
        raise kind("boom")

    return fail


def odd(what):
    """Return a function that raises Boom, and its name or None, for the case ``what``.

    In each case methods of the function, the name or the error raise SystemExit.

    The classes are local, because doctest collection would call their methods.
    """

    class BadName:
        __str__ = __repr__ = raises

    class BadTruth(str):
        __slots__ = ()
        __bool__ = __len__ = raises

    class BadFormat(str):
        __slots__ = ()
        __format__ = raises

    class Nameless(type):
        __name__ = property(raises)

    class Functor(metaclass=Nameless):
        __getattr__ = raises

        def __call__(self):
            boom()

    class BadNotes(Boom):
        add_note = raises

    class BadOldNotes(Boom):
        __notes__ = property(raises)

    class BadTrace(Boom):
        with_traceback = raises

    class BadAttributes(Boom):
        __getattribute__ = raises

    return {
        "name": (boom, BadName()),
        "truth": (boom, BadTruth("name")),
        "format": (boom, BadFormat("name")),
        "function": (Functor(), None),
        "notes": (failing(BadNotes), None),
        "old notes": (failing(BadOldNotes), None),
        "traceback": (failing(BadTrace), None),
        "attributes": (failing(BadAttributes), None),
    }[what]


@together()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "what", ["name", "truth", "format", "function", "notes", "old notes", "traceback", "attributes"]
)
@pytest.mark.parametrize("size", [0, 5])
def test_workers_survive_broken_names(kind, what, size):
    """If a method of the name, function or error raises SystemExit, Boom is reported and the next operation runs.

    This is true in a bulk and without one.
    """
    fn, name = odd(what)
    eng = engine.create(kind, **({} if kind == "Simulator" else {"cpu_workers": 1}))
    var = eng.new_variable()
    raised = None
    try:
        with eng.bulk(size):
            eng.push(fn, (), [var], name=name)
        if kind == "Simulator":
            eng.wait_for_var(var)
        else:
            raised = eng.future(var).exception(60)
    except Boom as error:
        raised = error
    assert isinstance(raised, Boom)
    eng.push(lambda: None, (), [var])
    eng.wait_for_var(var)
    assert var.version == 2
    eng.stop()
