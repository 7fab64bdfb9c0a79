"""``mx.io``: data iterators by name.

The classes stand in ``io.py``, ``file_iterators.py`` and ``prefetching.py``; this file owns their public names alone.
"""

from weftplan.training.file_iterators import CSVIter, MNISTIter, ResizeIter
from weftplan.training.io import DataBatch, DataDesc, DataIter, NDArrayIter
from weftplan.training.prefetching import PrefetchingIter

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
