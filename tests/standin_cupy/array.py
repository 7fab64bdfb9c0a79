"""The array of the stand-in: device memory that NumPy computes on, with CuPy's restrictions.

The file is long because it is one class with the methods and operators of CuPy's array.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.standin_cupy import names
from tests.standin_cupy.machine import machine, thread
from tests.standin_cupy.memory import Memory, MemoryPointer, Range, alloc, enqueue, memory_of, offset_of
from tests.standin_cupy.meter import meter
from tests.standin_cupy.streams import Device, Stream, capturable, get_current_stream, not_while_capturing

SCALARS = (bool, int, float, complex, np.generic)
namespace: Any = None
"""``cupy`` itself. ``functions.py``, which imports this module, assigns it."""

_METHODS = frozenset(path.split(".", 1)[1] for path in names.TABLE if path.startswith("ndarray."))
_AS_FUNCTION = frozenset(
    [
        "sum",
        "max",
        "min",
        "prod",
        "mean",
        "any",
        "all",
        "argmax",
        "argmin",
        "cumsum",
        "cumprod",
        "take",
        "argsort",
        "repeat",
        "clip",
        "dot",
        "nonzero",
        "round",
        "var",
        "std",
        "searchsorted",
    ]
)
_AS_FUNCTION &= _METHODS | {"searchsorted"}


class Flags:
    """``ndarray.flags``."""

    def __init__(self, host: np.ndarray) -> None:
        self.c_contiguous = host.flags.c_contiguous
        self.f_contiguous = host.flags.f_contiguous
        self.forc = host.flags.forc
        self.fnc = host.flags.fnc
        self.owndata = host.base is None


class ndarray:
    """``cupy.ndarray``; ``host`` is the NumPy view of its bytes, for the stand-in and for assertions only."""

    __slots__ = ("__weakref__", "base", "data", "host")
    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: MemoryPointer | None = None,
        strides: Any = None,
        order: str = "C",
    ) -> None:
        shape = tuple(shape) if isinstance(shape, (tuple, list)) else (int(shape),)
        kind = np.dtype(dtype)
        if memptr is None:
            nbytes = math.prod(shape) * kind.itemsize
            memptr = alloc(nbytes)
            if isinstance(memptr.mem, Memory):
                meter.temporaries += 1
                meter.temporary_bytes += nbytes
        self.data = memptr
        self.base: ndarray | None = None
        self.host = np.ndarray(shape, kind, memory_of(memptr).bytes, offset_of(memptr), strides, order)

    @classmethod
    def _view(cls, host: np.ndarray, of: ndarray) -> ndarray:
        result = cls.__new__(cls)
        result.host = host
        moved = host.__array_interface__["data"][0] - of.host.__array_interface__["data"][0] if host.size else 0
        result.data = of.data if moved == 0 else of.data + moved
        result.base = of if of.base is None else of.base
        return result

    shape = property(lambda self: self.host.shape)
    ndim = property(lambda self: self.host.ndim)
    size = property(lambda self: self.host.size)
    dtype = property(lambda self: self.host.dtype)
    nbytes = property(lambda self: self.host.nbytes)
    itemsize = property(lambda self: self.host.itemsize)
    strides = property(lambda self: self.host.strides)
    flags = property(lambda self: Flags(self.host))
    T = property(lambda self: ndarray._view(self.host.T, self))
    device = property(lambda self: Device(self.data.device_id))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.data.ptr, False),
            "strides": None if self.host.flags.c_contiguous else self.strides,
            "version": 3,
            "descr": self.dtype.descr,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.data.device_id

    def __dlpack__(self, **how: Any) -> Any:
        raise NotImplementedError("the stand-in hands arrays over in cupy.from_dlpack alone")

    def span(self) -> Range:
        """Return the range of bytes from the first to the last element."""
        memory, start = memory_of(self.data), offset_of(self.data)
        if not self.size:
            return memory, start, start
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        first = start + sum(r for r in reach if r < 0)
        return memory, first, start + sum(r for r in reach if r > 0) + self.itemsize

    def __getattr__(self, name: str) -> Any:
        if name in _AS_FUNCTION:
            function = getattr(namespace, name)
            return lambda *args, **kwargs: function(self, *args, **kwargs)
        if name not in _METHODS:
            raise AttributeError(f"'cupy.ndarray' object has no attribute {name!r}")
        raise NotImplementedError(f"the stand-in for CuPy has no ndarray.{name} yet")

    def __len__(self) -> int:
        return len(self.host)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array "
            "explicitly."
        )

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        function = getattr(namespace, ufunc.__name__)
        if method != "__call__":
            function = getattr(function, method)
        if "out" in kwargs:
            (kwargs["out"],) = kwargs["out"]
        return function(*inputs, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        place = namespace
        for part in func.__module__.split(".")[1:]:
            if part in ("lib", "linalg", "random"):
                place = getattr(place, part)
        return getattr(place, func.__name__)(*args, **kwargs)

    # -- the host reads: it waits for the device ----------------------------------------------------------------------

    def _read_by_host(self, what: str) -> np.ndarray:
        not_while_capturing(what)
        meter.syncs[what] += 1
        enqueue("memcpy DtoH", [self.span()], [])
        stream = get_current_stream()
        for key, count in stream.now().items():
            machine.host[key] = max(machine.host.get(key, 0), count)
        return self.host

    def __bool__(self) -> bool:
        return bool(self._read_by_host("bool"))

    def __int__(self) -> int:
        return int(self._read_by_host("int"))

    def __float__(self) -> float:
        return float(self._read_by_host("float"))

    def __index__(self) -> int:
        return operator.index(self._read_by_host("index").item())

    def item(self) -> Any:
        """Return the only element as a Python number."""
        return self._read_by_host("item").item()

    def tolist(self) -> Any:
        """Return all elements as nested lists."""
        return self._read_by_host("tolist").tolist()

    def get(self, stream: Stream | None = None, order: str = "C", out: Any = None, blocking: bool = True) -> Any:
        """Return a copy on the host; wait for the stream unless ``blocking`` is false."""
        not_while_capturing("get")
        target = np.empty(self.shape, self.dtype) if out is None else out
        if not isinstance(target, np.ndarray):
            raise TypeError("Only numpy.ndarray can be obtained from cupy.ndarray")
        if target.dtype != self.dtype:
            raise TypeError(f"{target.dtype} array cannot be obtained from {self.dtype} array")
        if target.shape != self.shape:
            raise ValueError(f"Shape mismatch. Expected shape: {self.shape}, actual shape: {target.shape}")
        if not target.flags.c_contiguous and not target.flags.f_contiguous:
            raise RuntimeError("`out` cannot be specified when copying to non-contiguous ndarray")
        with Device(self.data.device_id):
            where = stream or get_current_stream()
            enqueue("memcpy DtoH", [self.span()], [], stream=where)
            if blocking:
                where.synchronize()
        if not meter.dry:
            target[...] = self.host
        return target

    def set(self, arr: Any, stream: Stream | None = None) -> None:
        """Copy an array from the host."""
        not_while_capturing("set")
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if arr.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self.host.flags.c_contiguous and not self.host.flags.f_contiguous:
            raise RuntimeError("Cannot set to non-contiguous array")
        with Device(self.data.device_id):
            enqueue("memcpy HtoD", [], [self.span()], stream=stream)
        if not meter.dry:
            self.host[...] = arr

    def __iter__(self) -> Iterator[ndarray]:
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    # -- views --------------------------------------------------------------------------------------------------------

    def view(self, dtype: Any = None) -> ndarray:
        """Return a view of the same bytes, in ``dtype`` if given."""
        return ndarray._view(self.host.view() if dtype is None else self.host.view(dtype), self)

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> ndarray:
        """Return a view if possible, else a copy."""
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        seen = self.host.reshape(wanted)
        if seen.size and not np.shares_memory(seen, self.host):
            return computed("reshape", seen, [self])
        return ndarray._view(seen, self)

    def ravel(self, order: str = "C") -> ndarray:
        """Return the array with one dimension."""
        return self.reshape(-1)

    def flatten(self, order: str = "C") -> ndarray:
        """Return a flat copy."""
        return computed("flatten", self.host.reshape(-1), [self])

    def swapaxes(self, axis1: int, axis2: int) -> ndarray:
        """Return a view with two axes swapped."""
        return ndarray._view(self.host.swapaxes(axis1, axis2), self)

    def transpose(self, *axes: Any) -> ndarray:
        """Return a view with permuted axes."""
        wanted = (axes[0] if axes[0] is None or isinstance(axes[0], (tuple, list)) else axes) if axes else None
        return ndarray._view(self.host.transpose(wanted), self)

    def squeeze(self, axis: Any = None) -> ndarray:
        """Return a view without axes of size 1."""
        return ndarray._view(self.host.squeeze(axis), self)

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> ndarray:
        """Return a writable view of the diagonal; NumPy's is read-only."""
        seen = self.host.diagonal(offset, axis1, axis2)
        if self.host.flags.writeable:
            seen.flags.writeable = True
        return ndarray._view(seen, self)

    # -- copies -------------------------------------------------------------------------------------------------------

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        """Return a copy of another dtype."""
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        with np.errstate(all="ignore"):
            return computed("astype", self.host.astype(dtype), [self])

    def copy(self, order: str = "C") -> ndarray:
        """Return a copy."""
        return computed("copy", self.host, [self])

    @capturable
    def fill(self, value: Any) -> None:
        """Set every element to ``value``."""
        if isinstance(value, ndarray):
            if value.shape != ():
                raise ValueError("non-scalar cupy.ndarray cannot be used for fill")
            reads, plain = [value], value.host[()]
        else:
            reads, plain = [], np.asarray(value, dtype=self.dtype)
            if plain.shape != ():
                raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        run("fill", reads, [self])
        if not meter.dry:
            self.host.fill(plain)

    # -- indexing -----------------------------------------------------------------------------------------------------

    def _key(self, key: Any) -> tuple[Any, list[ndarray], bool]:
        """Return the key for NumPy, the arrays that the kernel reads, and whether the key has a boolean mask."""
        arrays: list[ndarray] = []
        mask = False

        def plain(part: Any) -> Any:
            nonlocal mask
            if isinstance(part, ndarray):
                arrays.append(part)
                mask = mask or part.dtype == bool
                return np.zeros_like(part.host) if meter.dry else part.host
            if isinstance(part, (np.ndarray, list)):
                meter.uploads["index"] += 1
                arrays.append(computed("index", np.asarray(part), []))
                mask = mask or np.asarray(part).dtype == bool
                return np.asarray(part)
            return part

        actual = tuple(plain(part) for part in key) if isinstance(key, tuple) else plain(key)
        return actual, arrays, mask

    def __getitem__(self, key: Any) -> ndarray:
        plain, arrays, mask = self._key(key)
        if not arrays:
            whole = plain if isinstance(plain, tuple) else (plain,)
            return ndarray._view(self.host[whole] if Ellipsis in whole else self.host[(*whole, ...)], self)
        if mask:  # the number of elements is counted on the device and read by the host
            not_while_capturing("boolean index")
            meter.syncs["boolean index"] += 1
        return computed("getitem", np.asarray(self.host[plain]), [self, *arrays])

    @capturable
    def __setitem__(self, key: Any, value: Any) -> None:
        plain, arrays, _ = self._key(key)
        reads = list(arrays)
        source: Any
        if isinstance(value, ndarray):
            reads.append(value)
            source = value.host
        elif isinstance(value, np.ndarray):
            if arrays:
                meter.uploads["setitem"] += 1
            elif value.shape != ():
                raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
            source = value
        elif isinstance(value, SCALARS):
            source = value
        else:
            raise TypeError(f"Unsupported type {type(value)}")
        target = self if arrays else self[key]
        run("setitem", reads, [target])
        if not meter.dry:
            with np.errstate(all="ignore"):
                self.host[plain] = source


