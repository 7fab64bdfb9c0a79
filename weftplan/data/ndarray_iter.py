"""NDArrayIter: batches cut from arrays in memory.

``last_batch_handle`` has its rule in :class:`NDArrayIter`; image iterators (``images/iterators.py``) and
``input/dataset_iter.py`` implement it for their own samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from operator import itemgetter

import numpy as np

from weftplan.data.batch import DataBatch, DataDesc, Host
from weftplan.data.data_iter import HoldingIter
from weftplan.data.random_draws import generator, order_key
from weftplan.data.resumable_position import (
    State,
    checked_integer,
    key_in,
    make_state,
    numbers_in,
    read_state,
)
from weftplan.errors import DTypeError, ParameterError, ShapeError
from weftplan.ndarray import NDArray, array
from weftplan.ops.core.floats import is_number


class NDArrayIter(HoldingIter):
    """Batches cut from arrays in memory.

    Args:
        data: an array, a list (named ``_0_data``, ``_1_data``, …; a single array: ``data``) or a dictionary of arrays,
            NumPy or NDArray, samples first. NumPy arrays of float64 or integers become float32; other dtypes are used
            in place, without a copy (a ``numpy.memmap`` stays mapped). NDArrays keep their dtype.
        label: the same for labels (default name ``softmax_label``), or None.
        batch_size: samples per batch.
        shuffle: take the samples in a new random order each epoch. The order follows the seed of ``np.random`` if the
            program has set it, else the seed of ``mx.random``.
        last_batch_handle: policy for the incomplete last batch: ``pad`` (fill it with the first samples, repeatedly if
            the batch is larger than the data; the batch's ``pad`` counts them), ``discard``, or ``roll_over`` (move the
            remaining samples to the start of the next epoch; the ``pad`` of its first batch is 0, while MXNet 1.9.1
            counts them as padding).
        layout: letters of the axes; the samples lie along its ``N``, and along the first axis of arrays with fewer
            axes than that.

    >>> it = NDArrayIter(np.arange(10.0).reshape(5, 2), np.arange(5.0), batch_size=2)
    >>> [(batch.data[0].shape, batch.pad) for batch in it]
    [((2, 2), 0), ((2, 2), 0), ((2, 2), 1)]
    """

    def __init__(
        self,
        data: object,
        label: object = None,
        batch_size: int = 1,
        shuffle: bool = False,
        last_batch_handle: str = "pad",
        data_name: str = "data",
        label_name: str = "softmax_label",
        layout: str = "NCHW",
    ) -> None:
        super().__init__(batch_size)
        if "N" not in layout:
            raise ParameterError(f"NDArrayIter: layout must name the axis of samples N, got {layout!r}")
        self.layout = layout
        if last_batch_handle not in ("pad", "discard", "roll_over"):
            raise ParameterError(
                f"last_batch_handle must be 'pad', 'discard' or 'roll_over', got {last_batch_handle!r}"
            )
        self._data = [(name, self._turned(v, 0)) for name, v in _named(data, data_name, empty_ok=False)]
        self._label = [(name, self._turned(v, 0)) for name, v in _named(label, label_name, empty_ok=True)]
        counts = {name: len(values) for name, values in (*self._data, *self._label)}
        if len(set(counts.values())) != 1:
            raise ShapeError(f"NDArrayIter: arrays differ in number of samples: {counts}")
        self.num_data = next(iter(counts.values()))
        is_positive = isinstance(batch_size, (int, np.integer)) and not isinstance(batch_size, bool) and batch_size >= 1
        if not is_positive or self.num_data < (batch_size if last_batch_handle == "roll_over" else 1):
            raise ParameterError(
                f"NDArrayIter: batch_size must be an integer in [1, {self.num_data}], the number of samples "
                f"(without last_batch_handle='roll_over' it may be larger), got {batch_size!r}"
            )
        self.shuffle = shuffle
        self.last_batch_handle = last_batch_handle
        self._facts = {
            "samples": self.num_data,
            "batch_size": int(batch_size),
            "shuffle": bool(shuffle),
            "last_batch_handle": last_batch_handle,
            "shapes": {name: list(values.shape[1:]) for name, values in (*self._data, *self._label)},
        }
        self._key: tuple[int, int] | None = None
        """Key of this epoch's random order; None if the order is not random."""
        self._brought = np.empty(0, np.int64)
        """Samples rolled over from the previous epoch to the start of this epoch."""
        self._carried = np.empty(0, np.int64)
        """Samples of this epoch that roll over to the next epoch."""
        self._order = np.arange(self.num_data)
        self._cursor = 0
        self.reset()

    @property
    def provide_data(self) -> list[DataDesc]:
        return self._described(self._data)

    @property
    def provide_label(self) -> list[DataDesc]:
        return self._described(self._label)

    def _turned(self, values: Host, source: int | None = None) -> Host:
        """Return values whose samples lie along the first axis in the layout; with ``source`` 0 the reverse."""
        axis = self.layout.index("N")
        axis = axis if axis < values.ndim else 0
        return np.moveaxis(values, 0, axis) if source is None else np.moveaxis(values, axis, source)

    def _described(self, named: list[tuple[str, Host]]) -> list[DataDesc]:
        shapes = [self._turned(np.broadcast_to(v[:1], (self.batch_size, *v.shape[1:]))).shape for _, v in named]
        return [DataDesc(n, s, v.dtype, self.layout) for (n, v), s in zip(named, shapes, strict=True)]

    def reset(self) -> None:
        self._begin(order_key() if self.shuffle else None, self._carried)

    def _begin(self, key: tuple[int, int] | None, brought: Host) -> None:
        order = np.arange(self.num_data)
        if key is not None:
            generator(key).shuffle(order)
        self._key, self._brought = key, brought
        self._order = np.concatenate([brought, order])
        self._carried = np.empty(0, np.int64)
        self._cursor = 0

    def state(self) -> State:
        return make_state(
            self,
            self._facts,
            key=None if self._key is None else list(self._key),
            brought=self._brought.tolist(),
            carried=self._carried.tolist(),
            cursor=self._cursor,
        )

    def set_state(self, state: Mapping[str, object]) -> None:
        key, *parts, cursor = read_state(self, state, self._facts, "key", "brought", "carried", "cursor")
        brought, carried = (np.asarray(numbers_in(self, "samples", part, self.num_data), np.int64) for part in parts)
        checked_integer(self, "cursor", cursor, len(brought) + self.num_data + self.batch_size)
        drawn = key_in(self, key) if self.shuffle else None
        self._begin(drawn, brought)
        self._carried, self._cursor = carried, cursor
        self.current_batch = None

    @property
    def data(self) -> list[tuple[str, NDArray]]:
        """(name, copy of the samples in this epoch's order) pairs, for scripts written for MXNet."""
        return self._ordered(self._data)

    @property
    def label(self) -> list[tuple[str, NDArray]]:
        """The same for labels."""
        return self._ordered(self._label)

    def _ordered(self, named: list[tuple[str, Host]]) -> list[tuple[str, NDArray]]:
        order = self._order[len(self._brought) :]
        return [(name, array(self._turned(values[order]), dtype=values.dtype)) for name, values in named]

    @property
    def data_list(self) -> list[NDArray]:
        """The arrays of :attr:`data` and :attr:`label`."""
        return [values for _, values in (*self.data, *self.label)]

    @property
    def num_source(self) -> int:
        """Number of arrays."""
        return len(self._data) + len(self._label)

    @property
    def cursor(self) -> int:
        """Position of the current batch in the order; minus the batch size before the first batch."""
        return self._cursor - self.batch_size

    @property
    def idx(self) -> Host:
        """Numbers of the samples in the order of this epoch."""
        return self._order

    def next(self) -> DataBatch:
        batch = super().next()
        batch.data, batch.label, batch.pad = self.getdata(), self.getlabel(), self.getpad()
        return batch

    def hard_reset(self) -> None:
        """Reset like :meth:`reset`, and discard the samples rolled over to the next epoch."""
        self._carried = np.empty(0, np.int64)
        self.reset()

    def iter_next(self) -> bool:
        start, size = self._cursor, self.batch_size
        chosen = self._order[start : start + size]
        if len(chosen) == 0:
            return False
        pad = size - len(chosen)
        if pad:
            if self.last_batch_handle == "discard":
                return False
            if self.last_batch_handle == "roll_over":
                self._carried = chosen
                self._cursor = len(self._order)
                return False
            chosen = np.concatenate([chosen, np.resize(self._order, pad)])
        self.current_batch = DataBatch(
            [array(self._turned(values[chosen]), dtype=values.dtype) for _, values in self._data],
            [array(self._turned(values[chosen]), dtype=values.dtype) for _, values in self._label],
            pad=pad,
            index=chosen,
            provide_data=self.provide_data,
            provide_label=self.provide_label,
        )
        self._cursor = start + size  # last: a batch that cannot be made is not lost
        return True


