"""Control flow in Python over arrays: ``mx.nd.contrib.foreach``, ``while_loop`` and ``cond``.

Bodies run on the calling thread and push operations like other code; only a condition waits for its value. A body may
return an array or nested lists of arrays, in the same structure at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from weftplan.errors import DTypeError, ParameterError, ShapeError
from weftplan.ndarray.array import NDArray
from weftplan.ndarray.creation import concatenate, stack, zeros
from weftplan.ndarray.operators import NAMESPACES

Number = TypeVar("Number", int, bool)
_Form = list[Any] | None
"""The nesting of arrays: None for an array, a list for a list or tuple."""


def _flat(value: object, what: str) -> tuple[list[NDArray], _Form]:
    """Flatten ``value``; return its arrays and their nesting."""
    if isinstance(value, NDArray):
        return [value], None
    if not isinstance(value, list | tuple):
        raise DTypeError(f"{what} must be an NDArray or nested lists of them, got {value!r} ({type(value).__name__})")
    arrays: list[NDArray] = []
    form: list[Any] = []
    for entry in value:
        leaves, inner = _flat(entry, what)
        arrays += leaves
        form.append(inner)
    return arrays, form


def _nested(arrays: Sequence[NDArray], form: _Form) -> Any:
    """Nest ``arrays`` as ``form`` defines."""
    following = iter(arrays)

    def build(form: _Form) -> Any:
        return next(following) if form is None else [build(inner) for inner in form]

    return build(form)


class _Steps:
    """The outputs of a body at each step, to be stacked."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._rows: list[list[NDArray]] = []
        self._form: _Form = []

    def add(self, output: object) -> None:
        """Append the output of a step.

        Raises:
            DTypeError: the output contains an object that is no array.
            ParameterError: its structure differs from that of earlier steps.
        """
        row, form = _flat(output, f"{self._what}: the output of step {len(self._rows)}")
        if self._rows and form != self._form:
            raise ParameterError(
                f"{self._what}: step {len(self._rows)} gave {len(row)} arrays, the steps before gave "
                f"{len(self._rows[0])}: expected as many, nested alike"
            )
        self._rows.append(row)
        self._form = form

    def stacked(self, length: int) -> Any:
        """Stack the outputs along a new first axis of ``length``, padded with zeros if there were fewer steps."""
        results = []
        for number, column in enumerate(zip(*self._rows, strict=True)):
            if any(value.shape != column[0].shape for value in column):
                shapes = ", ".join(str(value.shape) for value in column)
                raise ShapeError(f"{self._what}: output {number} has other shapes at other steps: {shapes}")
            joined = stack(*column)
            if len(column) < length:
                shape = (length - len(column), *joined.shape[1:])
                joined = concatenate([joined, zeros(shape, ctx=joined.context, dtype=joined.np_dtype)])
            results.append(joined)
        return _nested(results, self._form)


def _number(value: Any, kind: type[Number], what: str) -> Number:
    """Convert ``value``, a number or an array of one element, to a Python number; wait for an array."""
    if hasattr(value, "asscalar"):
        value = value.asscalar()
    try:
        return kind(value)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"{what}: expected {kind.__name__} or an array of one, got {value!r}") from error


