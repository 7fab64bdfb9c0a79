"""``NDArrayBase``: shape, dtype and offset in a chunk, array attributes, and waiting for values.

Arithmetic, copies and indexing are implemented above this file as functions of :class:`NDArrayBase`;
:class:`weftplan.ndarray.array.NDArray` offers them as methods. A function that makes an array uses the class of its
operand. Any thread may call this module; :meth:`NDArrayBase.raw` defines when the bytes may be accessed.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import numpy as np

from weftplan import device
from weftplan.device.context import Context, current_context
from weftplan.engine.var import Var
from weftplan.errors import DeviceError, DTypeError, FixedAttributeError, ShapeError
from weftplan.ndarray.memory import joint_allocation
from weftplan.ndarray.memory.chunk import Chunk, nothing
from weftplan.ndarray.pushing import push
from weftplan.ops.core.floats import dtype_of, is_number
from weftplan.support.array_types import DType, DTypeLike, RawArray, Scalar
from weftplan.support.slots import ARRAY_CHUNK, MAKE_ROOM

Shape = tuple[int, ...]
Array = TypeVar("Array", bound="NDArrayBase")
BinaryOperand: TypeAlias = "NDArrayBase | RawArray | Scalar"
"""The second operand of arithmetic and comparisons."""
_NOTHING = nullcontext()


class NDArrayBase:
    """A contiguous array in a chunk.

    Args:
        chunk: the memory and its var.
        shape: dimensions; ``()`` is one element.
        dtype: NumPy dtype or anything that makes one.
        offset: bytes from the start of the chunk to the first element.

    Raises:
        ShapeError: the array does not lie within the chunk.
    """

    __slots__ = ("__weakref__", "chunk", "dims", "np_dtype", "offset", "ready")
    __array_ufunc__ = None
    """NumPy operators defer to the operators of this class."""

    def __init__(self, chunk: Chunk, shape: Shape, dtype: DTypeLike, offset: int = 0) -> None:
        self.chunk = chunk
        self.dims = shape
        self.np_dtype: np.dtype[Any] = dtype if dtype.__class__ is np.dtype else np.dtype(dtype)
        """The dtype as NumPy's arrays have it."""
        self.offset = offset
        self.ready: Any = None
        """The cached result of :meth:`raw`, if it cannot change; hot paths use it to save the call."""
        if offset < 0 or offset + math.prod(shape) * self.np_dtype.itemsize > chunk.nbytes:
            raise ShapeError(f"an array of shape {shape} and dtype {self.np_dtype} at byte {offset} exceeds {chunk!r}")

    @classmethod
    def over(cls, chunk: Chunk, shape: Shape, dtype: DType) -> Self:
        """Make an array of all bytes of a chunk made for it, without checks.

        :meta private:
        """
        array = cls.__new__(cls)
        array.chunk = chunk
        array.dims = shape
        array.np_dtype = dtype
        array.offset = 0
        array.ready = None
        return array

    # -- facts ----------------------------------------------------------------------------------------------------

    def _keep_shape(self, shape: object) -> None:
        raise FixedAttributeError(
            f"the shape of an NDArray is fixed: x.reshape({shape!r}) returns the elements in another shape"
        )

    if TYPE_CHECKING:
        shape: Shape
    else:
        shape = property(attrgetter("dims"), _keep_shape, doc="Dimensions; assigning to it is refused.")

    @property
    def dtype(self) -> type[np.generic]:
        """The NumPy type of the elements, such as ``np.float32``, as in MXNet."""
        kind: type[np.generic] = self.np_dtype.type
        return kind

    @dtype.setter
    def dtype(self, dtype: object) -> None:
        raise FixedAttributeError(f"the dtype of an NDArray is fixed: x.astype({dtype!r}) returns a converted copy")

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.dims) * self.np_dtype.itemsize

    @property
    def var(self) -> Var:
        """The engine var of the chunk."""
        return self.chunk.var

    @property
    def context(self) -> Context:
        """The context of the memory."""
        return self.chunk.context

    @property
    def ctx(self) -> Context:
        """The same as :attr:`context`."""
        return self.chunk.context

    @property
    def stype(self) -> str:
        """Always ``"default"``: dense."""
        return "default"

    def raw(self) -> RawArray:
        """Return the bytes as a typed array of the device's array module.

        Only for an engine operation that declared :attr:`var`, or after :meth:`wait_to_read`. The result does not keep
        the memory alive: the bytes go back to storage when the NDArray is collected.
        """
        view: RawArray | None = self.ready
        if view is None:
            view = typed(self.chunk.raw, self.offset, self.dims, self.np_dtype)
            if not self.chunk.movable:
                self.ready = view
        return view

    # -- rows ----------------------------------------------------------------------------------------------------

    def slice_at(self, begin: int, end: int) -> Self:
        """Return a view of rows ``begin`` to ``end`` (exclusive); cheaper than ``x[begin:end]``."""
        row = math.prod(self.dims[1:]) * self.np_dtype.itemsize
        return self.__class__(self.chunk, (end - begin, *self.dims[1:]), self.np_dtype, self.offset + begin * row)

    # -- waiting and looking --------------------------------------------------------------------------------------

    def wait_to_read(self) -> None:
        """Block until every operation pushed so far that writes this array has run; raise their errors."""
        self.chunk.engine.wait_for_var(self.chunk.var)

    def wait_to_write(self) -> None:
        """Block until every operation pushed so far that reads or writes this array has run."""
        # A write waits for all of them, and waiting waits for the write.
        push(nothing, (), (self.chunk.var,), self.context, name="wait_to_write")
        self.wait_to_read()

    def asnumpy(self) -> RawArray:
        """Wait for the values and return a NumPy copy."""
        self.wait_to_read()
        out = np.empty(self.dims, self.np_dtype)
        if self.size:
            with _NOTHING if MAKE_ROOM.value is None else joint_allocation.Look():
                device.get(self.context).copy(out, self.raw())
        return out

    def asscalar(self) -> Any:
        """Return the only element as a NumPy scalar; raise MXNetError if there is not exactly one."""
        if self.size != 1:
            raise ShapeError(f"the current array is not a scalar: it has shape {self.dims}; take one element first")
        return self.asnumpy().reshape(())[()]

    def all(self, axis: Any = None, out: Any = None, **kwargs: Any) -> Any:
        """Return whether no element is 0, as ``numpy.all(array)`` needs it; waits.

        Args:
            axis: must be None.
            out: must be None.
            **kwargs: none; for NumPy's call.
        """
        return np.all(self.asnumpy(), axis, out, **kwargs)

    def any(self, axis: Any = None, out: Any = None, **kwargs: Any) -> Any:
        """Return whether any element is not 0, as ``numpy.any(array)`` needs it; waits.

        Args:
            axis: must be None.
            out: must be None.
            **kwargs: none; for NumPy's call.
        """
        return np.any(self.asnumpy(), axis, out, **kwargs)

    def item(self) -> Any:
        """Return the only element as a Python number."""
        return self.asscalar().item()

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.asnumpy().tolist()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> RawArray:
        if copy is False:
            raise ValueError("an NDArray cannot become a NumPy array without a copy; use DLPack for that")
        values = self.asnumpy()
        return values if dtype is None else values.astype(dtype, copy=False)

    def __bool__(self) -> bool:
        if self.size != 1:
            if self.size == 0:
                return False
            raise ShapeError(
                f"the truth value of an NDArray with several elements (shape {self.dims}) is ambiguous: compare "
                f"elements, or use len()"
            )
        return bool(self.asscalar())

    def __float__(self) -> float:
        return float(self.asscalar())

    def __int__(self) -> int:
        return int(self.asscalar())

    def __index__(self) -> int:
        if self.np_dtype.kind not in "iu":
            raise DTypeError(f"only an integer NDArray can be an index, this one is {self.np_dtype}; use astype")
        return int(self.asscalar())

    def __len__(self) -> int:
        if not self.dims:
            raise TypeError("len() of an NDArray without dimensions")
        return self.dims[0]

    def __contains__(self, value: object) -> bool:
        return bool((self.asnumpy() == value).any())

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.dims))
        return f"\n{self.asnumpy()}\n<NDArray {shape} @{self.context}>"


