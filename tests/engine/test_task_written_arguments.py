"""Written arguments: the rules agree with NumPy's signatures, and with what NumPy's functions do to their arguments."""

import contextlib
import inspect
import io
import itertools
import warnings
from types import FunctionType

import numpy as np
import pytest
from numpy.lib import recfunctions

from weftplan.tasks import written_arguments
from weftplan.tasks.written_arguments import unbound, write_rule

MODULES = (np, np.ma, np.linalg, np.fft, np.random, np.char, np.strings, np.rec, np.emath, recfunctions)
CLASSES = (
    *(np.ndarray, np.ma.MaskedArray, np.matrix, np.recarray, np.char.chararray),
    *(np.ufunc, np.random.Generator, np.random.RandomState),
)
REFUSED = {"resize", "setflags"}
"""Methods that tasks may not call."""
NO_TRIAL = {"test", "info", "show_config", "show_runtime", "save", "savez", "savez_compressed", "savetxt", "seterrcall"}
NO_TRIAL |= {"setbufsize", "set_printoptions", "seterr", "dump", "tofile", "seed", "set_state", "set_bit_generator"}
NO_TRIAL |= {"array_repr"}  # of a line width that is an array
"""Functions that write files or settings."""


def functions():
    """Return (name, function, whether it is a method) for every public function and method of NumPy."""
    found = []
    for module, name in [(one, name) for one in MODULES for name in dir(one) if not name.startswith("_")]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fn = getattr(module, name)
        if callable(fn) and not isinstance(fn, type):
            fn, owner = unbound(fn)
            found.append((f"{module.__name__}.{name}", fn, owner is not None))
    for cls, name in [(one, name) for one in CLASSES for name in dir(one)]:
        if name.startswith("_") and name not in ARITHMETIC:
            continue
        fn = getattr(cls, name)
        if callable(fn) and not isinstance(fn, type):
            found.append((f"{cls.__name__}.{name}", fn, True))
    return found


ARITHMETIC = {name for name in dir(np.ndarray) if name.startswith("__i") and name not in ("__init__", "__iter__")}
ARITHMETIC = (ARITHMETIC - {"__init_subclass__", "__invert__", "__index__", "__int__"}) | {"__setitem__", "__delitem__"}
FUNCTIONS = functions()
WITH_OUT = [
    (name, fn, method)
    for name, fn, method in FUNCTIONS
    if not isinstance(fn, np.ufunc) and "out" in written_arguments._parameters(fn, method)
]


def test_all_functions_with_an_output_are_known():
    """Every function whose documentation lists a parameter ``out`` has it in its rule."""
    documented = set()
    for name, fn, _ in FUNCTIONS:
        parameters = inspect.cleandoc(fn.__doc__ or "").partition("\nParameters\n")[2].partition("\nReturns\n")[0]
        if "\nout : " in parameters:
            documented.add(name)
    assert {"numpy.clip", "numpy.dot", "numpy.fft.fft", "Generator.random"} <= documented
    for name, fn, method in FUNCTIONS:
        # Some documentation is that of another function: the signature decides.
        if name in documented and written_arguments._parameters(fn, method).keys() & {"out", "args"}:
            names = [parameter for _, parameter in write_rule(fn, bound=method).always]
            assert "out" in names, name


@pytest.mark.parametrize(("name", "fn", "method"), WITH_OUT, ids=[name for name, _, _ in WITH_OUT])
def test_outputs_are_found_by_position_and_name(name, fn, method):
    """The argument that Python binds to ``out`` is written, by position and by name, and no other is."""
    rule, output = write_rule(fn, bound=method), object()
    assert rule.written([None] if method else [], {"out": output}) == [output]
    with contextlib.suppress(ValueError, TypeError):  # NumPy before 2.4 has no signatures of functions of C
        parameters = inspect.signature(fn).parameters
        position = list(parameters).index("out")
        if parameters["out"].kind is not inspect.Parameter.KEYWORD_ONLY:
            arguments = [None] * position + [output]
            assert inspect.signature(fn).bind(*arguments).arguments["out"] is output
            assert rule.written(arguments, {})[-1] is output


def test_docstrings_agree_with_signatures():
    """For functions of C the first line of the docstring gives the positions that the signature gives."""
    compared = 0
    for name, fn, method in WITH_OUT:
        documented = written_arguments._documented_parameters(fn, method)
        if not isinstance(fn, FunctionType) and "out" in documented:
            compared += 1
            position = written_arguments._parameters(fn, method)["out"]
            assert position in (documented["out"], -1), name
    assert compared > 20


