"""Engine contract under WEFTPLAN_ERRORS=mxnet: a failure is raised once, as in MXNet 1.9.1."""

import pytest

from tests.contract.engines import Boom, boom
from weftplan import engine


def test_mxnet_error_mode(monkeypatch):
    """With WEFTPLAN_ERRORS=mxnet, one raise clears the failure of every var that has it."""
    monkeypatch.setenv("WEFTPLAN_ERRORS", "mxnet")
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=2)
    a, b = eng.new_variable(), eng.new_variable()
    eng.push(boom, (), [a, b])
    with pytest.raises(Boom):
        eng.wait_for_var(a)
    eng.wait_for_var(a)
    eng.wait_for_var(b)
    eng.wait_for_all()
    eng.stop()


class TestMxnetRule:
    """Rules of WEFTPLAN_ERRORS=mxnet on three engines."""

    @pytest.fixture(params=["ThreadedEngine", "ThreadedEnginePerDevice", "Simulator"])
    def mxnet(self, request, monkeypatch):
        """An engine created with WEFTPLAN_ERRORS=mxnet."""
        monkeypatch.setenv("WEFTPLAN_ERRORS", "mxnet")
        eng = engine.create(request.param)
        yield eng
        eng.stop()
        eng.wait_for_all()

    def test_waiting_for_all_heals_everything(self, mxnet):
        """After wait_for_all has raised a failure, later waits for all or for a var raise nothing."""
        variables = [mxnet.new_variable() for _ in range(3)]
        mxnet.push(boom, (), [variables[0]])
        mxnet.push(boom, (), [variables[1]])
        mxnet.push(lambda: None, [variables[0]], [variables[2]])
        with pytest.raises(Boom):
            mxnet.wait_for_all()
        mxnet.wait_for_all()
        for var in variables:
            mxnet.wait_for_var(var)

    def test_success_does_not_heal(self, mxnet):
        """A write pushed before the raise is skipped; a write pushed after it runs."""
        var, ran = mxnet.new_variable(), []
        mxnet.push(boom, (), [var])
        mxnet.push(lambda: ran.append("skipped"), (), [var])
        with pytest.raises(Boom):
            mxnet.wait_for_var(var)
        assert ran == []
        mxnet.wait_for_var(var)
        mxnet.push(lambda: ran.append("runs"), (), [var])
        mxnet.wait_for_var(var)
        assert ran == ["runs"]

    def test_another_failure_stays(self, mxnet):
        """Raising one failure does not clear another failure."""
        a, b = mxnet.new_variable(), mxnet.new_variable()
        mxnet.push(boom, (), [a])
        mxnet.push(boom, (), [b])
        for var in (a, b):
            with pytest.raises(Boom):
                mxnet.wait_for_var(var)
            mxnet.wait_for_var(var)
        mxnet.wait_for_all()

    def test_a_healed_var_and_a_new_failure(self, mxnet):
        """An old failure that was raised through another var does not clear a new failure."""
        a, b = mxnet.new_variable(), mxnet.new_variable()
        mxnet.push(boom, (), [a, b])
        with pytest.raises(Boom):
            mxnet.throw(_settled(mxnet, b))
        mxnet.push(boom, (), [a])
        mxnet.wait_for_var(b)
        with pytest.raises(Boom):
            mxnet.wait_for_var(a)
        mxnet.wait_for_var(a)


def _settled(eng, var):
    """Return ``var`` after all operations have ended."""
    eng.stop()
    return var
