"""The functions of the stand-in: ufuncs with CuPy's loops, other functions by NumPy with CuPy's restrictions.

The file is long because CuPy has many functions, each with its own restrictions.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import numpy as np

from tests.standin_cupy import array as arrays
from tests.standin_cupy import names
from tests.standin_cupy.array import SCALARS, computed, ndarray, run
from tests.standin_cupy.cublas import handle, use
from tests.standin_cupy.generators import SPECIAL as RANDOM
from tests.standin_cupy.memory import MemoryPointer, UnownedMemory
from tests.standin_cupy.meter import meter
from tests.standin_cupy.streams import capturable

_AT = {
    "add": "int32 int64 float16 float32 float64 uint32 uint64",
    "subtract": "int32 uint32",
    "maximum": "int32 int64 float32 float64 uint32 uint64",
    "minimum": "int32 int64 float32 float64 uint32 uint64",
    "bitwise_and": "int32 int64 uint32 uint64",
    "bitwise_or": "int32 int64 uint32 uint64",
    "bitwise_xor": "int32 int64 uint32 uint64",
}
"""Dtypes that ``ufunc.at`` accepts."""
_FROM_HOST = frozenset(["array", "asarray", "ascontiguousarray", "asanyarray"])
_WEAK = {bool: bool, int: int, float: float, complex: complex}


@functools.lru_cache(maxsize=4096)
def _loop(name: str, kinds: tuple[Any, ...], dtype: np.dtype[Any] | None) -> tuple[list[Any], list[Any]]:
    """Return the dtypes of CuPy's computation, for inputs and outputs.

    ``kinds`` are dtypes of arrays and NumPy scalars, or types of Python numbers.
    """
    entry = names.TABLE[name]
    if dtype is not None:
        for text in entry.types:
            inputs, outputs = text.split("->")
            if all(np.dtype(c) == dtype for c in outputs):
                return [np.dtype(c) for c in inputs], [np.dtype(c) for c in outputs]
        raise TypeError(f"cupy.{name}: dtype={dtype} has no loop")
    strong = [kind for kind in kinds if not isinstance(kind, type)]
    # Python numbers are weak: they take the dtype of the others, unless they are of a higher kind.
    kinds = tuple(np.result_type(*strong, kind(1)) if isinstance(kind, type) else kind for kind in kinds)
    actual = names.loop(name, tuple(np.dtype(kind) for kind in kinds))
    if actual is None:
        raise TypeError(f"ufunc 'cupy_{name}' not supported for the input types {[str(kind) for kind in kinds]}")
    return actual


class Ufunc:
    """``cupy.ufunc`` with CuPy's own loops.

    It accepts only arrays and numbers, and only the keywords ``out``, ``dtype`` and ``casting``.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self._numpy = getattr(np, name)
        self.nin, self.nout = names.TABLE[name].nin, names.TABLE[name].nout
        self.types = list(names.TABLE[name].types)

    @capturable
    def __call__(
        self, *args: Any, out: Any = None, dtype: Any = None, casting: str = "same_kind", **unknown: Any
    ) -> Any:
        name, nin = self.__name__, self.nin
        if unknown:
            raise TypeError(f"cupy.{name}: Wrong arguments {unknown}")
        if not nin <= len(args) <= nin + self.nout:
            raise TypeError(f"cupy.{name}: Wrong number of arguments: {len(args)}")
        outs = args[nin:]
        if out is not None:
            if outs:
                raise ValueError("Cannot specify 'out' as both a positional and keyword argument")
            outs = out if isinstance(out, tuple) else (out,)
        ins = args[:nin]
        for inputs in ins:
            if not isinstance(inputs, (ndarray, *SCALARS)):
                raise TypeError(f"Unsupported type {type(inputs)}")
        for inputs in outs:
            if not isinstance(inputs, ndarray):
                raise TypeError(f"cupy.{name}: Unsupported type {type(inputs)} as output")
        kinds = tuple(
            inputs.dtype if isinstance(inputs, (ndarray, np.generic)) else _WEAK[type(inputs)] for inputs in ins
        )
        takes, gives = _loop(name, kinds, None if dtype is None else np.dtype(dtype))
        shape = np.broadcast_shapes(*(np.shape(g.host) if isinstance(g, ndarray) else () for g in ins))
        for inputs, kind in zip(outs, gives, strict=False):
            if np.broadcast_shapes(shape, inputs.shape) != inputs.shape:
                raise ValueError(f"cupy.{name}: non-broadcastable output operand with shape {inputs.shape}")
            if not np.can_cast(kind, inputs.dtype, casting):
                raise TypeError(
                    f"output (typecode '{kind.char}') could not be coerced to provided output parameter "
                    f"(typecode '{inputs.dtype.char}') according to the casting rule \"{casting}\""
                )
        reads = [inputs for inputs in ins if isinstance(inputs, ndarray)]
        targets = list(outs) or [ndarray(shape, kind) for kind in gives]
        run(name, reads, targets)
        if not meter.dry:
            with np.errstate(all="ignore"):
                values = [
                    (inputs.host if isinstance(inputs, ndarray) else np.asarray(inputs)).astype(kind, copy=False)
                    for inputs, kind in zip(ins, takes, strict=True)
                ]
                actual = self._numpy(*values)
                for target, value in zip(targets, actual if isinstance(actual, tuple) else (actual,), strict=True):
                    target.host[...] = value
        return targets[0] if len(targets) == 1 else tuple(targets)

    @capturable
    def at(self, a: ndarray, indices: Any, b: Any = None) -> None:
        """Apply the ufunc at ``indices`` without buffering, by atomics; few ufuncs and dtypes support it."""
        name = self.__name__
        if name not in _AT:
            raise NotImplementedError(f"`cupy_{name}.at` is not supported yet")
        if str(a.dtype) not in _AT[name].split():
            raise TypeError(f"cupy.{name}.at only supports {', '.join(_AT[name].split())}, as data type")
        parts = indices if isinstance(indices, tuple) else (indices,)
        inputs = [part for part in parts if isinstance(part, ndarray)]
        if any(isinstance(part, (np.ndarray, list)) for part in parts):
            meter.uploads["index"] += 1
        if a.dtype.kind == "f":
            meter.atomics[f"{name}.at"] += 1
        run(f"{name}.at", [*inputs, *([b] if isinstance(b, ndarray) else [])], [a], count=2)
        if not meter.dry:
            plain = tuple(part.host if isinstance(part, ndarray) else part for part in parts)
            value = b.host if isinstance(b, ndarray) else b
            self._numpy.at(a.host, plain, np.asarray(value).astype(a.dtype))

    def reduce(self, array: ndarray, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        """Reduce an axis; only add and multiply support it."""
        function = {"add": "sum", "multiply": "prod"}.get(self.__name__)
        if function is None:
            raise NotImplementedError(f"`cupy_{self.__name__}.reduce` is not supported yet")
        return getattr(namespace, function)(array, axis, dtype, out, keepdims)

    def accumulate(self, array: ndarray, axis: Any = 0, dtype: Any = None, out: Any = None) -> Any:
        """Accumulate along an axis; only add and multiply support it."""
        function = {"add": "cumsum", "multiply": "cumprod"}.get(self.__name__)
        if function is None:
            raise NotImplementedError(f"`cupy_{self.__name__}.accumulate` is not supported yet")
        return getattr(namespace, function)(array, axis, dtype, out)

    def outer(self, a: ndarray, b: ndarray, **kwargs: Any) -> Any:
        """Apply the ufunc to every pair of elements."""
        return self(a.reshape(a.shape + (1,) * b.ndim), b, **kwargs)

    def __repr__(self) -> str:
        return f"<ufunc 'cupy_{self.__name__}'>"


def _arrays_in(value: Any) -> list[ndarray]:
    if isinstance(value, ndarray):
        return [value]
    return [a for part in value for a in _arrays_in(part)] if isinstance(value, (list, tuple)) else []


def _plain(value: Any, where: str) -> Any:
    """Return ``value`` for NumPy; refuse a NumPy array, because CuPy does not mix the two."""
    if isinstance(value, ndarray):
        if meter.dry and value.dtype.kind in "iub":
            return np.zeros_like(value.host)
        return value.host
    if isinstance(value, np.ndarray):
        raise TypeError(f"{where}: Unsupported type <class 'numpy.ndarray'>")
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(part, where) for part in value)
    return value


