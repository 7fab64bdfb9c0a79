"""``mx.io.DatasetIter``: batches from any dataset or iterable, read inline or by worker processes.

One thread at a time uses an iterator. The contents of batches depend on the source, the seed of ``mx.random`` and the
settings, never on the number of workers or their timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from weftplan.data.batch import DataBatch, DataDesc
from weftplan.data.data_iter import DataIter
from weftplan.data.input.layout import BatchLayout, Host, Names, SamplePart, layout_of
from weftplan.data.input.sample_reader import Filled, Reader, ReadTask
from weftplan.data.input.seeding import Key, borrowed_generators
from weftplan.data.input.sources import Dataset, SampleStream, is_torch_loader, keeps_its_order, source_of
from weftplan.data.input.worker_loop import Recipe
from weftplan.data.input.workers import WorkerPool, check_start_method
from weftplan.data.resumable_position import State, checked_integer, key_in, make_state, not_resumable, read_state
from weftplan.device.context import HOST_MEMORY, Context, cpu
from weftplan.errors import DataError, DataWorkerError, ParameterError
from weftplan.ndarray import empty, random
from weftplan.support.package_log import log

_MAX_REPORTED = 5
"""Number of skipped samples that are logged individually."""


class DatasetIter(DataIter):
    """Batches of the samples of a dataset or an iterable.

    Args:
        source: a dataset (``__len__`` and ``__getitem__``: a list, an array, a dataset of ``torch.utils.data`` or of
            Hugging Face's ``datasets``), an iterable, a function that returns one, or a
            ``torch.utils.data.DataLoader``. A sample is an array, a tuple of arrays or a dictionary of them; an array
            is NumPy's, a tensor of any library that has DLPack, an image, or numbers.
        batch_size: samples per batch; None if the source yields batches, like a ``DataLoader``.
        shuffle: take the samples of a dataset in a new random order each epoch, from the sequence of ``mx.random``.
        data_names, label_names: names of the network's inputs for the parts of a sample, in order. For dictionary
            samples: their keys, or a dictionary from keys to names. A sample that is a single array has no label.
        transform: called with each sample (with each batch if the source yields batches); returns its replacement.
        num_workers: reader processes; 0 reads in this process, on demand.
        ahead: batches that each worker prefetches.
        last_batch_handle: policy for the incomplete last batch: ``pad`` (the batch repeats its samples, and its ``pad``
            counts the repeated rows) or ``discard``.
        on_error: policy for a sample that cannot be read: ``raise`` (DataError when its batch is requested) or ``skip``
            (it is left out and counted, and its batch is padded; a batch without any readable sample is left out).
        dtype: dtype of the batches, or a dictionary by name; default: float32 for float64 and integers, else unchanged.
        ctx: memory of the batches: the host, or ``mx.cpu_pinned()``.
        start_method: how processes start: ``forkserver``, ``spawn`` or ``fork``; default: the first available. With the
            first two, the source and the transform are pickled.
        deadline: seconds that a worker may spend on a batch. After that an error names the worker and shows its stack.

    Each sample is read under its own seed: ``random``, ``numpy.random``, ``torch`` and
    :func:`~weftplan.data.input.seeding.sample_rng` give a sample the same numbers in every process.
    ``mx.random`` is not seeded per sample, so do not use it in a dataset or a transform.

    Workers start with the first batch, stay until :meth:`close`, and use as many threads for BLAS as
    ``WEFTPLAN_BLAS_NTHREADS`` says. Each worker iterates the whole of an iterable and transforms its own batches.

    Raises:
        ParameterError: settings or names that do not fit; the message says which there are.
        DataError: the first sample cannot be read. Later, from ``next()``: a sample cannot be read or has another shape
            than the first; the dataset has changed its length. The next call continues after that batch.
        DataWorkerError: from ``next()``: a worker died, or missed the deadline. The next call starts new workers and
            reads the same batch again.

    >>> import weftplan as mx
    >>> squares = mx.io.DatasetIter([([i], i * i) for i in range(5)], batch_size=2)
    >>> [(batch.data[0].tolist(), batch.label[0].tolist(), batch.pad) for batch in squares]
    [([[0.0], [1.0]], [0.0, 1.0], 0), ([[2.0], [3.0]], [4.0, 9.0], 0), ([[4.0], [4.0]], [16.0, 16.0], 1)]
    """

    def __init__(
        self,
        source: Any,
        batch_size: int | None = 1,
        *,
        shuffle: bool = False,
        data_names: Names = "data",
        label_names: Names = "softmax_label",
        transform: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
        ahead: int = 2,
        last_batch_handle: str = "pad",
        on_error: str = "raise",
        dtype: Any = None,
        ctx: Context | None = None,
        start_method: str | None = None,
        deadline: float = 300.0,
    ) -> None:
        if last_batch_handle not in ("pad", "discard"):
            raise ParameterError(f"last_batch_handle must be 'pad' or 'discard', got {last_batch_handle!r}")
        if on_error not in ("raise", "skip"):
            raise ParameterError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
        if is_torch_loader(source):
            if num_workers:
                raise ParameterError("a DataLoader has workers of its own: use num_workers=0, or give its dataset")
            batch_size = None
        for what, value, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0), ("ahead", ahead, 1)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ParameterError(f"{what} must be a whole number of at least {least}, got {value!r}")
        if not deadline > 0:
            raise ParameterError(f"deadline must be seconds above 0, got {deadline!r}")
        self._original_source = source
        self._source = source_of(source, batches=batch_size is None)
        if shuffle and not isinstance(self._source, Dataset):
            raise ParameterError("shuffle needs a dataset with __len__ and __getitem__; a stream has its own order")
        self._reader = Reader(self._source, transform, on_error == "skip")
        with borrowed_generators():
            self._layout: BatchLayout = layout_of(
                self._reader.first_sample(), data_names, label_names, dtype, batch_size
            )
        self._reader.layout = self._layout
        super().__init__(self._layout.rows)
        self.shuffle, self.last_batch_handle = shuffle, last_batch_handle
        self.num_workers, self._ahead, self._deadline = num_workers, ahead, float(deadline)
        self._start_method = check_start_method(start_method)
        self._context = cpu() if ctx is None else ctx
        if self._context.device_type not in HOST_MEMORY:
            raise ParameterError(
                f"DatasetIter makes batches on the host; let mx.io.PrefetchingIter bring them to {self._context}"
            )
        self._recipe = Recipe(source, transform, on_error == "skip", self._layout)
        self.provide_data = [self._desc(part) for part in self._layout.parts if not part.label]
        self.provide_label = [self._desc(part) for part in self._layout.parts if part.label]
        self._samples = len(self._source) if isinstance(self._source, Dataset) else None
        self._facts = {
            "samples": self._samples,
            "batch_size": self.batch_size,
            "shuffle": bool(shuffle),
            "last_batch_handle": last_batch_handle,
            "on_error": on_error,
            "shapes": {part.name: list(part.shape) for part in self._layout.parts},
        }
        self.skipped = 0
        """Samples skipped so far."""
        self.skipped_samples: deque[tuple[int, str]] = deque(maxlen=1000)
        """(number, reason) of the last 1000 skipped samples."""
        self._pool: WorkerPool | None = None
        self._tickets: deque[tuple[int, int]] = deque()
        """(batch, ticket) of the outstanding requests, in order."""
        self._begin(random.next_key(cpu()), 0)

    def _desc(self, part: SamplePart) -> DataDesc:
        return DataDesc(part.name, (self.batch_size, *part.shape), part.dtype)

    # -- epochs and states ------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Start the next epoch.

        Raises:
            DataError: the dataset has changed its length; the epoch before stays as it was.
        """
        self._check_length()
        self._begin(random.next_key(cpu()), 0)

    def _begin(self, key: Key, batch: int) -> None:
        self._key, self._batch, self._requested = key, batch, batch
        self._ended = False
        self._tickets.clear()
        if self._pool is not None and not self._pool.closed:
            self._pool.forget()

    def _check_length(self) -> None:
        if isinstance(self._source, Dataset) and len(self._source) != self._samples:
            raise DataError(
                f"the dataset had {self._samples} samples when this iterator was made and has {len(self._source)} now; "
                f"make another iterator for it"
            )

    def state(self) -> State:
        self._check_resumable()
        return make_state(self, self._facts, key=list(self._key), batch=self._batch, skipped=self.skipped)

    def set_state(self, state: Mapping[str, object]) -> None:
        self._check_resumable()
        key, batch, skipped = read_state(self, state, self._facts, "key", "batch", "skipped")
        drawn, limit = key_in(self, key), 2**62 if self._count is None else self._count
        checked_integer(self, "batch", batch, limit)
        checked_integer(self, "skipped", skipped, 2**62)
        self._check_length()
        self._begin(drawn, batch)
        self.skipped = skipped

    def _check_resumable(self) -> None:
        if not keeps_its_order(self._original_source):
            raise not_resumable(
                self, "a DataLoader that shuffles does not say its order: give its dataset and shuffle=True instead"
            )

    @property
    def _count(self) -> int | None:
        """Batches of an epoch; None for a stream, whose length is unknown until it ends."""
        if self._samples is None:
            return None
        full_batches, remainder = divmod(self._samples, self.batch_size)
        return full_batches + (remainder > 0 and self.last_batch_handle == "pad")

    # -- batches ----------------------------------------------------------------------------------------------------

    def next(self) -> DataBatch:
        while not self._ended and (self._count is None or self._batch < self._count):
            batch = self._following()
            if batch is not None:
                return batch
        self._ended = True
        raise StopIteration

    def _following(self) -> DataBatch | None:
        """Read the next batch; None if none of its samples is readable or it is discarded."""
        task = ReadTask(self._key, self.shuffle, self._batch)
        arrays = [
            empty((self.batch_size, *part.shape), ctx=self._context, dtype=part.dtype) for part in self._layout.parts
        ]
        hosts = [array.raw() for array in arrays]  # not shared yet: no engine operation uses them
        try:
            filled = self._by_workers(task, hosts) if self.num_workers else self._read_inline(task, hosts)
        except DataError as error:
            self._batch += not isinstance(error, DataWorkerError)
            raise
        has_remainder = filled.rows + len(filled.skipped) < self.batch_size
        count = sum(not part.label for part in self._layout.parts)
        batch = None
        if filled.rows and not (has_remainder and self._samples is None and self.last_batch_handle == "discard"):
            try:
                batch = DataBatch(
                    arrays[:count],
                    arrays[count:],
                    pad=self.batch_size - filled.rows,
                    index=self._index(task, filled),
                    provide_data=self.provide_data,
                    provide_label=self.provide_label,
                )
            except BaseException:
                self._begin(self._key, self._batch)  # the workers read this batch again
                raise
        self._batch += 1
        self._count_skipped(filled)
        if filled.ended is not None:
            self._ended = True
            self._check_end(filled.ended)
        return batch

    def _index(self, task: ReadTask, filled: Filled) -> Host | None:
        if self._layout.batched:
            return None
        numbers = self._reader.numbers(task)
        read = (
            numbers[: filled.rows] if filled.positions is None else [numbers[position] for position in filled.positions]
        )
        return np.resize(np.asarray(read), self.batch_size)

    def _count_skipped(self, filled: Filled) -> None:
        for number, text in filled.skipped:
            self.skipped += 1
            self.skipped_samples.append((number, text))
            if self.skipped <= _MAX_REPORTED:
                suffix = (
                    "; further ones are counted alone (see skipped_samples)" if self.skipped == _MAX_REPORTED else ""
                )
                log.warning("DatasetIter left out what it cannot read: %s%s", text, suffix)

    def _check_end(self, got: int) -> None:
        """Raise DataError if a stream ended after a different number of items than its ``len()``."""
        assert isinstance(self._source, SampleStream)
        says = self._source.length()
        if says is not None and says != got:
            raise DataError(f"the source says that it has {says} items, but it ended after {got}")

    def _read_inline(self, task: ReadTask, hosts: Sequence[Host]) -> Filled:
        with borrowed_generators():
            return self._reader.read(task, hosts)

    def _by_workers(self, task: ReadTask, hosts: Sequence[Host]) -> Filled:
        pool = self._ask()
        number, ticket = self._tickets[0]
        assert number == task.number
        try:
            filled, views = pool.take(ticket)
        except DataError:
            self._tickets.popleft()
            raise
        for host, view in zip(hosts, views, strict=True):
            np.copyto(host, view)
        pool.release(ticket)
        self._tickets.popleft()
        if filled.ended is None:
            self._ask()
        return filled

    def _ask(self) -> WorkerPool:
        """Fill the request queue up to the prefetch limit, starting workers if needed; returns the pool."""
        if self._pool is None or self._pool.closed:
            self._pool = None
            self._tickets.clear()
            self._requested = self._batch
            self._pool = self._started()
        pool = self._pool
        if not self._tickets:
            pool.wait_for_slot()
        while pool.has_free_slot and (self._count is None or self._requested < self._count):
            ticket = pool.submit(ReadTask(self._key, self.shuffle, self._requested))
            self._tickets.append((self._requested, ticket))
            self._requested += 1
        return pool

    def _started(self) -> WorkerPool:
        pool = WorkerPool(
            self._recipe,
            workers=self.num_workers,
            slots=self.num_workers * self._ahead,
            start_method=self._start_method,
            deadline=self._deadline,
        )
        if self._samples is not None and pool.samples != {self._samples}:
            pool.close()
            raise DataError(
                f"the dataset has {self._samples} samples here and {sorted(pool.samples, key=str)} in workers: its "
                f"length must not depend on the process"
            )
        return pool

    # -- workers ----------------------------------------------------------------------------------------------------

    @property
    def worker_pids(self) -> list[int]:
        """Process IDs of the running workers."""
        return [] if self._pool is None or self._pool.closed else self._pool.pids

    def close(self) -> None:
        """Shut the workers down; the next batch starts new workers."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> DatasetIter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
