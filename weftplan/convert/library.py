"""Lazy import of the package ``onnx``, with an error that says how to install it.

Any thread may call this; Python's import lock serializes the import.
"""

from __future__ import annotations

from types import ModuleType

from weftplan.errors import MXNetError


def onnx_module() -> ModuleType:
    """Return the package ``onnx``; raise MXNetError with installation advice if it is missing."""
    try:
        import onnx
    except ImportError as error:
        raise MXNetError("ONNX files need the package onnx: pip install 'weftplan[convert]'") from error
    return onnx
