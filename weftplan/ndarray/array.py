"""NDArray: an array whose every access goes through the engine.

An operation on arrays is pushed and returns at once; whoever looks at values (``asnumpy``, ``print``, ``bool``, …)
waits. Arrays are contiguous. Several may share a chunk, and with it the var: views made by ``reshape``, by integers and
by slices that leave the selected bytes contiguous.

Longer than other files: one class, of some eighty methods of a few lines each; what they do stands in files beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from weftplan import device, engine
from weftplan.device.context import Context, current_context
from weftplan.engine import FnProperty
from weftplan.errors import DeviceError, DTypeError, MXNetError, ShapeError
from weftplan.ndarray import arithmetic, indexing
from weftplan.ndarray.chunk import Chunk, Value, compute, nothing, push, typed
from weftplan.ndarray.copying import copy_into, is_device
from weftplan.ndarray.exchange import export
from weftplan.ops import registry
from weftplan.ops.reshape_codes import reshaped

Shape = tuple[int, ...]

OPERATOR_METHODS = frozenset(
    """abs arccos arccosh arcsin arcsinh arctan arctanh argmax argmax_channel argmin argsort broadcast_axes
    broadcast_like broadcast_to cbrt ceil clip cos cosh degrees depth_to_space diag dot erf exp expm1 fix flip floor
    log log10 log1p log2 log_softmax max mean min nanprod nansum norm one_hot ones_like pad pick prod radians rcbrt
    reciprocal relu repeat reshape_like rint round rsqrt shape_array sigmoid sign sin sinh size_array slice
    slice_axis slice_like softmax softmin sort space_to_depth split sqrt square sum swapaxes take tan tanh
    tile topk trunc zeros_like""".split()  # noqa: SIM905
)
"""Operators that are methods too: ``x.sum(axis=1)`` is ``nd.sum(x, axis=1)``."""


class NDArray:
    """A contiguous array in a chunk.

    Args:
        chunk: the memory and its var.
        shape: dimensions; ``()`` is one element.
        dtype: NumPy dtype or anything that makes one.
        offset: bytes from the start of the chunk to the first element.

    Raises:
        ShapeError: the array does not lie within the chunk.
    """

    __slots__ = ("__weakref__", "_typed", "chunk", "dtype", "offset", "shape")
    __array_ufunc__ = None
    """NumPy operators leave the work to ours."""

    def __init__(self, chunk: Chunk, shape: Shape, dtype: Any, offset: int = 0) -> None:
        self.chunk = chunk
        self.shape = shape
        self.dtype: np.dtype[Any] = dtype if dtype.__class__ is np.dtype else np.dtype(dtype)
        self.offset = offset
        self._typed: Any = None
        if offset < 0 or offset + math.prod(shape) * self.dtype.itemsize > chunk.nbytes:
            raise ShapeError(f"an array of shape {shape} and dtype {self.dtype} at byte {offset} exceeds {chunk!r}")

    # -- facts ----------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def var(self) -> Any:
        """The engine var of the chunk."""
        return self.chunk.var

    @property
    def context(self) -> Context:
        """Where the memory is."""
        return self.chunk.context

    @property
    def ctx(self) -> Context:
        """The same as :attr:`context`."""
        return self.chunk.context

    @property
    def stype(self) -> str:
        """Always ``"default"``: dense."""
        return "default"

    def raw(self) -> Any:
        """The bytes as a typed array of the device's array module.

        Only for an engine operation that declared :attr:`var`, or after :meth:`wait_to_read`. Not kept alive by the
        caller: the bytes go back to storage when the NDArray is collected.
        """
        view = self._typed
        if view is None:
            view = typed(self.chunk.raw, self.offset, self.shape, self.dtype)
            if not self.chunk.movable:
                self._typed = view
        return view

    # -- waiting and looking --------------------------------------------------------------------------------------

    def wait_to_read(self) -> None:
        """Block until every operation pushed so far that writes this array has run; raises what they raised."""
        self.chunk.engine.wait_for_var(self.chunk.var)

    def wait_to_write(self) -> None:
        """Block until every operation pushed so far that reads or writes this array has run."""
        # A write waits for all of them, and waiting waits for the write.
        push(nothing, (), (self.chunk.var,), self.context, name="wait_to_write")
        self.wait_to_read()

    def asnumpy(self) -> np.ndarray[Any, Any]:
        """A NumPy copy of the values, waiting for them."""
        self.wait_to_read()
        out = np.empty(self.shape, self.dtype)
        if self.size:
            device.get(self.context).copy(out, self.raw())
        return out

    def asscalar(self) -> Any:
        """The only element as a NumPy scalar; raises MXNetError when there is not exactly one."""
        if self.size != 1:
            raise ShapeError(f"the current array is not a scalar: it has shape {self.shape}; take one element first")
        return self.asnumpy().reshape(())[()]

    def item(self) -> Any:
        """The only element as a Python number."""
        return self.asscalar().item()

    def tolist(self) -> Any:
        """Values as nested lists."""
        return self.asnumpy().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("an NDArray cannot become a NumPy array without a copy; use DLPack for that")
        values = self.asnumpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def __bool__(self) -> bool:
        if self.size != 1:
            if self.size == 0:
                return False
            raise ShapeError(
                f"the truth value of an NDArray with several elements (shape {self.shape}) is ambiguous: compare "
                f"elements, or use len()"
            )
        return bool(self.asscalar())

    def __float__(self) -> float:
        return float(self.asscalar())

    def __int__(self) -> int:
        return int(self.asscalar())

    def __index__(self) -> int:
        if self.dtype.kind not in "iu":
            raise DTypeError(f"only an integer NDArray can be an index, this one is {self.dtype}; use astype")
        return int(self.asscalar())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an NDArray without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[NDArray]:
        for index in range(len(self)):
            yield self[index]

    def __contains__(self, value: object) -> bool:
        return bool((self.asnumpy() == value).any())

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"\n{self.asnumpy()}\n<NDArray {shape} @{self.context}>"

    __hash__ = object.__hash__

    # -- copies ---------------------------------------------------------------------------------------------------

    def copyto(self, other: NDArray | Context, *, priority: int = 0) -> NDArray:
        """Copy into an array of equal shape (cast to its dtype) or to a new array on a context; returns the target.

        Raises:
            ShapeError: the shapes differ.
            DTypeError: ``other`` is neither an array nor a context.
        """
        if isinstance(other, Context):
            other = fresh(other, self.shape, self.dtype, "copy")
        elif not isinstance(other, NDArray):
            raise DTypeError(f"copyto needs an NDArray or a Context, got {type(other).__name__}")
        copy_into(self, other, priority=priority)
        return other

    def copy(self) -> NDArray:
        """A new array on the same context."""
        return self.copyto(self.context)

    def as_in_context(self, context: Context) -> NDArray:
        """This array if it is on ``context``, else a copy there."""
        return self if context == self.context else self.copyto(check_context(context))

    as_in_ctx = as_in_context

    def astype(self, dtype: Any, copy: bool = True) -> NDArray:
        """A copy with another dtype; with ``copy=False`` this array when it has that dtype."""
        wanted = check_dtype(dtype)
        if not copy and wanted == self.dtype:
            return self
        out = fresh(self.context, self.shape, wanted, "astype")
        copy_into(self, out)
        return out

    def detach(self) -> NDArray:
        """A view of the same memory."""
        return NDArray(self.chunk, self.shape, self.dtype, self.offset)

    def as_nd_ndarray(self) -> NDArray:
        """This array."""
        return self

    def tostype(self, stype: str) -> NDArray:
        """This array for ``"default"``; for ``"row_sparse"`` its memory under that name (see :mod:`row_sparse`).

        Raises:
            MXNetError: any other storage type.
        """
        if stype == "row_sparse":
            from weftplan.ndarray.row_sparse import as_row_sparse

            return as_row_sparse(self)
        if stype != "default":
            raise MXNetError(f"storage type {stype!r} is absent on purpose: every array is dense; use 'default'")
        return self

    # -- views ----------------------------------------------------------------------------------------------------

    def reshape(self, *shape: Any, **kwargs: Any) -> NDArray:
        """A view with another shape: ``x.reshape(2, 3)``, ``x.reshape((2, 3))`` or ``x.reshape(shape=(2, 3))``.

        The codes 0, -1, -2, -3, -4 and ``reverse=True`` mean what they mean for the operator ``Reshape``.

        Raises:
            ShapeError: the sizes do not agree.
        """
        reverse = kwargs.pop("reverse", False)
        codes = kwargs.pop("shape", shape)
        if kwargs:
            raise TypeError(f"reshape() got unexpected arguments {', '.join(kwargs)}")
        if len(codes) == 1 and not isinstance(codes[0], int | np.integer):
            codes = codes[0]
        codes = tuple(int(code) for code in ([codes] if isinstance(codes, int) else codes))
        wanted: Shape
        if self.size == 0 or min(codes, default=1) > 0:
            wanted = codes  # the codes take 0 for an unknown dimension, so empty arrays only get plain shapes
        else:
            wanted = reshaped(self.shape, codes, reverse=reverse)
        if math.prod(wanted) != self.size or min(wanted, default=0) < 0:
            raise ShapeError(f"cannot reshape an array of shape {self.shape} ({self.size} elements) to {codes}")
        return NDArray(self.chunk, wanted, self.dtype, self.offset)

    @property
    def T(self) -> NDArray:
        """A copy with the axes reversed (this array when it has fewer than two)."""
        return self if self.ndim < 2 else self.transpose()

    def transpose(self, *axes: Any, **kwargs: Any) -> NDArray:
        """A copy with the axes permuted: ``x.transpose()``, ``x.transpose(1, 0)`` or ``x.transpose(axes=(1, 0))``."""
        if len(axes) == 1 and not isinstance(axes[0], int):
            axes = tuple(axes[0] or ())
        given = {"axes": axes} if axes or "axes" not in kwargs else {}
        return self._operator("transpose", (), {**kwargs, **given})  # type: ignore[no-any-return]

    def split_v2(self, indices_or_sections: int | Sequence[int], axis: int = 0, squeeze_axis: bool = False) -> Any:
        """``nd.split_v2(x, …)``: equal sections along ``axis``, or pieces cut at the given places."""
        from weftplan.ndarray.creation import split_v2

        return split_v2(self, indices_or_sections, axis, squeeze_axis)

    def flatten(self, inplace: bool = False) -> NDArray:
        """All dimensions after the first joined into one: a copy, or with ``inplace`` a view."""
        return self._renamed("Flatten", {}, inplace=inplace)

    def expand_dims(self, axis: int, inplace: bool = False) -> NDArray:
        """A dimension of size 1 inserted at ``axis``: a copy, or with ``inplace`` a view."""
        return self._renamed("expand_dims", {"axis": axis}, inplace=inplace)

    def squeeze(self, axis: int | Shape | None = None, inplace: bool = False) -> NDArray:
        """Dimensions of size 1 removed, those of ``axis`` or all: a copy, or with ``inplace`` a view."""
        return self._renamed("squeeze", {"axis": axis}, inplace=inplace)

    def _renamed(self, name: str, params: dict[str, Any], *, inplace: bool) -> NDArray:
        """The result of an operator that keeps the elements in order."""
        if not inplace:
            return self._operator(name, (), params)  # type: ignore[no-any-return]
        op = registry.get(name)
        shape = op.infer_shape(registry.parse_params(op, params), [self.shape], [None])[1][0]
        return NDArray(self.chunk, shape or (), self.dtype, self.offset)

    def slice_at(self, begin: int, end: int) -> NDArray:
        """A view of rows ``begin`` to ``end`` (exclusive); cheaper than ``x[begin:end]``."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        return NDArray(self.chunk, (end - begin, *self.shape[1:]), self.dtype, self.offset + begin * row)

    def __getitem__(self, key: Any) -> NDArray:
        return indexing.getitem(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        indexing.setitem(self, key, value)

    # -- operators ------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        hint = ""
        if name in ("attach_grad", "grad", "backward"):
            hint = ": autograd on arrays is absent on purpose; bind a symbol and call executor.backward()"
        raise AttributeError(f"NDArray has no attribute {name!r}{hint}")

    def _operator(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from weftplan.ndarray.invoke import call

        return call(name, (self, *args), kwargs)

    def __add__(self, other: Any) -> NDArray:
        return arithmetic.binary(arithmetic.ADD, self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> NDArray:
        return arithmetic.binary(arithmetic.SUB, self, other)

    def __rsub__(self, other: Any) -> NDArray:
        return arithmetic.binary(arithmetic.SUB, self, other, swapped=True)

    def __mul__(self, other: Any) -> NDArray:
        return arithmetic.binary(arithmetic.MUL, self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> NDArray:
        return arithmetic.binary(arithmetic.DIV, self, other)

    def __rtruediv__(self, other: Any) -> NDArray:
        return arithmetic.binary(arithmetic.DIV, self, other, swapped=True)

    def __floordiv__(self, other: Any) -> NDArray:
        return arithmetic.binary(arithmetic.FLOORDIV, self, other)

    def __rfloordiv__(self, other: Any) -> NDArray:
        return arithmetic.binary(arithmetic.FLOORDIV, self, other, swapped=True)

    def __mod__(self, other: Any) -> NDArray:
        return arithmetic.binary(arithmetic.MOD, self, other)

    def __rmod__(self, other: Any) -> NDArray:
        return arithmetic.binary(arithmetic.MOD, self, other, swapped=True)

    def __pow__(self, other: Any) -> NDArray:
        return arithmetic.binary(arithmetic.POW, self, other)

    def __rpow__(self, other: Any) -> NDArray:
        return arithmetic.binary(arithmetic.POW, self, other, swapped=True)

    def __matmul__(self, other: Any) -> NDArray:
        return self._operator("dot", (other,), {})  # type: ignore[no-any-return]

    def __eq__(self, other: object) -> NDArray:  # type: ignore[override]  # elementwise, as in MXNet
        return arithmetic.binary(arithmetic.EQ, self, other)

    def __ne__(self, other: object) -> NDArray:  # type: ignore[override]
        return arithmetic.binary(arithmetic.NE, self, other)

    def __lt__(self, other: Any) -> NDArray:
        return arithmetic.binary(arithmetic.LT, self, other)

    def __le__(self, other: Any) -> NDArray:
        return arithmetic.binary(arithmetic.LE, self, other)

    def __gt__(self, other: Any) -> NDArray:
        return arithmetic.binary(arithmetic.GT, self, other)

    def __ge__(self, other: Any) -> NDArray:
        return arithmetic.binary(arithmetic.GE, self, other)

    def __iadd__(self, other: Any) -> NDArray:
        return arithmetic.inplace(arithmetic.ADD, self, other)

    def __isub__(self, other: Any) -> NDArray:
        return arithmetic.inplace(arithmetic.SUB, self, other)

    def __imul__(self, other: Any) -> NDArray:
        return arithmetic.inplace(arithmetic.MUL, self, other)

    def __itruediv__(self, other: Any) -> NDArray:
        return arithmetic.inplace(arithmetic.DIV, self, other)

    def __ifloordiv__(self, other: Any) -> NDArray:
        return arithmetic.inplace(arithmetic.FLOORDIV, self, other)

    def __imod__(self, other: Any) -> NDArray:
        return arithmetic.inplace(arithmetic.MOD, self, other)

    def __ipow__(self, other: Any) -> NDArray:
        return arithmetic.inplace(arithmetic.POW, self, other)

    def __neg__(self) -> NDArray:
        return arithmetic.unary("negative", self)

    def __pos__(self) -> NDArray:
        return self

    def __abs__(self) -> NDArray:
        return arithmetic.unary("absolute", self)

    # -- exchange -------------------------------------------------------------------------------------------------

    def __dlpack__(self, **kwargs: Any) -> Any:
        """A DLPack capsule that shares the memory, once nothing pending uses it.

        What the other side does with the memory the engine cannot see: finish there before using the array here again.
        """
        return export(self).__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        if is_device(self.context) and self.context.device_type == "gpu":
            return 2, self.context.device_id
        return 1, 0

    def to_dlpack_for_read(self) -> Any:
        """MXNet's name of :meth:`__dlpack__`."""
        return self.__dlpack__()

    to_dlpack_for_write = to_dlpack_for_read

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.asnumpy(), self.context)


def _method(name: str) -> Any:
    def method(self: NDArray, *args: Any, **kwargs: Any) -> Any:
        return self._operator(name, args, kwargs)

    method.__name__, method.__qualname__ = name, f"NDArray.{name}"
    method.__doc__ = f"``nd.{name}(x, …)``."
    return method


for _name in OPERATOR_METHODS:
    setattr(NDArray, _name, _method(_name))


def fresh(context: Context, shape: Shape, dtype: np.dtype[Any], name: str | None) -> NDArray:
    """A new array for the operation that is about to be pushed and writes it: its memory is taken there."""
    return NDArray(Chunk(context, math.prod(shape) * dtype.itemsize, delay_alloc=True, name=name), shape, dtype)


def check_context(ctx: Any) -> Context:
    """``ctx``, or the current context for None; raises DeviceError for what is no context."""
    if ctx is None:
        return current_context()
    if not isinstance(ctx, Context):
        raise DeviceError(f"a context such as mx.cpu(0) was expected, got {ctx!r}")
    return ctx


def check_dtype(dtype: Any) -> np.dtype[Any]:
    """``dtype`` as a NumPy dtype of booleans, integers or floats (None: float32); raises DTypeError for others."""
    if dtype is None:
        return np.dtype(np.float32)
    try:
        wanted: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise DTypeError(f"unknown dtype {dtype!r}: expected float16, float32, float64, int8, …, bool") from error
    if wanted.kind not in "biuf" or wanted.itemsize > 8:
        raise DTypeError(f"dtype {wanted} is not supported: expected booleans, integers or floats of at most 64 bits")
    return wanted if wanted.isnative else wanted.newbyteorder("=")


def from_host(values: np.ndarray[Any, Any], context: Context) -> NDArray:
    """A new array on ``context`` with a copy of ``values``; returns when they have been read."""
    out = NDArray(Chunk(context, values.nbytes), values.shape, values.dtype)
    if values.size:
        if is_device(context):
            # No launch around it: Device.copy enqueues by itself.
            fill = partial(compute, device.get(context).copy, [out, Value(np.array(values, order="C"))])
            engine.get().push(fill, (), (out.var,), context, prop=FnProperty.COPY_TO_GPU, name="array")
        else:
            # Nobody else knows the new array: filling it here is seen by every operation pushed later.
            np.copyto(out.raw(), values)
    return out


def _rebuild(values: np.ndarray[Any, Any], context: Context) -> NDArray:
    """Unpickle; an array of a GPU that does not exist here goes to the host."""
    try:
        device.get(context)
    except MXNetError:
        context = Context("cpu", 0)
    return from_host(values, context)
