"""MXNet's execution core for today's Python: dependency engine, static memory planner and kvstore on NumPy and CuPy.

``import weftplan as mx`` provides MXNet's names. Each layer is imported on first use of its name. A script that only
plans memory thus starts no thread, and a missing optional package breaks only its users.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import weftplan.support.command_start  # before the imports that take time

# isort: split
from weftplan import config
from weftplan.device.context import Context, cpu, cpu_pinned, current_context, gpu, sim
from weftplan.errors import MXNetError, did_you_mean
from weftplan.support.lazy_import import Aliases, late_import

if TYPE_CHECKING:
    from weftplan import device as context
    from weftplan import engine, executor, kvstore, models, ndarray, planner, profiler, rnn, storage, symbol
    from weftplan import kvstore as kv
    from weftplan import ndarray as nd
    from weftplan import symbol as sym
    from weftplan.compat import base, contrib, log, operator, runtime, test_utils, util
    from weftplan.compat.util import is_np_array, is_np_shape, np_shape, set_np_shape, use_np_shape
    from weftplan.data import images as image
    from weftplan.data import images as img
    from weftplan.data import iterators as io
    from weftplan.data import recordio
    from weftplan.device import num_gpus
    from weftplan.ndarray import random
    from weftplan.ndarray import random as rnd
    from weftplan.report import viz
    from weftplan.report import viz as visualization
    from weftplan.symbol import attribute, name
    from weftplan.symbol.attribute import AttrScope
    from weftplan.training import mod, model
    from weftplan.training import mod as module
    from weftplan.training.fit import callbacks as callback
    from weftplan.training.fit import monitor
    from weftplan.training.fit import monitor as mon
    from weftplan.training.initializers import initializer
    from weftplan.training.initializers import initializer as init
    from weftplan.training.metrics import metric
    from weftplan.training.optimizers import lr_scheduler
    from weftplan.training.optimizers import sgd_adam as optimizer

__version__ = "0.3.0"
__all__ = [
    "AttrScope", "Context", "MXNetError", "__version__", "callback", "config", "context", "cpu",
    "cpu_pinned", "current_context", "engine", "executor", "gpu", "init", "initializer", "io", "kv", "kvstore",
    "lr_scheduler", "metric", "mod", "models", "module", "name", "nd", "ndarray", "optimizer", "planner", "profiler",
    "random", "sim", "storage", "sym", "symbol",
]  # fmt: skip
_LAZY = {
    "AttrScope": "symbol.attribute:AttrScope",
    "attribute": "symbol.attribute",
    "base": "compat.base",
    "callback": "training.fit.callbacks",
    "context": "device",
    "contrib": "compat.contrib",
    "executor_manager": "compat.executor_manager",
    "gluon": "compat.gluon",
    "image": "data.images",
    "img": "data.images",
    "init": "training.initializers.initializer",
    "initializer": "training.initializers.initializer",
    "io": "data.iterators",
    "kv": "kvstore",
    "log": "compat.log",
    "lr_scheduler": "training.optimizers.lr_scheduler",
    "metric": "training.metrics.metric",
    "mod": "training.mod",
    "model": "training.model",
    "mon": "training.fit.monitor",
    "monitor": "training.fit.monitor",
    "module": "training.mod",
    "name": "symbol.name",
    "nd": "ndarray",
    "onnx": "compat.onnx",
    "operator": "compat.operator",
    "optimizer": "training.optimizers.sgd_adam",
    "notebook": "compat.notebook_names",
    "num_gpus": "device:num_gpus",
    "random": "ndarray.random",
    "recordio": "data.recordio",
    "rnd": "ndarray.random",
    "rnn": "rnn",
    "runtime": "compat.runtime",
    "sym": "symbol",
    "test_utils": "compat.test_utils",
    "util": "compat.util",
    "visualization": "report.viz",
    "viz": "report.viz",
    **{name: f"compat.util:{name}" for name in "is_np_array is_np_shape np_shape set_np_shape use_np_shape".split()},  # noqa: SIM905
    **{name: name for name in "engine executor kvstore models ndarray planner profiler storage symbol".split()},  # noqa: SIM905
}
"""Public names with their location below ``weftplan``: ``module`` or ``module:attribute``."""
_ABSENT = {
    "autograd": "bind a symbol and call executor.backward()",
    "error": "every exception class is in weftplan.errors",
    "libinfo": "nothing here is a C library; mx.runtime says what there is",
    "library": "operators are written in Python: mx.operator.CustomOp",
    "np": "use NumPy itself, or mx.nd for arrays whose operations run on the engine",
    "npx": "use the operators of mx.nd and mx.sym",
    "numpy": "use NumPy itself, or mx.nd for arrays whose operations run on the engine",
    "numpy_extension": "use the operators of mx.nd and mx.sym",
    "registry": "the classes have register and create themselves, such as mx.optimizer.register",
    "rtc": "kernels in CUDA C are compiled with CuPy: cupy.RawKernel, in an operator of mx.operator",
    "symbol_doc": "help(mx.sym.Convolution) shows an operator's documentation; SymbolDoc.get_output_shape is "
    "symbol.infer_shape(...)[1]",
    "ndarray_doc": "help(mx.nd.Convolution) shows an operator's documentation",
    "kvstore.kvstore_server": "weftplan launch starts what a dist store needs, servers too",
    "api": "the functions of mx.nd and mx.sym are plain Python",
    "libmxnet": "nothing here is a C library",
    "space": "nothing here is tuned by TVM",
    **{
        f"{array}.{part}": "write mx.nd or mx.sym, or NumPy itself"
        for array in ("ndarray", "symbol")
        for part in (
            "numpy",
            "numpy_extension",
            "register",
            *(f"gen_{kind}" for kind in ("_internal", "contrib", "image", "linalg", "op", "random", "sparse")),
        )
    },
    "th": "functions of PyTorch are called in an operator of mx.operator",
}
"""Modules of MXNet 1.9.1 that are absent on purpose, with their replacement."""


_DEEPER = {
    **{f"module.{name}": f"training.module.{name}" for name in
       "module base_module bucketing_module sequential_module python_module".split()},  # noqa: SIM905
    "gluon.utils": "compat.gluon_utils",
    "image.detection": "data.images.detection",
    "image.image": "data.images",
    "io.io": "data.iterators",
    "kvstore.kvstore": "kvstore",
    "misc": "training.optimizers.lr_scheduler",
    "module.executor_group": "training.mxnet_training",
    "ndarray.utils": "ndarray",
    "contrib.ndarray": "ndarray.contrib",
    "contrib.symbol": "symbol.contrib",
    "ndarray.ndarray": "ndarray",
    "notebook.callback": "compat.notebook",
    "optimizer.optimizer": "training.optimizers.sgd_adam",
    "rnn.io": "rnn.sentences",
    "rnn.rnn": "rnn.checkpoints",
    "rnn.rnn_cell": "rnn",
}  # fmt: skip
"""Further modules of MXNet 1.9.1, with the location of their classes, both below ``weftplan``."""


def _attribute(name: str) -> Any:
    if name not in _LAZY:
        if name in _ABSENT:
            raise AttributeError(f"weftplan has no {name} on purpose: {_ABSENT[name]}")
        near = "" if name.startswith("_") else did_you_mean(name, (*__all__, *_LAZY))
        raise AttributeError(f"module 'weftplan' has no attribute {name!r}" + (near and f"; {near.rstrip()}"))
    module_name, _, attribute = f"weftplan.{_LAZY[name]}".partition(":")
    value: Any = late_import(module_name)
    globals()[name] = value = getattr(value, attribute) if attribute else _listing(value)
    return value


if not TYPE_CHECKING:  # a type checker must report an unknown name as an error
    __getattr__ = _attribute


def __dir__() -> list[str]:
    return sorted({*__all__, *_LAZY})


def _listing(module: Any) -> Any:
    """Return the module, with a ``dir()`` of public names only: no imports, nothing private."""
    if "__dir__" not in vars(module):
        names = getattr(module, "__all__", None)
        module.__dir__ = lambda: sorted(filter(partial(_own, module), vars(module)) if names is None else names)
    return module


def _own(module: Any, name: str) -> bool:
    """Return whether a public name is defined in the module rather than imported."""
    return not name.startswith("_") and getattr(vars(module)[name], "__module__", "") == module.__name__


# For `from weftplan.io import DataBatch`. Names that are files of their own need no alias.
_ALIASES = {name for name, place in _LAZY.items() if ":" not in place and place != name}
Aliases(__name__, _ALIASES, _DEEPER, _ABSENT).install()
config.check_environment()
if config.process("MXNET_PROFILER_AUTOSTART"):
    late_import("weftplan.profiler").start_at_import()
