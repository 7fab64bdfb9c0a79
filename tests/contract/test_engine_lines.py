"""Engine contract: a failure names the operation and the exact line of its push, for every kind of push."""

import inspect
import re

import numpy as np
import pytest

from tests.contract.engines import Boom, boom
from tests.support.together import together
from weftplan import engine
from weftplan.device.context import cpu, sim
from weftplan.engine import FnProperty
from weftplan.engine.sites import site_text


def location(further=0):
    """Return the location of the caller, ``further`` lines down, as "file:line"."""
    frame = inspect.currentframe().f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno + further}"


def push_in_bulk(eng, var):
    """Push a failing member in a bulk; return the line of its push."""
    with eng.bulk(5):
        line = location(1)
        eng.push(boom, (), [var], name="culprit")
    return line


def push_operator(eng, var):
    """Push a failing stored operator; return the line of the push, not of the operator's creation."""
    stored = eng.new_operator(boom, (), [var], name="culprit")
    line = location(1)
    eng.push(stored)
    return line


def push_over_lines(eng, var):
    """Push a failing operation by a call over several lines; return the first of them."""
    line = location(1)
    eng.push(
        boom,
        (),
        [var],
        name="culprit",
    )
    return line


WAYS = {
    "plain": lambda eng, var: (eng.push(boom, (), [var], name="culprit"), location())[1],
    "with reads": lambda eng, var: (eng.push(boom, [eng.new_variable()], [var], name="culprit"), location())[1],
    "priority": lambda eng, var: (eng.push(boom, (), [var], priority=3, name="culprit"), location())[1],
    "context": lambda eng, var: (eng.push(boom, (), [var], cpu(1), name="culprit"), location())[1],
    "device": lambda eng, var: (eng.push(boom, (), [var], sim(0), name="culprit"), location())[1],
    "property": lambda eng, var: (eng.push(boom, (), [var], prop=FnProperty.NO_SKIP, name="culprit"), location())[1],
    "async": lambda eng, var: (eng.push_async(lambda done: boom(), (), [var], name="culprit"), location())[1],
    "said": lambda eng, var: (eng.push_async(lambda done: done(Boom()), (), [var], name="culprit"), location())[1],
    "operator": push_operator,
    "bulk": push_in_bulk,
    "several lines": push_over_lines,
}


@together()
@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
@pytest.mark.parametrize("way", WAYS)
def test_the_line_of_the_push(deferred, way, traced):
    """The note of the raised error has name and line, for a wait for the var itself and for a dependant."""
    if traced:
        deferred.tracer = lambda *record: None
    var, after = deferred.new_variable(), deferred.new_variable()
    line = WAYS[way](deferred, var)
    deferred.push(lambda: None, [var], [after], name="dependant")
    for one in (after, var):
        with pytest.raises(Boom) as caught:
            deferred.wait_for_var(one)
        assert caught.value.__notes__ == [f"raised in engine operation 'culprit', pushed at {line}"]


def test_the_line_of_a_delete(deferred):
    """The note of a failing delete has the name DeleteVariable and the line of the delete."""
    var = deferred.new_variable()
    line = location(1)
    deferred.delete_variable(var, boom)
    with pytest.raises(Boom) as caught:
        deferred.wait_for_all()
    assert caught.value.__notes__ == [f"raised in engine operation 'DeleteVariable', pushed at {line}"]


def test_the_line_is_the_users(deferred):
    """The note of a failing task has the line of the user's submit, not a line of the package."""
    out = np.zeros(1)
    with engine.using(deferred):
        line = location(1)
        engine.submit(boom, reads=[out], name="task")
        with pytest.raises(Boom) as caught:
            engine.wait()
    assert caught.value.__notes__ == [f"raised in engine operation 'task', pushed at {line}"]


def test_names_of_operations_without_one(deferred):
    """Without a name, an operation is called by its function's qualified name, or by its object's class."""

    class Callable:
        def __call__(self):
            boom()

        def method(self):
            boom()

    for fn, name in (
        (boom, "boom"),
        (Callable(), "Callable"),
        (Callable().method, ".Callable.method"),
        (lambda: boom(), ".<lambda>"),
    ):
        deferred.push(fn)
        with pytest.raises(Boom) as caught:
            deferred.wait_for_all()
        assert re.search(rf"operation '[^']*{re.escape(name)}', pushed", caught.value.__notes__[0])


def test_a_site_without_a_line():
    """Without a code location the line is unknown; without a line for the offset it is the function's first line."""
    assert site_text(None) == "an unknown line"
    code = test_a_site_without_a_line.__code__
    assert site_text((code, 10**6)) == f"{code.co_filename}:{code.co_firstlineno}"


def test_one_exception_object_of_many_operations(deferred):
    """An exception object that many operations raise lists each of them once in its notes, at most a hundred.

    All these operations fail.
    """
    error, result = Boom("shared"), []

    def fail():
        raise error

    for i in range(150):
        result.append(deferred.new_variable())
        deferred.push(fail, (), [result[i]], name=f"culprit {i // 2}")
    with pytest.raises(Boom):
        deferred.wait_for_var(result[149])
    for var in result:
        with pytest.raises(Boom):
            deferred.wait_for_var(var)
    assert len(error.__notes__) == len(set(error.__notes__)) == 75
    for i in range(150):
        deferred.push(fail, (), [result[i]], name=f"another {i}")
    with pytest.raises(Boom):
        deferred.wait_for_all()
    assert len(error.__notes__) == 100
    assert deferred.statistics().failed == 300
