"""Write ``names.txt``, the names and signatures of the installed CuPy: ``python -m tests.standin_cupy.record``.

Importing CuPy needs no driver. Each line describes one name:

    add ufunc 2 1 ??->? bb->b …            a ufunc: number of inputs and outputs, its loops
    sum function a axis? dtype? …          parameters in order; ``?`` has a default; ``/`` and ``*`` as in Python
    sum function ?                         a function without a readable signature
    float32 other                          any other object: types, constants, modules
"""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Iterator
from typing import Any

FILE = pathlib.Path(__file__).with_name("names.txt")
MODULES = ["", "linalg", "random", "random.Generator", "lib.stride_tricks", "cuda", "cuda.runtime", "ndarray"]
"""Modules and classes whose names are recorded; for a class, its methods."""


def parameters(function: Any) -> str:
    """Return the parameters of a function on one line, or ``?`` if the signature cannot be read."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "?"
    words: list[str] = []
    before: Any = None
    for parameter in signature.parameters.values():
        kind = parameter.kind
        if before == parameter.POSITIONAL_ONLY and kind != before:
            words.append("/")
        if kind == parameter.KEYWORD_ONLY and before not in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL):
            words.append("*")
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(kind, "")
        words.append(star + parameter.name + ("" if parameter.default is parameter.empty else "?"))
        before = kind
    if before == inspect.Parameter.POSITIONAL_ONLY:
        words.append("/")
    return " ".join(words)


def lines(cupy: Any) -> Iterator[str]:
    """Yield the lines of the table for a CuPy module."""
    yield f"# CuPy {cupy.__version__}"
    for module in MODULES:
        place = cupy
        for part in module.split(".") if module else ():
            place = getattr(place, part)
        for name in sorted(dir(place)):
            if name.startswith("_"):
                continue
            actual = getattr(place, name)
            path = f"{module}.{name}" if module else name
            if isinstance(actual, cupy.ufunc):
                yield f"{path} ufunc {actual.nin} {actual.nout} {' '.join(actual.types)}"
            elif callable(actual) and not inspect.isclass(actual):
                yield f"{path} function {parameters(actual)}"
            else:
                yield f"{path} other"


def main() -> None:
    """Write the table of the installed CuPy."""
    import cupy

    FILE.write_text("\n".join(lines(cupy)) + "\n")


if __name__ == "__main__":
    main()
