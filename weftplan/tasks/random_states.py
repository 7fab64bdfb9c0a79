"""Random generators as resources: each draw changes the state, so each task that uses a generator writes it.

A generator has no memory that NumPy shares, so a :class:`StateArray` represents its state: the registry orders it like
any array. Any thread may call this module. Lock rank: the lock is held only to store a new array; nothing is called
under it.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from weftplan.locks import ReentrantLock, consistent_in_children


class StateArray(np.ndarray):
    """An array that stands for the state of a random generator: a task that uses it counts as a writer."""

    __slots__ = ()


_lock = consistent_in_children(ReentrantLock())
"""Guards the insertion of a state, so that two threads never make two arrays for one generator. Reentrant, because a
garbage collection under it may run a finalizer that submits a draw."""
_states: WeakKeyDictionary[object, StateArray] = WeakKeyDictionary()


def state_of(value: object) -> StateArray | None:
    """Return the array that stands for the state of a random generator; None for anything else.

    Generators of NumPy that share a bit generator share a state. ``random.Random`` counts, too, and a seed sequence,
    which counts its children.

    >>> rng = np.random.default_rng(0)
    >>> state_of(rng) is state_of(rng.bit_generator), state_of(3) is None
    (True, True)
    """
    resource: Any = None
    # A module that is not loaded has no instances; numpy.random is expensive to import.
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        bits: Any = value
        if isinstance(value, numpy_random.Generator):
            bits = value.bit_generator
        elif isinstance(value, numpy_random.RandomState):
            bits = value._bit_generator
        if isinstance(bits, numpy_random.BitGenerator):
            resource = bits.lock  # bit generators cannot be referenced weakly; each has a lock of its own
        elif isinstance(value, numpy_random.SeedSequence):
            pool: StateArray = value.pool.view(StateArray)  # nor can seed sequences; this array of theirs never changes
            return pool
    python_random: Any = sys.modules.get("random")
    if resource is None and python_random is not None and isinstance(value, python_random.Random):
        resource = value
    if resource is None:
        return None
    state = _states.get(resource)
    if state is None:
        with _lock:
            state = _states.setdefault(resource, np.zeros(1, np.uint8).view(StateArray))
    return state
