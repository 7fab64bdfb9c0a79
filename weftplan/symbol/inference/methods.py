"""Shape and dtype inference as methods of :class:`~weftplan.symbol.symbol.Symbol`.

They order results by the symbol's name lists and report unknown shapes; ``solver.py`` does the inference. This module
keeps no state; any thread may call it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from weftplan.errors import ParameterError, ShapeError, did_you_mean, listed
from weftplan.ops.core.rules import is_known
from weftplan.ops.core.schema import Shape
from weftplan.symbol import placeholder
from weftplan.symbol.inference import solver as infer
from weftplan.symbol.node import Entry, Node, warn

F = TypeVar("F", bound=Callable[..., Any])

_local = threading.local()


def is_np_shape() -> bool:
    """Return whether this thread writes unknown dimensions as -1."""
    return bool(getattr(_local, "active", False))


def set_np_shape(active: bool) -> bool:
    """Write unknown dimensions as -1 (or as 0 if not ``active``); return the previous setting."""
    previous = is_np_shape()
    _local.active = bool(active)
    return previous


class np_shape:
    """A context ``with np_shape():`` in which unknown dimensions are -1 and unknown shapes None.

    -1 is read as unknown in any case.

    >>> with np_shape():
    ...     shown((0, 3)), shown(None)
    ((-1, 3), None)
    >>> shown((0, 3)), shown(None)
    ((0, 3), ())
    """

    def __init__(self, active: bool = True) -> None:
        self._active = active
        self._previous: list[bool] = []

    def __enter__(self) -> np_shape:
        self._previous.append(set_np_shape(self._active))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        set_np_shape(self._previous.pop())


def use_np_shape(func: F) -> F:
    """Decorate ``func`` to run inside ``with np_shape():``."""

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        with np_shape():
            return func(*args, **kwargs)

    return run  # type: ignore[return-value]


def read_shape(shape: Any, what: str) -> Any:
    """Convert a caller's shape to the internal form, with 0 for unknown dimensions.

    Raises:
        ShapeError: ``shape`` is no sequence, or has a dimension of size 0 inside ``with np_shape():``.
    """
    if shape is None or isinstance(shape, str):
        return shape
    try:
        dims: Sequence[Any] = tuple(shape)
    except TypeError:
        raise ShapeError(f"{what} must be a tuple of integers such as (32, 10), got {shape!r}") from None
    if not dims and not is_np_shape():
        return None  # MXNet's form of an unknown shape
    if is_np_shape() and 0 in dims:
        raise ShapeError(f"{what}: {dims} has no elements; arrays of a symbol need at least one along each axis")
    return tuple(0 if dim == -1 else dim for dim in dims)


def shown(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Convert a shape with 0 for unknown dimensions to the caller's form."""
    if not is_np_shape():
        return () if shape is None else shape
    return None if shape is None else tuple(dim or -1 for dim in shape)


