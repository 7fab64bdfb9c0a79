"""Models in the formats of others: ONNX in both directions, parameters as safetensors.

ONNX needs the package ``onnx`` (the extra ``convert``); safetensors needs nothing.
"""

from weftplan.convert.safetensors import load_safetensors, save_safetensors

__all__ = ["load_safetensors", "save_safetensors"]
