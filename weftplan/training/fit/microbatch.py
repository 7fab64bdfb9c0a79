"""Micro-batches: a batch split into pieces whose gradients are summed before a single update.

This file splits batches and their descriptions; the loop that sums is in ``loop.py``. The functions are stateless. A
piece is a view of its batch if the samples lie along the first axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weftplan import ndarray as nd
from weftplan.data.batch import DataBatch, DataDesc
from weftplan.data.data_iter import DataIter
from weftplan.errors import BindError, ParameterError, ShapeError
from weftplan.ndarray import NDArray
from weftplan.training.executor_group import as_ndarray, replaced
from weftplan.training.fit.fit_module import FitModule


def checked(count: object) -> int:
    """Validate a number of micro-batches; raises ParameterError unless it is a whole number >= 1."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ParameterError(f"micro_batches must be a whole number >= 1, got {count!r}")
    return count


def cut_descs(descs: Sequence[tuple[str, Sequence[int]]] | None, count: int) -> list[DataDesc]:
    """Describe a piece of a batch that is split into ``count`` equal pieces.

    Raises:
        ShapeError: the number of samples is not divisible by ``count``.

    >>> cut_descs([DataDesc("data", (12, 3))], 4)
    [DataDesc[data,(3, 3),float32,NCHW]]
    """
    pieces = []
    for desc in descs or ():
        desc = desc if isinstance(desc, DataDesc) else DataDesc(*desc)
        axis = desc.batch_axis
        samples = desc.shape[axis]
        if samples % count:
            raise ShapeError(
                f"a batch of {samples} samples ({desc.name!r} has shape {tuple(desc.shape)}) cannot be cut into "
                f"{count} equal micro-batches: choose a divisor of {samples}"
            )
        pieces.append(DataDesc(desc.name, replaced(desc.shape, axis, samples // count), desc.dtype, desc.layout))
    return pieces


def bind_for(module: FitModule, data: DataIter, micro_batches: int, *, rebind: bool) -> None:
    """Bind a module for the batches of ``data``, or for micro-batches with summed gradients.

    Raises:
        ShapeError: the batch size is not divisible by ``micro_batches``.
        BindError: the module is already bound for other shapes or another grad_req.
    """
    if micro_batches == 1:
        descs = {"data_shapes": data.provide_data, "label_shapes": data.provide_label}
        module.bind(**descs, for_training=True, force_rebind=rebind)
        return
    pieces = cut_descs(data.provide_data, micro_batches), cut_descs(data.provide_label, micro_batches)
    if module.binded and not rebind:
        bound = [tuple(desc.shape) for desc in module.data_shapes]
        piece_shapes = [tuple(desc.shape) for desc in pieces[0]]
        if bound != piece_shapes or module.bound_grad_req() != "add":
            raise BindError(
                f"fit: micro_batches={micro_batches} needs the module bound for {piece_shapes} with grad_req 'add', "
                f"but it is bound for {bound} with {module.bound_grad_req()!r}: pass force_rebind=True"
            )
    module.bind(*pieces, for_training=True, force_rebind=rebind, grad_req="add")


class BatchPieces:
    """Splitter for the batches of an iterator, given its data and label descriptions."""

    def __init__(
        self, data: Sequence[tuple[str, Sequence[int]]], label: Sequence[tuple[str, Sequence[int]]] | None
    ) -> None:
        self._data_axes = _axes(data)
        self._label_axes = _axes(label)

    @property
    def axis(self) -> int:
        """Batch axis of the first data array."""
        return self._data_axes[0] if self._data_axes else 0

    def cut(self, batch: DataBatch, samples: int) -> list[DataBatch]:
        """Split the batch into pieces of at most ``samples`` samples, in order."""
        length = as_ndarray(batch.data[0], "data of the batch").shape[self.axis] if batch.data else 0
        if length <= samples:
            return [batch]
        real = length - (getattr(batch, "pad", None) or 0)
        return [self._piece(batch, at, min(at + samples, length), real) for at in range(0, length, samples)]

    def _piece(self, batch: DataBatch, begin: int, end: int, real: int) -> DataBatch:
        index = getattr(batch, "index", None)
        return DataBatch(
            [_rows(value, axis, begin, end) for value, axis in zip(batch.data, self._data_axes, strict=False)],
            [_rows(value, axis, begin, end) for value, axis in zip(batch.label or (), self._label_axes, strict=False)],
            pad=min(max(0, end - real), end - begin),
            index=None if index is None else index[begin:end],
            bucket_key=getattr(batch, "bucket_key", None),
            provide_data=_resized(getattr(batch, "provide_data", None), end - begin),
            provide_label=_resized(getattr(batch, "provide_label", None), end - begin),
        )


class MicroBatchIter(DataIter):
    """Batches of another iterator in pieces of at most ``batch_size`` samples; pieces of pure padding are dropped.

    >>> import numpy as np
    >>> from weftplan.data.ndarray_iter import NDArrayIter
    >>> it = MicroBatchIter(NDArrayIter(np.arange(7.0), batch_size=4), batch_size=2)
    >>> [(batch.data[0].tolist(), batch.pad) for batch in it]
    [([0.0, 1.0], 0), ([2.0, 3.0], 0), ([4.0, 5.0], 0), ([6.0, 0.0], 1)]
    """

    def __init__(self, source: DataIter, batch_size: int) -> None:
        super().__init__(batch_size)
        self._source = source
        self._pieces = BatchPieces(source.provide_data, source.provide_label)
        self.provide_data = _resized(source.provide_data, batch_size)
        self.provide_label = _resized(source.provide_label, batch_size)

    def reset(self) -> None:
        self._source.reset()

    def __iter__(self) -> Iterator[DataBatch]:
        for batch in self._source:
            for piece in self._pieces.cut(batch, self.batch_size):
                if not piece.data or (piece.pad or 0) < piece.data[0].shape[self._pieces.axis]:
                    yield piece


def _axes(descs: Sequence[tuple[str, Sequence[int]]] | None) -> list[int]:
    return [desc.batch_axis if isinstance(desc, DataDesc) else 0 for desc in descs or ()]


def _rows(value: object, axis: int, begin: int, end: int) -> NDArray:
    array = as_ndarray(value, "an array of the batch")
    if axis == 0:
        return array[begin:end]
    cut: NDArray = nd.slice_axis(array, axis=axis, begin=begin, end=end)
    return cut


def _resized(descs: Sequence[tuple[str, Sequence[int]]] | None, samples: int) -> list[DataDesc] | None:
    if descs is None:
        return None
    described = [desc if isinstance(desc, DataDesc) else DataDesc(*desc) for desc in descs]
    return [DataDesc(d.name, replaced(d.shape, d.batch_axis, samples), d.dtype, d.layout) for d in described]