class Inference:
    """A mixin of :class:`Symbol` that infers shapes and dtypes in both directions from those of some variables."""

    __slots__ = ()
    entries: list[Entry]

    def _nodes(self) -> list[Node]:
        """Return all nodes, inputs first."""
        raise NotImplementedError

    def _variables(self) -> tuple[list[Node], list[Node]]:
        """Return (arguments, auxiliary states)."""
        raise NotImplementedError

    def infer_shape(
        self, *args: Shape | None, **kwargs: Shape
    ) -> tuple[list[Shape], list[Shape], list[Shape]] | tuple[None, None, None]:
        """Infer the shapes of (arguments, outputs, auxiliary states) from those of some arguments.

        Return ``(None, None, None)``, after a warning, if some argument stays unknown.

        Args:
            args: shapes in the order of ``list_arguments()``; None where unknown.
            kwargs: shapes by argument name; 0 and -1 are unknown dimensions.

        Raises:
            ShapeError: shapes conflict; names operator, node, both shapes and the line that made the node.
            ParameterError: no variable has this name, or both ways are used.
            UnknownOperatorError: the network has operators that weftplan does not have; names all of them.
        """
        arguments, outputs, states = self._infer("shape", args, kwargs)
        missing = [
            (name, shape)
            for name, shape in zip(self._variable_names(), (*arguments, *states), strict=True)
            if not is_known(shape)
        ]
        if missing or not all(map(is_known, outputs)):
            placeholder.require_known(self._nodes(), "infer_shape")
            shown = ", ".join(f"{name}: {shape or '()'}" for name, shape in missing[:8])
            shown += f", … {len(missing) - 8} more" if len(missing) > 8 else ""
            warn(f"shapes cannot be inferred; unknown: {shown or 'outputs'}")
            return None, None, None
        known: Any = arguments, outputs, states
        return known  # type: ignore[no-any-return]

    def infer_shape_partial(
        self, *args: Shape | None, **kwargs: Shape
    ) -> tuple[list[Shape | None], list[Shape | None], list[Shape | None]]:
        """Infer shapes as :meth:`infer_shape`, but return ``()`` for an unknown shape and 0 for an unknown dimension.

        Inside ``with mx.np_shape():`` these are None and -1.
        """
        arguments, outputs, states = (list(map(shown, part)) for part in self._infer("shape", args, kwargs))
        return arguments, outputs, states

    def infer_type(
        self, *args: object, **kwargs: object
    ) -> tuple[list[type], list[type], list[type]] | tuple[None, None, None]:
        """Infer the dtypes of (arguments, outputs, auxiliary states), as NumPy types such as ``np.float32``.

        The result is ``(None, None, None)`` if some dtype stays unknown.

        Raises:
            DTypeError: dtypes conflict; names operator, node and both dtypes.
            ParameterError: no variable has this name, or both ways are used.
        """
        arguments, outputs, states = self.infer_type_partial(*args, **kwargs)
        if any(dtype is None for dtype in (*arguments, *outputs, *states)):
            placeholder.require_known(self._nodes(), "infer_type")
            pairs = zip(self._variable_names(), (*arguments, *states), strict=True)
            unknown = [name for name, dtype in pairs if dtype is None]
            warn(f"dtypes cannot be inferred; unknown: {listed(unknown) if unknown else 'outputs'}")
            return None, None, None
        known: Any = arguments, outputs, states
        return known  # type: ignore[no-any-return]

    def infer_type_partial(
        self, *args: object, **kwargs: object
    ) -> tuple[list[type | None], list[type | None], list[type | None]]:
        """Infer dtypes as :meth:`infer_type`, but return None for each unknown dtype."""
        parts = self._infer("dtype", args, kwargs)
        arguments, outputs, states = ([None if kind is None else kind.type for kind in part] for part in parts)
        return arguments, outputs, states

    def _variable_names(self) -> list[str]:
        return [node.name for part in self._variables() for node in part]

    def _infer(
        self, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        nodes = self._nodes()
        arguments, states = self._variables()
        if args and kwargs:
            raise ParameterError(f"infer_{kind}: give {kind}s by position or by name, not both")
        if len(args) > len(arguments):
            raise ParameterError(f"infer_{kind}: {len(args)} {kind}s given for {len(arguments)} arguments")
        if kind == "shape":
            args = [read_shape(shape, f"infer_shape: argument {i}") for i, shape in enumerate(args)]
            kwargs = {name: read_shape(shape, f"infer_shape: {name!r}") for name, shape in kwargs.items()}
        by_node: dict[Node, Any] = dict(zip(arguments, args, strict=False))
        by_name: dict[str, list[Node]] = {}
        for node in (*arguments, *states):
            by_name.setdefault(node.name, []).append(node)
        for name, value in kwargs.items():
            if name not in by_name:
                hint = did_you_mean(name, by_name)
                raise ParameterError(
                    f"infer_{kind}: no variable is called {name!r}; {hint}variables: {listed(by_name)}"
                )
            by_node.update(dict.fromkeys(by_name[name], value))
        solve = infer.infer_shapes if kind == "shape" else infer.infer_dtypes
        entries: list[Any] = list(solve(nodes, by_node))
        row = infer.entry_rows(nodes)
        row_of = {node: row[i] for i, node in enumerate(nodes)}
        return (
            [entries[row_of[node]] for node in arguments],
            [entries[row_of[entry.node] + entry.index] for entry in self.entries],
            [entries[row_of[node]] for node in states],
        )
