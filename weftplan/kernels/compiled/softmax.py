"""Compiled implementation of SoftmaxOutput, which reads each row from memory once.

A row's exponentials are summed in vectors of one length and in one order on every processor, so bits depend neither on
the width of registers nor on how rows are cut. Any worker may call the kernel: it writes only to its arguments and
needs no scratch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np

from weftplan.kernels.compiled.exchange.sums import LINE
from weftplan.kernels.compiled.ir import Function
from weftplan.kernels.compiled.jit import Entry, library
from weftplan.kernels.compiled.offset_tables import KernelArguments
from weftplan.kernels.compiled.parts import count, in_parts
from weftplan.kernels.compiled.replay import Call, RepeatedKernel, holding, nothing
from weftplan.kernels.compiled.target import Target, host
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.schema import Arrays, OpContext, Params
from weftplan.ops.nn.softmax_output import as_rows_of
from weftplan.support.addresses import address
from weftplan.support.array_types import RawArray

WORDS = ("x", "y", "first", "last", "classes", "row")
"""Argument words of a call: rows ``first`` to ``last`` of ``classes`` elements, which are ``row`` bytes apart."""
LEAST = 1 << 14
"""Minimum elements of a call; for fewer, loading the compiled kernel costs more than it saves."""
LEAST_CLASSES = 64
"""Minimum classes; fewer do not fill the :data:`_BESIDE` vectors of partial sums."""
LITTLE, FEW = 1 << 15, 1 << 19
"""Minimum elements of a part for a helper that is awake, and of a part that is worth waking a helper for."""
_BESIDE = 4
"""Number of vectors of partial sums."""
_MAGIC = 1.5 * 2**23
"""Adding this to a small float32 rounds it to an integer, which the low bits of the sum contain."""
_LEAST_POWER = -126 * math.log(2)
"""The exponential of a smaller number counts as 0."""


def entry(target: Target | None = None) -> Entry:
    """Return the compiled function ``softmax``."""
    return library("softmax", lambda _: [_function()], ("softmax",), target)["softmax"]


def _number(value: float) -> str:
    """Return ``value``, rounded to float32, in LLVM's notation."""
    (bits,) = struct.unpack("<Q", struct.pack("<d", float(np.float32(value))))
    return f"0x{bits:016X}"


def power(f: Function, x: str) -> str:
    """Emit exp(x) for elements that are at most 0; NaN stays NaN.

    With x = n log 2 + r, an integer n and abs(r) <= log(2) / 2, exp(r) is approximated by a polynomial of eight terms,
    accurate to a bit or two, and n is added to the exponent.
    """
    kind = f"<{f.lanes} x i32>"
    lanes = f"<{f.lanes} x i1>"
    least = f.constant(_number(_LEAST_POWER))
    small = f.value(f"fcmp olt {f.vector} {x}, {least}")
    clamped = f.value(f"select {lanes} {small}, {f.vector} {least}, {f.vector} {x}")
    shifted = f.fma(clamped, f.constant(_number(1 / math.log(2))), f.constant(_number(_MAGIC)))
    exponent = f.binary("fsub", shifted, f.constant(_number(_MAGIC)))
    high = float(np.float32(round(math.log(2) * 2**9) / 2**9))  # times a whole number it is exact
    fraction = f.fma(exponent, f.constant(_number(-high)), clamped)
    fraction = f.fma(exponent, f.constant(_number(high - math.log(2))), fraction)
    total = f.constant(_number(1 / math.factorial(7)))
    for k in range(6, -1, -1):
        total = f.fma(total, fraction, f.constant(_number(1 / math.factorial(k))))
    bits = f.value(f"bitcast {f.vector} {shifted} to {kind}")
    moved = f.value(f"shl {kind} {bits}, <{', '.join(['i32 23'] * f.lanes)}>")
    scale = f.value(f"add {kind} {moved}, <{', '.join([f'i32 {127 << 23}'] * f.lanes)}>")
    value = f.binary("fmul", total, f.value(f"bitcast {kind} {scale} to {f.vector}"))
    return f.value(f"select {lanes} {small}, {f.vector} zeroinitializer, {f.vector} {value}")


def _larger(f: Function, a: str, b: str) -> str:
    above = f.value(f"fcmp ogt {f.vector} {a}, {b}")
    return f.value(f"select <{f.lanes} x i1> {above}, {f.vector} {a}, {f.vector} {b}")


