"""``mx.gluon``: ``gluon.utils``; any other name raises AttributeError, which names the replacement."""

from typing import NoReturn

from weftplan.compat import gluon_utils as utils

__all__ = ["utils"]

REASON = (
    "write the network with mx.sym and train it with mx.mod.Module; one that Gluon exported is loaded by "
    "mx.mod.Module.load(prefix, 0, label_names=None)"
)
"""The replacement of Gluon."""


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(f"weftplan has no gluon.{name} on purpose: {REASON}")
