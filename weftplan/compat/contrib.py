"""``mx.contrib``: contributed operators of arrays and symbols, ONNX files, text, and SVRG.

The module holds names only, and explains the absence of MXNet's other contributed parts.
"""

from weftplan.compat import text
from weftplan.ndarray.operators import NAMESPACES
from weftplan.support.lazy_import import late_import
from weftplan.symbol.api.functions import contrib

__all__ = ["nd", "ndarray", "sym", "symbol", "text"]

ndarray = nd = NAMESPACES["contrib"]
symbol = sym = contrib

ABSENT = {
    "amp": "optimizers have multi_precision=True, and Module.fit has mixed_precision",
    "autograd": "gradients are those of a symbol: bind it and call backward",
    "io": "it is for data loaders of Gluon; weftplan.io.DatasetIter reads datasets and loaders",
    "tensorboard": "Module.fit(report=FOLDER) writes events and a page",
    "tensorrt": "graphs are not given to other runtimes",
}
"""Absent parts of ``mx.contrib`` and their replacements."""


def __getattr__(name: str) -> object:
    if name in ("onnx", "quantization", "svrg_optimization"):  # imports what they need on first use
        return late_import(f"weftplan.compat.{name}")
    if name in ABSENT:
        raise AttributeError(f"mx.contrib.{name} is absent on purpose: {ABSENT[name]}")
    raise AttributeError(f"module 'mx.contrib' has no attribute {name!r}")
