"""``PrefetchingIter``: threads that read the next batches ahead of the consumer.

Each wrapped iterator has one thread, which owns it between two calls of ``reset`` or ``set_state``. One thread uses the
``PrefetchingIter`` itself. Reads are delivered in request order, so batches do not depend on the depth. Errors keep
their order, too: they are raised in place of the batch that failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import NamedTuple

from weftplan.data.batch import DataBatch, DataDesc
from weftplan.data.data_iter import DataIter, HoldingIter
from weftplan.data.device_placement import check_contexts, placed
from weftplan.data.resumable_position import State, make_state, read_state, state_or_none
from weftplan.device.context import Context, cpu_pinned
from weftplan.errors import NotResumableError, ParameterError, ShapeError
from weftplan.ndarray.randomness.seeds import Draws, next_key


class _Read(NamedTuple):
    """Result of a read; without a batch and an error, the epoch has ended."""

    batch: DataBatch | None
    position_before: State | NotResumableError
    """State of the iterator before the read."""
    error: Exception | None = None
    """Exception that the read raised."""


class PrefetchingIter(HoldingIter):
    """Prefetch the next batches of one or several iterators on threads.

    During ``next()``, an iterator's draws from ``mx.random`` use a separate sequence, keyed at each ``reset()``. The
    threads and the consumer therefore do not affect each other's random numbers.

    Args:
        iters: iterators whose data and labels are concatenated in a batch. The caller must not use them directly.
        rename_data, rename_label: for each iterator a dictionary from old to new names.
        depth: number of batches to prefetch; each takes memory.
        ctx: context, or contexts, of the training module. Batches go into page-locked memory, and each device's samples
            are copied to the device on its copy queue while the previous step computes. Samples lie along the first
            axis. CPU contexts get no copy.

    Raises:
        ParameterError: no iterator, a depth below 1, or a context that is none.
        ShapeError: while reading, the iterators have different numbers of batches.

    >>> import weftplan as mx
    >>> source = mx.io.NDArrayIter(mx.nd.array([1, 2, 3, 4, 5]), batch_size=2)
    >>> with mx.io.PrefetchingIter(source, depth=3) as batches:
    ...     [batch.data[0].tolist() for batch in batches]
    [[1.0, 2.0], [3.0, 4.0], [5.0, 1.0]]
    """

    def __init__(
        self,
        iters: DataIter | Sequence[DataIter],
        rename_data: Sequence[Mapping[str, str]] | None = None,
        rename_label: Sequence[Mapping[str, str]] | None = None,
        *,
        depth: int = 1,
        ctx: Context | Sequence[Context] | None = None,
    ) -> None:
        contexts = check_contexts(ctx)
        self.iters = [iters] if isinstance(iters, DataIter) else list(iters)
        if not self.iters:
            raise ParameterError("PrefetchingIter needs at least one iterator")
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ParameterError(f"PrefetchingIter: depth must be a whole number of at least 1, got {depth!r}")
        super().__init__(self.iters[0].batch_size)
        self.depth = depth
        self.provide_data = self._descs(lambda it: it.provide_data, rename_data)
        self.provide_label = self._descs(lambda it: it.provide_label, rename_label)
        if hasattr(self.iters[0], "default_bucket_key"):
            self.default_bucket_key = self.iters[0].default_bucket_key
        self._readers = [_Reader(it, depth, contexts) for it in self.iters]
        self._begin()

    def _descs(
        self,
        of: Callable[[DataIter], Sequence[DataDesc | tuple[str, Sequence[int]]]],
        names: Sequence[Mapping[str, str]] | None,
    ) -> list[DataDesc]:
        renamed = names or [{}] * len(self.iters)
        return [
            DataDesc(
                new.get(desc[0], desc[0]), desc[1], *((desc.dtype, desc.layout) if isinstance(desc, DataDesc) else ())
            )
            for it, new in zip(self.iters, renamed, strict=True)
            for desc in of(it)
        ]

    def _begin(self) -> None:
        for reader in self._readers:
            # No network computes on this context, so prefetching does not change any network's draws.
            reader.begin(Draws(*next_key(cpu_pinned())))

    def reset(self) -> None:
        with self._keep_position():
            for reader in self._readers:
                reader.halt()
            for it in self.iters:
                it.reset()
            self._begin()

    @contextmanager
    def _keep_position(self) -> Iterator[None]:
        """Go on from the current position if the body raises; without states, from where the iterators are."""
        positions = [state_or_none(reader) for reader in self._readers]
        try:
            yield
        except BaseException:
            for reader, position in zip(self._readers, positions, strict=True):
                reader.resume(position)
            raise

    def state(self) -> State:
        return make_state(self, {}, of_iters=[reader.state() for reader in self._readers])

    def set_state(self, state: Mapping[str, object]) -> None:
        (inner,) = read_state(self, state, {}, "of_iters")
        if not isinstance(inner, list) or len(inner) != len(self._readers):
            raise ParameterError(f"PrefetchingIter.set_state: the state is not of {len(self._readers)} iterators")
        with self._keep_position():
            for reader, reader_state in zip(self._readers, inner, strict=True):
                reader.set_state(reader_state)
        self.current_batch = None

    def iter_next(self) -> bool:
        reads = [reader.first_read() for reader in self._readers]
        batches = [read.batch for read in reads if read.batch is not None]
        error = next((read.error for read in reads if read.error is not None), None)
        if error is None and 0 < len(batches) < len(reads):
            error = ShapeError("PrefetchingIter: the iterators have different numbers of batches")
        batch = None if error is not None or not batches else self._concatenated(batches)
        for reader in self._readers:
            reader.advance()  # after the batch is made, so that a batch that cannot be made is not lost
        if error is not None:
            raise error
        if batch is not None:
            self.current_batch = batch
        return batch is not None

    def _concatenated(self, batches: Sequence[DataBatch]) -> DataBatch:
        """Return one batch with the arrays of all iterators' batches."""
        joined = DataBatch(
            [a for batch in batches for a in batch.data],
            [a for batch in batches for a in batch.label],
            batches[0].pad,
            batches[0].index,
            getattr(batches[0], "bucket_key", None),
            self._shapes(batches, "provide_data", self.provide_data),
            self._shapes(batches, "provide_label", self.provide_label),
        )
        if all(batch.placed is not None for batch in batches):
            # The data of all iterators come before the labels, as in the batch itself.
            placements = [(batch.placed or [], len(batch.data)) for batch in batches]
            joined.placed = [
                *(copies for placed, count in placements for copies in placed[:count]),
                *(copies for placed, count in placements for copies in placed[count:]),
            ]
        return joined

    @staticmethod
    def _shapes(batches: Sequence[DataBatch], which: str, joined: list[DataDesc]) -> list[DataDesc]:
        """Return the batch's own shapes under our names: with buckets, shapes differ between batches."""
        descriptions = [getattr(batch, which, None) for batch in batches]
        if any(descs is None for descs in descriptions):
            return joined
        shapes = [desc[1] for descs in descriptions for desc in descs or ()]
        if len(shapes) != len(joined):
            return joined
        return [DataDesc(desc.name, shape, desc.dtype, desc.layout) for desc, shape in zip(joined, shapes, strict=True)]

    def close(self) -> None:
        """Stop the threads after their current reads, and close the iterators that have ``close``."""
        for reader in self._readers:
            reader.close()

    def __enter__(self) -> PrefetchingIter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        for reader in getattr(self, "_readers", ()):
            reader.abandon()


