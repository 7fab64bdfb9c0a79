"""Objects of Python programs by name: ``FILE.py:NAME`` and ``package.module:NAME``.

Reading such a name runs the program's file, or imports the module.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import click

from weftplan.errors import did_you_mean
from weftplan.symbol import Symbol

_PACKAGE = str(Path(__file__).parents[2]) + os.sep


def is_python_name(text: str) -> bool:
    """Return whether a text has the form of such a name.

    >>> [is_python_name(text) for text in ("net.py:net", "nets.small:make", "resnet18", "C:/net.json")]
    [True, True, False, False]
    """
    module, _, name = text.rpartition(":")
    return name.isidentifier() and (module.endswith(".py") or all(part.isidentifier() for part in module.split(".")))


def load_object(text: str) -> Any:
    """Return the object of a name.

    Raises:
        click.BadParameter: no such file, module or name.
        click.ClickException: the program fails; the message has its error and line.
    """
    module_name, _, name = text.rpartition(":")
    module = _run(Path(module_name)) if module_name.endswith(".py") else _import(module_name)
    try:
        return getattr(module, name)
    except AttributeError:
        names = [key for key in vars(module) if not key.startswith("_")]
        hint = did_you_mean(name, names) or f"it has {', '.join(_symbols(module)) or 'no symbol'}"
        raise click.BadParameter(f"{module_name} has no {name!r}; {hint.rstrip()}", param_hint="MODEL") from None


T = TypeVar("T")


def call(function: Callable[[], T], text: str) -> T:
    """Return the result of a function of a program, called without arguments.

    Raises:
        click.ClickException: the function fails; the message has its error and line.
    """
    with _reported(text):
        return function()


def load_symbol(text: str) -> Symbol:
    """Return the symbol of a name: a symbol, a module, or a function without arguments that returns one.

    A function may return a tuple that begins with the symbol, as the functions for BucketingModule do.

    Raises:
        click.BadParameter: the object is nothing of this; otherwise as :func:`load_object`.
    """
    value = load_object(text)
    if callable(value) and not isinstance(value, Symbol):
        value = call(value, text)
    result = value
    if isinstance(value, tuple) and value:
        value = value[0]
    symbol = value if isinstance(value, Symbol) else getattr(value, "symbol", None)
    if not isinstance(symbol, Symbol):
        hint = f"; add --torch if {text} makes a step of PyTorch" if result is not value and callable(value) else ""
        kind = type(result).__name__
        raise click.BadParameter(
            f"{text} must be a symbol or a function without arguments that returns one, got {kind}{hint}",
            param_hint="MODEL",
        )
    return symbol


def _run(path: Path) -> ModuleType:
    """Run a file as a module; the modules next to it can be imported, as when Python runs it."""
    if not path.is_file():
        raise click.BadParameter(f"there is no file {str(path)!r}", param_hint="MODEL")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module  # as an import does: dataclasses and pickle look modules up there
    try:
        with _reported(str(path)):
            spec.loader.exec_module(module)
    except click.ClickException:
        del sys.modules[path.stem]
        raise
    return module


def _import(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with _reported(name):
            return importlib.import_module(name)
    except click.ClickException as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}."):
            raise click.BadParameter(f"there is no module {cause.name!r}", param_hint="MODEL") from None
        raise


@contextmanager
def _reported(text: str) -> Iterator[None]:
    """Turn an error of the user's program into a message with its line."""
    try:
        yield
    except click.ClickException:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        frames_outside = [frame for frame in frames if not frame.filename.startswith((_PACKAGE, "<frozen"))]
        line = f", {frames_outside[-1].filename}:{frames_outside[-1].lineno}" if frames_outside else ""
        reason = f"the program ends with status {error.code}" if isinstance(error, SystemExit) else f"{error}"
        hint = "; install it: pip install 'weftplan[torch]'" if _misses_torch(error) else ""
        raise click.ClickException(f"{text}: {type(error).__name__}: {reason}{line}{hint}") from error


def _misses_torch(error: BaseException) -> bool:
    return isinstance(error, ModuleNotFoundError) and error.name == "torch"


def _symbols(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, Symbol)]
