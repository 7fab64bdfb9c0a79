"""The recorded table of CuPy's names and signatures (``names.txt``, written by ``record.py``)."""

from __future__ import annotations

import inspect
import pathlib
from dataclasses import dataclass
from typing import Any

import numpy as np

FILE = pathlib.Path(__file__).with_name("names.txt")


@dataclass(frozen=True)
class Name:
    """A line of the table; ``kind`` is ufunc, function or other.

    Loops of bfloat16 (``E``) are omitted, because NumPy has no such dtype.
    """

    path: str
    kind: str
    nin: int = 0
    nout: int = 0
    types: tuple[str, ...] = ()
    signature: inspect.Signature | None = None


def _signature(words: list[str]) -> inspect.Signature | None:
    if words == ["?"]:
        return None
    parameter = inspect.Parameter
    kind = parameter.POSITIONAL_ONLY if "/" in words else parameter.POSITIONAL_OR_KEYWORD
    results = []
    for word in words:
        if word == "/":
            kind = parameter.POSITIONAL_OR_KEYWORD
        elif word == "*":
            kind = parameter.KEYWORD_ONLY
        elif word.startswith("**"):
            results.append(parameter(word[2:], parameter.VAR_KEYWORD))
        elif word.startswith("*"):
            results.append(parameter(word[1:], parameter.VAR_POSITIONAL))
            kind = parameter.KEYWORD_ONLY
        else:
            default = None if word.endswith("?") else parameter.empty
            results.append(parameter(word.rstrip("?"), kind, default=default))
    return inspect.Signature(results)


def _read() -> dict[str, Name]:
    table: dict[str, Name] = {}
    for line in FILE.read_text().splitlines()[1:]:
        path, kind, *remaining = line.split(" ")
        if kind == "ufunc":
            table[path] = Name(
                path,
                kind,
                int(remaining[0]),
                int(remaining[1]),
                tuple(text for text in remaining[2:] if "E" not in text),
            )
        elif kind == "function":
            table[path] = Name(path, kind, signature=_signature([word for word in remaining if word]))
        else:
            table[path] = Name(path, kind)
    return table


TABLE = _read()
VERSION = FILE.read_text().split("\n", 1)[0].split()[-1]
MODULES = ("linalg", "random", "lib", "lib.stride_tricks", "cuda", "cuda.runtime")


def check(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TypeError if CuPy's ``path`` does not accept these arguments."""
    signature = TABLE[path].signature
    if signature is not None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"cupy.{path}: {error}") from None


def loop(path: str, dtypes: tuple[np.dtype[Any], ...]) -> tuple[list[np.dtype[Any]], list[np.dtype[Any]]] | None:
    """Return the input and output dtypes of the loop that CuPy chooses, or None if there is none.

    It is the first loop to which all inputs cast safely.
    """
    for text in TABLE[path].types:
        inputs, outputs = text.split("->")
        if all(np.can_cast(arguments, wanted) for arguments, wanted in zip(dtypes, inputs, strict=True)):
            return [np.dtype(c) for c in inputs], [np.dtype(c) for c in outputs]
    return None