def _operator(name: str) -> tuple[Any, Any, Any]:
    def function() -> Any:
        return getattr(namespace, name)

    return (
        lambda self, other: function()(self, other),
        lambda self, other: function()(other, self),
        lambda self, other: function()(self, other, out=self),
    )


for _sign, _name in {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "left_shift",
    "rshift": "right_shift",
    "matmul": "matmul",
}.items():
    for _prefix, _function in zip(("", "r", "i"), _operator(_name), strict=True):
        setattr(ndarray, f"__{_prefix}{_sign}__", _function)
for _sign, _name in {
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
}.items():
    setattr(ndarray, f"__{_sign}__", _operator(_name)[0])
for _sign, _name in {"neg": "negative", "abs": "absolute", "invert": "invert"}.items():
    setattr(ndarray, f"__{_sign}__", lambda self, _name=_name: _unary(_name, self))


def _unary(name: str, array: ndarray) -> Any:
    return getattr(namespace, name)(array)


def run(name: str, reads: list[ndarray], writes: list[ndarray], *, count: int = 1) -> None:
    """Launch one kernel; check that all arrays are on the current device and the accesses are ordered."""
    for array in (*reads, *writes):
        if array.data.device_id != thread.device:
            raise ValueError(
                f"cupy.{name}: The device where the array resides ({array.data.device_id}) is different from the "
                f"current device ({thread.device}). Peer access is unavailable between these devices."
            )
    enqueue(name, [array.span() for array in reads], [array.span() for array in writes], count=count)


def computed(name: str, values: np.ndarray, reads: list[ndarray]) -> ndarray:
    """Return a new temporary array with ``values``, written by one kernel that reads ``reads``."""
    result = ndarray(values.shape, values.dtype)
    run(name, reads, [result])
    if not meter.dry:
        result.host[...] = values
    return result


__all__ = ["SCALARS", "Memory", "computed", "ndarray", "run"]