def _function() -> Function:
    """Return the function ``softmax(words)``, which computes the softmax of the rows that :data:`WORDS` describes."""
    f = Function("softmax", (("ptr", "words"),), "float", LINE // 4)
    x, y = f.pointer("%words", 0), f.pointer("%words", 1)
    begin_row, end_row, classes, row_bytes = (f.word("%words", k) for k in range(2, 6))
    wide = LINE * _BESIDE
    nbytes = f.mul(classes, 4)
    wide_bytes = f.value(f"and i64 {nbytes}, {-wide}")
    lines = f.value(f"and i64 {nbytes}, {-LINE}")
    remainder = f.value(f"sdiv exact i64 {f.sub(nbytes, lines)}, 4")
    mask, has_remainder = f.mask_below(remainder), f.compare("sgt", remainder, 0)
    lanes = f"<{f.lanes} x i1>"
    low = f.constant("0xFFF0000000000000")
    partials = [f.local(f.vector) for _ in range(_BESIDE)]

    def each_line(row: str, what: Callable[[str, str, str | None], None]) -> None:
        """Emit ``what(address, slot of its partial result, mask)`` for every line of a row; None: a whole line."""
        with f.loop(0, wide_bytes, wide) as at:
            for k, slot in enumerate(partials):
                what(f.at(f.at(row, at), k * LINE), slot, None)
        with f.loop(wide_bytes, lines, LINE) as at:
            what(f.at(row, at), partials[0], None)
        with f.when(has_remainder):
            what(f.at(row, lines), partials[1], mask)

    def gathered(how: Callable[[str, str], str]) -> str:
        values = [f.load(slot) for slot in partials]
        return how(how(values[0], values[1]), how(values[2], values[3]))

    with f.loop(begin_row, end_row) as number:
        moved = f.mul(number, row_bytes)
        source, result = f.at(x, moved), f.at(y, moved)
        for slot in partials:
            f.store(low, slot)

        def seen(vector_at: str, slot: str, lanes_mask: str | None) -> None:
            value = f.load(vector_at) if lanes_mask is None else f.load_masked(vector_at, lanes_mask)
            if lanes_mask is not None:
                value = f.value(f"select {lanes} {lanes_mask}, {f.vector} {value}, {f.vector} {low}")
            f.store(_larger(f, value, f.load(slot)), slot)

        each_line(source, seen)
        largest = gathered(lambda a, b: _larger(f, a, b))
        step = f.lanes // 2
        while step:
            turned = f.shuffle(largest, "poison", [(lane + step) % f.lanes for lane in range(f.lanes)])
            largest = _larger(f, largest, turned)
            step //= 2
        for slot in partials:
            f.store("zeroinitializer", slot)
        distance = f.sub(f.value(f"ptrtoint ptr {result} to i64"), f.value(f"ptrtoint ptr {source} to i64"))

        def raised(vector_at: str, slot: str, lanes_mask: str | None) -> None:
            value = f.load(vector_at) if lanes_mask is None else f.load_masked(vector_at, lanes_mask)
            value = power(f, f.binary("fsub", value, largest))
            target = f.at(vector_at, distance)
            if lanes_mask is None:
                f.store(value, target)
            else:
                f.store_masked(value, target, lanes_mask)
                value = f.value(f"select {lanes} {lanes_mask}, {f.vector} {value}, {f.vector} zeroinitializer")
            f.store(f.binary("fadd", f.load(slot), value), slot)

        each_line(source, raised)
        total = f.splat(f.total(gathered(lambda a, b: f.binary("fadd", a, b))))
        factor = f.binary("fdiv", f.constant("1.0"), total)

        def scaled(vector_at: str, slot: str, lanes_mask: str | None) -> None:
            if lanes_mask is None:
                f.store(f.binary("fmul", f.load(vector_at), factor), vector_at)
            else:
                f.store_masked(f.binary("fmul", f.load_masked(vector_at, lanes_mask), factor), vector_at, lanes_mask)

        each_line(result, scaled)
    return f


def call(x: RawArray, y: RawArray, rows: int, classes: int, target: Target | None = None) -> Call:
    """Return a call that writes the softmax of every row of ``x`` to ``y``, which may be ``x``."""
    words = np.array([address(x), address(y), 0, rows, classes, classes * 4], np.int64)
    size = rows * classes
    parts = count(size, LITTLE, rows)
    work = in_parts(entry(target), KernelArguments(WORDS, words), rows, parts, light=size // parts < FEW)
    return holding(work, x, y)


def _forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
    if outputs[0] is None:
        return nothing
    rows, classes, _ = as_rows_of(params, inputs[0].shape)
    return call(inputs[0], outputs[0], rows, classes)


def _refusal(params: Params, inputs: Specs, outputs: Specs) -> str:
    target = host()
    if isinstance(target, str):
        return target
    if inputs[0].dtype != np.float32 or outputs[0].dtype != np.float32:
        return f"compiled for float32, not {inputs[0].dtype}"
    if as_rows_of(params, inputs[0].shape)[2] != 1 or 0 in inputs[0].shape:
        return "classes do not lie side by side"
    return ""


def _slower(params: Params, inputs: Specs, outputs: Specs) -> str:
    rows, classes, _ = as_rows_of(params, inputs[0].shape)
    return "small arrays" if rows * classes < LEAST or classes < LEAST_CLASSES else ""


provide(
    "SoftmaxOutput",
    Implementation(
        name="native",
        kernel=RepeatedKernel(_forward),
        workspace=lambda params, inputs, outputs: 0,
        refusal=_refusal,
        slower=_slower,
    ),
)
