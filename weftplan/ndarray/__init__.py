"""The imperative array interface ``mx.nd``: NDArray, operators and creation functions.

``nd.<Operator>(...)`` exists for every registered operator; :func:`weftplan.ndarray.calls.call_arguments.understood`
defines how arguments are read. Functions without an operator (``array``, ``zeros``, ``concatenate``, …) are defined
here by name.
"""

from typing import TYPE_CHECKING, Any

from weftplan.errors import did_you_mean
from weftplan.ndarray.array import NDArray
from weftplan.ndarray.calls.call_cache import Repeated as _Repeated  # noqa: F401 - methods of arrays call by it
from weftplan.ndarray.calls.invoke import invoke
from weftplan.ndarray.creation import (
    add,
    arange,
    array,
    concatenate,
    divide,
    empty,
    equal,
    eye,
    full,
    greater,
    greater_equal,
    histogram,
    lesser,
    lesser_equal,
    linspace,
    logical_and,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    modulo,
    moveaxis,
    multiply,
    not_equal,
    onehot_encode,
    ones,
    ones_like,
    power,
    reset_arrays,
    split_v2,
    stack,
    subtract,
    true_divide,
    waitall,
    zeros,
    zeros_like,
)
from weftplan.ndarray.formats.dlpack import from_dlpack, from_numpy, to_dlpack_for_read, to_dlpack_for_write
from weftplan.ndarray.formats.serialize import load, load_frombuffer, save
from weftplan.ndarray.memory.chunk import Chunk
from weftplan.ndarray.row_sparse import cast_storage
from weftplan.ndarray.spill import spilling
from weftplan.support import slots
from weftplan.support.lazy_import import late_import

if TYPE_CHECKING:
    from weftplan.ndarray import random
    from weftplan.ndarray import row_sparse as sparse  # noqa: F401 - made at first use
    from weftplan.ndarray.operators import NAMESPACES
    from weftplan.ndarray.registered import *  # noqa: F403 - the operators, written by docs/write_stubs.py
    from weftplan.ndarray.registered import contrib, image, linalg  # noqa: F401

    op = _internal = NAMESPACES["op"]

__all__ = [
    "Chunk",
    "NDArray",
    "add",
    "arange",
    "array",
    "cast_storage",
    "concatenate",
    "divide",
    "empty",
    "equal",
    "eye",
    "from_dlpack",
    "from_numpy",
    "full",
    "greater",
    "greater_equal",
    "histogram",
    "invoke",
    "lesser",
    "lesser_equal",
    "linspace",
    "load",
    "load_frombuffer",
    "logical_and",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "modulo",
    "moveaxis",
    "multiply",
    "not_equal",
    "onehot_encode",
    "ones",
    "ones_like",
    "power",
    "random",
    "reset_arrays",
    "save",
    "spilling",
    "split_v2",
    "stack",
    "subtract",
    "to_dlpack_for_read",
    "to_dlpack_for_write",
    "true_divide",
    "waitall",
    "zeros",
    "zeros_like",
]


def _attribute(name: str) -> Any:
    from weftplan.ndarray.operators import NAMESPACES, function

    if name == "sparse":
        return late_import("weftplan.ndarray.row_sparse")
    if name == "random":
        return late_import("weftplan.ndarray.random")
    if name == "contrib":  # both add functions to the namespace
        late_import("weftplan.ndarray.contributed")
        late_import("weftplan.ndarray.control_flow")
    if name == "Custom":
        return slots.ARRAY_CUSTOM.get()
    value = NAMESPACES.get(name) or function(name)
    if value is None:
        near = "" if name.startswith("__") else did_you_mean(name, __dir__())
        raise AttributeError(f"mx.nd has no attribute or operator {name!r}" + (near and f"; {near.rstrip()}"))
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # for a type checker a name that no operator has is an error
    __getattr__ = _attribute


def __dir__() -> list[str]:
    from weftplan.ndarray.operators import NAMESPACES, names

    return sorted({*__all__, *names(), "sparse", *(name for name in NAMESPACES if not name.startswith("_"))})
