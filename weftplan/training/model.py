"""``mx.model``: checkpoints and :class:`FeedForward` by name.

The functions stand in ``checkpoint.py``, the class in ``feed_forward.py``; this file owns their public names alone.
"""

from __future__ import annotations

from weftplan.training.fit.callbacks import BatchEndParam
from weftplan.training.fit.parameter_files import load_checkpoint, load_params, save_checkpoint
from weftplan.training.module.feed_forward import FeedForward

__all__ = ["BatchEndParam", "FeedForward", "load_checkpoint", "load_params", "save_checkpoint"]
