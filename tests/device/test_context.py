"""Contexts as values: numbers, names, equality, pickles, and the current context of each thread."""

import pickle
import threading

import pytest

import weftplan as mx
from weftplan.device import Context, cpu, cpu_pinned, current_context, gpu, sim

MAKERS = {"cpu": cpu, "gpu": gpu, "cpu_pinned": cpu_pinned, "sim": sim}


@pytest.mark.parametrize(("kind", "number"), [("cpu", 1), ("gpu", 2), ("cpu_pinned", 3), ("sim", 6)])
def test_numbers_and_names(kind, number):
    """Each device type has MXNet's number and a function that makes its contexts, with device 0 as the default."""
    context = MAKERS[kind](2)
    assert (context.device_type, context.device_typeid, context.device_id, repr(context)) == (
        kind, number, 2, f"{kind}(2)",
    )  # fmt: skip
    assert Context.devstr2type[kind] == number
    assert Context.devtype2str[number] == kind
    assert MAKERS[kind]() == Context(kind) == Context(kind, 0)
    assert context.is_host is (kind != "gpu")


def test_equal_contexts_are_one_value():
    """Contexts of equal type and index are equal, with equal hashes, also after pickling."""
    context = sim(3)
    assert pickle.loads(pickle.dumps(context)) == context == Context("sim", 3)
    assert len({context, sim(3), sim(2), cpu(3)}) == 3
    assert context != "sim(3)"
    assert context != cpu(3)
    assert not context == sim(2)  # noqa: SIM201


def test_the_current_context_of_nested_blocks():
    """The innermost ``with`` block sets the current context, for new arrays too; after it the outer one is restored."""
    assert current_context() == cpu(0)
    with sim(1):
        with cpu(2) as inner:
            assert current_context() is inner
            assert mx.nd.zeros((1,)).context == cpu(2)
        assert current_context() == sim(1)
        with pytest.raises(ZeroDivisionError), inner:
            1 / 0  # noqa: B018
        assert current_context() == sim(1)
    assert current_context() == cpu(0)


def test_the_current_context_is_the_threads_own():
    """A new thread starts with the context cpu(0), whatever is current elsewhere."""
    seen = []

    def look():
        seen.append(current_context())
        with cpu(5):
            seen.append(current_context())

    with cpu(4):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert current_context() == cpu(4)
    assert seen == [cpu(0), cpu(5)]
