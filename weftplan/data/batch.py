"""A batch of training data (DataBatch) and the description of its arrays (DataDesc)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weftplan.device.context import Context
from weftplan.errors import ParameterError
from weftplan.ndarray import NDArray
from weftplan.support.array_types import DType, DTypeLike
from weftplan.support.keyword_errors import Constructed

Host = np.ndarray[Any, DType]
"""Array in host memory."""


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
    """A NumPy type such as ``np.float32``, or the dtype's name, if the description was made with a name."""
    layout: str

    def __new__(cls, name: str, shape: Sequence[int], dtype: DTypeLike = np.float32, layout: str = "NCHW") -> DataDesc:
        desc = super().__new__(cls, name, tuple(shape))
        desc.dtype, desc.layout = dtype.type if isinstance(dtype, np.dtype) else dtype, layout
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