def _named(source: object, default: str, *, empty_ok: bool) -> list[tuple[str, Host]]:
    """[(name, host array)] from an array, a list or a dictionary.

    NumPy arrays of float64, integers or booleans become float32, as in MXNet; NDArrays keep their dtype.
    """
    if source is None:
        source = []
    if isinstance(source, (np.ndarray, NDArray)):
        source = [source]
    if isinstance(source, Mapping):
        pairs = list(source.items())
    elif isinstance(source, (list, tuple)):
        names = [default] if len(source) == 1 else [f"_{i}_{default}" for i in range(len(source))]
        pairs = list(zip(names, source, strict=True))
    else:
        raise ParameterError(
            f"{default}: expected an array, a list or a dictionary of arrays, got {type(source).__name__}"
        )
    if not pairs and not empty_ok:
        raise ParameterError(f"{default}: no arrays given")
    result = []
    # MXNet sorts by name: a dictionary's order does not count, and of twelve unnamed arrays the eleventh is the second.
    for name, value in sorted(pairs, key=itemgetter(0)):
        host = value.asnumpy() if isinstance(value, NDArray) else np.asarray(value)
        if host.ndim == 0:
            raise ShapeError(f"{name}: expected samples along the first axis, got a scalar")
        if host.dtype.kind in "SUO":  # text or objects: columns of a file or a table
            with suppress(DTypeError):
                host = array(host).asnumpy()
        if not is_number(host.dtype):
            raise DTypeError(f"{name}: expected an array of numbers, got dtype {host.dtype}")
        if not isinstance(value, NDArray) and (host.dtype == np.float64 or host.dtype.kind in "biu"):
            host = host.astype(np.float32)
        result.append((str(name), host))
    return result