def arguments():
    """Yield argument lists for trials: arrays of several kinds, with indices, masks and values."""
    grid = np.array([[3.0, np.nan, 1.0], [9.0, 4.0, 5.0], [6.0, 8.0, 7.0]])
    masked = np.ma.array([4.0, 3.0, 9.0], mask=[False, True, False])
    record = np.array([(3, 2.0), (1, 5.0)], dtype=[("a", int), ("b", float)])
    firsts = (grid, grid[1].copy(), np.array([5, 3, 4]), masked, record, np.array([True, False, True]))
    others = ((), ([0],), ([0], [7]), ([True, False, True], [7.0, 6.0, 5.0]), (7,), (grid[2].copy(),), ([0], [7], 0))
    for first, rest in itertools.product(firsts, others):
        yield [first.copy(), *rest]
    yield [np.array([True, False, True]), masked.copy()]
    yield [np.array([[4, 3]]), np.array([[0]]), 9, 1]
    yield [record.copy(), np.array([(7, 8.0), (9, 9.0)], dtype=record.dtype)]


def content(value):
    """Return what a change of a value's memory changes."""
    if not isinstance(value, np.ndarray):
        return None
    return value.tobytes() + (value.mask.tobytes() if isinstance(value, np.ma.MaskedArray) else b"")


def trials(fn, method):
    """Yield (arguments, options, positions of the arguments whose memory changed) of the calls that succeed."""
    flags = [{}]
    for name in ("copy", "inplace", "overwrite_input"):
        if name in written_arguments._parameters(fn, method):
            flags.append({name: name != "copy"})
    owners = [()]
    if method and fn.__qualname__.split(".")[0] in ("Generator", "RandomState"):
        owners = [(np.random.default_rng(0),) if fn.__qualname__.startswith("G") else (np.random.RandomState(0),)]
    elif method and getattr(fn, "__objclass__", None) is np.ufunc:
        owners = [(np.add,), (np.negative,)]
    for owner, options in itertools.product(owners, flags):
        for trial in arguments():
            args = [*owner, *trial]
            before = [content(value) for value in args]
            with contextlib.suppress(Exception), np.errstate(all="ignore"), contextlib.redirect_stdout(io.StringIO()):
                fn(*args, **options)
                yield args, options, [n for n, value in enumerate(args) if content(value) != before[n]]


@pytest.mark.filterwarnings("ignore")
def test_every_change_of_an_argument_is_known():
    """No public function or method of NumPy changes an argument that its rule does not say is written."""
    writers, unknown = set(), set()
    for name, fn, method in FUNCTIONS:
        if name.rpartition(".")[2] in NO_TRIAL | REFUSED:
            continue
        rule = write_rule(fn, bound=method)
        for args, options, changed in trials(fn, method):
            written = rule.written(args, options) + ([args[0]] if rule.writes_self else [])
            for number in changed:
                writers.add(name)
                if not any(args[number] is value for value in written):
                    unknown.add((name, number))
    assert unknown == set()
    assert writers >= {
        *("numpy.copyto", "numpy.put", "numpy.place", "numpy.putmask", "numpy.fill_diagonal", "numpy.put_along_axis"),
        *("numpy.nan_to_num", "numpy.ma.put", "numpy.ma.masked_where", "numpy.random.shuffle", "Generator.shuffle"),
        *("ndarray.sort", "ndarray.partition", "ndarray.byteswap", "ndarray.fill", "ndarray.__iadd__", "ufunc.at"),
        *("numpy.ma.fix_invalid", "numpy.lib.recfunctions.assign_fields_by_name", "numpy.median", "MaskedArray.sort"),
    }


def test_rules_of_ufuncs():
    """All outputs of a ufunc are written, by position, also through a partial and a bound method."""
    output, second = object(), object()
    assert write_rule(np.modf, bound=False).written([1.0, output, second], {}) == [output, second]
    assert write_rule(np.add, bound=False).written([1, 2], {"out": (output,)}) == [(output,)]
    assert write_rule(unbound(np.add.at)[0], bound=True).written([np.add, output, [0]], {}) == [output]


def test_functions_of_the_user_are_not_known():
    """A function of the user writes what its caller declares; a parameter named ``out`` says nothing."""

    def smooth(source, out):
        pass

    assert write_rule(smooth, bound=False).written([1, 2], {"out": 3}) == []
