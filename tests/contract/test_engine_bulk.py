"""The engine's contract: several pushes as one operation. On every driver."""

import pytest

from tests.contract.engines import Boom, boom
from weftplan.errors import EngineError


def test_bulk_runs_everything_in_order(eng):
    """Pushes inside a bulk run in order, in fewer operations; leaving it restores the size."""
    var, log = eng.new_variable(), []
    with eng.bulk(10):
        for i in range(25):
            eng.push(lambda i=i: log.append(i), (), [var])
    eng.wait_for_all()
    assert log == list(range(25))
    assert eng.set_bulk_size(0) == 0


def test_bulk_member_fails_alone(deferred):
    """One member fails: what depends on it is skipped, everything else of the bulk runs."""
    a, b, c, log = *(deferred.new_variable() for _ in range(3)), []
    with deferred.bulk(15):
        deferred.push(boom, (), [a], name="bad member")
        deferred.push(lambda: log.append("unrelated"), (), [b])
        deferred.push(lambda: log.append("dependant"), [a], [c])
    with pytest.raises(Boom) as caught:
        deferred.wait_for_var(c)
    assert "'bad member'" in caught.value.__notes__[0]
    deferred.wait_for_var(b)
    with pytest.raises(Boom):
        deferred.wait_for_var(a)
    assert log == ["unrelated"]


def test_waiting_flushes_the_bulk(eng):
    """A wait inside a bulk does not wait for ever."""
    var, log = eng.new_variable(), []
    with eng.bulk(100):
        eng.push(lambda: log.append(1), (), [var])
        eng.wait_for_var(var)
        assert log == [1]
    with pytest.raises(EngineError, match="bulk size"):
        eng.set_bulk_size(-1)
