"""Iterator interface of ``mx.io`` (DataIter, DataBatch, DataDesc), and NDArrayIter.

``fit`` relies on this interface. One thread at a time uses an iterator. The file is long because it holds the base
classes of all other iterators.

``last_batch_handle`` has its rule in :class:`NDArrayIter`; image iterators (``images/iterators.py``) and
``input/dataset_iter.py`` implement it for their own samples.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from weftplan.device.context import Context, cpu
from weftplan.errors import DTypeError, ParameterError, ShapeError
from weftplan.ndarray import NDArray, array, random
from weftplan.ops.core.floats import is_number
from weftplan.support.array_types import DType, DTypeLike
from weftplan.support.keyword_errors import Constructed
from weftplan.training.data.iterator_state import (
    State,
    key_in,
    make_state,
    not_resumable,
    numbers_in,
    read_state,
    whole_in,
)

Host = np.ndarray[Any, DType]


class _NameAndShape(NamedTuple):
    name: str
    shape: tuple[int, ...]


class DataDesc(_NameAndShape):
    """Name and shape of one input, as a pair, with its dtype and the layout of its axes.

    Samples lie along axis ``N`` of the layout, or along the first axis if the layout has no ``N``.

    >>> DataDesc("data", (32, 3, 8, 8))
    DataDesc[data,(32, 3, 8, 8),float32,NCHW]
    >>> dict([DataDesc("data", (32, 10)), ("label", (32,))])
    {'data': (32, 10), 'label': (32,)}
    """

    dtype: Any
    layout: str

    def __new__(cls, name: str, shape: Sequence[int], dtype: DTypeLike = np.float32, layout: str = "NCHW") -> DataDesc:
        desc = super().__new__(cls, name, tuple(shape))
        desc.dtype, desc.layout = dtype, layout
        return desc

    @staticmethod
    def get_batch_axis(layout: str | None) -> int:
        """Return the axis of the samples; 0 without a layout."""
        return 0 if layout is None else layout.find("N")

    @staticmethod
    def get_list(
        shapes: Sequence[tuple[str, Sequence[int]]],
        types: Mapping[str, DTypeLike] | Iterable[tuple[str, DTypeLike]] | None = None,
    ) -> list[DataDesc]:
        """Describe (name, shape) pairs, with dtypes from ``types``: (name, dtype) pairs or a dictionary.

        >>> DataDesc.get_list([("data", (2, 3))], [("data", np.float16)])
        [DataDesc[data,(2, 3),float16,NCHW]]
        """
        dtypes = dict(types or ())
        return [DataDesc(name, shape, dtypes.get(name, np.float32)) for name, shape in shapes]

    @property
    def batch_axis(self) -> int:
        """The axis of the samples."""
        return max(0, self.get_batch_axis(self.layout))

    def __repr__(self) -> str:
        return f"DataDesc[{self.name},{self.shape},{np.dtype(self.dtype).name},{self.layout}]"


class DataBatch(Constructed):
    """One batch: lists of data and label arrays, and how many samples at its end are padding.

    ``bucket_key`` says which network of a :class:`~weftplan.training.module.bucketing_module.BucketingModule` it is
    for.
    """

    def __init__(
        self,
        data: Sequence[NDArray],
        label: Sequence[NDArray] | None = None,
        pad: int | None = 0,
        index: Host | None = None,
        bucket_key: Hashable = None,
        provide_data: Sequence[DataDesc] | None = None,
        provide_label: Sequence[DataDesc] | None = None,
    ) -> None:
        for what, arrays in (("data", data), ("label", label)):
            if isinstance(arrays, (NDArray, np.ndarray)):  # iterating over it would give rows
                raise ParameterError(f"DataBatch: {what} must be a list of arrays, got one array; write [{what}]")
        self.data = list(data)
        self.label = [] if label is None else list(label)
        self.pad = pad
        self.index = index
        self.bucket_key = bucket_key
        self.provide_data, self.provide_label = provide_data, provide_label
        self.placed: list[Mapping[tuple[Context, int, int], NDArray]] | None = None
        """For data and then labels: (device, first row, end) -> these rows on that device (see ``PrefetchingIter``)."""

    def __str__(self) -> str:
        labels = [tuple(a.shape) for a in self.label] or None
        return f"DataBatch: data shapes: {[tuple(a.shape) for a in self.data]} label shapes: {labels}"


class _Settable:
    """Descriptor of an attribute that a subclass computes or a script sets on an iterator, as in MXNet."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, iterator: Any, owner: type | None = None) -> Any:
        if iterator is None:
            return self
        try:
            return vars(iterator)[self._name]
        except KeyError:
            raise NotImplementedError(f"{type(iterator).__name__}.{self._name}") from None

    def __set__(self, iterator: Any, value: Any) -> None:
        vars(iterator)[self._name] = value


