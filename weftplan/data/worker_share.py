"""PartOfBatchIter: a worker's share of every batch in data-parallel training with several processes."""

from __future__ import annotations

from collections.abc import Mapping

from weftplan.data.batch import DataBatch, DataDesc
from weftplan.data.data_iter import DataIter
from weftplan.data.resumable_position import State, make_state, read_state
from weftplan.errors import ParameterError
from weftplan.ndarray import NDArray


class PartOfBatchIter(DataIter):
    """Share ``rank`` of ``num_workers`` equal shares of every batch of another iterator.

    Every worker constructs the same iterator, with the same seed if it shuffles. The shares of a step then form the
    batch of a single-process run, without any communication about the split.

    Args:
        source: an iterator whose batch size is a multiple of ``num_workers``.
        rank: this worker, from 0.
        num_workers: workers that share each batch.

    Raises:
        ParameterError: the batch cannot be cut evenly, or there is no such rank.

    >>> import numpy as np
    >>> from weftplan.data.ndarray_iter import NDArrayIter
    >>> it = PartOfBatchIter(NDArrayIter(np.arange(8.0), batch_size=4), rank=1, num_workers=2)
    >>> [batch.data[0].tolist() for batch in it]
    [[2.0, 3.0], [6.0, 7.0]]
    """

    def __init__(self, source: DataIter, *, rank: int, num_workers: int) -> None:
        if not 0 <= rank < num_workers:
            raise ParameterError(f"rank must be in [0, {num_workers}), got {rank}")
        if source.batch_size % num_workers:
            raise ParameterError(
                f"batches of {source.batch_size} cannot be shared evenly by {num_workers} workers: use a multiple"
            )
        super().__init__(source.batch_size // num_workers)
        self._source = source
        self._start = rank * self.batch_size

    @property
    def provide_data(self) -> list[DataDesc]:
        return [self._cut(desc) for desc in self._source.provide_data]

    @property
    def provide_label(self) -> list[DataDesc]:
        return [self._cut(desc) for desc in self._source.provide_label]

    def reset(self) -> None:
        self._source.reset()

    def state(self) -> State:
        """Return the source's :meth:`state <weftplan.data.data_iter.DataIter.state>`, which does not depend
        on ``rank`` and ``num_workers``."""
        return make_state(self, {}, source=self._source.state())

    def set_state(self, state: Mapping[str, object]) -> None:
        (source,) = read_state(self, state, {}, "source")
        self._source.set_state(source)

    def next(self) -> DataBatch:
        batch = self._source.next()
        first_padded = self._source.batch_size - (batch.pad or 0)
        pad = min(max(self._start + self.batch_size - first_padded, 0), self.batch_size)
        index = None if batch.index is None else batch.index[self._start : self._start + self.batch_size]
        return DataBatch(
            [self._rows(array) for array in batch.data],
            [self._rows(array) for array in batch.label],
            pad=pad,
            index=index,
            provide_data=self.provide_data,
            provide_label=self.provide_label,
        )

    def _cut(self, desc: DataDesc) -> DataDesc:
        return DataDesc(desc.name, (self.batch_size, *desc.shape[1:]), desc.dtype)

    def _rows(self, array: NDArray) -> NDArray:
        return array[self._start : self._start + self.batch_size]