def foreach(body: Callable[[Any, Any], tuple[Any, Any]], data: Any, init_states: Any) -> tuple[Any, Any]:
    """Run ``output, states = body(row, states)`` for each row of ``data`` in order.

    Args:
        body: gets a row, or a list of one row of each array, and the states that it gave last.
        data: an array, or a list of arrays; the first says how many rows are used.
        init_states: an array or nested lists of arrays.

    Returns:
        (the outputs joined along a new first axis, the last states): nested as the body nested them.

    Raises:
        DTypeError: something that is no array.
        ShapeError: no row, or an array with fewer rows than the first.
        ParameterError: outputs that are nested in another way than those before.

    >>> import weftplan as mx
    >>> outputs, total = mx.nd.contrib.foreach(lambda x, s: (x + s, x + s), mx.nd.array([1, 2, 3]), mx.nd.zeros((1,)))
    >>> outputs.asnumpy().tolist(), total.asnumpy().tolist()
    ([[1.0], [3.0], [6.0]], [6.0])
    """
    arrays, _ = _flat(data, "foreach: data")
    _flat(init_states, "foreach: init_states")
    if not isinstance(data, NDArray) and not all(isinstance(entry, NDArray) for entry in data):
        raise DTypeError("foreach: data must be an NDArray or a flat list of them, of which rows can be taken")
    rows = [array.shape[0] if array.ndim else 0 for array in arrays]
    if not rows or min(rows) < rows[0] or not rows[0]:
        raise ShapeError(
            f"foreach: expected at least one row, and in each array as many as in the first, got shapes "
            f"{[array.shape for array in arrays]}"
        )
    steps = _Steps("foreach")
    states = init_states
    for k in range(rows[0]):
        output, states = body(data[k] if isinstance(data, NDArray) else [array[k] for array in arrays], states)
        steps.add(output)
    return steps.stacked(rows[0]), states


def while_loop(
    cond: Callable[..., Any], func: Callable[..., tuple[Any, Any]], loop_vars: Any, max_iterations: Any = None
) -> tuple[Any, Any]:
    """Run ``output, loop_vars = func(*loop_vars)`` while ``cond(*loop_vars)``, at most ``max_iterations`` times.

    Args:
        cond: returns a number or an array of one element; each step waits for it.
        func: returns (an array, nested lists of arrays, or None; the same number of new variables as it got).
        loop_vars: an array, or a list of at least one array.
        max_iterations: a number, or an array of one element.

    Returns:
        (the outputs stacked along a new first axis of ``max_iterations``, the last variables). Rows after the last step
        are zeros; MXNet leaves them uninitialized. Without a step the outputs are an empty list.

    Raises:
        ParameterError: no variables, no or no proper ``max_iterations``, a condition that is no number, another number
            of variables, or outputs nested in another way than those before.
        ShapeError: a condition of several elements, or an output with other shapes at other steps.
        DTypeError: an output that is no array.

    >>> import weftplan as mx
    >>> i = mx.nd.array([0])
    >>> outputs, last = mx.nd.contrib.while_loop(lambda i: i < 2, lambda i: (i * 10, i + 1), i, max_iterations=3)
    >>> outputs.asnumpy().tolist(), last.asnumpy().tolist()
    ([[0.0], [10.0], [0.0]], [2.0])
    """
    if max_iterations is None:
        raise ParameterError("while_loop: max_iterations should be specified")
    limit = _number(max_iterations, int, "while_loop: max_iterations")
    is_single = isinstance(loop_vars, NDArray)
    variables = [loop_vars] if is_single else loop_vars
    if len(variables) == 0:
        raise ParameterError("while_loop: loop_vars should contain at least one element")
    steps = _Steps("while_loop")
    count = 0
    while count < limit and _number(cond(*variables), bool, "while_loop: what cond gives"):
        output, new = func(*variables)
        new = [] if new is None else list(new) if isinstance(new, list | tuple) else [new]
        if len(new) != len(variables):
            raise ParameterError(
                f"while_loop: the length of loop_vars should be consistent during the loop: func got "
                f"{len(variables)} and gave {len(new)}"
            )
        variables = new
        steps.add([] if output is None else output)
        count += 1
    return steps.stacked(limit), variables[0] if is_single else variables


def cond(pred: Any, then_func: Callable[[], Any], else_func: Callable[[], Any]) -> Any:
    """Call ``then_func()`` if ``pred``, a number or an array of one element, is not 0, else ``else_func()``.

    It waits for the value of ``pred``.

    Raises:
        ParameterError, ShapeError: a condition that is no number, or has several elements.

    >>> import weftplan as mx
    >>> a = mx.nd.array([2])
    >>> mx.nd.contrib.cond(a < 5, lambda: a * 10, lambda: a).asnumpy().tolist()
    [20.0]
    """
    return then_func() if _number(pred, bool, "cond: pred") else else_func()


vars(NAMESPACES["contrib"]).update(foreach=foreach, while_loop=while_loop, cond=cond)
