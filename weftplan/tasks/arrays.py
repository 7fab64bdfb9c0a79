"""The map from plain arrays to the vars that order access to their memory.

``array_vars.py`` stores the vars of each buffer. Any thread may call this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np

from weftplan.device.context import Context
from weftplan.engine.core import Engine
from weftplan.engine.factory import get
from weftplan.engine.var import Var
from weftplan.errors import EngineError
from weftplan.support.array_types import RawArray
from weftplan.support.keyword_errors import known_keywords
from weftplan.tasks.array_vars import nothing, registry
from weftplan.tasks.handle import Task
from weftplan.tasks.random_states import StateArray, state_of
from weftplan.tasks.tiles import TileGrid, Tiles

_CPU0 = Context("cpu", 0)
LEAVES = (str, bytes, bytearray, int, float, complex, np.generic, np.dtype, np.ufunc, type)
"""Classes whose instances share no memory, but for ``bytearray``, and refer to no arrays."""


class DeviceArray(Protocol):
    """An NDArray, as far as tasks know it: this layer does not import its class."""

    var: Var
    context: Context

    def raw(self) -> RawArray:
        """Return its memory as an array."""
        ...


def is_array(value: object) -> bool:
    """Return whether an object orders tasks: NumPy and CuPy arrays, rows of structured arrays, NDArrays, vars.

    >>> is_array(np.zeros(3)), is_array(3.0), is_array([1, 2])
    (True, False, False)
    """
    if isinstance(value, (np.ndarray, Var, np.void)):
        return not isinstance(value, np.void) or _is_row(value)
    return is_ndarray(value) or hasattr(value, "__cuda_array_interface__")


def _is_row(value: object) -> TypeGuard[np.void]:
    """Return whether an object is a row of a structured array, which is a view but no array."""
    return isinstance(value, np.void) and value.base is not None


def memory_of(value: object) -> np.ndarray | None:
    """Return an array over the host memory that ``value`` shares, without a copy; None if it shares none.

    >>> memory_of(memoryview(bytearray(3))).nbytes, memory_of([1.0])
    (3, None)
    """
    kind = type(value)
    if isinstance(value, np.flatiter):
        base: np.ndarray = value.base
        return base
    if isinstance(value, LEAVES) and not isinstance(value, bytearray):
        return None
    try:
        if hasattr(kind, "__array_interface__"):
            return np.asarray(value)
        if hasattr(kind, "__dlpack__"):
            return _from_dlpack(value)
        buffer: Any = value
        return np.asarray(memoryview(buffer))
    except Exception:  # not on a host, or no memory to share; a foreign object may raise anything
        return None


def _from_dlpack(value: Any) -> np.ndarray:
    """Return an array over a host tensor; a tensor that requires gradients is detached."""
    try:
        return np.from_dlpack(value)
    except Exception:
        return np.from_dlpack(value.detach())


def is_ndarray(value: object) -> TypeGuard[DeviceArray]:
    """Return whether an object is a :class:`weftplan.nd.NDArray`, which has a var; do not import that layer."""
    return isinstance(getattr(value, "var", None), Var) and hasattr(value, "raw")


def context_of(value: object) -> Context | None:
    """Return the context of an array; None for a var, a task or a generator's state, which have none."""
    if isinstance(value, StateArray):
        return None
    if isinstance(value, (np.ndarray, np.void)):
        return _CPU0
    if is_ndarray(value):
        context = value.context
        return context if isinstance(context, Context) else None
    if isinstance(value, (Var, Task)):
        return None
    array: Any = value
    return Context("gpu", int(array.device.id))


def var_of(array: object, engine: Engine | None = None) -> Var:
    """Return the var that orders access to the memory of ``array`` on ``engine`` (default: the process-wide engine).

    From then on tasks on slices of its buffer are ordered with each other, as tasks on the whole buffer are.

    Args:
        array: a NumPy or CuPy array, a row of a structured one, an NDArray, another object over host memory, a random
            generator, or a var, which stands for itself.

    Raises:
        EngineError: something else; an array that another engine still works on; or one that was divided into tiles
            and is not within one of them.

    >>> whole = np.zeros((4, 4))
    >>> var_of(whole[1:]) is var_of(whole.T), var_of(whole) is var_of(whole.copy())
    (True, False)
    """
    engine = engine if engine is not None else get()
    (array,) = resources((array,))
    if _is_row(array):
        array = array.base
    variables = registry.undivided(array, engine) if isinstance(array, np.ndarray) else vars_of(array, engine)
    if len(variables) != 1:
        raise EngineError(
            f"an array of shape {getattr(array, 'shape', '?')} was divided into tiles and touches {len(variables)} of "
            f"them: it has no var of its own; ask for a tile's"
        )
    return variables[0]


def resources(values: Iterable[object]) -> list[Any]:
    """Return ``values`` with arrays in place of random generators and of objects over host memory; None is left out."""
    ordered: list[object] = []
    for value in values:
        if type(value) is np.ndarray or type(value) is Task or is_array(value):
            ordered.append(value)
        elif value is not None:
            state = state_of(value)
            shared = memory_of(value) if state is None else state
            ordered.append(value if shared is None else shared)
    return ordered


def vars_of(array: object, engine: Engine) -> list[Var]:
    """Return the vars that order access to ``array``: one, or one per overlapped tile; raises as :func:`var_of`."""
    if type(array) is np.ndarray:
        return registry.vars_of(array, engine)
    if isinstance(array, Var):
        return [array]
    if type(array) is Task or is_ndarray(array):
        return [array.var]
    if not is_array(array):
        raise EngineError(
            f"expected a NumPy or CuPy array, an NDArray, a tensor or buffer in host memory, a random generator, a "
            f"task or an engine var, got {type(array).__name__}; of an object that holds arrays, such as a table, name "
            f"these arrays"
        )
    raw: Any = array.base if _is_row(array) else array
    return registry.vars_of(raw, engine)


@known_keywords()
def tiles(array: RawArray, tile: int | Sequence[int]) -> Tiles:
    """Divide an array into tiles: from now on tasks on its views are ordered by the tiles that they overlap.

    Tasks submitted earlier on any view of the buffer run first. An array may be divided again; then tasks on the
    earlier tiles run first, too. The tiles last as long as arrays over the buffer do.

    Args:
        array: NumPy or CuPy array; views of the same buffer beyond it keep the var they share.
        tile: elements of a tile along each axis; an integer for an array of one axis.

    Raises:
        EngineError: ``array`` is none, or ``tile`` does not fit it; or another engine still works on it.

    >>> from weftplan import engine
    >>> field = np.zeros((4, 6))
    >>> parts = engine.tiles(field, (2, 3))
    >>> for number, part in enumerate(parts):  # four tasks that may run side by side
    ...     _ = engine.submit(np.add, part, number, out=part)
    >>> engine.wait(field)
    >>> field[::2, ::3]
    array([[0., 1.],
           [2., 3.]])
    """
    if not isinstance(array, np.ndarray) and not hasattr(array, "__cuda_array_interface__"):
        raise EngineError(f"tiles: expected a NumPy or CuPy array, got {type(array).__name__}")
    engine = get()
    grid = TileGrid(array, tuple(tile) if isinstance(tile, Sequence) else (tile,), engine)
    previous_vars = registry.divide(array, grid, engine)
    engine.push(nothing, (), [*previous_vars, *grid.vars], name="tiles")
    return Tiles(array, grid)
