"""Model conversion: ONNX in both directions, safetensors parameters, and inference rewrites.

ONNX needs the package ``onnx`` (the extra ``convert``); safetensors needs nothing.
"""

from weftplan.convert.constants import fold_constants
from weftplan.convert.folding import fold_batch_norm
from weftplan.convert.heads import classes_of, with_classes, without_computed_labels
from weftplan.convert.safetensors import load_safetensors, save_safetensors

__all__ = [
    "classes_of",
    "fold_batch_norm",
    "fold_constants",
    "load_safetensors",
    "save_safetensors",
    "with_classes",
    "without_computed_labels",
]
