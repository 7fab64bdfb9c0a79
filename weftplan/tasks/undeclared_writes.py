"""A warning about tasks that probably write an array without declaring it: they return None and only read arrays.

Such a task is not ordered with others that use its arrays, so its changes are lost or seen too early in silence. Any
thread may call this module. The only state is a cache of functions that return values; concurrent threads store equal
entries.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import numpy as np

from weftplan.engine.sites import Site, push_site, site_line
from weftplan.engine.var import Var
from weftplan.errors import UndeclaredAccessWarning
from weftplan.tasks.handle import Task
from weftplan.tasks.random_states import StateArray
from weftplan.tasks.written_arguments import in_library

_TYPES_WITHOUT_CODE = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, np.ufunc)
"""Classes of functions whose writes are known from a table, or that only pass their arguments on."""
_NO_ARRAYS = (Task, Var, StateArray)
_MAX_CACHED = 4096
"""Maximum length of ``_returning``, which lambdas made in a loop would fill without limit. A full table is emptied."""
_returning: dict[int, CodeType] = {}
"""Code of functions that have returned a value, by identity: hashing code is slow. The code itself is kept, so that no
other code gets its identity."""
_warned: dict[Any, Any] = {}
"""The registry by which ``warnings`` shows a warning once per line."""


class Candidate:
    """A submitted call that may write what it only reads: where it was submitted, and the code of its function."""

    __slots__ = ("code", "site")

    def __init__(self, site: Site, code: CodeType | None) -> None:
        self.site = site
        self.code = code

    def __call__(self, name: str, value: object) -> None:
        """Warn if the call has returned None as ``value``; otherwise exclude its function from now on."""
        if value is None:
            file, line = site_line(self.site)
            warnings.warn_explicit(
                f"task {name!r} returned None and declares no write; if it changes an array, tasks that use the array "
                f"are not ordered with it. Declare what it writes, as in submit(fn, a, writes=[a]) or "
                f"@engine.task(writes=['a']); writes=[] says that it only reads",
                UndeclaredAccessWarning,
                file,
                line,
                registry=_warned,
            )
        elif self.code is not None:
            if len(_returning) >= _MAX_CACHED:
                _returning.clear()
            _returning[id(self.code)] = self.code


def candidate(fn: Any, arrays: Sequence[object]) -> Candidate | None:
    """Return the candidate for a call of ``fn`` that declares no write and reads ``arrays``; None if it cannot be one.

    The site is the innermost line outside this package that is calling now.
    """
    code: CodeType | None = None
    if type(fn) is FunctionType:  # the usual case first
        code = fn.__code__
        if id(code) in _returning or in_library[fn.__module__]:
            return None
    else:
        while isinstance(fn, functools.partial):
            fn = fn.func
        fn = getattr(fn, "__func__", fn)
        code = getattr(fn, "__code__", None)
        if isinstance(fn, _TYPES_WITHOUT_CODE) or id(code) in _returning or in_library[getattr(fn, "__module__", None)]:
            return None
    if type(next(iter(arrays), None)) is not np.ndarray and all(isinstance(array, _NO_ARRAYS) for array in arrays):
        return None
    return Candidate(push_site(), code)
