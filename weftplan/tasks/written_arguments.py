"""The arguments that a call writes, from the signature of its function.

A parameter named ``out`` or ``output`` of a function of NumPy, SciPy or CuPy is written, wherever it stands. So is
the operand of a function that works in place, and of one that does so by a flag such as ``copy=False``. Signatures
come from ``inspect`` or, for functions of C that have none (NumPy 2.0 to 2.3), from the first line of the docstring.
Functions of the user are not looked at: their caller declares what they write.

Any thread may call this module. The only state is a cache of rules; concurrent threads store equal entries.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any, NamedTuple

import numpy as np

LIBRARIES = frozenset({"numpy", "scipy", "cupy", "cupyx"})
"""Packages whose signatures say what a function writes."""
_OUTPUTS = ("out", "output")
_FLAG = "overwrite_"
"""Beginning of the flags by which a function may destroy an argument; the rest is its name, or ``input``."""
_INPLACE_OPERATORS = (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"),
    *("iand", "ior", "ixor", "ilshift", "irshift", "imatmul"),
)
"""Python's in-place operators, which write their left side."""
ITEM_METHODS = frozenset({"__setitem__", "__delitem__", *(f"__{name}__" for name in _INPLACE_OPERATORS)})
"""Methods that change their object, by the rules of the language."""
_METHODS = ITEM_METHODS | frozenset(
    {
        *("fill", "itemset", "partition", "put", "setfield", "sort", "__setattr__", "__setmask__"),
        *("harden_mask", "soften_mask", "shrink_mask", "unshare_mask", "set_fill_value", "fill_value"),
        *("append", "clear", "extend", "insert", "pop", "remove", "reverse"),  # of bytearray and array.array
        *("frombytes", "fromfile", "fromlist", "fromunicode", "move", "write", "write_byte"),  # and of mmap
    }
)
"""Methods that write the memory of their object, if it is one with memory."""
_METHODS_INTO = frozenset(
    {
        *("at", "pack_into", "readinto", "readinto1", "recv_into", "recvfrom_into", "recvmsg_into", "shuffle"),
        *("conj", "conjugate"),  # of arrays; their signatures do not list the output
    }
)
"""Methods that write their first argument."""
_FUNCTIONS = {
    "numpy": {"copyto": 0, "fill_diagonal": 0, "place": 0, "put": 0, "put_along_axis": 0, "putmask": 0},
    "numpy.ma.core": {"harden_mask": 0, "put": 0, "putmask": 0, "set_fill_value": 0, "soften_mask": 0},
    "numpy.lib.recfunctions": {"assign_fields_by_name": 0},
    "_operator": {"delitem": 0, "setitem": 0, **dict.fromkeys(_INPLACE_OPERATORS, 0)},
    "_struct": {"pack_into": 1},
    "posix": {"preadv": 1, "readinto": 1, "readv": 1},
}
"""By module, functions that work in place, and the position of the argument that they write."""
_MASKED = frozenset({"numpy.ma.core", "numpy.ma.extras"})
_UNLESS_COPIED = re.compile(r"nan_to_num|fix_invalid|masked_\w+")
"""Functions of NumPy that change their operand with ``copy=False``; others then only avoid a copy."""
_SIGNATURE = re.compile(r"^(?P<owner>\w+\.)?\w+\((?P<parameters>.*)\)")


