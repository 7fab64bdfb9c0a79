"""Sample sources: a map-style dataset, read by index, or a stream, read in its own order.

Sources are recognised by duck typing; no third-party library is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from weftplan.errors import DataError, ParameterError


class Dataset:
    """Map-style dataset: any object with ``__len__`` and ``__getitem__``; uses ``__getitems__`` if available."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.reads_together = callable(getattr(source, "__getitems__", None))
        """Whether the source supports batched reads (``__getitems__``)."""

    def __len__(self) -> int:
        return len(self._source)

    def sample(self, number: int) -> object:
        """Return a sample."""
        return self._source[number]

    def samples(self, numbers: Sequence[int]) -> Sequence[object]:
        """Return several samples in a batched read.

        Raises:
            DataError: the source returns a different number of samples.
        """
        batch: Sequence[Any] = self._source.__getitems__(list(numbers))
        if len(batch) != len(numbers):
            raise DataError(f"__getitems__ gave {len(batch)} samples for {len(numbers)} numbers")
        return batch


class SampleStream:
    """Items in the order of an iterable. With states or workers, every iteration must yield the same items."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._begun: Iterator[Any] | None = None
        """The only possible iteration, if the source itself is an iterator."""

    def length(self) -> int | None:
        """Return the number of items if the source has ``len()``, else None."""
        try:
            return len(self._source)
        except TypeError:
            return None

    def start(self) -> Iterator[object]:
        """Start a new iteration.

        Raises:
            DataError: the source is a single-use iterator and has been consumed.
        """
        if callable(self._source) and not isinstance(self._source, Iterable):
            return iter(self._source())
        iterator: Iterator[Any] = iter(self._source)
        if iterator is self._source:
            if self._begun is not None:
                raise DataError(
                    f"a {type(iterator).__name__} gives its samples once, so there is no second epoch, and no way back "
                    f"in this one: pass an iterable that can be iterated again, or a function that makes a new one"
                )
            self._begun = iterator
        return iterator


def source_of(source: object, *, batches: bool = False) -> Dataset | SampleStream:
    """Wrap ``source`` as a dataset or a stream; a source of ``batches`` is always a stream.

    Raises:
        ParameterError: it is neither a dataset, nor an iterable, nor a function that makes one.
    """
    kinds = {kind.__name__ for kind in type(source).__mro__}
    by_number = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    if by_number and not batches and not isinstance(source, (Mapping, str, bytes)) and "IterableDataset" not in kinds:
        return Dataset(source)
    if isinstance(source, (str, bytes, Mapping)) or not (isinstance(source, Iterable) or callable(source)):
        raise ParameterError(
            f"a source must have __len__ and __getitem__, be an iterable, or a function that returns one; got "
            f"{type(source).__name__}"
        )
    return SampleStream(source)


def is_torch_loader(source: object) -> bool:
    """Return whether this is a ``torch.utils.data.DataLoader``, which yields batches and has its own workers."""
    return any(
        kind.__name__ == "DataLoader" and kind.__module__.startswith("torch.utils.data")
        for kind in type(source).__mro__
    )


def keeps_its_order(source: object) -> bool:
    """Return False for a ``torch.utils.data.DataLoader`` with a random order, which cannot be reproduced."""
    if not is_torch_loader(source):
        return True
    return type(getattr(source, "sampler", None)).__name__ == "SequentialSampler"
