"""Batch reader, shared by the owner process and the workers, so both produce the same bits.

A reader is used by one thread.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from weftplan.data.input.layout import BatchLayout, DoesNotFit, Host
from weftplan.data.input.seeding import Key, epoch_order, epoch_seed, sample_seed, seed_sample
from weftplan.data.input.sources import Dataset, SampleStream
from weftplan.errors import DataError


class ReadTask(NamedTuple):
    """Request for a batch: a few numbers, independent of the batch size."""

    key: Key
    """Key of the epoch; every sample's seed is derived from it."""
    shuffled: bool
    number: int
    """Number of the batch in the epoch."""


class Filled(NamedTuple):
    """Result of a task."""

    rows: int
    """Number of rows with samples; the remaining rows repeat them."""
    positions: list[int] | None
    """Positions of the read samples in the batch; None if no sample was skipped."""
    skipped: list[tuple[int, str]]
    """(number, error text) of each skipped sample."""
    ended: int | None = None
    """Total number of items of a stream that has ended; None otherwise."""


class _Unreadable(Exception):
    """Failure of a sample or its transform; ``__cause__`` is the original exception."""


_Item = tuple[int, int, Callable[[], Any]]
"""(position in the batch, number of the sample, function that loads it)."""


class Reader:
    """Reads batches of a source into memory.

    Args:
        source: dataset or stream of samples.
        transform: applied to each sample, or to each batch if the source yields batches.
        skip: whether unreadable samples are left out.
        layout: layout of a batch; may be None until :meth:`read` is called.
    """

    def __init__(
        self,
        source: Dataset | SampleStream,
        transform: Callable[[Any], Any] | None,
        skip: bool,
        layout: BatchLayout | None = None,
    ) -> None:
        self._source = source
        self._transform = transform
        self._skip = skip
        self.layout: Any = layout
        self._order: tuple[Any, Any] = (None, None)
        """(key, order) of the epoch of a dataset."""
        self._running: Iterator[Any] | None = None
        self._epoch: Key | None = None
        self._next_number = 0
        # State of a stream: its iterator, the epoch it belongs to (None: any), and the number of the next sample.

    def first_sample(self) -> object:
        """Return the first readable sample, transformed.

        Raises:
            DataError: there is none, or the first cannot be read and nothing is to be left out.
        """
        if isinstance(self._source, SampleStream):
            self._start(None)
            assert self._running is not None
            for sample in self._running:
                self._running = itertools.chain([sample], self._running)
                items: Iterable[_Item] = [(0, 0, partial(_same, sample))]
                break
            else:
                raise DataError("the source gives no sample")
        else:
            items = ((n, n, partial(self._source.sample, n)) for n in range(len(self._source)))
        errors: list[str] = []
        for _, number, get in items:
            try:
                return self._read(epoch_seed((0, 0)), number, get)
            except _Unreadable as error:
                if not self._skip:
                    raise DataError(str(error)) from error.__cause__
                errors.append(str(error))
        raise DataError(f"none of {len(errors)} samples can be read; {errors[0]}" if errors else "there are no samples")

    def numbers(self, task: ReadTask) -> list[int]:
        """Return the sample numbers of a batch; for a stream always a full batch of numbers."""
        rows = self.layout.rows
        if isinstance(self._source, SampleStream):
            return list(range(task.number * rows, (task.number + 1) * rows))
        order_key = task.key if task.shuffled else None
        if self._order[1] is None or self._order[0] != order_key:
            self._order = (order_key, epoch_order(len(self._source), order_key))
        chosen: list[int] = self._order[1][task.number * rows : (task.number + 1) * rows].tolist()
        return chosen

    def read(self, task: ReadTask, views: Sequence[Host]) -> Filled:
        """Fill the rows of a batch.

        Raises:
            DataError: a sample does not fit, or cannot be read and is not to be left out.
        """
        ended: list[int] = []
        items = self._stream(task, ended) if isinstance(self._source, SampleStream) else self._dataset(task)
        epoch = epoch_seed(task.key)
        row, positions, skipped = 0, [], []
        pick, store = self.layout.pick, self.layout.store
        for position, number, get in items:
            try:
                arrays = self._read(epoch, number, get, pick)
                row += store(arrays, views, row)
                positions.append(position)
            except _Unreadable as error:
                if not self._skip:
                    raise DataError(str(error)) from error.__cause__
                skipped.append((number, str(error)))
            except DoesNotFit as error:
                raise DataError(f"sample {number}: {error}") from None
        _repeat(views, row)
        return Filled(row, positions if skipped else None, skipped, *ended)

    def _read(self, epoch: int, number: int, get: Callable[[], Any], use: Callable[[Any], Any] | None = None) -> Any:
        seed_sample(sample_seed(epoch, number))
        try:
            sample = get()
            if self._transform is not None:
                sample = self._transform(sample)
            if sample is None:
                raise ValueError("it is None")
            return sample if use is None else use(sample)
        except DoesNotFit:
            raise
        except Exception as error:
            raise _Unreadable(f"sample {number} cannot be read: {type(error).__name__}: {error}") from error

    def _dataset(self, task: ReadTask) -> Iterable[_Item]:
        assert isinstance(self._source, Dataset)
        numbers = self.numbers(task)
        batch_samples: Sequence[Any] | None = None
        if self._source.reads_together and numbers:
            seed_sample(sample_seed(epoch_seed(task.key), numbers[0]))
            try:
                batch_samples = self._source.samples(numbers)
            except Exception:
                batch_samples = None  # read individually, to find the failing sample
        for position, number in enumerate(numbers):
            yield (
                position,
                number,
                partial(self._source.sample, number)
                if batch_samples is None
                else partial(_same, batch_samples[position]),
            )

    def _stream(self, task: ReadTask, ended: list[int]) -> Iterable[_Item]:
        samples = 1 if self.layout.batched else self.layout.rows
        start = task.number * samples
        if self._running is None or self._epoch not in (None, task.key) or start < self._next_number:
            self._start(task.key)
        self._epoch = task.key
        assert self._running is not None
        for number in range(self._next_number, start + samples):
            try:
                sample = next(self._running)
            except StopIteration:
                ended.append(self._next_number)
                return
            except Exception as error:  # a failed iterator cannot continue, so the sample cannot be skipped
                self._running = None
                raise DataError(f"the source ends at sample {number}: {type(error).__name__}: {error}") from error
            self._next_number = number + 1
            if number >= start:  # earlier samples belong to batches of other workers
                yield number - start, number, partial(_same, sample)

    def _start(self, epoch: Key | None) -> None:
        assert isinstance(self._source, SampleStream)
        self._running, self._next_number, self._epoch = self._source.start(), 0, epoch


T = TypeVar("T")


def _same(sample: T) -> T:
    return sample


def _repeat(views: Sequence[Host], rows: int) -> None:
    """Pad the batch: repeat its first ``rows`` rows in the remaining rows."""
    for view in views if rows else ():
        for start in range(rows, len(view), rows):
            view[start : start + rows] = view[: min(rows, len(view) - start)]


def trace_of(error: BaseException) -> str:
    """Format the traceback of an error's cause, or its own if it has no cause."""
    return "".join(traceback.format_exception(error.__cause__ or error))
