"""What higher layers fill in, so that a plan can draw itself and know optimizers while imports only go down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weftplan.errors import MXNetError
from weftplan.support.lazy_import import late_import

_TRAINING = ("optimizer", "on_several")
"""Hooks that ``weftplan.training.memory`` fills; ``weftplan.report`` fills the others."""
_hooks: dict[str, Callable[..., Any]] = {}


def provide(**hooks: Callable[..., Any]) -> None:
    """Called once by each provider.

    Reports (``html``, ``plot``, ``summary`` and so on) take a plan first; ``optimizer`` makes an optimizer from its
    name; ``on_several`` plans what data-parallel training holds, besides its executors too.
    """
    _hooks.update(hooks)


def hook(name: str) -> Callable[..., Any]:
    """The function called ``name``; its provider is imported when that has not happened yet."""
    provider = "weftplan.training.memory" if name in _TRAINING else "weftplan.report"
    if name not in _hooks:
        late_import(provider)
    if name not in _hooks:
        raise MXNetError(f"plans have no {name!r}: {provider} did not register it")
    return _hooks[name]
