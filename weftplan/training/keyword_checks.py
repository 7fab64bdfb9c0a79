"""Validation of settings: readable constructor errors and checks of numeric values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from weftplan.errors import KeywordError, ParameterError

T = TypeVar("T")


def construct(klass: type[T], positional: Sequence[object], settings: Mapping[str, object], what: str) -> T:
    """Call ``klass(*positional, **settings)``, with a readable error for settings that do not fit.

    Raises:
        ParameterError: an unknown setting (the message lists the known ones), or a value of a wrong type.
    """
    try:
        return klass(*positional, **settings)
    except KeywordError:
        raise
    except TypeError as error:
        arguments = f"{dict(settings)}" if not positional else f"{list(positional)} and {dict(settings)}"
        raise ParameterError(f"{what} {klass.__name__} cannot be made of {arguments}: {error}") from error


def number(value: object, what: str, *, low: float = -math.inf, below: float = math.inf) -> float:
    """Return ``value`` if it is a finite number with ``low <= value < below``; else raise ParameterError.

    >>> number(0.5, "SGD: momentum", low=0)
    0.5
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ParameterError(f"{what} must be a number, got {type(value).__name__}: {value!r}")
    if not (math.isfinite(value) and low <= value < below):
        limits = f">= {low:g}" if below == math.inf else f"in [{low:g}, {below:g})"
        message = f"{limits if low > -math.inf else 'finite'}, got {value!r}"
        raise ParameterError(f"{what} must be {message}" + ("" if math.isfinite(value) else ", which is not finite"))
    return value if isinstance(value, (int, float)) else value.item()
