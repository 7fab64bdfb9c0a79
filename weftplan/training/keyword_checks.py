"""Checks of settings that come as keyword arguments: names that exist, values that are numbers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from weftplan.errors import ParameterError, did_you_mean

T = TypeVar("T")


def construct(klass: type[T], positional: Sequence[Any], settings: Mapping[str, Any], what: str) -> T:
    """``klass(*positional, **settings)``, with a readable error for a setting that no class in its ancestry takes.

    Raises:
        ParameterError: an unknown setting (the message lists the known ones), or a value of a wrong type.
    """
    known: list[str] = []
    open_ended = False
    for base in klass.__mro__:
        if base is object or "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        known += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        if not open_ended:
            break
    known = list(dict.fromkeys(known))
    if not open_ended:
        unknown_setting(settings, known, f"{what} {klass.__name__}")
    try:
        return klass(*positional, **settings)
    except TypeError as error:
        given = f"{dict(settings)}" if not positional else f"{list(positional)} and {dict(settings)}"
        raise ParameterError(f"{what} {klass.__name__} cannot be made of {given}: {error}") from error


def unknown_setting(settings: Mapping[str, Any], known: list[str], what: str) -> None:
    """Raise ParameterError for the first setting that is not among ``known``."""
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ParameterError(f"{what} has no setting {name!r}: {hint}known: {', '.join(known)}")


def number(value: Any, what: str, *, low: float = -math.inf, below: float = math.inf) -> float:
    """``value`` if it is a finite number with ``low <= value < below``; raises ParameterError naming ``what``.

    >>> number(0.5, "SGD: momentum", low=0)
    0.5
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ParameterError(f"{what} must be a number, got {type(value).__name__}: {value!r}")
    if not (math.isfinite(value) and low <= value < below):
        limits = f">= {low:g}" if below == math.inf else f"in [{low:g}, {below:g})"
        told = f"{limits if low > -math.inf else 'finite'}, got {value!r}"
        raise ParameterError(f"{what} must be {told}" + ("" if math.isfinite(value) else ", which is not finite"))
    return value if isinstance(value, (int, float)) else value.item()
