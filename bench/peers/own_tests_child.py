"""Child of ``bench/mxnet_own_tests.py``: runs the tests of one file of MXNet on weftplan or on MXNet itself.

It writes a line of JSON to file descriptor 3 at the begin and the end of each test. If ``OWN_TESTS_TREE`` is set,
``import mxnet`` imports weftplan. This also happens when the module is only imported, because processes that the tests
spawn import it again.
"""

import ast
import builtins
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import traceback
import types
import unittest
from pathlib import Path

TREE = os.environ.get("OWN_TESTS_TREE")
"""MXNet's source tree; None: the name ``mxnet`` is MXNet's own."""
OUT_OF_SCOPE = frozenset(json.loads((Path(__file__).parents[1] / "data" / "own_tests.json").read_text())["absent"])
"""Parts of MXNet that weftplan leaves out on purpose; a test that uses one is out of scope."""
SAME = {"ndarray.ndarray": "ndarray", "symbol.symbol": "symbol", "model": "model", "module.module": "module"}
"""{module of MXNet: module of weftplan that has its public names}."""

PRIVATE = {"ndarray.ndarray": {"_STORAGE_TYPE_STR_TO_ID": {"undefined": -1, "default": 0, "row_sparse": 1, "csr": 2},
                               "py_slice": slice}}  # fmt: skip
"""Private names of MXNet that the tests and their tools import."""

importing = True


class OutOfScopeError(BaseException):
    """A test uses a part of MXNet that is absent on purpose.

    It is no ``Exception``, so that a test that expects any error does not catch it.
    """


class Absent(types.ModuleType):
    """A stand-in for an absent module or anything in it.

    Code may name it and inherit from it. After the test file is imported, a call or a ``with`` block raises
    OutOfScopeError.
    """

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        if importing:
            return self
        raise OutOfScopeError(self.__name__)

    def __enter__(self):
        raise OutOfScopeError(self.__name__)

    def __exit__(self, *exc):
        pass

    def __mro_entries__(self, bases):
        return (Used,)

    def __instancecheck__(self, value):
        return False


class Used:
    """The base class of a class that names an absent class as its base; making an instance raises OutOfScopeError."""

    def __new__(cls, *args, **kwargs):
        raise OutOfScopeError(cls.__name__)


class NamedModule(types.ModuleType):
    """A module with MXNet's name and the attributes of a module of weftplan."""

    def __init__(self, name, real):
        super().__init__(name)
        self.__dict__["real"] = real
        self.__path__ = []

    def __getattr__(self, name):
        inner = f"{self.__name__}.{name}".partition(".")[2]
        if inner in OUT_OF_SCOPE:
            return Absent(f"mxnet.{inner}")
        value = sys.modules.get(f"mxnet.{inner}")
        if value is not None:
            return value
        if self.__name__ == "mxnet" and name == "test_utils":
            return importlib.import_module("mxnet.test_utils")
        value = getattr(self.real, name)
        if isinstance(value, types.ModuleType) and value.__name__.startswith("weftplan"):
            value = sys.modules[f"mxnet.{inner}"] = NamedModule(f"mxnet.{inner}", value)
        return value

    def __setattr__(self, name, value):
        setattr(self.real, name, value) if not name.startswith("__") else super().__setattr__(name, value)

    def __dir__(self):
        return dir(self.real)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An importer that finds ``mxnet.X`` as weftplan's X, and ``mxnet.test_utils`` in MXNet's tree."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "mxnet.test_utils":
            return importlib.util.spec_from_file_location(fullname, Path(TREE, "python/mxnet/test_utils.py"))
        if fullname.startswith("mxnet."):
            return importlib.machinery.ModuleSpec(fullname, self)
        return None

    def create_module(self, spec):
        inner = spec.name.partition(".")[2]
        if inner in OUT_OF_SCOPE or any(inner.startswith(f"{part}.") for part in OUT_OF_SCOPE):
            stand_in = Absent(spec.name)
            stand_in.__path__ = []
            return stand_in
        import weftplan

        value = weftplan
        for part in SAME.get(inner, inner).split("."):
            try:
                value = getattr(value, part)
            except AttributeError as error:
                raise ModuleNotFoundError(f"No module named {spec.name!r}: {error}", name=spec.name) from None
        if not isinstance(value, types.ModuleType):
            raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name)
        return NamedModule(spec.name, value)

    def exec_module(self, module):
        module.__dict__.update(PRIVATE.get(module.__name__.partition(".")[2], {}))
        with contextlib.suppress(AttributeError):
            module.__dict__.update({k: v for k, v in vars(module.real).items() if not k.startswith("_")
                                    and not isinstance(v, types.ModuleType)})  # for ``import *``  # fmt: skip


