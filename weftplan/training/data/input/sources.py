"""Sample sources: a map-style dataset, read by index, or a stream, read in its own order.

Sources are recognised by duck typing; no third-party library is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from weftplan.errors import DataError, ParameterError


class Dataset:
    """Samples by number: anything with ``__len__`` and ``__getitem__``; ``__getitems__`` is used where it is there."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.reads_together = callable(getattr(source, "__getitems__", None))
        """Whether the source reads several samples faster together."""

    def __len__(self) -> int:
        return len(self._source)

    def one(self, number: int) -> Any:
        """A sample."""
        return self._source[number]

    def together(self, numbers: Sequence[int]) -> Sequence[Any]:
        """Several samples.

        Raises:
            DataError: the source gives another number of them.
        """
        found: Sequence[Any] = self._source.__getitems__(list(numbers))
        if len(found) != len(numbers):
            raise DataError(f"__getitems__ gave {len(found)} samples for {len(numbers)} numbers")
        return found


class Stream:
    """Items in the order of an iterable, which must give the same ones each time where states or workers are used."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._begun: Iterator[Any] | None = None
        """Of the only iteration that there is, where the source is an iterator itself."""

    def length(self) -> int | None:
        """How many items there are, if the source says so."""
        try:
            return len(self._source)
        except TypeError:
            return None

    def start(self) -> Iterator[Any]:
        """From the beginning.

        Raises:
            DataError: the source gives its samples once, and has.
        """
        if callable(self._source) and not isinstance(self._source, Iterable):
            return iter(self._source())
        found: Iterator[Any] = iter(self._source)
        if found is self._source:
            if self._begun is not None:
                raise DataError(
                    f"a {type(found).__name__} gives its samples once, so there is no second epoch, and no way back in "
                    f"this one: give what can be iterated again, or a function that makes a new one"
                )
            self._begun = found
        return found


def source_of(source: Any, *, batches: bool = False) -> Dataset | Stream:
    """What to read samples of ``source`` from; one that gives ``batches`` is a stream of them.

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
    return Stream(source)


def is_torch_loader(source: Any) -> bool:
    """Whether this is a ``torch.utils.data.DataLoader``, which gives batches and has workers of its own."""
    return any(
        kind.__name__ == "DataLoader" and kind.__module__.startswith("torch.utils.data")
        for kind in type(source).__mro__
    )


def keeps_its_order(source: Any) -> bool:
    """False for a ``torch.utils.data.DataLoader`` that draws an order which cannot be had again."""
    if not is_torch_loader(source):
        return True
    return type(getattr(source, "sampler", None)).__name__ == "SequentialSampler"
