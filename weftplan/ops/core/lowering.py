"""Lowering: from expressions to Python functions that call the array module, with the scratch that they need.

The allocator gives each result a slot: the memory of an output, a state or scratch. An output may be the memory of
certain inputs, so it is free only after the last use of these. A result takes, in this order, its own output, the slot
of an operand that is not used again, free scratch, a free output or state, new scratch. States are replaced in place.
Of several outputs none holds another value: these would be left in each other's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weftplan.ops.core.expression import (
    BOOL,
    UFUNCS,
    Expr,
    FormulaError,
    Kind,
    dtype_of,
    operations,
    value_of,
)
from weftplan.ops.core.floats import is_float
from weftplan.ops.core.schema import DType, Params, Shape
from weftplan.support.array_types import ArrayModule

Step = Callable[..., None]
"""``step(*inputs, *outputs, *scratch)`` computes a formula on arrays, for example on one block."""


@dataclass(frozen=True, slots=True)
class LoweredFormula:
    """A lowered formula: its scratch, and the function that binds it.

    Attributes:
        arrays: names of the inputs.
        bind: ``bind(xp, *constants)`` returns the :data:`Step`.
        constants: numbers and scalars that a call computes once.
        scratch: (dtype, names of the inputs whose shapes broadcast to that of the array) of each scratch array.
        single: (ufunc, operands, keyword arguments) if the formula is one call of a ufunc; an operand is the name of an
            input or an index into ``constants``.
    """

    arrays: tuple[str, ...]
    bind: Callable[..., Step]
    constants: tuple[Any, ...]
    scratch: tuple[tuple[DType, frozenset[str]], ...]
    single: tuple[str, tuple[str | int, ...], dict[str, object]] | None

    def step(self, xp: ArrayModule, params: Params) -> Step:
        """Return the function of arrays for these parameters."""
        return self.bind(xp, *[value_of(constant, params) for constant in self.constants])

    def scratch_in(self, block: Shape, shapes: Mapping[str, Shape]) -> list[tuple[Shape, DType]]:
        """Return the shape and dtype of each scratch array for a block of inputs of these shapes, which broadcast."""

        def needed(reads: frozenset[str]) -> Shape:
            parts = {tuple(map(min, shapes.get(name, block), block)) for name in reads}
            return block if block in parts or not parts else np.broadcast_shapes(*parts)

        return [(needed(reads), dtype) for dtype, reads in self.scratch]

    def ufunc(self, xp: ArrayModule) -> Step | None:
        """Return the ufunc that the formula is, of the inputs in order and the output; None if it is more or less."""
        # NumPy 2.4 deprecates a third positional argument of maximum and minimum.
        if self.single is None or self.single[0] in ("maximum", "minimum") or self.single[1:] != (self.arrays, {}):
            return None
        return getattr(xp, self.single[0])  # type: ignore[no-any-return]


def is_real(name: str) -> bool:
    """Return whether NumPy's function has no loop for integers."""
    return all(loop[-1] in "efdgFDGO" for loop in getattr(np, name).types)