def old_numpy():
    """Add to NumPy the names that it had when the tests were written."""
    import numpy as np

    old = {
        **{name: getattr(builtins, name) for name in ("bool", "int", "float", "object", "str", "complex")},
        "product": np.prod,
        "sometrue": np.any,
        "alltrue": np.all,
        "cumproduct": np.cumprod,
        "row_stack": np.vstack,
        "infty": np.inf,
        "Inf": np.inf,
        "NaN": np.nan,
        "PINF": np.inf,
        "NINF": -np.inf,
        "float_": np.float64,
        "in1d": np.isin,
        "unicode_": np.str_,
        "asscalar": lambda a: a.item(),
        "asfarray": lambda a: np.asarray(a, np.float64),
    }
    for name, value in old.items():
        if name not in np.__dict__:
            setattr(np, name, value)
    arange = np.arange

    def wrapping(*args, dtype=None, **more):
        try:
            return arange(*args, dtype=dtype, **more)
        except OverflowError:  # until NumPy 2, -5 as uint8 was 251
            return arange(*args, dtype=np.int64, **more).astype(dtype)

    np.arange = wrapping


class OldIndices(ast.NodeTransformer):
    """Pass each index in a test file through :func:`as_old_index`; NumPy took a list of slices as a tuple of them."""

    def visit_Subscript(self, node):
        self.generic_visit(node)
        if not isinstance(node.slice, (ast.Slice, ast.Tuple, ast.Constant)):
            call = ast.Call(ast.Name("_as_old_index", ast.Load()), [node.slice], [])
            node.slice = ast.copy_location(call, node.slice)
        return node


def as_old_index(index):
    """Return a list that contains slices as a tuple, and any other index as it is."""
    return tuple(index) if type(index) is list and any(isinstance(part, slice) for part in index) else index


def old_scipy():
    """Let ``scipy.stats.chisquare`` accept frequencies whose sums differ, as it did when the tests were written."""
    try:
        import scipy.stats
    except ImportError:
        return
    compare = scipy.stats.chisquare

    def chisquare(f_obs, f_exp=None, **more):
        import numpy as np

        if f_exp is not None:
            f_obs, f_exp = np.asarray(f_obs, np.float64), np.asarray(f_exp, np.float64)
            f_exp = f_exp * (f_obs.sum() / f_exp.sum())
        return compare(f_obs, f_exp, **more)

    scipy.stats.chisquare = chisquare


def stand_in_for_nose():
    """Install a module with the few names of ``nose`` that the tests import; it does not run on today's Python."""
    tools = types.ModuleType("nose.tools")
    case = unittest.TestCase()
    for name in dir(case):
        if name.startswith("assert"):
            setattr(tools, re.sub(r"(?<!^)([A-Z])", lambda m: "_" + m[1].lower(), name), getattr(case, name))

    def make_decorator(function):
        def decorate(new):
            new.__name__, new.__doc__, new.__module__ = function.__name__, function.__doc__, function.__module__
            new.__dict__.update(function.__dict__)
            return new

        return decorate

    def raises(*errors):
        def decorate(function):
            def run(*args, **kwargs):
                try:
                    function(*args, **kwargs)
                except errors:
                    return
                raise AssertionError(f"{function.__name__} did not raise {errors}")

            return make_decorator(function)(run)

        return decorate

    tools.make_decorator, tools.raises = make_decorator, raises
    tools.ok_, tools.eq_ = case.assertTrue, case.assertEqual
    tools.nottest = tools.istest = lambda function: function
    nose = types.ModuleType("nose")
    nose.tools, nose.SkipTest = tools, unittest.SkipTest
    nose.run = nose.main = nose.runmodule = lambda *args, **kwargs: None
    sys.modules.update({"nose": nose, "nose.tools": tools})


