"""Typed access to every environment variable, through one table (:mod:`weftplan.default_settings`).

Settings of process-wide objects (engine, pools, thread counts) are read with :func:`process`: once, when the object is
created. Settings of a plan or an executor are read with :func:`get` at every bind. An unset or empty variable has its
default. Any thread may call these functions; the caller guards the environment itself.

>>> import os
>>> os.environ["MXNET_EXEC_MATCH_RANGE"] = "16"
>>> get("MXNET_EXEC_MATCH_RANGE"), lookup("NNVM_EXEC_MATCH_RANGE").origin
(16, 'environment')
>>> del os.environ["MXNET_EXEC_MATCH_RANGE"]
>>> get("MXNET_EXEC_MATCH_RANGE"), lookup("NNVM_EXEC_MATCH_RANGE").origin
(10, 'default')
"""

from __future__ import annotations

import difflib
import math
import os
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from weftplan.default_settings import TABLE, UNUSED_HERE, Variable, When
from weftplan.errors import ConfigError, ConfigWarning
from weftplan.locks import Lock, consistent_in_children

__all__ = [
    "Setting",
    "Variable",
    "When",
    "check_environment",
    "get",
    "lookup",
    "nearest",
    "process",
    "strangers",
    "table",
    "warn_of_late_changes",
    "warn_once",
    "without_effect",
]

_PREFIXES = ("MXNET_", "NNVM_", "FLAGS_", "WEFTPLAN_")
_BOOLS = {"true": True, "1": True, "false": False, "0": False}
_BY_NAME: dict[str, Variable] = {}
for _variable in TABLE:
    for _name in (_variable.name, *_variable.aliases):
        if _name in _BY_NAME:
            raise AssertionError(f"{_name} is declared twice")
        _BY_NAME[_name] = _variable


@dataclass(frozen=True, slots=True)
class Setting:
    """Present setting of one variable.

    ``origin`` is ``"default"``, ``"environment"``, ``"alias NAME"``, or ``"default (as NAME)"`` if another variable's
    value is the default. ``text`` is the raw text, None for a default.
    """

    variable: Variable
    value: bool | int | float | str
    origin: str
    text: str | None


_lock = consistent_in_children(Lock())
_first_values: dict[str, Setting] = {}
"""Settings returned by :func:`process`, by canonical name. Guarded by ``_lock``."""
_origins: dict[str, str] = {}
"""Lines outside the package that caused these first readings. Guarded by ``_lock``."""
_warned: set[tuple[str, str]] = set()
"""(canonical name, text) pairs of warnings already issued. Guarded by ``_lock``."""
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class _Read:
    """Cache of settings for one state of the environment.

    A bind reads about forty variables, and Python decodes name and text each time, although they rarely change.
    """

    __slots__ = ("environment", "in_force", "settings", "texts", "unchanged")

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.settings: dict[str, Setting] = {}
        """Settings by requested name."""
        self.texts: dict[str, tuple[str, str | None]] = {}
        """Results of :func:`_raw` by canonical name."""
        self.in_force: tuple[tuple[str, str], ...] | None = None
        self.unchanged: dict[str, int] = {}
        """Per group, the number of settings from :func:`process` when all were last found unchanged."""


_read = _Read({})


def _current_read() -> _Read:
    """Return the cache for the present environment, a new one if the environment has changed."""
    global _read  # replaced as a whole: a slower thread fills an abandoned cache
    environment = getattr(os.environ, "_data", None)
    if not isinstance(environment, dict):  # os.environ was replaced by another mapping: do not cache
        return _Read({})
    current = _read
    if current.environment != environment:
        current = _read = _Read(environment)
    return current


def table() -> tuple[Variable, ...]:
    """Return every variable, grouped by layer."""
    return TABLE


def get(name: str) -> Any:
    """Return the present value of a variable, by name or alias.

    Returns:
        A bool, int, float or str, according to the table.

    Raises:
        ConfigError: the value is not legal, or no variable has this name.
    """
    return lookup(name).value


def in_force() -> tuple[tuple[str, str], ...]:
    """Return names and texts of all variables that :func:`get` may read, as a cheap key for caches."""
    read = _current_read()
    if read.in_force is None:
        environment = os.environ
        read.in_force = tuple(
            (name, environment.get(name, "")) for name in environment if name.startswith(_PREFIXES) or name in _BY_NAME
        )
    return read.in_force


