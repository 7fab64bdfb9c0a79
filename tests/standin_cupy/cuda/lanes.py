"""Lockstep execution of all threads of a launch: a variable is an array with one element per thread.

A statement runs for the threads that reach it and returns the threads that continue. All threads of a block must reach
``__syncthreads()`` together. Blocks run in groups, in an order that does not affect a correct kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.standin_cupy.cuda.memory import Cells, KernelError, Pointer
from tests.standin_cupy.cuda.syntax import CompileException, Function
from tests.standin_cupy.cuda.types import BINARY, FUNCTIONS, common_type, convert, kind_of, number, shifted

LANES = 1 << 16
"""Number of threads that run together."""
_NONE = np.empty(0, np.int64)


def launch(
    functions: Mapping[str, Function], kernel: Function, grid: Sequence[int], block: Sequence[int], given: Sequence[Any]
) -> None:
    """Run every thread of a grid; ``given`` are the arguments as Cells and NumPy numbers."""
    threads, blocks = int(np.prod(block)), int(np.prod(grid))
    step = max(1, LANES // threads)
    for first in range(0, blocks, step):
        Lanes(functions, grid, block, np.arange(first, min(first + step, blocks))).run(kernel, given)


class _Loop:
    def __init__(self) -> None:
        self.broken: list[Any] = []
        self.continued: list[Any] = []


class _Frame:
    """A call's variables, arrays, loops, and return value."""

    def __init__(self, result: Any) -> None:
        self.variables: dict[str, Any] = {}
        self.arrays: dict[str, Pointer] = {}
        self.loops: list[_Loop] = []
        self.result = result


def _together(*parts: Any) -> Any:
    some = [part for part in parts if part.size]
    if len(some) < 2:
        return some[0] if some else _NONE
    return np.sort(np.concatenate(some))


def _spread(values: Any, shape: tuple[int, ...]) -> Any:
    """Broadcast to one value per thread; skip NumPy's slow function if the shape is right already."""
    return values if values.shape == shape else np.broadcast_to(values, shape)


