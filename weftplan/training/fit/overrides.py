"""Which methods a class of the user overrides: such a method is called as MXNet calls it, and at no other time."""

from __future__ import annotations

from typing import Any


def overrides(what: object, *methods: str) -> bool:
    """Return whether a class outside the package defines one of the methods, of ``what`` or of a part of it.

    The parts of a module are those of a chain and its buckets, those of a metric its metrics.
    """
    owners = [getattr(getattr(type(what), name, None), "__module__", None) or "" for name in methods]
    if any(not owner.startswith("weftplan.") for owner in owners):
        return True
    whole: Any = what
    parts = (getattr(whole, "_modules", ()), getattr(whole, "_buckets", {}).values(), getattr(whole, "metrics", ()))
    return any(overrides(part, *methods) for group in parts for part in group)
