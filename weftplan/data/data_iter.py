"""Interface of data iterators (DataIter), on which ``fit`` relies, and a base of iterators that hold their batch.

One thread at a time uses an iterator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weftplan.data.batch import DataBatch, Host
from weftplan.data.resumable_position import (
    State,
    not_resumable,
)
from weftplan.errors import ParameterError
from weftplan.ndarray import NDArray
from weftplan.support.keyword_errors import Constructed


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

    provide_data: Any = _Settable(
        "Names and shapes of the data arrays of a batch, a list of :class:`~weftplan.data.batch.DataDesc`."
    )
    provide_label: Any = _Settable(
        "Names and shapes of the label arrays of a batch, a list of :class:`~weftplan.data.batch.DataDesc`."
    )

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
