"""Held arrays: a call is ordered after the writer of every array that its function or arguments refer to."""

import collections
import functools
import io
import operator
import random
import struct
import threading
import types
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import linalg, ndimage

from weftplan import engine
from weftplan.errors import EngineError, UndeclaredAccessWarning
from weftplan.support.address_ranges import AddressRanges


@dataclass
class Plain:
    """A data object whose attributes are in a dictionary."""

    value: object


@dataclass(slots=True)
class Slotted:
    """A data object whose attributes are in slots."""

    value: object

    def total(self):
        """Return the sum of the value."""
        return np.sum(self.value)


class Interface:
    """An object that exports an array only by __array_interface__, without a reference to the array object."""

    def __init__(self, array):
        self.interface = dict(array.__array_interface__)
        self.lifeline = lambda: array  # closures of functions are not searched

    @property
    def __array_interface__(self):
        return self.interface


class Tensor:
    """An object that exports an array only by __dlpack__, like tensors of other libraries."""

    def __init__(self, array):
        self.lifeline = lambda: array

    def __dlpack__(self, **options):
        return self.lifeline().__dlpack__(**options)

    def __dlpack_device__(self):
        return self.lifeline().__dlpack_device__()

    def zero_(self):
        """Set all elements to 0, in place; the name is that of tensor libraries."""
        self.lifeline()[:] = 0

    def __iter__(self):
        return iter(self.lifeline())


class TensorThatNeedsGradients(Tensor):
    """A tensor that exports no memory until it is detached."""

    def __dlpack__(self, **options):
        raise BufferError("detach first")

    def detach(self):
        """Return a tensor over the same memory."""
        return Tensor(self.lifeline())


class Frame:
    """An object with __array__ whose arrays are blocks inside a manager, as in table libraries."""

    def __init__(self, array):
        self.manager = types.SimpleNamespace(blocks=(types.SimpleNamespace(values=array),))

    def __array__(self, dtype=None, copy=None):
        return self.manager.blocks[0].values


def object_array_of(array):
    """Return an object array whose only element is ``array``."""
    box = np.empty(1, object)
    box[0] = array
    return box


def total(values):
    """Return the sum of an iterable of numbers or arrays."""
    return sum(float(np.sum(np.asarray(value))) for value in values)


ROUTES = {
    "bound method": lambda a: engine.submit(a.sum),
    "method wrapper": lambda a: engine.submit(a.__add__, 0),
    "unbound method": lambda a: engine.submit(np.ndarray.sum, a),
    "partial": lambda a: engine.submit(functools.partial(np.sum, a)),
    "partial keyword": lambda a: engine.submit(functools.partial(np.sum, a=a)),
    "partial of a method": lambda a: engine.submit(functools.partial(a.sum, axis=0)),
    "method of a data object": lambda a: engine.submit(Slotted(a).total),
    "memoryview": lambda a: engine.submit(total, memoryview(a)),
    "flat": lambda a: engine.submit(total, a.flat),
    "iterator": lambda a: engine.submit(total, iter(a)),
    "nditer": lambda a: engine.submit(total, np.nditer(a)),
    "zip": lambda a: engine.submit(lambda pairs: total(pair[0] for pair in pairs), zip([a], strict=True)),
    "generator": lambda a: engine.submit(total, (one for one in [a])),
    "deque": lambda a: engine.submit(total, collections.deque([a])),
    "UserList": lambda a: engine.submit(total, collections.UserList([a])),
    "UserDict": lambda a: engine.submit(lambda d: d["a"].sum(), collections.UserDict(a=a)),
    "dict view": lambda a: engine.submit(total, {"a": a}.values()),
    "object array": lambda a: engine.submit(total, object_array_of(a)),
    "data object": lambda a: engine.submit(lambda d: np.sum(d.value), Plain(a)),
    "slots": lambda a: engine.submit(lambda d: np.sum(d.value), Slotted(a)),
    "nested data objects": lambda a: engine.submit(lambda d: np.sum(d.value.value), Plain(Slotted(a))),
    "namespace": lambda a: engine.submit(lambda d: np.sum(d.a), types.SimpleNamespace(a=a)),
    "interface": lambda a: engine.submit(lambda i: np.asarray(i).sum(), Interface(a)),
    "array of an interface": lambda a: engine.submit(np.sum, np.asarray(Interface(a))),
    "tensor": lambda a: engine.submit(total, Tensor(a)),
    "tensor with gradients": lambda a: engine.submit(total, TensorThatNeedsGradients(a)),
    "array of a tensor": lambda a: engine.submit(np.sum, np.from_dlpack(Tensor(a))),
    "part of an array of a tensor": lambda a: engine.submit(lambda x: 2 * x.sum(), np.from_dlpack(Tensor(a))[2:]),
    "table": lambda a: engine.submit(lambda f: np.asarray(f).sum(), Frame(a)),
}


