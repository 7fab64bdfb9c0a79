"""Rollback: give objects back the fields that they had before an operation that failed.

A method that changes several fields runs under :func:`rollback`, so that it either completes or changes nothing: after
an exception, an interrupt included, every attribute has its old value, and every list, dictionary or set in an
attribute its old items. Contents of arrays are not saved, so a method checks and allocates everything before it writes
any. One thread at a time uses the objects, or holds their lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TypeAlias, TypeVar

Method = TypeVar("Method", bound=Callable[..., object])
Container: TypeAlias = "list[object] | dict[object, object] | set[object]"


@contextmanager
def rollback(*objects: object) -> Iterator[None]:
    """Restore the fields of ``objects`` if the body of the ``with`` statement raises.

    >>> class Pair:
    ...     left, right = 1, [2]
    >>> pair = Pair()
    >>> pair.items = [1]
    >>> with rollback(pair):
    ...     pair.items.append(2)
    ...     pair.left = 1 / 0
    Traceback (most recent call last):
    ...
    ZeroDivisionError: division by zero
    >>> pair.left, pair.items
    (1, [1])
    """
    saved = [
        (vars(target), [(name, value, _copy(value)) for name, value in vars(target).items()])
        for target in {id(target): target for target in objects}.values()
    ]
    try:
        yield
    except BaseException:
        for fields, values in saved:
            for name in fields.keys() - {name for name, _, _ in values}:
                del fields[name]
            for name, value, items in values:
                fields[name] = value
                if items is not None:
                    _restore(value, items)
        raise


def all_or_nothing(method: Method) -> Method:
    """Return ``method`` under :func:`rollback` of the object that it is called on.

    If the object has a method ``rollback_parts``, the objects that this returns are rolled back.
    """

    @wraps(method)
    def call(self: object, *args: object, **kwargs: object) -> object:
        parts: Callable[[], list[object]] | None = getattr(self, "rollback_parts", None)
        with rollback(*((self,) if parts is None else parts())):
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def _restore(value: Container, items: Container) -> None:
    """Give a container its old items; a thread that reads it meanwhile never finds one of them missing."""
    if isinstance(value, list):
        value[:] = items
    elif isinstance(value, set):
        value.intersection_update(items)
        value.update(items)
    elif isinstance(items, dict):
        for key in value.keys() - items.keys():
            del value[key]
        value.update(items)


def _copy(value: object) -> Container | None:
    """Return the items of a list, dictionary or set, which may change in place; None for any other value."""
    return value.copy() if isinstance(value, (list, dict, set)) else None
