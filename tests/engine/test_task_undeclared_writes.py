"""The warning about tasks that return None, read arrays and declare no write."""

import functools
import warnings

import numpy as np
import pytest

from weftplan import engine
from weftplan.errors import UndeclaredAccessWarning

pytestmark = pytest.mark.usefixtures("threaded")


def correct(frame):
    frame -= 1


class Model:
    """An object with an array and a method that changes it."""

    def __init__(self):
        self.weights = np.ones(3)

    def update(self):
        self.weights -= 1


CASES = {
    "function": lambda: engine.submit(correct, np.ones(3)),
    "partial": lambda: engine.submit(functools.partial(correct), np.ones(3)),
    "method": lambda: engine.submit(Model().update),
    "decorator": lambda: engine.task()(correct)(np.ones(3)),
    "array in a list": lambda: engine.submit(lambda frames: frames[0].fill(0), [np.ones(3)]),
    "other reads are declared": lambda: engine.submit(correct, np.ones(3), reads=[np.ones(2)]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_silent_writer_is_named_with_line_and_remedy(case):
    """The warning names the task, points at the line that submitted it, and says what to write."""
    with pytest.warns(UndeclaredAccessWarning, match=r"returned None.*writes=\[a\].*writes=\[\]") as caught:
        case().wait()
    assert caught[0].filename == __file__
    assert caught[0].lineno == case.__code__.co_firstlineno


SILENT = {
    "writes": lambda: engine.submit(correct, a := np.ones(3), writes=[a]),
    "no writes": lambda: engine.submit(correct, np.ones(3), writes=[]),
    "decorator": lambda: engine.task(writes=[])(correct)(np.ones(3)),
    "out": lambda: engine.submit(lambda source, out: None, np.ones(3), out=np.ones(3)),
    "value": lambda: engine.submit(lambda a: a.sum(), np.ones(3)),
    "no array": lambda: engine.submit(correct, 3),
    "task": lambda: engine.submit(correct, engine.submit(int)),
    "var": lambda: engine.submit(lambda: None, reads=[engine.get().new_variable()]),
    "generator": lambda: engine.submit(lambda rng: None, np.random.default_rng(0)),
    "function of C": lambda: engine.submit([].append, np.ones(3)),
    "method that writes": lambda: engine.submit(np.ones(3).sort),
}


@pytest.mark.parametrize("case", SILENT.values(), ids=SILENT)
def test_other_tasks_give_no_warning(case):
    """Tasks that declare, that return a value, or whose writes are known give none."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case().result()


def test_one_warning_for_each_line():
    """A line that submits such a task in a loop warns once; another line warns again."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(5):
            engine.submit(correct, np.ones(3)).wait()
        engine.submit(correct, np.ones(3)).wait()
    assert len([one for one in caught if one.category is UndeclaredAccessWarning]) == 2