@pytest.fixture
def threads():
    """The current engine of the test, with three workers."""
    with engine.using(engine.create("ThreadedEnginePerDevice", cpu_workers=3)) as eng:
        yield eng
    eng.stop()


def run_after_writer(array, route):
    """Return the result of ``route``, whose task is submitted while a write of ``array`` is pending.

    The array is filled with 7; the task must not end before the write.
    """
    door = threading.Event()

    def write(out):
        door.wait(60)
        out[...] = 7

    writer = engine.submit(write, out=array)
    reader = route(array)
    early = reader.wait(0.05)
    door.set()
    writer.result()
    assert not early
    return reader.result()


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_a_reader_waits_for_the_writer(threads, route):
    """By each route, the task begins after the writer has ended and sees its values."""
    assert np.sum(run_after_writer(np.zeros(4), route)) == 28


@pytest.mark.parametrize("library", ["torch", "pandas", "scipy.sparse"])
def test_objects_of_libraries(threads, library):
    """Tasks on tensors, tables and sparse matrices over an array are ordered like tasks on the array."""
    module = pytest.importorskip(library)
    routes = {
        "torch": [
            lambda a: engine.submit(total, module.from_numpy(a)),
            lambda a: engine.submit(module.from_numpy(a).sum),
            lambda a: engine.submit(np.sum, module.from_numpy(a).numpy()),
        ],
        "pandas": [lambda a: engine.submit(module.Series(a, copy=False).sum)],
        "scipy.sparse": [lambda a: engine.submit(module.csr_array((a, [0, 1, 2, 3], [0, 4]), shape=(1, 4)).sum)],
    }
    for route in routes[library]:
        assert float(run_after_writer(np.zeros(4), route)) == 28


def test_memory_that_is_found_while_nothing_is_pending(threads):
    """Two objects over the same memory are one resource, also if both were found while no task used them."""
    array = np.zeros(4)
    other = np.asarray(Interface(array))
    assert engine.submit(np.sum, array).result() == engine.submit(np.sum, other).result() == 0
    threads.wait_for_all()
    assert run_after_writer(array, lambda _: engine.submit(np.sum, other)) == 28


def test_one_tensor_imported_twice(threads):
    """Two arrays imported from one tensor are ordered as one buffer; an array of another tensor is independent."""
    memory = np.zeros(4)
    tensor = Tensor(memory)
    door = threading.Event()
    writer = engine.submit(lambda out: (door.wait(60), out.fill(7)), out=np.from_dlpack(tensor)[2:])
    other_task = engine.submit(np.sum, np.from_dlpack(Tensor(np.ones(4))))
    assert other_task.result() == 4
    reader = engine.submit(np.sum, np.from_dlpack(tensor)[1:3])
    assert not reader.wait(0.05)
    door.set()
    assert reader.result() == 7
    writer.result()


class Cells:
    """An indexer: cells of a table, whose blocks hold the memory, as in a DataFrame."""

    def __init__(self, array):
        block = types.SimpleNamespace(values=array)
        self.table = types.SimpleNamespace(manager=types.SimpleNamespace(blocks=(block,)))

    def __setitem__(self, key, value):
        self.table.manager.blocks[0].values[key] = value