class _Reader:
    """An iterator with the thread that prefetches from it."""

    def __init__(self, source: DataIter, depth: int, contexts: list[Context]) -> None:
        self._source = source
        self._contexts = contexts
        self._depth = depth
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weftplan-prefetch")
        self._coming: deque[Future[_Read]] = deque()
        self._draws = Draws(0, 0)
        self._ended = False
        # Invariant: while reads are pending, only the thread accesses the iterator, its draws and this flag.

    def begin(self, draws: Draws, *, ended: bool = False) -> None:
        """Start prefetching from the iterator's current position."""
        self._draws, self._ended = draws, ended
        while len(self._coming) < self._depth:
            self._ask()

    def first_read(self) -> _Read:
        """Wait for the first pending read and return it."""
        return self._coming[0].result()

    def advance(self) -> None:
        """Drop the first pending read, and request another to keep the depth."""
        self._ask()
        self._coming.popleft()

    def resume(self, position: State | None) -> None:
        """Prefetch from a state of :meth:`state`, or, if it is None, from where the iterator is."""
        if position is not None:
            self.set_state(position)
        else:
            self.halt()
            self.begin(self._draws, ended=self._ended)

    def _ask(self) -> None:
        self._coming.append(self._thread.submit(self._read))

    def _read(self) -> _Read:
        position = self._position()
        if self._ended:
            return _Read(None, position)
        try:
            with self._draws:
                batch = self._source.next()
            return _Read(placed(batch, self._contexts) if self._contexts else batch, position)
        except StopIteration:
            self._ended = True
            return _Read(None, position)
        except Exception as error:
            return _Read(None, position, error)

    def _position(self) -> State | NotResumableError:
        try:
            return {"source": self._source.state(), "draws": self._draws.state(), "ended": self._ended}
        except NotResumableError as error:
            return error

    def halt(self) -> None:
        """Discard pending reads, errors included, and wait until the thread has released the iterator."""
        for future in self._coming:
            future.cancel()
        wait(self._coming)
        self._coming.clear()

    def state(self) -> State:
        """Return the consumer's position: the iterator's state before the next batch to deliver."""
        position = self._coming[0].result().position_before
        if isinstance(position, NotResumableError):
            raise position
        return position

    def set_state(self, state: object) -> None:
        """Restore a state and prefetch from it."""
        if not isinstance(state, Mapping) or {*state} != {"source", "draws", "ended"}:
            raise ParameterError(f"PrefetchingIter.set_state: this is no state of its iterator: {state!r:.80}")
        draws, ended = Draws.of(state["draws"]), bool(state["ended"])
        self.halt()
        self._source.set_state(state["source"])
        self.begin(draws, ended=ended)

    def close(self) -> None:
        """Stop the thread, and close the iterator if it has ``close``."""
        self.halt()
        self._thread.shutdown(wait=True)
        close = getattr(self._source, "close", None)
        if callable(close):
            close()

    def abandon(self) -> None:
        """Let the thread exit by itself, without waiting."""
        self._thread.shutdown(wait=False, cancel_futures=True)
