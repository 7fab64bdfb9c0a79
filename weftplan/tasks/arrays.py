"""From plain arrays to vars: which var orders access to the memory under an array.

Arrays are known by their *owner*, the object at the end of the chain ``array.base``: all views of one buffer share one
var, so a slice and the whole never run into each other (and two disjoint slices are ordered too). An entry lasts as
long as an array over that owner; no array is kept alive by it. Memory that is reached through unrelated owners (the
same DLPack tensor imported twice, a pointer) is not recognised as the same: give such operations a common var.

Lock rank: the registry's lock is above the engine's (nothing is pushed under it). Weak-reference callbacks run
anywhere, inside this lock too, so they only append to a deque, which the next look-up empties. The interpreter runs
them before the memory of the dead array can be used for another one, hence whoever reuses an ``id`` finds the obituary
of its old entry in the deque.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np

from weftplan.device.context import Context
from weftplan.engine.core import Engine
from weftplan.engine.factory import get
from weftplan.engine.var import Var
from weftplan.errors import EngineError
from weftplan.locks import ReentrantLock, whole_in_children


def is_array(thing: Any) -> bool:
    """True for what :func:`var_of` accepts: NumPy and CuPy arrays, rows of structured ones, NDArrays, vars.

    >>> is_array(np.zeros(3)), is_array(3.0), is_array([1, 2])
    (True, False, False)
    """
    if isinstance(thing, (np.ndarray, Var, np.void)):
        return not isinstance(thing, np.void) or _is_row(thing)
    return is_ndarray(thing) or hasattr(thing, "__cuda_array_interface__")


def _is_row(thing: Any) -> bool:
    """True for a row of a structured array, which is a view of it, though no array."""
    return isinstance(thing, np.void) and thing.base is not None


def is_ndarray(thing: Any) -> bool:
    """True for a :class:`weftplan.nd.NDArray`, which brings its var; plain arrays need nothing of that layer."""
    return isinstance(getattr(thing, "var", None), Var) and hasattr(thing, "raw")


def context_of(thing: Any) -> Context | None:
    """Where an array is; None for a var, which is anywhere."""
    if isinstance(thing, (np.ndarray, np.void)):
        return _CPU0
    if isinstance(thing, Var):
        return None
    if is_ndarray(thing):
        where = thing.context
        return where if isinstance(where, Context) else None
    return Context("gpu", int(thing.device.id))


def var_of(array: Any, engine: Engine | None = None) -> Var:
    """The var that orders access to the memory of ``array`` on ``engine`` (default: the process-wide one).

    Args:
        array: a NumPy or CuPy array, a row of a structured one, an NDArray, or a var, which stands for itself.

    Raises:
        EngineError: something else; or an array that another engine still works on.

    >>> whole = np.zeros((4, 4))
    >>> var_of(whole[1:]) is var_of(whole.T), var_of(whole) is var_of(whole.copy())
    (True, False)
    """
    if type(array) is np.ndarray:
        return _registry.var_of(array, engine if engine is not None else get())
    if isinstance(array, Var):
        return array
    if is_ndarray(array):
        var: Var = array.var
        return var
    if not is_array(array):
        raise EngineError(f"expected a NumPy or CuPy array, an NDArray or an engine var, got {type(array).__name__}")
    return _registry.var_of(array.base if _is_row(array) else array, engine if engine is not None else get())


class _Entry:
    """One owner: its var, and weak references to the arrays through which it is known, by their ids."""

    __slots__ = ("anchors", "var")

    def __init__(self, var: Var) -> None:
        self.var = var
        self.anchors: dict[int, weakref.ref[Any]] = {}


class _Registry:
    """Owners by id."""

    def __init__(self) -> None:
        self._lock = whole_in_children(ReentrantLock())
        """Re-entrant: a collection in here may run a finalizer of the user's that asks for another array's var."""
        self._entries: dict[int, _Entry] = {}
        self._dead: deque[tuple[int, int]] = deque()
        """(owner, anchor) ids of arrays that died; appended by weak-reference callbacks only."""

    def var_of(self, array: Any, engine: Engine) -> Var:
        anchor, owner = _roots(array)
        key, known = id(owner), id(anchor)
        with self._lock:
            self._bury()
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(engine.new_variable())
            elif entry.var.engine is not engine:
                if entry.var.state != "IDLE":
                    raise EngineError(
                        f"an array of shape {getattr(array, 'shape', '?')} is still used by operations on "
                        f"{entry.var.engine!r}, and was given to {engine!r}; wait for the first engine before"
                    )
                entry.var = engine.new_variable()
            if known not in entry.anchors:
                dead = self._dead
                entry.anchors[known] = weakref.ref(anchor, lambda _: dead.append((key, known)))
                # Once more: a finalizer that ran in here may have buried the entry with its last other array.
                self._entries[key] = entry
            return entry.var

    def _bury(self) -> None:
        """Lock held: forget the arrays that died, and owners without arrays."""
        while self._dead:
            key, known = self._dead.popleft()
            entry = self._entries.get(key)
            if entry is not None:
                entry.anchors.pop(known, None)
                if not entry.anchors:
                    del self._entries[key]

    def __len__(self) -> int:
        with self._lock:
            self._bury()
            return len(self._entries)


def _roots(array: Any) -> tuple[Any, Any]:
    """The last array of the chain of bases, which all views keep alive, and the owner of the memory at its end."""
    anchor = array
    base = array.base
    if base is None:
        return array, array
    kind = np.ndarray if isinstance(array, np.ndarray) else type(array)
    while isinstance(base, kind):
        anchor = base
        base = anchor.base
    owner: Any = anchor if base is None else base
    below: Any
    while True:
        if isinstance(owner, memoryview):
            below = owner.obj
        else:
            below = getattr(owner, "base", None)
            # Anything may have a ``base``: that of an object counts where it is an array, as behind strided views.
            if not isinstance(owner, np.ndarray) and not isinstance(below, np.ndarray):
                return anchor, owner
        if below is None:
            return anchor, owner
        owner = below


_registry = _Registry()
_CPU0 = Context("cpu", 0)