WRITERS = {
    "sort": (lambda a: engine.submit(a.sort), [1, 2, 3]),
    "unbound sort": (lambda a: engine.submit(np.ndarray.sort, a), [1, 2, 3]),
    "partial sort": (lambda a: engine.submit(functools.partial(a.sort, kind="stable")), [1, 2, 3]),
    "fill": (lambda a: engine.submit(a.fill, 5), [5, 5, 5]),
    "setitem": (lambda a: engine.submit(a.__setitem__, 0, 9), [9, 1, 2]),
    "operator": (lambda a: engine.submit(operator.iadd, a, 1), [4, 2, 3]),
    "partition": (lambda a: engine.submit(a.partition, 1), [1, 2, 3]),
    "method put": (lambda a: engine.submit(a.put, [0], [8]), [8, 1, 2]),
    "byteswap": (lambda a: engine.submit(a.byteswap, True), None),
    "copyto": (lambda a: engine.submit(np.copyto, a, 4), [4, 4, 4]),
    "ufunc.at": (lambda a: engine.submit(np.add.at, a, [0, 0], 1), [5, 1, 2]),
    "output by position": (lambda a: engine.submit(np.add, 1, 1, a), [2, 2, 2]),
    "dot": (lambda a: engine.submit(np.dot, np.eye(3), np.ones(3), a), [1, 1, 1]),
    "clip": (lambda a: engine.submit(np.clip, np.arange(3.0), 1, 9, a), [1, 1, 2]),
    "take": (lambda a: engine.submit(np.take, [5.0, 6.0], [0, 1, 0], 0, a), [5, 6, 5]),
    "cumsum": (lambda a: engine.submit(np.cumsum, [1, 1, 1], 0, None, a), [1, 2, 3]),
    "concatenate": (lambda a: engine.submit(np.concatenate, [[1.0], [2.0, 3.0]], 0, a), [1, 2, 3]),
    "round": (lambda a: engine.submit(np.round, [0.1, 1.9, 2.2], 0, a), [0, 2, 2]),
    "ufunc.reduce": (lambda a: engine.submit(np.add.reduce, np.ones((2, 3)), 0, None, a), [2, 2, 2]),
    "ufunc.accumulate": (lambda a: engine.submit(np.add.accumulate, np.ones(3), 0, None, a), [1, 2, 3]),
    "ufunc.reduceat": (lambda a: engine.submit(np.add.reduceat, np.ones(3), [0, 1, 2], 0, None, a), [1, 1, 1]),
    "ufunc.__call__": (lambda a: engine.submit(np.add.__call__, 1, 1, a), [2, 2, 2]),
    "method clip": (lambda a: engine.submit(np.arange(3.0).clip, 1, 9, a), [1, 1, 2]),
    "method dot": (lambda a: engine.submit(np.eye(3).dot, np.ones(3), a), [1, 1, 1]),
    "unbound clip": (lambda a: engine.submit(np.ndarray.clip, np.arange(3.0), 1, 9, a), [1, 1, 2]),
    "masked clip": (lambda a: engine.submit(np.ma.clip, np.arange(3.0), 1, 9, a), [1, 1, 2]),
    "partial by position": (lambda a: engine.submit(functools.partial(np.add, 1, 2), a), [3, 3, 3]),
    "partial with its output": (lambda a: engine.submit(functools.partial(np.add, 1, 2, a)), [3, 3, 3]),
    "partial of clip": (lambda a: engine.submit(functools.partial(np.clip, np.ones(3), 2), 9, a), [2, 2, 2]),
    "out in kwargs": (lambda a: engine.submit(np.add, 1, 2, kwargs={"out": a}), [3, 3, 3]),
    "copyto by keyword": (lambda a: engine.submit(np.copyto, src=np.full(3, 4), dst=a), [4, 4, 4]),
    "nan_to_num": (lambda a: engine.submit(np.nan_to_num, a, copy=False), [3, 1, 2]),
    "masked_where": (lambda a: engine.submit(np.ma.masked_where, [1, 0, 0], a, copy=False), None),
    "overwrite_input": (lambda a: engine.submit(np.median, a, overwrite_input=True), None),
    "numpy.random.shuffle": (lambda a: engine.submit(np.random.shuffle, a), None),
    "shuffle by keyword": (lambda a: engine.submit(np.random.default_rng(0).shuffle, x=a), None),
    "permuted": (lambda a: engine.submit(np.random.default_rng(0).permuted, [5, 5, 5], out=a), [5, 5, 5]),
    "draw by position": (lambda a: engine.submit(np.random.default_rng(0).standard_normal, None, "d", a), None),
    "readinto": (lambda a: engine.submit(io.BytesIO(np.ones(3).tobytes()).readinto, a), [1, 1, 1]),
    "pack_into": (lambda a: engine.submit(struct.pack_into, "d", a, 8, 9.0), [3, 9, 2]),
    "Struct.pack_into": (lambda a: engine.submit(struct.Struct("d").pack_into, a, 8, 9.0), [3, 9, 2]),
    "setattr": (lambda a: engine.submit(setattr, a, "flat", 9.0), [9, 9, 9]),
    "__setattr__": (lambda a: engine.submit(a.__setattr__, "flat", 9.0), [9, 9, 9]),
    "item of a table": (lambda a: engine.submit(Cells(a).__setitem__, 1, 9.0), [3, 9, 2]),
    "operator.setitem of a table": (lambda a: engine.submit(operator.setitem, Cells(a), 1, 9.0), [3, 9, 2]),
    "f2py": (lambda a: engine.submit(linalg.blas.daxpy, np.ones(3), a), [4, 2, 3]),
    "memoryview": (lambda a: engine.submit(memoryview(a).__setitem__, 1, 9.0), [3, 9, 2]),
    "put": (lambda a: engine.submit(np.put, a, [0], [8]), [8, 1, 2]),
    "a buffer as output": (lambda a: engine.submit(lambda out: np.asarray(out).fill(6), out=memoryview(a)), [6, 6, 6]),
    "a tensor in writes": (lambda a: engine.submit(np.ndarray.fill, a, 6, writes=[Tensor(a)]), [6, 6, 6]),
    "scipy": (lambda a: engine.submit(ndimage.uniform_filter, np.ones(3), 1, a), [1, 1, 1]),
    "partial with out": (lambda a: engine.submit(functools.partial(np.add, 1, 2, out=a)), [3, 3, 3]),
    "tensor method": (lambda a: engine.submit(Tensor(a).zero_), [0, 0, 0]),
    "shuffle": (lambda a: engine.submit(np.random.default_rng(0).shuffle, a), None),
    "shuffle of Python": (lambda a: engine.submit(random.Random(0).shuffle, a), None),
}