class Lanes:
    """The threads of some blocks of a grid, and the state of their execution."""

    def __init__(
        self, functions: Mapping[str, Function], grid: Sequence[int], block: Sequence[int], blocks: Any
    ) -> None:
        self.functions = functions
        self.threads = int(np.prod(block))
        self.count = len(blocks) * self.threads
        self.lane = np.arange(self.count) + blocks[0] * self.threads
        self.here = np.arange(self.count) // self.threads
        self.epoch = np.zeros(len(blocks), np.int64)
        self.builtin = {
            "threadIdx": self._places(block, np.arange(self.count) % self.threads),
            "blockIdx": self._places(grid, np.repeat(blocks, self.threads)),
            "blockDim": {name: np.array(size, "uint32") for name, size in zip("xyz", block, strict=False)},
            "gridDim": {name: np.array(size, "uint32") for name, size in zip("xyz", grid, strict=False)},
        }
        self.frame = _Frame(None)

    @staticmethod
    def _places(extents: Sequence[int], flat: Any) -> dict[str, Any]:
        places = {}
        for name, size in zip("xyz", extents, strict=False):
            places[name] = (flat % size).astype("uint32")
            flat = flat // size
        return places

    def run(self, kernel: Function, given: Sequence[Any]) -> None:
        """Run the kernel with the arguments ``given``."""
        for parameter, value in zip(kernel.parameters, given, strict=True):
            if isinstance(value, Cells):
                zero = np.zeros(self.count, np.int64)
                self.frame.arrays[parameter.name] = Pointer(value, zero, const=parameter.const)
            else:
                self.frame.variables[parameter.name] = np.full(self.count, value)
        with np.errstate(all="ignore"):
            self.do(kernel.body, np.arange(self.count))

    # -- statements: the threads that continue ------------------------------------------------------------------------

    def do(self, statement: Any, act: Any) -> Any:
        """Run one statement for the threads ``act``; return the threads that continue."""
        return getattr(self, f"_do_{statement[0]}")(statement, act)

    def _do_block(self, statement: Any, act: Any) -> Any:
        for part in statement[1]:
            if not act.size:
                break
            act = self.do(part, act)
        return act

    def _do_do(self, statement: Any, act: Any) -> Any:
        self.value(statement[1], act)
        return act

    def _do_variable(self, statement: Any, act: Any) -> Any:
        _, kind, pointer, name, first = statement
        if pointer:
            actual = self.value(first, act)
            if not isinstance(actual, Pointer):
                raise CompileException(f"{name} is a pointer, and what it is given is none")
            offset = np.zeros(self.count, np.int64)
            offset[act] = actual.offset
            self.frame.arrays[name] = Pointer(actual.cells, offset, const=actual.const)
            return act
        held = self.frame.variables.get(name)
        if held is None or kind_of(held) != kind:
            held = self.frame.variables[name] = np.zeros(self.count, kind)
        if first is not None:
            held[act] = convert(self.value(first, act), kind)
        return act

    def _do_array(self, statement: Any, act: Any) -> Any:
        _, kind, name, length, shared = statement
        if name not in self.frame.arrays:
            owners = len(self.epoch) if shared else self.count
            cells = Cells(
                np.zeros(owners * length, kind),
                f"{'shared' if shared else 'local'} array {name}",
                tracked=shared,
                length=length,
            )
            base = (self.here if shared else np.arange(self.count)) * length
            self.frame.arrays[name] = Pointer(cells, base)
        return act

    def _do_if(self, statement: Any, act: Any) -> Any:
        _, test, yes, no = statement
        true = self.truth(test, act)
        return _together(self.do(yes, act[true]), self.do(no, act[~true]))

    def _do_for(self, statement: Any, act: Any) -> Any:
        _, first, test, step, body = statement
        act = self.do(first, act)
        loop, ended = _Loop(), []
        self.frame.loops.append(loop)
        while act.size:
            true = self.truth(test, act)
            ended.append(act[~true])
            loop.continued = []
            act = _together(self.do(body, act[true]), *loop.continued)
            if step is not None and act.size:
                self.value(step, act)
        self.frame.loops.pop()
        return _together(*ended, *loop.broken)

    def _do_break(self, statement: Any, act: Any) -> Any:
        self.frame.loops[-1].broken.append(act)
        return _NONE

    def _do_continue(self, statement: Any, act: Any) -> Any:
        self.frame.loops[-1].continued.append(act)
        return _NONE

    def _do_return(self, statement: Any, act: Any) -> Any:
        if statement[1] is not None and act.size:
            self.frame.result[act] = convert(self.value(statement[1], act), kind_of(self.frame.result))
        return _NONE

    # -- expressions: one value for each of the threads ---------------------------------------------------------------

    def value(self, tree: Any, act: Any) -> Any:
        """Return the value of an expression for the threads ``act``: one element per thread, or one for all."""
        return getattr(self, f"_of_{tree[0]}")(tree, act)

    def truth(self, tree: Any, act: Any) -> Any:
        """Return a boolean for each of the threads ``act``."""
        return _spread(convert(self.value(tree, act), "bool"), act.shape)

    def _of_number(self, tree: Any, act: Any) -> Any:
        return number(tree[1])

    def _of_name(self, tree: Any, act: Any) -> Any:
        actual = self.frame.variables.get(tree[1])
        if actual is not None:
            return actual[act]
        if tree[1] in ("true", "false"):
            return np.array(tree[1] == "true")
        pointer = self.frame.arrays.get(tree[1])
        if pointer is None:
            raise CompileException(f"no variable is called {tree[1]}")
        return Pointer(pointer.cells, pointer.offset[act], const=pointer.const)

    def _of_member(self, tree: Any, act: Any) -> Any:
        actual = self.builtin[tree[1][1]][tree[2]]
        return actual[act] if actual.ndim else actual

    def _of_unary(self, tree: Any, act: Any) -> Any:
        _, sign, inner = tree
        actual = self.value(inner, act)
        if sign == "!":
            return ~convert(actual, "bool")
        actual = convert(actual, common_type(kind_of(actual), "int32"))
        return {"-": np.negative, "+": np.positive, "~": np.invert}[sign](actual)

    def _of_binary(self, tree: Any, act: Any) -> Any:
        _, sign, left, right = tree
        if sign in ("&&", "||"):
            true = self.truth(left, act).copy()
            remaining = true if sign == "&&" else ~true
            if remaining.any():
                true[remaining] = self.truth(right, act[remaining])
            return true
        a, b = self.value(left, act), self.value(right, act)
        if isinstance(a, Pointer):
            if sign not in "+-":
                raise CompileException(f"{sign} of a pointer")
            moved = convert(b, "int64")
            return Pointer(a.cells, a.offset + (moved if sign == "+" else -moved), const=a.const)
        if sign in ("<<", ">>"):
            return shifted(sign, a, b)
        kind = common_type(kind_of(a), kind_of(b))
        return BINARY[sign](convert(a, kind), convert(b, kind))

    def _of_choose(self, tree: Any, act: Any) -> Any:
        _, test, yes, no = tree
        true = self.truth(test, act)
        parts = [(where, self.value(part, act[where])) for where, part in ((true, yes), (~true, no)) if where.any()]
        if not parts:
            return np.zeros(0, "int32")
        kind = kind_of(parts[0][1])
        second = self.kind(no if parts[0][0] is true else yes, act) if len(parts) == 1 else kind_of(parts[1][1])
        kind = kind if kind == second else common_type(kind, second)
        actual = np.empty(act.shape, kind)
        for where, value in parts:
            actual[where] = convert(value, kind)
        return actual

    def kind(self, tree: Any, act: Any) -> str:
        """Return the type of an expression that no thread evaluates."""
        empty = self.value(tree, act[:0])
        return kind_of(empty)

    def _of_cast(self, tree: Any, act: Any) -> Any:
        return convert(self.value(tree[2], act), tree[1])

    def _place(self, tree: Any, act: Any) -> tuple[Pointer, Any]:
        pointer = self.value(tree[1], act)
        if not isinstance(pointer, Pointer):
            raise CompileException("only pointers and arrays have elements")
        where = convert(self.value(tree[2], act), "int64")
        length = pointer.cells.length
        if length is not None and act.size and (where.min() < 0 or where.max() >= length):
            raise KernelError(f"a thread uses element {where.min()} to {where.max()} of {pointer.cells.what}[{length}]")
        return pointer, _spread(pointer.offset + where, act.shape)

    def _of_index(self, tree: Any, act: Any) -> Any:
        pointer, where = self._place(tree, act)
        return pointer.cells.load(where, self.lane[act], self.epoch[self.here[act]], self.threads)

    def _of_assign(self, tree: Any, act: Any) -> Any:
        _, target, source = tree
        value = self.value(source, act)
        if target[0] == "index":
            pointer, where = self._place(target, act)
            if pointer.const:
                raise CompileException(f"{pointer.cells.what} is const")
            value = _spread(convert(value, kind_of(pointer.cells.values)), act.shape)
            pointer.cells.store(where, value, self.lane[act], self.epoch[self.here[act]], self.threads)
            return value
        held = self.frame.variables.get(target[1]) if target[0] == "name" else None
        if held is None:
            raise CompileException(f"nothing can be assigned to {target}")
        value = convert(value, kind_of(held))
        held[act] = value
        return value

    def _of_after(self, tree: Any, act: Any) -> Any:
        before = self.value(tree[1], act)
        self.value(tree[2], act)
        return before

    def _of_call(self, tree: Any, act: Any) -> Any:
        _, name, inputs = tree
        if name == "__syncthreads":
            return self._barrier(act)
        if name == "atomicAdd":
            pointer, value = (self.value(part, act) for part in inputs)
            added = convert(value, kind_of(pointer.cells.values))
            return pointer.cells.add(pointer.offset, _spread(added, act.shape))
        values = [self.value(part, act) for part in inputs]
        if name == "__builtin_assume_aligned":
            return values[0].aligned(int(values[1]))
        if name in FUNCTIONS:
            return FUNCTIONS[name](*values)
        function = self.functions.get(name)
        if function is None:
            raise CompileException(f"no function is called {name}")
        return self._called(function, values, act)

    def _called(self, function: Function, values: Sequence[Any], act: Any) -> Any:
        outer, self.frame = (
            self.frame,
            _Frame(None if function.result == "void" else np.zeros(self.count, function.result)),
        )
        for parameter, value in zip(function.parameters, values, strict=True):
            if parameter.pointer:
                offset = np.zeros(self.count, np.int64)
                offset[act] = value.offset
                const = value.const or parameter.const
                self.frame.arrays[parameter.name] = Pointer(value.cells, offset, const=const)
            else:
                held = self.frame.variables[parameter.name] = np.zeros(self.count, parameter.type)
                held[act] = convert(value, parameter.type)
        self.do(function.body, act)
        result, self.frame = self.frame.result, outer
        return np.zeros(act.shape, "int32") if result is None else result[act]

    def _barrier(self, act: Any) -> Any:
        blocks, counts = np.unique(self.here[act], return_counts=True)
        if (counts != self.threads).any():
            raise KernelError("__syncthreads() is reached by some threads of a block only")
        self.epoch[blocks] += 1
        return np.zeros(act.shape, "int32")