class _Lowering:
    """The state of one lowering: values, slots and lines; the arguments are those of :func:`lower`.

    ``holder`` maps a slot to the number of the live value in it, and ``slot`` the number of a value to its slot.
    """

    def __init__(
        self,
        results: Mapping[str, object],
        dtypes: Mapping[str, DType],
        overlaps: Mapping[str, frozenset[str]],
        dtype: DType,
        compute: Kind,
        numbers: frozenset[str],
    ) -> None:
        self.dtypes, self.overlaps, self.dtype, self.compute = dtypes, overlaps, dtype, compute
        self.numbers = numbers
        self.same: dict[int, Expr] = {}
        """Casts to the dtype that their operand has, with the operand."""
        self.operations: list[Expr] = []
        for expr in operations(results.values()):
            operand = self.resolved(expr.args[0])
            if expr.op == "cast" and isinstance(operand, Expr) and self.kind(expr) == self.kind(operand):
                self.same[expr.number] = operand
            else:
                self.operations.append(expr)
        self.results = {name: self.resolved(value) for name, value in results.items()}
        end = len(self.operations)
        self.last_use: dict[int, int] = {}
        """The last operation that reads a value; for a result, the end."""
        self.last_read: dict[str, int] = {}
        """The last operation that reads an input."""
        self.later_reads: set[int] = set()
        for k, expr in enumerate(self.operations):
            for operand in self.operands(expr):
                self.later_reads.add(operand.number)
                self._read(operand, k)
        for value in self.results.values():
            if isinstance(value, Expr):
                self._read(value, end)
        outputs = [name for name in results if name not in overlaps[name]]
        self.spare = [name for name in results if len(outputs) == 1 or name not in outputs]
        """The outputs and states that may hold other values."""
        self.slot: dict[int, str] = {}
        self.holder: dict[str, int] = {}
        self.scratch: dict[str, tuple[DType, set[str]]] = {}
        self.reads: dict[int, set[str]] = {}
        self.lines: list[str] = []
        self.constants: list[Any] = []
        self.namespace: dict[str, object] = {}
        self.single: tuple[str, tuple[str | int, ...], dict[str, object]] | None = None

    def _read(self, operand: Expr, k: int) -> None:
        self.last_use[operand.number] = k
        if operand.op == "input":
            self.last_read[operand.args[0]] = k

    def resolved(self, operand: object) -> object:
        """Return the value that ``operand`` is, without casts that change nothing."""
        return self.same.get(operand.number, operand) if isinstance(operand, Expr) else operand

    def operands(self, expr: Expr) -> list[Expr]:
        """Return the operands of an operation that are arrays."""
        arguments = [] if expr.op == "input" else map(self.resolved, expr.args)
        return [a for a in arguments if isinstance(a, Expr)]

    def kind(self, value: Expr) -> DType:
        """Return the dtype that holds a value, unless the value is rounded into an output."""
        if value.op == "input":
            return self.dtypes[value.args[0]]
        if value.kind != "default":
            return dtype_of(value.kind, self.dtype)
        return BOOL if value.is_truth else dtype_of(self.compute, self.dtype)

    def dtype_at(self, slot: str) -> DType:
        """Return the dtype of a slot."""
        return self.scratch[slot][0] if slot in self.scratch else self.dtypes[slot]

    def text(self, operand: object) -> str:
        """Return the name of an array or of a new constant."""
        operand = self.resolved(operand)
        if isinstance(operand, Expr):
            return str(operand.args[0]) if operand.op == "input" else self.slot[operand.number]
        self.constants.append(operand)
        return f"c{len(self.constants) - 1}"

    def choose(self, expr: Expr, k: int) -> str:
        """Return the slot for the result of operation ``k``, and update the holders of slots."""
        # These operands are read after the first write of the result.
        exposed = expr.args[:2] if expr.op == "select" else expr.args[1:] if expr.op == "call" else ()
        barred = {self.text(operand) for operand in exposed if isinstance(operand, Expr)}
        dying = {
            self.slot[a.number]: a.number
            for a in self.operands(expr)
            if a.op != "input" and self.last_use[a.number] <= k
        }
        reads = self.reads[expr.number] = set()
        for operand in self.operands(expr):
            reads |= {operand.args[0]} if operand.op == "input" else self.reads[operand.number]
        if not reads:
            reads |= self.numbers  # a constant broadcasts to all other values
        slot = self._slot(expr, k, [name for name in dying if name not in barred], barred, self.is_small(reads))
        for name, number in dying.items():
            if self.holder.get(name) == number:
                del self.holder[name]
        self.holder[slot] = expr.number
        self.slot[expr.number] = slot
        if slot in self.scratch:
            self.scratch[slot][1].update(reads)
        else:
            reads.add(slot)
        return slot

    def is_small(self, reads: set[str]) -> bool:
        """Return whether a value depends on inputs of few elements alone."""
        return bool(reads) and reads <= self.numbers

    def _slot(self, expr: Expr, k: int, dying: Sequence[str], barred: set[str], small: bool) -> str:
        wide = self.kind(expr)

        def is_free(name: str) -> bool:
            inputs = self.overlaps[name]
            return (
                name not in barred
                and (name not in self.holder or name in dying)
                and not inputs & barred
                and all(self.last_read.get(a, -1) <= k for a in inputs)
            )

        def fits(name: str) -> bool:
            return small == self.is_small(self.scratch[name][1])

        outputs = [name for name, value in self.results.items() if value is expr]
        for name in () if small else outputs:
            # These values must not be rounded when they are written.
            exact = expr.op in ("select", "clip") or expr.number in self.later_reads or expr.kind != "default"
            if is_free(name) and (self.dtypes[name] == wide or not exact):
                return name
        for name in dying:
            if self.dtype_at(name) == wide and (fits(name) if name in self.scratch else not small and is_free(name)):
                return name
        for name, (held, _) in self.scratch.items():
            if held == wide and name not in self.holder and fits(name):
                return name
        for name in () if small else self.spare:
            if self.dtypes[name] == wide and is_free(name) and not outputs:
                return name
        name = f"t{len(self.scratch)}"
        self.scratch[name] = (wide, set())
        return name

    def emit(self, k: int, expr: Expr) -> None:
        """Add the lines of operation ``k``."""
        arguments = [self.text(operand) for operand in expr.args]
        held = [self.dtype_at(self.text(operand)) for operand in self.operands(expr)]
        target = self.choose(expr, k)
        if expr.op == "cast":
            self.lines.append(f"xp.copyto({target}, {arguments[0]}, casting='unsafe')")
        elif expr.op == "select":
            if arguments[2] != target:
                self.lines.append(f"xp.copyto({target}, {arguments[2]})")
            words = ", casting='unsafe'" if self.dtype_at(target) == BOOL else ""  # a number need not be a bool
            self.lines.append(f"xp.copyto({target}, {arguments[1]}{words}, where={arguments[0]})")
        elif expr.op == "clip":
            self.lines.append(f"xp.clip({', '.join(arguments)}, out={target})")
        elif expr.op == "call":
            name = f"f{len(self.namespace)}"
            self.namespace[name] = expr.function
            self.lines.append(f"{name}(xp, {', '.join([*arguments, target])})")
        else:
            options = self.options(expr, held, self.dtype_at(target))
            words = "".join(f", {key}={'float' if value is float else repr(value)}" for key, value in options.items())
            # A position costs less time than a name, but NumPy 2.4 deprecates it for extrema.
            result = target if not words and expr.op not in ("maximum", "minimum") else f"out={target}"
            self.lines.append(f"xp.{expr.op}({', '.join(arguments)}, {result}{words})")
            if len(self.operations) == 1:
                operands = [
                    name if isinstance(a, Expr) else int(name[1:]) for name, a in zip(arguments, expr.args, strict=True)
                ]
                self.single = (expr.op, tuple(operands), options)

    def options(self, expr: Expr, held: Sequence[DType], target: DType) -> dict[str, object]:
        """Return the keyword arguments of a function for operands and a result of these dtypes."""
        if expr.is_truth:
            return {} if target == BOOL or is_float(target) else {"casting": "unsafe"}
        is_refused = target == BOOL and expr.op in ("subtract", "negative", "sign")  # by NumPy, for bools
        # NumPy would compute int8 in float16.
        if not is_float(target) and (expr.as_float or is_real(expr.op) or is_refused):
            return {"dtype": float, "casting": "unsafe"}
        has_loop = is_float(target) or (target.kind in "iu" and len(held) == len(expr.args))  # a number may be 0.5
        is_exact = has_loop and set(held) == {target}
        return {} if is_exact else {"casting": "unsafe"}