@pytest.mark.parametrize("name", WRITERS)
def test_writing_methods_wait_for_readers(threads, name):
    """A call that changes its array counts as a write: earlier readers end first, later readers wait."""
    write, expected = WRITERS[name]
    array, door = np.array([3.0, 1.0, 2.0]), threading.Event()
    before = engine.submit(lambda x: (door.wait(60), x.tolist())[1], array)
    task = write(array)
    after = engine.submit(np.copy, array)
    early = task.wait(0.05)
    door.set()
    assert not early
    assert before.result() == [3, 1, 2]
    task.result()
    if expected is not None:
        assert after.result().tolist() == expected
    assert engine.var_of(array).version == 1


def masked(data, mask):
    """Return a masked array over ``data`` and ``mask``."""
    return np.ma.array(data, mask=mask, copy=False, shrink=False)


PARTS = {
    "mask of a written array": lambda a: (masked(np.ones(4), a.view(bool)[:4]), a),
    "written mask": lambda a: (a, masked(np.ones(4), a.view(bool)[:4])),
    "data of a masked array": lambda a: (masked(a, np.zeros(4, bool)), a[1:]),
    "field of a structured array": lambda a: (a.view([("x", float)])["x"], a),
    "strided window": lambda a: (np.lib.stride_tricks.as_strided(a, (2, 2), (8, 8)), a[2:]),
    "masked memory map": lambda a: (masked(np.ones(4), a.view(bool)[:4]).view(np.ma.MaskedArray), a[:1]),
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_all_buffers_of_an_array_are_ordered(threads, parts):
    """A task that writes one array is over before a task on another that shares any of its buffers begins."""
    written, read = parts(np.zeros(4))
    door = threading.Event()
    writer = engine.submit(lambda: door.wait(60), writes=[written])
    reader = engine.submit(np.ma.count, read)
    early = reader.wait(0.05)
    waited = engine.submit(np.ma.count, written)
    door.set()
    assert not early
    engine.wait(read, written, writer)
    assert waited.result() is not None


def test_method_of_an_object_waits_beside_its_output(threads):
    """A method reads all arrays of its object, also those that share a buffer with ``out=``."""
    field, door = np.zeros((8, 8)), threading.Event()
    engine.submit(lambda out: (door.wait(60), out.fill(1)), out=field[:7, 4])

    class Holder:
        def __init__(self, value):
            self.value = value

        def total(self, out):
            out[...] = self.value.sum()

    task = engine.submit(Holder(field[:, 4:8:2]).total, out=field[2:4:2, 6:7])
    early = task.wait(0.05)
    door.set()
    task.result()
    assert not early
    assert field[2, 6] == 7


@pytest.mark.parametrize(
    "thing", [{"a": 1}, "text", types.SimpleNamespace(a=np.zeros(2))], ids=["dict", "str", "table"]
)
def test_output_without_memory_is_refused_with_advice(threads, thing):
    """A written object that shares no memory is refused; the error says to name the arrays in it."""
    with pytest.raises(EngineError, match=r"NumPy or CuPy array, .*tensor.*holds arrays.*name these arrays"):
        engine.submit(np.sum, [1.0], writes=[thing])
    with pytest.raises(EngineError, match="name these arrays"):
        engine.submit(np.sum, [1.0], out=thing)


@pytest.mark.parametrize("verb", ["resize", "setflags"])
def test_methods_that_replace_memory_are_refused(threads, verb):
    """``resize`` and ``setflags`` raise EngineError with the wait to use in their place; no task is scheduled."""
    array = np.zeros(3)
    with pytest.raises(EngineError, match=r"engine\.wait\(array, readers=True\)"):
        engine.submit(getattr(array, verb), 3)
    assert engine.var_of(array).version == 0


def test_declared_slice_keeps_methods_parallel(threads):
    """Methods of one object run in parallel if the caller declares all that each uses: a slice, and no other array."""

    class Field:
        def __init__(self):
            self.cells = np.zeros(4)
            self.first = threading.Event()

        def step(self, wait, out):
            assert self.first.wait(60) if wait else not self.first.set()
            out += 1

    field = Field()
    slow = engine.submit(field.step, True, out=field.cells[:2], reads=[])
    engine.submit(field.step, False, out=field.cells[2:], reads=[]).result(30)
    slow.result(30)
    assert field.cells.tolist() == [1, 1, 1, 1]


def test_debug_mode_names_hidden_arrays(monkeypatch):
    """In debug mode UndeclaredAccessWarning names an array in a closure or default that another task uses.

    There is no warning for a declared array or for an array that no other task uses.
    """
    monkeypatch.setenv("WEFTPLAN_ENGINE_DEBUG", "1")
    shared, own = np.zeros(3), np.zeros(3)
    with engine.using(engine.create("ThreadedEngine", cpu_workers=2)):
        engine.submit(np.add, shared, 1, out=shared)
        with pytest.warns(UndeclaredAccessWarning, match="shared.*reads="):
            engine.submit(lambda: shared.sum() + own.sum()).result()
        with pytest.warns(UndeclaredAccessWarning, match="values"):
            engine.submit(lambda values=shared: values.sum()).result()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.submit(lambda: shared.sum() + own.sum(), reads=[shared]).result()
            engine.submit(lambda: own.sum()).result()


def test_ranges_agree_with_a_list():
    """AddressRanges finds the overlaps that a comparison with every range finds.

    An entry that has ended stays while it is in use.
    """
    rng = random.Random(3)
    used = {sys_intern(f"entry {number}") for number in range(60)}
    ranges = AddressRanges(used.__contains__)
    spans: dict[str, list[tuple[int, int]]] = {}
    for number in range(200):
        low = rng.randrange(1000)
        name = sys_intern(f"entry {number % 60}")
        spans.setdefault(name, []).append((low, low + rng.randrange(1, 40)))
        ranges.add(name, *spans[name][-1])
        low = rng.randrange(1000)
        expected = {one for one, parts in spans.items() if any(start < low + 25 and end > low for start, end in parts)}
        assert sorted(ranges.overlapping(low, low + 25)) == sorted(expected)
    victim = sys_intern("entry 5")
    ranges.end(victim)
    assert victim in ranges.overlapping(*spans[victim][0])
    used.clear()
    assert all(victim not in ranges.overlapping(*part) for part in spans[victim])


_names: dict[str, str] = {}


def sys_intern(name):
    """Return one object per name, because entries are compared by identity."""
    return _names.setdefault(name, name)
