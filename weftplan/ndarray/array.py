"""``NDArray``, the array class whose every access goes through the engine, and its methods.

An operation on arrays is pushed and returns immediately; reading values (``asnumpy``, ``print``, ``bool``, …) waits.
Arrays are contiguous. Several arrays may share a chunk and its var: views made by ``reshape``, by integers, and by
slices that leave the selected bytes contiguous.

This file owns the class and the list of its methods. The bodies are in the files that it imports, which know only
:class:`NDArrayBase`. A few bodies are in files that import this file; those fill slots (:mod:`weftplan.support.slots`).
Any thread may call any method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from weftplan import device
from weftplan.device.context import Context
from weftplan.errors import DTypeError, MXNetError, ShapeError
from weftplan.ndarray import arithmetic, copying, indexing
from weftplan.ndarray.base import BinaryOperand, NDArrayBase, Shape, check_context, check_dtype, pending
from weftplan.ndarray.copying import copy_into, is_device
from weftplan.ndarray.export import export
from weftplan.ops.core import registry
from weftplan.ops.core.params import from_text
from weftplan.ops.shape.reshape_codes import reshaped
from weftplan.support import slots
from weftplan.support.array_types import DType, DTypeLike, RawArray

if TYPE_CHECKING:
    from weftplan.ndarray.registered import Methods
else:
    Methods = object


OPERATOR_METHODS = frozenset(
    """abs arccos arccosh arcsin arcsinh arctan arctanh argmax argmax_channel argmin argsort broadcast_axes
    broadcast_like broadcast_to cbrt ceil clip cos cosh degrees depth_to_space diag dot erf exp expm1 fix flip floor
    log log10 log1p log2 log_softmax max mean min nanprod nansum norm one_hot ones_like pad pick prod radians rcbrt
    reciprocal relu repeat reshape_like rint round rsqrt shape_array sigmoid sign sin sinh size_array slice
    slice_axis slice_like softmax softmin sort space_to_depth split sqrt square sum swapaxes take tan tanh
    tile topk trunc zeros_like""".split()  # noqa: SIM905
)
"""Operators that are also methods: ``x.sum(axis=1)`` is ``nd.sum(x, axis=1)``."""


class NDArray(NDArrayBase, Methods):
    """A contiguous array in a chunk.

    Args:
        chunk: the memory and its var.
        shape: dimensions; ``()`` is one element.
        dtype: NumPy dtype or anything that makes one.
        offset: bytes from the start of the chunk to the first element.

    Raises:
        ShapeError: the array does not lie within the chunk.
    """

    __slots__ = ()
    __hash__ = object.__hash__

    def __iter__(self) -> Iterator[NDArray]:
        for index in range(len(self)):
            yield self[index]

    # -- copies ---------------------------------------------------------------------------------------------------

    def copyto(self, other: NDArray | Context, *, priority: int = 0) -> NDArray:
        """Copy into an array of equal shape (cast to its dtype) or to a new array on a context; return the target.

        Raises:
            ShapeError: the shapes differ.
            DTypeError: ``other`` is neither an array nor a context.
        """
        if not isinstance(other, (Context, NDArray)):
            raise DTypeError(f"copyto needs an NDArray or a Context, got {type(other).__name__}")
        target = fresh(other, self.shape, self.np_dtype, "copy") if isinstance(other, Context) else other
        copy_into(self, target, priority=priority)
        return target

    def copy(self) -> NDArray:
        """Copy to a new array on the same context."""
        return self.copyto(self.context)

    def as_in_context(self, context: Context) -> NDArray:
        """Return this array if it is on ``context``, else a copy there."""
        return self if context == self.context else self.copyto(check_context(context))

    as_in_ctx = as_in_context

    def astype(self, dtype: DTypeLike | None, copy: bool = True) -> NDArray:
        """Return a copy with another dtype; with ``copy=False`` this array if it has that dtype."""
        target_dtype = check_dtype(dtype)
        if not copy and target_dtype == self.np_dtype:
            return self
        out = fresh(self.context, self.shape, target_dtype, "astype")
        copy_into(self, out)
        return out

    def detach(self) -> NDArray:
        """Return a view of the same memory."""
        return NDArray(self.chunk, self.shape, self.np_dtype, self.offset)

    def as_nd_ndarray(self) -> NDArray:
        """Return this array."""
        return self

    def tostype(self, stype: str) -> NDArray:
        """Return this array for ``"default"``, or a ``row_sparse`` array over its memory (see
        :mod:`weftplan.ndarray.row_sparse`).

        Raises:
            MXNetError: any other storage type.
        """
        if stype == "row_sparse":
            sparse: NDArray = slots.ARRAY_AS_ROW_SPARSE.get()(self)
            return sparse
        if stype != "default":
            raise MXNetError(f"storage type {stype!r} is absent on purpose: every array is dense; use 'default'")
        return self

    # -- views ----------------------------------------------------------------------------------------------------

    def reshape(self, *shape: Any, **kwargs: Any) -> NDArray:
        """Return a view with another shape: ``x.reshape(2, 3)``, ``x.reshape((2, 3))`` or ``x.reshape(shape=(2, 3))``.

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
        target_shape: Shape
        if self.size == 0 or min(codes, default=1) > 0:
            target_shape = codes  # the codes take 0 for an unknown dimension, so empty arrays only get plain shapes
        else:
            target_shape = reshaped(self.shape, codes, reverse=reverse)
        if math.prod(target_shape) != self.size or min(target_shape, default=0) < 0:
            raise ShapeError(f"cannot reshape an array of shape {self.shape} ({self.size} elements) to {codes}")
        return NDArray(self.chunk, target_shape, self.np_dtype, self.offset)

    @property
    def T(self) -> NDArray:
        """Return a copy with the axes reversed (this array if it has fewer than two)."""
        return self if self.ndim < 2 else self.transpose()

    def transpose(self, *axes: object, **kwargs: object) -> NDArray:
        """Permute the axes into a copy: ``x.transpose()``, ``x.transpose(1, 0)`` or ``x.transpose(axes=(1, 0))``."""
        if len(axes) == 1 and not isinstance(axes[0], int):
            axes = tuple(from_text(axes[0]) or ())
        chosen_axes = {"axes": axes} if axes or "axes" not in kwargs else {}
        return self._operator("transpose", (), {**kwargs, **chosen_axes})  # type: ignore[no-any-return]

    def split_v2(
        self, indices_or_sections: int | Sequence[int], axis: int = 0, squeeze_axis: bool = False
    ) -> NDArray | list[NDArray]:
        """Split into equal sections along ``axis``, or at the given indices, as ``nd.split_v2(x, …)``.

        Args:
            indices_or_sections: number of equal sections, or the indices at which sections begin.
            axis: axis to split.
            squeeze_axis: drop the axis, if each section has length 1.
        """
        parts: NDArray | list[NDArray] = slots.ARRAY_SPLIT.get()(self, indices_or_sections, axis, squeeze_axis)
        return parts

    def flatten(self, inplace: bool = False) -> NDArray:
        """Merge all dimensions after the first; return a copy, or with ``inplace`` a view."""
        return self._renamed("Flatten", {}, inplace=inplace)

    def expand_dims(self, axis: int, inplace: bool = False) -> NDArray:
        """Insert a dimension of size 1 at ``axis``; return a copy, or with ``inplace`` a view."""
        return self._renamed("expand_dims", {"axis": axis}, inplace=inplace)

    def squeeze(self, axis: int | Shape | None = None, inplace: bool = False) -> NDArray:
        """Remove dimensions of size 1, those of ``axis`` or all; return a copy, or with ``inplace`` a view."""
        return self._renamed("squeeze", {"axis": axis}, inplace=inplace)

    def _renamed(self, name: str, params: dict[str, object], *, inplace: bool) -> NDArray:
        """Return the result of an operator that keeps the elements in order."""
        if not inplace:
            return self._operator(name, (), params)  # type: ignore[no-any-return]
        op = registry.get(name)
        shape = op.infer_shape(registry.parse_params(op, params), [self.shape], [None])[1][0]
        return NDArray(self.chunk, shape or (), self.np_dtype, self.offset)

    def __getitem__(self, key: object) -> NDArray:
        return indexing.getitem(self, key)

    def __setitem__(self, key: object, value: object) -> None:
        indexing.setitem(self, key, value)

    # -- operators ------------------------------------------------------------------------------------------------

    def _attribute(self, name: str) -> NoReturn:
        hint = ""
        if name in ("attach_grad", "grad", "backward"):
            hint = ": autograd on arrays is absent on purpose; bind a symbol and call executor.backward()"
        raise AttributeError(f"NDArray has no attribute {name!r}{hint}")

    if not TYPE_CHECKING:  # for a type checker a method that is not there is an error
        __getattr__ = _attribute

    def _operator(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        return slots.ARRAY_OPERATOR.get()(name, (self, *args), kwargs)

    def __add__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.binary(arithmetic.ADD, self, other)

    __radd__ = __add__

    def __sub__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.binary(arithmetic.SUB, self, other)

    def __rsub__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.binary(arithmetic.SUB, self, other, swapped=True)

    def __mul__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.binary(arithmetic.MUL, self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.binary(arithmetic.DIV, self, other)

    def __rtruediv__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.binary(arithmetic.DIV, self, other, swapped=True)

    def __floordiv__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.binary(arithmetic.FLOORDIV, self, other)

    def __rfloordiv__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.binary(arithmetic.FLOORDIV, self, other, swapped=True)

    def __mod__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.binary(arithmetic.MOD, self, other)

    def __rmod__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.binary(arithmetic.MOD, self, other, swapped=True)

    def __pow__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.binary(arithmetic.POW, self, other)

    def __rpow__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.binary(arithmetic.POW, self, other, swapped=True)

    def __matmul__(self, other: object) -> NDArray:
        return self._operator("dot", (other,), {})  # type: ignore[no-any-return]

    def __eq__(self, other: object) -> NDArray:  # type: ignore[override]  # elementwise, as in MXNet
        return arithmetic.binary(arithmetic.EQ, self, other)

    def __ne__(self, other: object) -> NDArray:  # type: ignore[override]
        return arithmetic.binary(arithmetic.NE, self, other)

    def __lt__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.binary(arithmetic.LT, self, other)

    def __le__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.binary(arithmetic.LE, self, other)

    def __gt__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.binary(arithmetic.GT, self, other)

    def __ge__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.binary(arithmetic.GE, self, other)

    def __iadd__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.inplace(arithmetic.ADD, self, other)

    def __isub__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.inplace(arithmetic.SUB, self, other)

    def __imul__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.inplace(arithmetic.MUL, self, other)

    def __itruediv__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.inplace(arithmetic.DIV, self, other)

    def __ifloordiv__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.inplace(arithmetic.FLOORDIV, self, other)

    def __imod__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.inplace(arithmetic.MOD, self, other)

    def __ipow__(self, other: BinaryOperand) -> NDArray:
        return arithmetic.inplace(arithmetic.POW, self, other)

    def __neg__(self) -> NDArray:
        return arithmetic.unary("negative", self)

    def __pos__(self) -> NDArray:
        return self

    def __abs__(self) -> NDArray:
        return arithmetic.unary("absolute", self)

    # -- exchange -------------------------------------------------------------------------------------------------

    def __dlpack__(self, **kwargs: Any) -> object:
        """Wait for pending operations and return a DLPack capsule that shares the memory.

        The engine cannot see accesses by the other library: finish there before using the array here again.
        """
        return export(self).__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        if is_device(self.context) and self.context.device_type == "gpu":
            return 2, self.context.device_id
        return 1, 0

    def to_dlpack_for_read(self) -> object:
        """MXNet's name of :meth:`__dlpack__`."""
        return self.__dlpack__()

    to_dlpack_for_write = to_dlpack_for_read

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.asnumpy(), self.context)

    def __setstate__(self, state: Mapping[str, bytearray]) -> None:
        """Load the state of an array that MXNet 1.9.1 has pickled: one record of a parameter file.

        Raises:
            FormatError: the state is no such record.
        """
        record = slots.ARRAY_RECORD.get()(bytes(state["handle"]), "the state of a pickled array")
        if hasattr(self, "chunk"):  # an operation pushed before must not see, or keep a view of, the new fields
            self.wait_to_write()
        NDArrayBase.__init__(self, record.chunk, record.shape, record.np_dtype, record.offset)


def _method(name: str) -> Callable[..., object]:
    def method(self: NDArray, *args: object, **kwargs: object) -> object:
        return self._operator(name, args, kwargs)

    method.__name__, method.__qualname__ = name, f"NDArray.{name}"
    method.__doc__ = f"``nd.{name}(x, …)``."
    return method


for _name in OPERATOR_METHODS:
    setattr(NDArray, _name, _method(_name))


def fresh(context: Context, shape: Shape, dtype: DType, name: str | None) -> NDArray:
    """Make a new array for an operation that will write it; that operation allocates the memory."""
    return pending(NDArray, context, shape, dtype, name)


def from_host(values: RawArray, context: Context) -> NDArray:
    """Make a new array on ``context`` with a copy of ``values``; return when they have been read."""
    return copying.from_host(NDArray, values, context)


def _rebuild(values: RawArray, context: Context) -> NDArray:
    """Unpickle; an array of a GPU that does not exist here goes to the host."""
    try:
        device.get(context)
    except MXNetError:
        context = Context("cpu", 0)
    return from_host(values, context)