def lower(
    results: Mapping[str, object],
    arrays: Sequence[str],
    dtypes: Mapping[str, DType],
    overlaps: Mapping[str, frozenset[str]],
    *,
    dtype: DType,
    compute: Kind = None,
    numbers: frozenset[str] = frozenset(),
) -> LoweredFormula:
    """Return the program that writes ``results``: expressions or numbers by the names of outputs and states.

    Args:
        arrays: names of the arrays in the order of the step's arguments.
        dtypes: dtype of every array.
        overlaps: for each name in ``results`` the inputs whose memory it may be; a state is such an input itself.
        dtype: the dtype that :data:`Kind` refers to.
        compute: kind of the results that do not state their own.
        numbers: names of inputs of few elements; values that depend on them alone, and constants, have scratch apart.
    """
    low = _Lowering(results, dtypes, overlaps, dtype, compute, numbers)
    for k, expr in enumerate(low.operations):
        if expr.op not in UFUNCS and expr.op not in ("cast", "select", "clip", "call"):
            raise FormulaError(f"unknown function {expr.op!r}")
        low.emit(k, expr)
    copies = []
    for name, value in low.results.items():
        source = low.text(value)
        if not isinstance(value, Expr):
            copies.append(f"{name}.fill({source})")
        elif source != name:
            copies.append(f"if {source} is not {name}: xp.copyto({name}, {source}, casting='unsafe')")
    lines = [f"def bind({', '.join(['xp', *(f'c{k}' for k in range(len(low.constants)))])}):"]
    lines.append(f"    def step({', '.join([*arrays, *low.scratch])}):")
    lines += [f"        {line}" for line in [*low.lines, *copies]]
    lines.append("    return step")
    namespace: dict[str, Any] = dict(low.namespace)
    exec(compile("\n".join(lines), "<formula>", "exec"), namespace)
    scratch = tuple((held, frozenset(reads)) for held, reads in low.scratch.values())
    single = low.single if not copies and not scratch and len(results) == 1 else None
    inputs = tuple([name for name in arrays if name not in results])
    return LoweredFormula(inputs, namespace["bind"], tuple(low.constants), scratch, single)
