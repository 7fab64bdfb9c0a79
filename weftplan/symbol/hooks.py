"""Verbs of symbols that modules further up provide, so that imports only go down.

``symbol.bind`` comes from the executor, ``symbol.plan`` from the planner, operators as methods from ``functions.py``,
``split_v2`` from ``creation.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weftplan.errors import MXNetError
from weftplan.support.lazy_import import late_import

_hooks: dict[str, Callable[..., Any]] = {}


def set_binder(bind: Callable[..., Any], simple_bind: Callable[..., Any]) -> None:
    """Called once by :mod:`weftplan.executor`; both take the symbol first."""
    _hooks["bind"] = bind
    _hooks["simple_bind"] = simple_bind


def set_planner(plan: Callable[..., Any]) -> None:
    """Called once by :mod:`weftplan.planner`; ``plan`` takes the symbol first."""
    _hooks["plan"] = plan


def set_functions(function: Callable[..., Any]) -> None:
    """Called once by :mod:`weftplan.symbol.api.functions`; ``function`` takes the name of an operator."""
    _hooks["function"] = function


def set_split(split_v2: Callable[..., Any]) -> None:
    """Called once by :mod:`weftplan.symbol.api.creation`; ``split_v2`` takes the symbol first."""
    _hooks["split_v2"] = split_v2


def hook(name: str, package: str) -> Callable[..., Any]:
    """The function that ``package`` registered as ``name``; the package is imported when that has not happened yet."""
    if name not in _hooks:
        late_import(package)
    if name not in _hooks:
        raise MXNetError(f"symbol.{name} is not available: {package} did not register it")
    return _hooks[name]