def process(name: str) -> Any:
    """Return the value that the variable had on first use in this process.

    Warns (:class:`~weftplan.errors.ConfigWarning`) once per new value if the environment has changed since: the object
    it configures already exists.

    Raises:
        ConfigError: at the first call, as :func:`get`; nothing is cached then.
    """
    variable = _find(name)
    with _lock:
        initial = _first_values.get(variable.name)
    if initial is None:
        current = lookup(name)
        with _lock:
            # Two threads may race to the first call; `setdefault` gives both the value stored first.
            initial = _first_values.setdefault(variable.name, current)
            _origins.setdefault(variable.name, _caller())
    _warn_if_late(variable, initial)
    return initial.value


def warn_of_late_changes(group: str) -> None:
    """Warn of every variable of a group whose value has changed since :func:`process` returned it."""
    read = _current_read()
    if read.unchanged.get(group) == len(_first_values):  # settings are only added
        return
    with _lock:
        settings = list(_first_values.values())
    for setting in settings:
        if setting.variable.group == group:
            _warn_if_late(setting.variable, setting)
    read.unchanged[group] = len(settings)


def _warn_if_late(variable: Variable, initial: Setting) -> None:
    _, text = _raw(variable)
    if text != initial.text:
        warn_once(
            variable.name,
            f"{variable.name} changed from {_shown(initial.text)} to {_shown(text)} too late: it was read when what it "
            f"shapes was first made ({_origins.get(variable.name)}), and {initial.value} stays in force; set it before "
            f"the process starts",
        )


def warn_once(name: str, text: str) -> None:
    """Issue a :class:`~weftplan.errors.ConfigWarning` about a variable, once per text and process."""
    with _lock:
        new = (name, text) not in _warned
        _warned.add((name, text))
    if new:
        warnings.warn(text, ConfigWarning, stacklevel=3)


def _caller() -> str:
    """Return ``file:line`` of the innermost frame outside this package."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def lookup(name: str) -> Setting:
    """Return the setting of a variable: its value as in :func:`get`, and its origin."""
    settings = _current_read().settings
    setting = settings.get(name)
    if setting is None:
        setting = settings[name] = _looked_up(_find(name))
    return setting


def _looked_up(variable: Variable) -> Setting:
    source, text = _raw(variable)
    if text is not None:
        origin = "environment" if source == variable.name else f"alias {source}"
        return Setting(variable, _parse(variable, source, text), origin, text)
    if variable.default_from is not None:
        source_setting = lookup(variable.default_from)
        if source_setting.text is not None:
            return Setting(variable, source_setting.value, f"default (as {variable.default_from})", None)
    return Setting(variable, variable.default, "default", None)


def check_environment() -> None:
    """Warn about variables that are misspelt or have no effect, and about contradictory aliases.

    Called at ``import weftplan``; the warnings name the line of that import. Values are not checked here: a bad value
    is an error of its reader, so ``weftplan doctor`` still runs.
    """
    for name in strangers():
        near = nearest(name)
        if near is not None:
            warnings.warn(
                f"unknown environment variable {name}, which is ignored: did you mean {near}? "
                "`weftplan doctor` lists every variable",
                ConfigWarning,
                stacklevel=3,
            )
        elif name.upper().startswith("WEFTPLAN_"):
            warnings.warn(
                f"unknown environment variable {name}, which is ignored: `weftplan doctor` lists every variable",
                ConfigWarning,
                stacklevel=3,
            )
    for variable in TABLE:
        if not variable.effective:
            for name in (variable.name, *variable.aliases):
                if os.environ.get(name, "").strip():
                    warnings.warn(
                        f"{name} is set, but it has {variable.effect}; unset it, or filter this warning",
                        ConfigWarning,
                        stacklevel=3,
                    )
        texts = {n: os.environ[n] for n in (variable.name, *variable.aliases) if os.environ.get(n, "").strip()}
        if len(set(texts.values())) > 1:
            assignments = ", ".join(f"{n}={text}" for n, text in texts.items())
            warnings.warn(
                f"{assignments} contradict each other: they are names of one variable, and {next(iter(texts))} wins; "
                "unset the others",
                ConfigWarning,
                stacklevel=3,
            )


def strangers() -> list[str]:
    """Return unknown names in the environment with one of our prefixes, sorted. Names of MXNet and Paddle are known."""
    return sorted(
        name
        for name in os.environ
        if name.upper().startswith(_PREFIXES) and name not in _BY_NAME and name not in UNUSED_HERE
    )


def without_effect() -> dict[str, str]:
    """Return the names in the environment that MXNet or Paddle reads and weftplan does not, each with the reason."""
    return {name: UNUSED_HERE[name] for name in sorted(UNUSED_HERE.keys() & os.environ)}


def nearest(name: str) -> str | None:
    """Return the variable that a misspelt name most likely means, if any.

    >>> nearest("MXNET_CPU_WORKER_NTHREAD"), nearest("MXNET_SOMETHING_ELSE")
    ('MXNET_CPU_WORKER_NTHREADS', None)
    """
    upper = {name.upper(): name for name in _BY_NAME}
    near = difflib.get_close_matches(name.upper(), upper, n=1, cutoff=0.8)
    return upper[near[0]] if near else None


def _find(name: str) -> Variable:
    variable = _BY_NAME.get(name)
    if variable is None:
        near = difflib.get_close_matches(name, _BY_NAME, n=1)
        raise ConfigError(f"no variable is named {name!r}" + (f": did you mean {near[0]}?" if near else ""))
    return variable


def _raw(variable: Variable) -> tuple[str, str | None]:
    """Return (name that is set, its text or None). The variable's own name precedes its aliases."""
    texts = _current_read().texts
    named_text = texts.get(variable.name)
    if named_text is None:
        named_text = texts[variable.name] = _text_of(variable)
    return named_text


