"""State of an ONNX import: the values so far, one node with its attributes, and the tables of rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from weftplan import symbol as sym
from weftplan.errors import FormatError, MXNetError, ShapeError
from weftplan.ops.core.rules import is_known
from weftplan.ops.core.schema import Shape
from weftplan.support.array_types import DTypeLike, RawArray
from weftplan.symbol import Symbol

Value = Any
"""The value of an ONNX name: a Symbol, or a NumPy array that is constant during the import."""


class OnnxModel:
    """The model under construction."""

    def __init__(self, shapes: Mapping[str, Shape], opset: int, path: str, budget: int) -> None:
        self.shapes: dict[str, Shape] = dict(shapes)
        self.opset = opset
        self.path = path
        self.budget = budget
        """Remaining bytes for constants that the import computes."""
        self.values: dict[str, Value] = {"": None}
        self.args: dict[str, Any] = {}
        self.aux: dict[str, Any] = {}
        self.parameters: dict[tuple[object, ...], Symbol] = {}

    def parameter(self, name: str, values: ArrayLike, *, state: bool = False) -> Symbol:
        """Return a variable that holds ``values``."""
        label, count = name, 1
        table = self.aux if state else self.args
        while label in self.args or label in self.aux or label in self.shapes:
            label, count = f"{name}_{count}", count + 1
        table[label] = np.ascontiguousarray(values)
        return sym.Variable(label, shape=np.shape(values), dtype=np.asarray(values).dtype)

    def shape(self, value: Value) -> Shape:
        """Return the shape of a value; raise ShapeError if it is unknown."""
        if not isinstance(value, Symbol):
            return np.shape(value)
        shapes = {**self.shapes, **{key: np.shape(array) for key, array in self.args.items()}}
        names = set(value.list_arguments())
        _, outputs, _ = value.infer_shape_partial(**{key: shape for key, shape in shapes.items() if key in names})
        if not is_known(outputs[0]):
            raise ShapeError(f"{self.path}: the shape of {value.name!r} is not known; give the shapes of the inputs")
        shape: Shape = tuple(outputs[0])  # type: ignore[arg-type]
        return shape


class OnnxCall:
    """One node of the file, with the queries that its rule may use."""

    def __init__(self, model: OnnxModel, node: Any, attrs: dict[str, Any]) -> None:
        self.model = model
        self.op = node.op_type
        self.name = node.name or (node.output[0] if node.output else node.op_type)
        self.inputs: list[Any] = [model.values.get(name) for name in node.input]
        self.names = list(node.input)
        self.outputs = len(node.output)
        self.attrs = attrs

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.attrs.get(key, default)

    def has(self, k: int) -> bool:
        """Return whether input ``k`` is present."""
        return k < len(self.inputs) and self.inputs[k] is not None

    def symbol(self, k: int = 0) -> Symbol:
        """Return input ``k`` as a symbol; a constant becomes a parameter that its readers share."""
        value = self.inputs[k] if k < len(self.inputs) else None
        if value is None:
            raise self.refuse(f"input {k} is missing")
        if isinstance(value, Symbol):
            return value
        key = (id(value), self.names[k])
        result = self.model.parameters.get(key)
        if result is None:
            result = self.model.parameters[key] = self.model.parameter(self.names[k], as_parameter(value))
        return result

    def as_parameter(self, k: int, values: ArrayLike | None = None, *, state: bool = False) -> Symbol:
        """Return input ``k``, a constant, as a parameter of this node (or ``values`` instead)."""
        values = self.constant(k) if values is None else values
        if np.size(values) == 0:
            raise self.refuse(f"input {k} has no elements")
        array = as_parameter(values)
        # Nodes that read one initializer share its parameter, if they need the same values of it.
        key = (self.names[k], array.shape, array.dtype.str, array.tobytes(), state)
        result = self.model.parameters.get(key)
        if result is None:
            result = self.model.parameters[key] = self.model.parameter(self.names[k], array, state=state)
        return result

    def constant(self, k: int) -> RawArray:
        """Return input ``k``, which must be constant during the import."""
        value = self.inputs[k] if k < len(self.inputs) else None
        if value is None or isinstance(value, Symbol):
            raise self.refuse(f"input {k} ({self.names[k] if k < len(self.names) else 'missing'}) must be a constant")
        constant: RawArray = value
        return constant

    def numbers(self, k: int, attribute: str) -> list[int] | None:
        """Return integers from input ``k`` (newer files) or an attribute (older files)."""
        if self.has(k):
            return [int(number) for number in np.reshape(self.constant(k), -1)]
        value = self.get(attribute)
        return None if value is None else [int(number) for number in ([value] if isinstance(value, int) else value)]

    def spend(self, count: int, dtype: DTypeLike) -> None:
        """Account for an array before it is computed; refuse it if the size of the file does not justify it."""
        self.model.budget -= count * np.dtype(dtype).itemsize
        if self.model.budget < 0:
            raise self.refuse(f"the constants computed up to here, the last of {count:,} elements, exceed its size")

    def is_constant(self) -> bool:
        """Return whether all inputs are constant during the import."""
        return all(not isinstance(value, Symbol) for value in self.inputs)

    def shape(self, k: int = 0) -> Shape:
        """Return the shape of input ``k``."""
        return self.model.shape(self.inputs[k])

    def refuse(self, why: str) -> MXNetError:
        """Return the error for an unsupported or malformed node."""
        return FormatError(f"{self.model.path}: node {self.name!r} ({self.op}): {why}")

    def make(self, op: str, *inputs: Symbol, **params: object) -> Symbol:
        """Return a node of a weftplan operator."""
        result: Symbol = getattr(sym, op)(*inputs, **params)
        return result


def as_parameter(values: ArrayLike) -> RawArray:
    """Return a parameter's values; float64 becomes float32, as it does for constants in scripts."""
    array = np.asarray(values)
    return array.astype(np.float32) if array.dtype == np.float64 else array


Rule = Callable[[OnnxCall], Any]
RULES: dict[str, Rule] = {}
Constants: TypeAlias = Sequence[RawArray]
"""Inputs of a node that are constant."""
Fold: TypeAlias = Callable[[OnnxCall, Constants], RawArray]
FOLDS: dict[str, Fold] = {}
"""Functions that fold nodes whose inputs are all constant, by operator."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a rule for these operators; a rule returns a symbol, or one per output."""

    def note(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return note
