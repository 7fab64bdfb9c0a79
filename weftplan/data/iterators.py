"""``mx.io``: public names of the data iterators.

This file owns only the names. The classes are in ``batch.py``, ``data_iter.py``, ``ndarray_iter.py``,
``file_iterators.py``, ``libsvm.py``, ``prefetching.py``, ``images/`` and ``input/``.
"""

from weftplan.data.batch import DataBatch, DataDesc
from weftplan.data.data_iter import DataIter
from weftplan.data.file_iterators import CSVIter, MNISTIter, ResizeIter
from weftplan.data.images.detection_records import ImageDetRecordIter
from weftplan.data.images.folder import ImageFolder
from weftplan.data.images.records import ImageRecordInt8Iter, ImageRecordIter, ImageRecordUInt8Iter
from weftplan.data.input.dataset_iter import DatasetIter
from weftplan.data.input.seeding import sample_rng
from weftplan.data.libsvm import LibSVMIter
from weftplan.data.ndarray_iter import NDArrayIter
from weftplan.data.prefetching import PrefetchingIter

__all__ = [
    "CSVIter",
    "DataBatch",
    "DataDesc",
    "DataIter",
    "DatasetIter",
    "ImageDetRecordIter",
    "ImageFolder",
    "ImageRecordInt8Iter",
    "ImageRecordIter",
    "ImageRecordIter_v1",
    "ImageRecordUInt8Iter",
    "ImageRecordUInt8Iter_v1",
    "LibSVMIter",
    "MNISTIter",
    "NDArrayIter",
    "PrefetchingIter",
    "ResizeIter",
    "sample_rng",
]

ImageRecordIter_v1, ImageRecordUInt8Iter_v1 = ImageRecordIter, ImageRecordUInt8Iter
"""Aliases for scripts that use MXNet's older image iterators."""