def take_the_name():
    """Make ``import mxnet`` import weftplan, unless this process runs MXNet itself."""
    stand_in_for_nose()
    old_scipy()
    if TREE is None:
        return
    import weftplan

    old_numpy()
    sys.modules["mxnet"] = NamedModule("mxnet", weftplan)
    sys.meta_path.insert(0, Finder())


def collect(module):
    """Yield (name, callable) of every test, in the order of the file."""
    for name, value in list(vars(module).items()):
        if isinstance(value, Absent) and name.startswith("test"):
            yield name, value
        elif isinstance(value, type) and issubclass(value, unittest.TestCase):
            if value.__module__ == module.__name__:
                for inner in unittest.defaultTestLoader.getTestCaseNames(value):
                    yield f"{name}.{inner}", case_runner(value, inner)
        elif name.startswith("test") and callable(value) and getattr(value, "__module__", None) == module.__name__:
            yield name, value


def case_runner(case, name):
    """Return a function that runs one method of a TestCase, and raises its errors."""

    def run():
        one = case(name)
        case.setUpClass()
        try:
            one.setUp()
            try:
                getattr(one, name)()
            finally:
                one.tearDown()
        finally:
            case.tearDownClass()

    return run


def run(test):
    """Run a test; return (``pass``, ``fail``, ``skip``, or ``out`` if it is out of weftplan's scope; reason)."""
    try:
        result = test()
        for item in result if isinstance(result, types.GeneratorType) else ():
            item[0](*item[1:])
    except OutOfScopeError as error:
        return "out", f"uses {error}"
    except unittest.SkipTest as error:
        return "skip", str(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        if "on purpose" in str(error) and isinstance(error, (AttributeError, NotImplementedError)):
            return "out", " ".join(str(error).split())[:120]
        if os.environ.get("OWN_TESTS_VERBOSE"):
            traceback.print_exc()
        own = [frame for frame in frames if frame.startswith("test_")]
        text = " ".join(str(error).split())[:300]
        return "fail", f"{(own or frames)[-1]} {type(error).__name__}: {text}"
    return "pass", ""


def main(path, only):
    """Import a test file and run the tests named in ``only``; if it is empty, report only the names of all tests."""
    global importing
    tell = os.fdopen(3, "w", buffering=1)

    def say(**what):
        tell.write(json.dumps(what) + "\n")
        tell.flush()

    sys.path.insert(0, str(Path(path).parent))
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        if TREE:
            # ``common.py`` puts MXNet's own Python on the path, so import test_utils, and its imports, before it.
            importlib.import_module("mxnet.test_utils")
        module.__dict__["_as_old_index"] = as_old_index
        tree = ast.fix_missing_locations(OldIndices().visit(ast.parse(Path(path).read_text(), path)))
        exec(compile(tree, path, "exec"), module.__dict__)
    except BaseException as error:
        traceback.print_exc()
        say(kind="broken", why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return
    importing = False
    tests = list(collect(module))
    say(kind="tests", names=[name for name, _ in tests])
    if not only:
        return
    with contextlib.suppress(AttributeError):
        module.setup_module()
    for name, test in tests:
        if name in only:
            say(kind="begin", name=name)
            result, why = run(test) if not isinstance(test, Absent) else ("out", f"uses {test.__name__}")
            say(kind="end", name=name, result=result, why=why)
    say(kind="done")


if builtins.__dict__.get("_own_tests_named") is None and (TREE or __name__ == "__main__"):
    builtins._own_tests_named = True
    take_the_name()
if __name__ == "__main__":
    main(sys.argv[1], set(sys.argv[2:]))
