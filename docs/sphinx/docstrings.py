"""A Sphinx extension that changes docstrings as autodoc reads them.

* A short name in a reference becomes the full name of the object that it means.
* An override whose docstring has no ``Args:`` gets those of the method that it overrides.
* The documentation of operators is plain text, so characters with a meaning in reStructuredText are escaped.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from typing import Any

from api_objects import arguments, inherited_arguments, look_up, owner_of
from sphinx.application import Sphinx

ROLE = re.compile(r":(class|func|meth|attr|data|mod):`(?!~|<)([^`<>]+)`")
PARAMETER = re.compile(r"^    \w+ \(.*?\): ")


def full_names(line: str, scopes: list[str]) -> str:
    """Return a line whose references have full names: the first of ``scopes`` that contains the name is its prefix."""

    def full(match: re.Match[str]) -> str:
        for scope in scopes:
            name = f"{scope}.{match[2].lstrip('.')}"
            try:
                look_up(name)
            except LookupError:
                continue
            return f":{match[1]}:`{match[2]} <{name}>`"
        return match[0]

    return ROLE.sub(full, line)


def plain(lines: list[str]) -> list[str]:
    """Return an operator's documentation, which is plain text, as reStructuredText."""
    found, example = [], False
    for line in lines:
        example = example or line.startswith("Example")
        head = match[0] if (match := PARAMETER.match(line)) else ""
        found.append(line if example else head + re.sub(r"([*|`])", r"\\\1", line[len(head) :]))
    return found


def complete(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Complete the references and ``Args:`` of a docstring that autodoc has read; ``lines`` changes in place."""
    wrapped = getattr(obj, "fget", None) or getattr(obj, "func", None) if what == "property" else obj
    function = inspect.unwrap(getattr(wrapped, "__func__", wrapped))
    owner = obj if what == "class" else owner_of(function)
    module = obj.__name__ if what == "module" else getattr(function, "__module__", None)
    if module == "weftplan.symbol.api.functions":
        lines[:] = plain(lines)
        return
    classes = owner.__mro__[:-1] if owner else ()
    scopes = [f"{one.__module__}.{one.__qualname__}" for one in classes]
    scopes += [one.__module__ for one in classes] if classes else [module] if module else []
    lines[:] = [full_names(line, scopes) for line in lines]
    if what == "method" and owner is not None and not arguments("\n".join(lines)):
        taken = inherited_arguments(owner, function.__name__, function)
        lines += ["", *(full_names(line, scopes) for line in taken)]


def shorten(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    """Omit the signature of a dataclass with over ten fields: its page lists them, and callers do not construct it."""
    if what == "class" and is_dataclass(obj) and len(fields(obj)) > 10:
        return "", returned
    return None


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the hooks; priority 400 precedes napoleon, which must read the lines that :func:`complete` adds."""
    app.connect("autodoc-process-docstring", complete, priority=400)
    app.connect("autodoc-process-signature", shorten)
    return {"parallel_read_safe": True}
