"""The vars of a call that is about to be pushed: reads, writes, and vars whose failures it inherits.

Relies on the registry for the vars of arrays; the caller has located the arrays in the arguments. Any thread may call
this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from weftplan.engine.core import Engine
from weftplan.engine.var import Var
from weftplan.tasks.array_vars import in_flight, owner_of, registry
from weftplan.tasks.arrays import vars_of
from weftplan.tasks.held_arrays import held_arrays
from weftplan.tasks.random_states import StateArray


def vars_for(
    read: Sequence[object], written: Sequence[object], engine: Engine, flight: object
) -> tuple[list[Var], list[Var], bool]:
    """Return the vars that a task reads and writes, before it is pushed; slices that it writes get their own vars.

    The last result is true if all are NumPy arrays, not of a derived class. ``flight`` identifies the task: the caller
    removes it from :data:`in_flight` when the task has been pushed.
    """
    in_flight.add(flight)
    read_vars, write_vars = registry.cached_vars(read, engine), registry.cached_vars(written, engine)
    if read_vars is not None and write_vars is not None:
        return read_vars, write_vars, True
    # A task that runs inline gains nothing, and in debug mode an array is writable or read-only as a whole.
    cut = not engine._inline and not engine._debug
    if cut and len(written) > 1:  # all cuts come before the first look-up, since one slice may overlap another
        for array in written:
            if type(array) is np.ndarray and array.base is not None:
                registry.cut(array, engine)
        cut = False
    reads: list[Var] = []
    writes: list[Var] = []
    plain = True
    for arrays, collected, cuts in ((written, writes, cut), (read, reads, False)):
        for array in arrays:
            if type(array) is not np.ndarray:
                plain = False
                # A draw changes the state of its generator, so every use of one is a write.
                (writes if type(array) is StateArray else collected).extend(vars_of(array, engine))
            elif (array_vars := registry.cached_vars((array,), engine)) is not None:
                collected += array_vars
                continue
            else:
                registry.add_vars(array, engine, collected, cut=cuts and array.base is not None)
            for component in components(array):
                collected += vars_of(component, engine)
    return reads, writes, plain


def components(array: object) -> Iterator[object]:
    """Yield the arrays that an array refers to: elements of an array of objects, attributes such as a mask.

    A part of the same buffer is left out.
    """
    if not isinstance(array, np.ndarray) or (type(array) is np.ndarray and not array.dtype.hasobject):
        return
    owner = owner_of(array)
    for held in held_arrays(array):
        if owner_of(held) is not owner:
            yield held


def inherited(
    read: Sequence[Var], written: Sequence[object], overwritten: Sequence[object], engine: Engine
) -> list[Var]:
    """Return the failed vars whose failure a task inherits, because it does not overwrite all their elements.

    Args:
        read: vars of the arrays that it reads.
        written: arrays that it writes.
        overwritten: the written arrays whose elements it overwrites completely without reading any.
    """
    failed: dict[Var, None] = {}
    for array in written:
        if type(array) is StateArray:  # draws go on after a failed one: its state is valid
            continue
        is_overwritten = any(array is other for other in overwritten)
        for part in (array, *components(array)):
            for var in vars_of(part, engine):
                if var.failure is None:
                    continue
                heals = is_overwritten and part is array and var not in read
                if not heals or (isinstance(array, np.ndarray) and not registry.covers(array, var, engine)):
                    failed[var] = None
    return list(failed)