class DataIter(Constructed):
    """Base of iterators: ``for batch in it`` runs one epoch; ``reset()`` starts the next.

    A resumable iterator also implements :meth:`state` and :meth:`set_state`.
    """

    def __init__(self, batch_size: int = 0) -> None:
        self.batch_size = batch_size

    provide_data: Any = _Settable("Names and shapes of the data arrays of a batch, a list of :class:`DataDesc`.")
    provide_label: Any = _Settable("Names and shapes of the label arrays of a batch, a list of :class:`DataDesc`.")

    def reset(self) -> None:
        """Start over (and shuffle again if that was asked for)."""

    def next(self) -> DataBatch:
        """Return the next batch; raises StopIteration at the end of the epoch.

        A subclass overrides this method, or the methods that it calls: ``iter_next``, ``getdata``, ``getlabel``,
        ``getpad``, ``getindex``.
        """
        if not self.iter_next():
            raise StopIteration
        return DataBatch(self.getdata(), self.getlabel(), self.getpad(), self.getindex())

    def iter_next(self) -> bool:
        """Advance to the next batch; returns False at the end of the epoch."""
        raise NotImplementedError

    def getdata(self) -> list[NDArray]:
        """Return the data arrays of the current batch."""
        raise NotImplementedError

    def getlabel(self) -> list[NDArray]:
        """Return the label arrays of the current batch; empty unless a subclass overrides it."""
        return []

    def getpad(self) -> int:
        """Return the number of padding samples at the end of the current batch."""
        return 0

    def getindex(self) -> Host | None:
        """Return the sample numbers of the current batch, or None if unknown."""
        return None

    def state(self) -> State:
        """Return the iterator's position: the epoch, its sample order, and the last batch read.

        After :meth:`set_state`, an iterator constructed with the same arguments, in this process or another, yields the
        remaining batches of the epoch bit for bit. The orders of later epochs are drawn from ``mx.random``, whose state
        is not included. A prefetching iterator reports the position of its consumer.

        The values are JSON-compatible: None, booleans, numbers, text, and lists and dictionaries of these. Call this on
        the thread that uses the iterator.

        Raises:
            NotResumableError: the iterator has no state; a custom iterator must override both methods.
        """
        raise not_resumable(self)

    def set_state(self, state: Mapping[str, object]) -> None:
        """Restore the position of a :meth:`state`, without drawing from ``mx.random``.

        Raises:
            ParameterError: the state is of another iterator; the message lists the differences, and nothing changes.
            NotResumableError: as :meth:`state`.
        """
        raise not_resumable(self)

    def __iter__(self) -> Iterator[DataBatch]:
        return self

    def __next__(self) -> DataBatch:
        return self.next()


class HoldingIter(DataIter):
    """Base of iterators that hold the current batch; ``iter_next`` of a subclass sets it."""

    current_batch: DataBatch | None = None

    def next(self) -> DataBatch:
        if not self.iter_next():
            raise StopIteration
        return self._current()

    def getdata(self) -> list[NDArray]:
        return self._current().data

    def getlabel(self) -> list[NDArray]:
        return self._current().label

    def getpad(self) -> int:
        return self._current().pad or 0

    def getindex(self) -> Host | None:
        return self._current().index

    def _current(self) -> DataBatch:
        if self.current_batch is None:
            raise ParameterError(f"{type(self).__name__}: there is no batch yet; call next() or iter_next() first")
        return self.current_batch


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
    ) -> None:
        super().__init__(batch_size)
        if last_batch_handle not in ("pad", "discard", "roll_over"):
            raise ParameterError(
                f"last_batch_handle must be 'pad', 'discard' or 'roll_over', got {last_batch_handle!r}"
            )
        self._data = _named(data, data_name, empty_ok=False)
        self._label = _named(label, label_name, empty_ok=True)
        counts = {name: len(values) for name, values in (*self._data, *self._label)}
        if len(set(counts.values())) != 1:
            raise ShapeError(f"NDArrayIter: arrays differ in number of samples: {counts}")
        self.num_data = next(iter(counts.values()))
        whole = isinstance(batch_size, (int, np.integer)) and not isinstance(batch_size, bool) and batch_size >= 1
        if not whole or self.num_data < (1 if last_batch_handle == "pad" else batch_size):
            raise ParameterError(
                f"NDArrayIter: batch_size must be an integer in [1, {self.num_data}], the number of samples "
                f"(with last_batch_handle='pad' it may be larger), got {batch_size!r}"
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
        return [DataDesc(n, (self.batch_size, *v.shape[1:]), v.dtype) for n, v in self._data]

    @property
    def provide_label(self) -> list[DataDesc]:
        return [DataDesc(n, (self.batch_size, *v.shape[1:]), v.dtype) for n, v in self._label]

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
        whole_in(self, "cursor", cursor, len(brought) + self.num_data + self.batch_size)
        drawn = key_in(self, key) if self.shuffle else None
        self._begin(drawn, brought)
        self._carried, self._cursor = carried, cursor
        self.current_batch = None

    layout = "NCHW"

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
        return [(name, array(values[order], dtype=values.dtype)) for name, values in named]

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
        self._cursor = start + size
        self.current_batch = DataBatch(
            [array(values[chosen], dtype=values.dtype) for _, values in self._data],
            [array(values[chosen], dtype=values.dtype) for _, values in self._label],
            pad=pad,
            index=chosen,
            provide_data=self.provide_data,
            provide_label=self.provide_label,
        )
        return True


def order_key() -> tuple[int, int]:
    """Draw a key for the order of an epoch.

    If the program has called ``np.random.seed``, the key comes from NumPy's global generator, so that the seed decides
    the order, as in MXNet. Otherwise it comes from the sequence of ``mx.random``, which is reproducible even unseeded.
    """
    if np.random.get_bit_generator().seed_seq is not None:  # type: ignore[attr-defined]
        return random.next_key(cpu())
    first, second = np.random.randint(0, 2**63, 2, np.int64).tolist()  # noqa: NPY002 - the program has seeded it
    return first, second


def generator(key: tuple[int, int]) -> np.random.Generator:
    """Return a generator that depends only on the key of a draw."""
    mask = 2**64 - 1
    return np.random.Generator(np.random.Philox(key=[key[0] & mask, key[1] & mask]))


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
    for name, value in pairs:
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
