"""Objects of the API reference: look-up by name, and the arguments that their docstrings describe.

``sphinx/docstrings.py`` and ``sphinx/references.py`` use this for the site. A test uses it for the rule that every
public function with three or more parameters describes them.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any


def look_up(name: str) -> Any:
    """Return the object with a dotted name; None for a field that only instances have.

    Raises:
        LookupError: there is no such object.
    """
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            place: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            if not hasattr(place, part):
                if part == parts[-1] and _is_field(place, part):
                    return None
                break
            place = getattr(place, part)
        else:
            return getattr(place, "__func__", place)
    raise LookupError(name)


def _is_field(owner: Any, name: str) -> bool:
    """Return whether instances of a class have an annotated or documented attribute of this name."""
    bases = owner.__mro__ if inspect.isclass(owner) else ()
    return any(name in vars(base).get("__annotations__", ()) or f" {name}:" in (base.__doc__ or "") for base in bases)


def arguments(doc: str) -> list[str]:
    """Return the section ``Args:`` (``Parameters:`` of operators) of a docstring, its title included.

    >>> arguments("Do it.\\n\\nArgs:\\n    x: a number.\\n\\nRaises:\\n    ValueError: never.")
    ['Args:', '    x: a number.']
    """
    section: list[str] = []
    for line in inspect.cleandoc(doc).splitlines():
        if line in ("Args:", "Parameters:"):
            section = [line]
        elif section and line and not line.startswith(" "):
            break
        elif section:
            section.append(line)
    while section and not section[-1]:
        section.pop()
    return section


def inherited_arguments(owner: type, name: str, function: Callable[..., Any]) -> list[str]:
    """Return the ``Args:`` of the nearest base method that describes an argument of ``function``; [] without one."""
    taken = set(inspect.signature(function).parameters) - {"self", "cls"}
    for base in owner.__mro__[1:]:
        method = vars(base).get(name)
        lines = arguments(getattr(method, "__doc__", None) or "")
        if lines and taken & set(re.findall(r"^ {4}\*{0,2}(\w+)", "\n".join(lines), re.MULTILINE)):
            return lines
    return []


def owner_of(function: Any) -> type | None:
    """Return the class that defines a function; None if no class does."""
    try:
        owner = look_up(f"{function.__module__}.{function.__qualname__.rpartition('.')[0]}")
    except (AttributeError, LookupError):
        return None
    return owner if inspect.isclass(owner) else None
