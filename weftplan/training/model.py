"""``mx.model``: public names of checkpoint functions and :class:`FeedForward`.

This file owns only the names. The functions are in ``parameter_files.py``, the class in ``feed_forward.py``.
"""

from __future__ import annotations

from weftplan.training.fit.callbacks import BatchEndParam
from weftplan.training.fit.parameter_files import load_checkpoint, load_params, save_checkpoint
from weftplan.training.module.feed_forward import FeedForward
from weftplan.training.mxnet_training import (  # noqa: F401 - private names that scripts for MXNet import
    _create_kvstore,
    _initialize_kvstore,
    _update_params,
    _update_params_on_kvstore,
)

__all__ = ["BatchEndParam", "FeedForward", "load_checkpoint", "load_params", "save_checkpoint"]
