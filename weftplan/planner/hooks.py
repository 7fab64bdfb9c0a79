"""What a higher layer fills in, so that a plan can draw itself while imports only go down."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from weftplan.errors import MXNetError

_hooks: dict[str, Callable[..., Any]] = {}


def set_reports(*, html: Callable[..., str], plot: Callable[..., Any]) -> None:
    """Called once by :mod:`weftplan.report`; both take the plan first."""
    _hooks["html"] = html
    _hooks["plot"] = plot


def report(name: str) -> Callable[..., Any]:
    """The report called ``name``; :mod:`weftplan.report` is imported when that has not happened yet."""
    if name not in _hooks:
        importlib.import_module("weftplan.report")
    if name not in _hooks:
        raise MXNetError(f"plans have no report {name!r}: weftplan.report did not register it")
    return _hooks[name]