class Function:
    """A function of the recorded table: checked by CuPy's signature, computed by NumPy's function of the same name."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.__name__ = path.split(".")[-1]
        place: Any = np
        for part in path.split("."):
            place = getattr(place, part, None)
        self._numpy = place

    @capturable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        path = self.path
        names.check(path, args, kwargs)
        if path in _PRODUCTS:
            use(handle(), path)
        special = _SPECIAL.get(path)
        if special is not None:
            return special(*args, **kwargs)
        if self._numpy is None:
            raise NotImplementedError(f"the stand-in for CuPy has no cupy.{path} yet")
        out = kwargs.pop("out", None)
        if out is not None and not isinstance(out, ndarray):
            raise TypeError(f"cupy.{path}: out must be a cupy.ndarray, got {type(out)}")
        if meter.dry and out is not None:
            run(path, [*_arrays_in(args), *_arrays_in(list(kwargs.values()))], [out])
            return out
        where = f"cupy.{path}"
        reads = [*_arrays_in(args), *_arrays_in(list(kwargs.values()))]
        with np.errstate(all="ignore"):
            actual = self._numpy(*_plain(args, where), **{key: _plain(value, where) for key, value in kwargs.items()})
        if not isinstance(actual, (np.ndarray, np.generic, tuple, list)):
            return actual
        if isinstance(actual, (tuple, list)):
            return type(actual)(_result(path, value, reads) for value in actual)
        if out is None:
            return _result(path, actual, reads)
        return _into(path, np.asarray(actual), out, reads)


def _result(path: str, value: Any, reads: list[ndarray]) -> Any:
    value = np.asarray(value)
    for source in reads:
        if value.base is not None and value.size and np.shares_memory(value, source.host):
            return ndarray._view(value, source)
    return computed(path, value, reads)


def _into(path: str, value: np.ndarray, out: ndarray, reads: list[ndarray], casting: str = "same_kind") -> ndarray:
    if out.shape != value.shape:
        raise ValueError(f"cupy.{path}: output shape {out.shape}, result {value.shape}")
    if not np.can_cast(value.dtype, out.dtype, casting):
        raise TypeError(f"cupy.{path}: cannot cast {value.dtype} to {out.dtype} by the rule {casting!r}")
    run(path, reads, [out])
    if not meter.dry:
        with np.errstate(all="ignore"):
            out.host[...] = value
    return out


_PRODUCTS = ("dot", "inner", "matmul", "tensordot", "vdot")
"""Functions that CuPy computes by cuBLAS."""

# -- functions that differ from NumPy's -------------------------------------------------------------------------------


def _copyto(dst: Any, src: Any, casting: str = "same_kind", where: Any = None) -> None:
    if not isinstance(dst, ndarray):
        raise TypeError(f"copyto: dst must be a cupy.ndarray, got {type(dst)}")
    if isinstance(src, np.ndarray):
        if src.size != 1:
            raise ValueError("non-scalar numpy.ndarray cannot be used for copyto")
        src = src.reshape(-1)[0]
    if not isinstance(src, (ndarray, *SCALARS)):
        raise TypeError(f"copyto: Unsupported type {type(src)}")
    if where is not None and not isinstance(where, (ndarray, bool, np.bool_)):
        raise TypeError(f"copyto: Unsupported type {type(where)} as where")
    plain = src.host if isinstance(src, ndarray) else src
    if isinstance(src, ndarray) and not np.can_cast(src.dtype, dst.dtype, casting):
        raise TypeError(f"Cannot cast {src.dtype} to {dst.dtype} in {casting} casting mode")
    np.broadcast_to(plain, dst.shape)
    run("copyto", [a for a in (src, where) if isinstance(a, ndarray)], [dst])
    if not meter.dry:
        with np.errstate(all="ignore"):
            mask = {} if where is None else {"where": where.host if isinstance(where, ndarray) else where}
            np.copyto(dst.host, plain, casting=casting, **mask)


def _take(a: Any, indices: Any, axis: Any = None, out: Any = None) -> Any:
    """Take elements; indices out of range wrap around."""
    if not isinstance(a, ndarray):
        raise TypeError(f"take: Unsupported type {type(a)}")
    reads = [a, *_arrays_in(indices)]
    if isinstance(indices, (np.ndarray, list)):
        meter.uploads["index"] += 1
        plain = np.asarray(indices)
    else:
        plain = _plain(indices, "take")
    if out is not None and out.dtype != a.dtype:
        raise TypeError("Output dtype mismatch")
    if meter.dry and out is not None:
        run("take", reads, [out])
        return out
    actual = np.take(a.host, plain, axis=axis, mode="wrap")
    return _result("take", actual, reads) if out is None else _into("take", actual, out, reads)


def _asarray(a: Any, dtype: Any = None, order: Any = None, **how: Any) -> ndarray:
    if isinstance(a, ndarray):
        return a if dtype is None or np.dtype(dtype) == a.dtype else a.astype(dtype)
    if hasattr(a, "__cuda_array_interface__"):
        facts = a.__cuda_array_interface__
        result = ndarray.__new__(ndarray)
        memory = UnownedMemory(facts["data"][0], 0, a)
        result.data, result.base = MemoryPointer(memory, 0), None
        source = next(part for part in _reachable(a) if isinstance(part, ndarray))
        memory.owner = source
        memory.device_id = source.data.device_id
        start = facts["data"][0] - source.data.ptr
        flat = source.host.reshape(-1).view(np.uint8)[start:]
        result.host = np.ndarray(facts["shape"], np.dtype(facts["typestr"]), flat, 0, facts["strides"])
        return result
    parts = _arrays_in(a)
    values = np.array(_plain(a, "asarray") if parts else a, dtype=dtype)
    if not parts:
        meter.uploads["asarray"] += 1
    return computed("asarray", values, parts)


def _reachable(thing: Any) -> list[Any]:
    actual = [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
    actual += list(getattr(thing, "__dict__", {}).values())
    return actual + [part for value in actual for part in (getattr(value, "_raw", None), getattr(value, "raw", None))]


def _empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def _filled(name: str, value: int) -> Any:
    def make(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
        result = ndarray(shape, dtype, order=order)
        run(name, [], [result])
        result.host[...] = value
        return result

    return make


def _as_strided(x: ndarray, shape: Any = None, strides: Any = None) -> ndarray:
    seen = np.lib.stride_tricks.as_strided(x.host, shape, strides, writeable=x.host.flags.writeable)
    return ndarray._view(seen, x)


def _reduction(name: str) -> Any:
    function = getattr(np, name)
    signature = names.TABLE[name].signature
    assert signature is not None

    def reduce(a: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(a, ndarray):
            raise TypeError(f"cupy.{name}: Unsupported type {type(a)}")
        inputs = dict(signature.bind(a, *args, **kwargs).arguments)
        inputs.pop(next(iter(inputs)))
        out = inputs.pop("out", None)
        if out is not None and not isinstance(out, ndarray):
            raise TypeError(f"cupy.{name}: out must be a cupy.ndarray, got {type(out)}")
        if meter.dry and out is not None:
            run(name, [a], [out])
            return out
        with np.errstate(all="ignore"):
            actual = np.asarray(function(a.host, **inputs))
        if out is None:
            return computed(name, actual, [a])
        return _into(name, actual, out, [a], "unsafe" if name.startswith("arg") else "same_kind")

    return reduce


def _matmul(*args: Any, out: Any = None, **how: Any) -> ndarray:
    if len(args) > 2:
        args, out = args[:2], args[2]
    a, b = args
    for inputs in (a, b):
        if not isinstance(inputs, ndarray):
            raise TypeError(f"cupy.matmul: Unsupported type {type(inputs)}")
    shape = np.broadcast_shapes(a.shape[:-2], b.shape[:-2]) + (a.shape[-2:-1] if a.ndim > 1 else ()) + b.shape[-1:]
    kind = np.result_type(a.dtype, b.dtype)
    batched = max(a.ndim, b.ndim) > 2
    a, b = (g if _by_cublas(g, batched=batched) else g.copy() for g in (a, b))
    value = np.empty(shape, kind) if meter.dry else np.matmul(a.host, b.host)
    fits = out is not None and out.host.flags.c_contiguous and out.dtype == value.dtype
    target = out if fits else ndarray(value.shape, value.dtype)
    if batched and not a.shape[:-2] == b.shape[:-2] == shape[:-2]:
        _pointers(a, b, target, shape[:-2])
    _into("matmul", value, target, [a, b])
    if out is None or fits:
        return target
    return _into("elementwise_copy", target.host, out, [target])


def _by_cublas(given: ndarray, *, batched: bool) -> bool:
    """Return whether cuBLAS reads an operand in place; otherwise CuPy copies it."""
    flags = given.host.flags
    return bool(flags.c_contiguous or (flags.f_contiguous and not batched))


def _pointers(a: ndarray, b: ndarray, out: ndarray, batch: Any) -> None:
    """Count the launches of a batched product that broadcasts.

    For each operand and batch axis, CuPy makes an array of pointers with one launch.
    """
    for operand in (a, b, out):
        for axis in range(len(batch)):
            run("cupy_mat_ptrs", [operand], [ndarray(tuple(batch[: axis + 1]), np.uint64)])


def _searchsorted(a: ndarray, v: Any, side: str = "left", sorter: Any = None) -> ndarray:
    if a.ndim > 1:
        raise ValueError("object of too small depth for desired array")
    return computed("searchsorted", np.asarray(np.searchsorted(a.host, _plain(v, "searchsorted"), side)), [a])


def _from_dlpack(array: Any, **how: Any) -> ndarray:
    source = array if isinstance(array, ndarray) else next(p for p in _reachable(array) if isinstance(p, ndarray))
    return source.view()


_REDUCTIONS = ["sum", "max", "min", "prod", "all", "any", "argmax", "argmin", "mean", "cumsum", "cumprod"]
_SPECIAL: dict[str, Any] = {
    "copyto": _copyto,
    "take": _take,
    "asarray": _asarray,
    "array": _asarray,
    "ascontiguousarray": lambda a, dtype=None: (
        _asarray(a, dtype) if not isinstance(a, ndarray) or a.host.flags.c_contiguous else a.copy()
    ),
    "empty": _empty,
    "zeros": _filled("zeros", 0),
    "ones": _filled("ones", 1),
    "lib.stride_tricks.as_strided": _as_strided,
    "matmul": _matmul,
    "searchsorted": _searchsorted,
    "from_dlpack": _from_dlpack,
    **{name: _reduction(name) for name in _REDUCTIONS},
}


class Namespace(types.ModuleType):
    """``cupy`` or one of its modules; it has only the names of the recorded table."""

    def __init__(self, path: str = "") -> None:
        super().__init__(f"cupy.{path}" if path else "cupy")
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self._path}.{name}" if self._path else name
        if path in names.MODULES:
            result: Any = Namespace(path)
        elif path in RANDOM:
            result = RANDOM[path]
        elif path not in names.TABLE:
            raise AttributeError(f"module 'cupy' has no attribute {path!r}")
        elif names.TABLE[path].kind == "ufunc":
            result = Ufunc(name)
        elif names.TABLE[path].kind == "function":
            result = Function(path)
        elif not self._path and hasattr(np, name):
            result = getattr(np, name)  # dtypes and constants are NumPy's own
        else:
            raise NotImplementedError(f"the stand-in for CuPy has no cupy.{path} yet")
        setattr(self, name, result)
        return result


namespace = Namespace()
arrays.namespace = namespace
