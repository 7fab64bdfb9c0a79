"""Iterator states for checkpoints: their common form as plain values, and its validation.

The contract is that of :meth:`weftplan.data.data_iter.DataIter.state`. A state holds the name of the
iterator's class, *facts* that the resuming iterator must share, and the position. The functions are stateless and
thread-safe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from weftplan.errors import NotResumableError, ParameterError

State = dict[str, Any]
"""None, booleans, numbers, text, and lists and dictionaries of these; JSON stores them without loss."""


class HasState(Protocol):
    """An iterator whose position can be saved. :func:`state_or_none` accepts other iterators, too."""

    def state(self) -> State:
        """Return its position."""
        ...


def make_state(iterator: object, facts: Mapping[str, object], **position: object) -> State:
    """Return the state of an iterator at this position.

    >>> make_state([], {"batch_size": 2}, batch=7)
    {'iterator': 'list', 'of': {'batch_size': 2}, 'batch': 7}
    """
    return {"iterator": type(iterator).__name__, "of": dict(facts), **position}


def read_state(iterator: object, state: object, facts: Mapping[str, object], *names: str) -> list[Any]:
    """Return the values under these names from a state, after checking that it fits the iterator.

    Raises:
        ParameterError: not a state, a state of another class, or of an iterator with other facts; the message lists the
            differences.

    >>> read_state([], {"iterator": "list", "of": {"batch_size": 2}, "batch": 7}, {"batch_size": 2}, "batch")
    [7]
    """
    kind = type(iterator).__name__
    if not isinstance(state, Mapping) or not isinstance(state.get("of"), Mapping):
        raise ParameterError(f"{kind}.set_state needs what state() of such an iterator has given, got {state!r:.80}")
    if state.get("iterator") != kind:
        raise ParameterError(
            f"{kind}.set_state: this is the state of a {state.get('iterator')}; make the iterator as it was made then"
        )
    was = state["of"]
    differences = [
        f"{name}: {was.get(name)!r} then, {facts.get(name)!r} now"
        for name in dict.fromkeys((*was, *facts))
        if was.get(name) != facts.get(name)
    ]
    if differences:
        raise ParameterError(f"{kind}.set_state: the state is of another iterator: {'; '.join(differences)}")
    missing = [name for name in names if name not in state]
    if missing:
        raise ParameterError(f"{kind}.set_state: the state lacks {missing}")
    return [state[name] for name in names]


def checked_integer(iterator: object, what: str, value: object, limit: int) -> int:
    """Return ``value`` if it is a whole number in [0, most].

    Raises:
        ParameterError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise ParameterError(
            f"{type(iterator).__name__}.set_state: {what} must be a whole number in [0, {limit}], got {value!r}"
        )
    return value


def numbers_in(iterator: object, what: str, value: object, below: int) -> list[int]:
    """Return ``value`` if it is a list of whole numbers in [0, below).

    Raises:
        ParameterError: it is not.
    """
    if not isinstance(value, list) or not all(type(part) is int and 0 <= part < below for part in value):
        raise ParameterError(
            f"{type(iterator).__name__}.set_state: {what} must be whole numbers below {below}, got {value!r:.80}"
        )
    return value


def key_in(iterator: object, value: object) -> tuple[int, int]:
    """Return ``value`` if it is the key of a random draw: two whole numbers.

    Raises:
        ParameterError: it is not.
    """
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(type(part) is int for part in value):
        return value[0], value[1]
    raise ParameterError(
        f"{type(iterator).__name__}.set_state: the key of an order must be two whole numbers, got {value!r}"
    )


def not_resumable(
    iterator: object,
    why: str = "it does not say where it stands; give it state() and set_state(state), see mx.io.DataIter",
) -> NotResumableError:
    """Return the error of an iterator that cannot be resumed."""
    return NotResumableError(f"{type(iterator).__name__} cannot be resumed: {why}")


def state_or_none(data: HasState) -> State | None:
    """Return the state of an iterator, or None if it has none."""
    try:
        return data.state()
    except (AttributeError, NotImplementedError, NotResumableError):
        return None
