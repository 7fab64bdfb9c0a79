"""Imports and strings in the package's modules; each module is parsed once per process."""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path

Found = ast.Import | ast.ImportFrom | ast.Constant | ast.JoinedStr | ast.BinOp


@functools.cache
def found(path: Path) -> tuple[Found, ...]:
    """Return the imports, string constants and string sums of a module; the rest of its syntax tree is dropped."""
    collecting = gc.isenabled()
    gc.disable()  # collections would scan every new tree repeatedly, half of the time
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        return tuple(node for node in ast.walk(tree) if isinstance(node, Found) and _matters(node))
    finally:
        if collecting:
            gc.enable()


def _matters(node: Found) -> bool:
    return isinstance(node.value, str) if isinstance(node, ast.Constant) else True
