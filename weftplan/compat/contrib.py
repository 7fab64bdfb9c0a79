"""``mx.contrib``: operators of arrays and symbols that MXNet calls contributed, ONNX files, and words.

It owns names only, and says of MXNet's other parts of that name why they are absent.
"""

from typing import Any

from weftplan.compat import text
from weftplan.ndarray.operators import NAMESPACES
from weftplan.support.lazy_import import late_import
from weftplan.symbol.api.namespaces import contrib

__all__ = ["nd", "ndarray", "sym", "symbol", "text"]

ndarray = nd = NAMESPACES["contrib"]
symbol = sym = contrib

ABSENT = {
    "amp": "optimizers have multi_precision=True, and Module.fit has mixed_precision",
    "autograd": "gradients are those of a symbol: bind it and call backward",
    "io": "it is for data loaders of Gluon; weftplan.io.DatasetIter reads datasets and loaders",
    "quantization": "operators quantize and dequantize, but networks are not calibrated or run in int8",
    "svrg_optimization": "no optimizer here keeps a second copy of the network",
    "tensorboard": "Module.fit(report=FOLDER) writes events and a page",
    "tensorrt": "graphs are not given to other runtimes",
}
"""What MXNet has besides, and what there is in its place."""


def __getattr__(name: str) -> Any:
    if name == "onnx":  # it imports what reads and writes ONNX
        return late_import("weftplan.compat.onnx")
    if name in ABSENT:
        raise AttributeError(f"mx.contrib.{name} is absent on purpose: {ABSENT[name]}")
    raise AttributeError(f"module 'mx.contrib' has no attribute {name!r}")
