"""The package ``onnx``, which only conversion needs: imported at the first use, and an error that says how to get it.

Any thread may call this; Python's import lock does the rest.
"""

from __future__ import annotations

from typing import Any

from weftplan.errors import MXNetError


def onnx_module() -> Any:
    """The package ``onnx``; raises MXNetError that says how to get it."""
    try:
        import onnx
    except ImportError as error:
        raise MXNetError("ONNX files need the package onnx: pip install 'weftplan[convert]'") from error
    return onnx
