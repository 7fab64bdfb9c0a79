"""Better errors for misspelt keyword arguments.

Python's own message names neither the nearest argument nor all of them. The check costs one call, so functions that are
called thousands of times a second go without it. Any thread may call this module.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from weftplan.errors import KeywordError, did_you_mean

P = ParamSpec("P")
T = TypeVar("T")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def known_keywords(**elsewhere: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function so that it raises KeywordError for an unknown keyword or too many positional arguments.

    Args:
        elsewhere: advice for arguments that belong to another function, by argument name.

    >>> @known_keywords(momentum="give it to the optimizer")
    ... def fit(train_data, num_epoch=1):
    ...     return num_epoch
    >>> fit([], epochs=2)
    Traceback (most recent call last):
    ...
    weftplan.errors.KeywordError: fit has no argument 'epochs': did you mean 'num_epoch'? known: train_data, num_epoch
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters = list(inspect.signature(function).parameters.values())
        passed_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)  # and checked there
        accepted = frozenset(parameter.name for parameter in parameters if parameter.kind in _NAMED)
        constructs = function.__name__ == "__init__"
        order = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        any_number = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            if len(args) > len(order) and not any_number:
                what = type(args[0]).__name__ if constructs else function.__name__
                bound = order[:1] in (["self"], ["cls"])
                raise KeywordError(
                    f"{what} takes {len(order) - bound} arguments by position, got {len(args) - bound}: "
                    f"{', '.join(order[bound:]) or 'all are given by name'}"
                )
            if kwargs and not passed_on and not accepted.issuperset(kwargs):
                unknown = next(name for name in kwargs if name not in accepted)
                if constructs:
                    kind = type(args[0])
                    raise _error(f"{kind.__name__} has no setting", unknown, settings_of(kind), elsewhere)
                names = [
                    parameter.name
                    for parameter in parameters
                    if parameter.kind in _NAMED and parameter.name not in ("self", "cls")
                ]
                raise _error(f"{function.__name__} has no argument", unknown, names, elsewhere)
            try:
                return function(*args, **kwargs)
            finally:
                del args, kwargs  # the traceback of an error must not keep them alive

        return checked

    return decorate


class Constructed:
    """A base class whose subclasses have constructors that refuse unknown settings and name the known settings."""

    __slots__ = ()

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        constructor = vars(cls).get("__init__")
        if inspect.isfunction(constructor):
            cls.__init__ = known_keywords()(constructor)  # type: ignore[method-assign]


def settings_of(kind: type) -> list[str]:
    """Return the settings that a class's constructor takes, including those that it passes on to its bases."""
    settings: list[str] = []
    for base in kind.__mro__:
        if base is object or "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        settings += [parameter.name for parameter in parameters if parameter.kind in _NAMED]
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return list(dict.fromkeys(settings))


def changed_settings(instance: object) -> dict[str, object]:
    """Return the settings of an object that differ from its constructor's defaults, as its attributes hold them now.

    A setting without an attribute of its name is left out.
    """
    changed: dict[str, Any] = {}
    for base in type(instance).__mro__:
        constructor = vars(base).get("__init__")
        for name, parameter in (
            inspect.signature(constructor).parameters.items() if inspect.isfunction(constructor) else ()
        ):
            if parameter.kind in _NAMED and name in vars(instance) and name not in changed:
                changed[name] = vars(instance)[name], parameter.default
    return {name: value for name, (value, default) in changed.items() if not _same(value, default)}


def shown(settings: Mapping[str, object]) -> str:
    """Return settings as Python's call syntax has them.

    >>> shown({"step": 3, "mode": "linear"})
    "step=3, mode='linear'"
    """
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def _same(value: object, default: object) -> bool:
    if default is None and value == {}:
        return True
    return value is default or (isinstance(default, (str, int, float, tuple)) and bool(value == default))


def _error(what: str, name: str, names: Iterable[str], elsewhere: dict[str, str]) -> KeywordError:
    if name in elsewhere:
        return KeywordError(f"{what} {name!r}: {elsewhere[name]}")
    names = list(names)
    return KeywordError(f"{what} {name!r}: {did_you_mean(name, names)}known: {', '.join(names)}")