def _text_of(variable: Variable) -> tuple[str, str | None]:
    for name in (variable.name, *variable.aliases):
        text = os.environ.get(name, "").strip()
        if text:
            return name, text
    return variable.name, None


def _parse(variable: Variable, source: str, text: str) -> bool | int | float | str:
    value: bool | int | float | str | None = None
    hint = ""
    if variable.kind is bool:
        value = _BOOLS.get(text.lower())
    elif variable.kind is str:
        value = text if variable.form or text in variable.choices else None
        near = difflib.get_close_matches(text.lower(), {c.lower(): c for c in variable.choices}, n=1)
        hint = "".join(f"; did you mean {c}?" for c in variable.choices if near and c.lower() == near[0])
    elif variable.kind is int:
        value = _integer(text)
    else:
        try:
            value = float(text)
        except ValueError:
            value = None
        if value is not None and not math.isfinite(value):
            value = None
    if value is None or not _in_range(variable, value):
        raise ConfigError(
            f"{source}={text!r} is not legal: expected {variable.legal} (default {variable.default}){hint}"
        )
    return value


def _integer(text: str) -> int | None:
    """Return the integer that ``text`` spells, ``1e6`` included, or None.

    MXNet documents ``MXNET_KVSTORE_BIGARRAY_BOUND`` as ``1e6``, and reads that as 1.

    >>> _integer("1e6"), _integer("2.5e3"), _integer("1.5e0"), _integer("1_000")
    (1000000, 2500, None, None)
    """
    # int() would also accept "1_000" and digits of other scripts.
    if re.fullmatch(r"[+-]?[0-9]+", text):
        return int(text)
    if not re.fullmatch(r"[+-]?[0-9]+(\.[0-9]+)?[eE]\+?[0-9]{1,2}", text):
        return None
    number = Decimal(text)
    return int(number) if number == number.to_integral_value() else None


def _in_range(variable: Variable, value: bool | int | float | str) -> bool:
    if isinstance(value, (bool, str)):
        return True
    if value < (-math.inf if variable.low is None else variable.low):
        return False
    if value > (math.inf if variable.high is None else variable.high):
        return False
    return not variable.power_of_two or int(value).bit_count() == 1


def _shown(text: str | None) -> str:
    return "unset" if text is None else repr(text)


def _reset_for_tests() -> None:
    """Forget the settings that :func:`process` has returned."""
    _current_read().unchanged.clear()
    with _lock:
        _first_values.clear()
        _origins.clear()
        _warned.clear()
