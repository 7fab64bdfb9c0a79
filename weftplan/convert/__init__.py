"""Models in the formats of others (ONNX in both directions, parameters as safetensors), and for inference alone.

ONNX needs the package ``onnx`` (the extra ``convert``); safetensors needs nothing.
"""

from weftplan.convert.constants import fold_constants
from weftplan.convert.folding import fold_batch_norm
from weftplan.convert.safetensors import load_safetensors, save_safetensors

__all__ = ["fold_batch_norm", "fold_constants", "load_safetensors", "save_safetensors"]
