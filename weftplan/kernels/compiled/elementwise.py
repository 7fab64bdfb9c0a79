"""Formulas of :mod:`weftplan.ops.core.formulas` as compiled loops, fused into a single pass.

For each element, the loop runs the operations of the formula in order and rounds each as NumPy does, so results have
NumPy's bits on every processor. A compiled loop reads its constants when it runs, so formulas that differ only in
constants share it. Any thread may call; only the compiled functions are cached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weftplan.kernels.compiled.exchange.sums import LINE
from weftplan.kernels.compiled.ir import Function
from weftplan.kernels.compiled.jit import Entry, library
from weftplan.ops.core.formulas import TRUTHS, Computation, Formula
from weftplan.ops.core.schema import DType
from weftplan.support import slots
from weftplan.support.addresses import address
from weftplan.support.array_types import RawArray

_ARITHMETIC = {"add": "fadd", "subtract": "fsub", "multiply": "fmul", "divide": "fdiv"}
_COMPARED = {"not_equal": "une", "equal": "oeq", "less": "olt", "less_equal": "ole", "greater": "ogt",
             "greater_equal": "oge"}  # fmt: skip
assert set(_COMPARED) == TRUTHS


Run = Callable[[Sequence[Any], int, int], None]
"""``run(arrays, first, last)`` computes a formula for the elements ``first`` to ``last``; ``first`` is
the first of a cache line."""


def compiled(computation: Computation, dtype: DType) -> Run:
    """Return a function that runs a formula on flat contiguous arrays of ``dtype``, on the calling thread.

    Two arrays of a call may be the same memory, but may not overlap partly.
    """
    entry = _entry(computation.formula, "float" if dtype == np.float32 else "double")
    constants = np.array(computation.constants, dtype)
    size = dtype.itemsize
    numbers = address(constants)

    def run(arrays: Sequence[RawArray], begin: int, end: int) -> None:
        words = np.array([begin * size, end * size, numbers, *map(address, arrays)], np.int64)
        entry(address(words))
        assert constants is not None  # keeps the constants alive as long as this function

    return run


@functools.lru_cache(maxsize=1024)
def _entry(formula: Formula, scalar: str) -> Entry:
    return library(f"elementwise-{scalar}-{formula}", lambda target: [_function(formula, scalar)], ("elementwise",))[
        "elementwise"
    ]


def _function(formula: Formula, scalar: str) -> Function:
    """Return the function ``elementwise(words)``, which computes a formula on a range of bytes.

    The words: first byte, end byte, address of the constants, addresses of the arrays.
    """
    f = Function("elementwise", (("ptr", "words"),), scalar, LINE // (4 if scalar == "float" else 8))
    begin, end, numbers = f.word("%words", 0), f.word("%words", 1), f.pointer("%words", 2)
    pointers = [f.pointer("%words", 3 + i) for i in range(formula.arrays)]
    constants = {
        number: f.broadcast(f.at(numbers, operation.operands[0] * f.size))
        for number, operation in enumerate(formula.operations, formula.arrays)
        if operation.name == "constant"
    }
    used = {value for operation in formula.operations if operation.name != "constant" for value in operation.operands}
    used.update(value for _, value in formula.results)

    def line(load: Callable[[str], str], store: Callable[[str, str], None]) -> None:
        values = dict(constants)
        for i in range(formula.arrays):
            if i in used:
                values[i] = load(pointers[i])
        for number, operation in enumerate(formula.operations, formula.arrays):
            if operation.name != "constant":
                values[number] = _operation(f, operation.name, [values[value] for value in operation.operands])
        for array, value in formula.results:
            store(values[value], pointers[array])

    full_end = f.add(begin, f.value(f"and i64 {f.sub(end, begin)}, {-LINE}"))
    with f.loop(begin, full_end, LINE) as offset:
        line(
            lambda pointer: f.load(f.at(pointer, offset)), lambda value, pointer: f.store(value, f.at(pointer, offset))
        )
    remaining = f.value(f"sdiv exact i64 {f.sub(end, full_end)}, {f.size}")
    with f.when(f.compare("sgt", remaining, 0)):
        mask = f.mask_below(remaining)
        line(
            lambda pointer: f.load_masked(f.at(pointer, full_end), mask),
            lambda value, pointer: f.store_masked(value, f.at(pointer, full_end), mask),
        )
    return f


def _operation(f: Function, name: str, operands: Sequence[str]) -> str:
    a = operands[0]
    if name in _ARITHMETIC:
        return f.binary(_ARITHMETIC[name], *operands)
    if name in _COMPARED:
        return f.value(f"fcmp {_COMPARED[name]} {f.vector} {a}, {operands[1]}")
    if name == "number":
        return f.value(f"uitofp <{f.lanes} x i1> {a} to {f.vector}")
    if name == "negative":
        return f.value(f"fneg {f.vector} {a}")
    if name in ("absolute", "sqrt"):
        return f.function("fabs" if name == "absolute" else "sqrt", a)
    if name == "sign":
        zero = "zeroinitializer"
        sign = _chosen(f, "oeq", a, zero, zero, a)
        sign = _chosen(f, "olt", a, zero, f.constant("-1.0"), sign)
        return _chosen(f, "ogt", a, zero, f.constant("1.0"), sign)
    b = operands[1]
    if name == "at_least":
        return _chosen(f, "olt", a, b, b, a)
    if name == "at_most":
        return _chosen(f, "ogt", a, b, b, a)
    if name == "maximum":
        return _chosen(f, "ugt", a, b, a, b)
    assert name == "minimum", name
    return _chosen(f, "ult", a, b, a, b)


def _chosen(f: Function, how: str, a: str, b: str, chosen: str, otherwise: str) -> str:
    """Emit a selection by lane: ``chosen`` if the comparison holds, else ``otherwise``."""
    holds = f.value(f"fcmp {how} {f.vector} {a}, {b}")
    return f.value(f"select <{f.lanes} x i1> {holds}, {f.vector} {chosen}, {f.vector} {otherwise}")


slots.COMPILED_FORMULA.fill(compiled)