def typed(raw: RawArray, offset: int, shape: tuple[int, ...], dtype: DType) -> RawArray:
    """Return the bytes of flat ``raw`` from ``offset`` as an array of ``shape`` and ``dtype``."""
    if raw.__class__ is np.ndarray and 0 not in shape:
        return np.ndarray(shape, dtype, raw, offset)  # a quarter of the time of the general way
    return raw[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def pending(
    kind: type[Array], context: Context, shape: Shape, dtype: DType, name: str | None, *, prompt: bool = True
) -> Array:
    """Make a new array for an operation that will write it; that operation allocates the memory."""
    nbytes = math.prod(shape) * dtype.itemsize
    return kind(ARRAY_CHUNK.get()(context, nbytes, delay_alloc=True, name=name, prompt=prompt), shape, dtype)


def check_context(ctx: object) -> Context:
    """Return ``ctx``, or the current context for None; raise DeviceError for other objects."""
    if ctx is None:
        return current_context()
    if not isinstance(ctx, Context):
        raise DeviceError(f"a context such as mx.cpu(0) was expected, got {ctx!r}")
    return ctx


def check_dtype(dtype: DTypeLike | None) -> DType:
    """Return ``dtype`` as a NumPy dtype of booleans, integers or floats (None: float32); else raise DTypeError."""
    if dtype is None:
        return np.dtype(np.float32)
    try:
        checked = dtype_of(dtype)
    except TypeError as error:
        if dtype == "bfloat16":
            raise DTypeError(str(error)) from None
        raise DTypeError(f"unknown dtype {dtype!r}: expected float16, float32, float64, int8, …, bool") from error
    if not is_number(checked) or checked.itemsize > 8:
        raise DTypeError(f"dtype {checked} is not supported: expected booleans, integers or floats of at most 64 bits")
    return checked if checked.isnative else checked.newbyteorder("=")
