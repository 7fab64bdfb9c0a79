"""``mx.io``: data iterators by name.

The classes stand in ``io.py`` and ``file_iterators.py``; this file owns their public names alone.
"""

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
