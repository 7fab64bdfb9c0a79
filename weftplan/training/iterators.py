"""``mx.io``: data iterators by name."""

from weftplan.training.file_iterators import CSVIter, MNISTIter, PrefetchingIter, ResizeIter
from weftplan.training.io import DataBatch, DataDesc, DataIter, NDArrayIter

__all__ = [
    "CSVIter",
    "DataBatch",
    "DataDesc",
    "DataIter",
    "MNISTIter",
    "NDArrayIter",
    "PrefetchingIter",
    "ResizeIter",
]