class WriteRule(NamedTuple):
    """What a function writes; positions count ``self``, and -1 is a parameter that only a keyword reaches."""

    always: tuple[tuple[int, str], ...] = ()
    flags: tuple[tuple[int, str, bool, int, str], ...] = ()
    """Position and name of a flag, the truth by which it has effect, position and name of what is written then."""
    writes_self: bool = False
    """Whether it also writes the memory of its object, as far as the object is an array or another one over memory."""
    quiet: int = -1
    """A call with at most this number of arguments, all by position, writes nothing."""

    def written(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
        """Return the values that a call with these arguments writes, apart from memory of its object."""
        values = [_argument(args, kwargs, position, name) for position, name in self.always]
        for position, name, truth, target, target_name in self.flags:
            flag = _argument(args, kwargs, position, name)
            if flag is not None and _is_true(flag) is truth:
                values.append(_argument(args, kwargs, target, target_name))
        return [value for value in values if value is not None]


def _argument(args: Sequence[object], kwargs: Mapping[str, object], position: int, name: str) -> object:
    return args[position] if 0 <= position < len(args) else kwargs.get(name)


def _is_true(flag: object) -> bool:
    """Return the truth of a flag; a value without a truth, such as an array, counts as set."""
    try:
        return bool(flag)
    except (TypeError, ValueError):
        return True


class _Libraries(dict[str | None, bool]):
    """Whether a module belongs to one of :data:`LIBRARIES`, by its name."""

    def __missing__(self, module: str | None) -> bool:
        is_library = isinstance(module, str) and module.partition(".")[0] in LIBRARIES
        self[module] = is_library
        return is_library


in_library = _Libraries()
_FAST = frozenset({type(np.sum), type(np.ndarray.sum)})
"""Classes of functions whose rule is stored under the function itself."""
_rules: dict[object, WriteRule] = {}
"""Rules of functions and descriptors of libraries, which live as long as the process, and of names of other methods."""


def unbound(fn: Any) -> tuple[Any, object]:
    """Return the function of a bound method and its object; for any other function itself and None."""
    owner = getattr(fn, "__self__", None)
    if owner is None or isinstance(owner, (ModuleType, type)):
        return fn, None
    if isinstance(fn, MethodType):
        return fn.__func__, owner
    if isinstance(fn, (BuiltinFunctionType, MethodWrapperType)):
        return getattr(type(owner), fn.__name__, fn), owner
    return fn, None


def write_rule(fn: Any, *, bound: bool) -> WriteRule:
    """Return what calls of ``fn`` write; ``bound`` if it was a method of an object, which is the first argument."""
    if type(fn) in _FAST and (rule := _rules.get(fn)) is not None:
        return rule
    if type(fn).__module__ in _MASKED and not isinstance(fn, type):
        fn = _wrapped(fn)
    if isinstance(getattr(fn, "nin", None), int):  # a ufunc of NumPy, CuPy or Numba
        return WriteRule(tuple((fn.nin + number, "out" if not number else "") for number in range(fn.nout)))
    of_type = hasattr(fn, "__objclass__")
    module = getattr(fn.__objclass__ if of_type else fn, "__module__", None)
    name = getattr(fn, "__name__", "")
    library = in_library[module]
    key: object = fn if library or of_type or module in _FUNCTIONS else (name, bound)
    rule = _rules.get(key)
    if rule is None:
        method = bound or of_type or (library and "." in (getattr(fn, "__qualname__", None) or ""))
        parameters = _parameters(fn, method) if key is fn else {}
        rule = _rules[key] = _make_rule(name, parameters, _FUNCTIONS.get(module or "", {}), library, method)
    return rule


def _wrapped(fn: Any) -> Any:
    """Return the function to which a callable object of ``numpy.ma`` passes its arguments."""
    masked = sys.modules["numpy.ma"]
    for name in ("f", "_func"):  # a ufunc, or before NumPy 2.3 a function
        if hasattr(fn, name):
            return getattr(fn, name)
    method = getattr(fn, "_methodname", None)
    return getattr(masked.MaskedArray if method else np, str(method or getattr(fn, "__name__", "")), fn)


def _make_rule(
    name: str, parameters: Mapping[str, int], functions: Mapping[str, int], library: bool, method: bool
) -> WriteRule:
    """Return the rule of a function with these parameters, from the tables above."""
    names = {position: parameter for parameter, position in parameters.items()}
    always = [(position, output) for output, position in parameters.items() if library and output in _OUTPUTS]
    flags = [(parameters.get("inplace", -1), "inplace", True, 0, "")]
    if name in (_METHODS_INTO if method else functions):
        position = 1 if method else functions[name]
        always.append((position, names.get(position, "")))
    for flag, position in parameters.items() if library else ():
        if flag.startswith(_FLAG):
            target = parameters.get(flag.removeprefix(_FLAG), 0)
            flags.append((position, flag, True, target, names.get(target, "")))
        elif flag == "copy" and _UNLESS_COPIED.fullmatch(name):
            target = parameters.get("a", parameters.get("x", 0))
            flags.append((position, flag, False, target, names.get(target, "")))
    # Libraries of tensors end the name of a method in place with an underscore.
    in_place = name in _METHODS or (name.endswith("_") and not name.startswith("_"))
    writes_self = in_place if method else name == "setattr"
    reached = [position for position, _ in always] + [position for position, *_ in flags]
    quiet = -1 if writes_self else min((position for position in reached if position >= 0), default=sys.maxsize)
    return WriteRule(tuple(always), tuple(flags), writes_self, quiet)


def _parameters(fn: Any, method: bool) -> dict[str, int]:
    """Return the positions of a function's parameters by their names, -1 for those that only a keyword reaches."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return _documented_parameters(fn, method)
    positions: dict[str, int] = {}
    passed = True
    for number, parameter in enumerate(signature.parameters.values()):
        passed = passed and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        positions[parameter.name] = number if passed else -1
    return positions


def _documented_parameters(fn: Any, method: bool) -> dict[str, int]:
    """Return :func:`_parameters` from the first line of the docstring; empty if it is no signature."""
    match = _SIGNATURE.match((getattr(fn, "__doc__", None) or "").lstrip().partition("\n\n")[0].replace("\n", " "))
    if match is None:
        return {}
    positions: dict[str, int] = {}
    passed, number = True, int(method)  # these lines leave out `self`
    for text in re.sub(r"\([^()]*\)|\[[^\[\]]*\]|'[^']*'|\"[^\"]*\"", "_", match["parameters"]).split(","):
        name = text.partition("=")[0].strip()
        if name == "/":
            continue
        if name.startswith("*"):
            passed = False
            continue
        positions[name] = number if passed else -1
        number += 1
    return positions
