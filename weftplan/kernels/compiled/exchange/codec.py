"""Gradient compression as compiled loops, bit-compatible with ``kvstore/compression.py``.

A step packs sixteen elements into whole bytes; the caller handles the remainder. Each lane of a vector computes a code,
shifted to its position in its byte, and one multiplication adds the lanes of a byte. Two-bit codes are unpacked by a
table look-up in a register if the processor has an instruction for that. Any thread may call; only compiled functions
are cached.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weftplan.kernels.compiled.exchange.sums import LINE, MAX_ARRAYS
from weftplan.kernels.compiled.ir import Function
from weftplan.kernels.compiled.jit import Entry, library
from weftplan.kernels.compiled.target import Target, host
from weftplan.ops.core.implementations import PACK_STEP as STEP
from weftplan.ops.core.implementations import PAST, Array
from weftplan.support import slots
from weftplan.support.addresses import address
from weftplan.support.slots import Work


def compiled_pack(gradient: Array, residual: Array, packed: Array, bits: int, threshold: float) -> Work | None:
    """Return a function that packs elements ``first:last``; None if there is no compiled kernel for it.

    Args:
        gradient, residual: contiguous float32 arrays of one dimension.
        packed: receives the packed bytes.
        bits: 1 or 2, per element.
    """
    if not _fits(gradient, residual):
        return None
    entry = library(f"pack-{bits}", lambda target: [_pack(bits)], ("pack",))["pack"]
    return _work(entry, threshold, [gradient, residual, packed])


def compiled_unpack(packed: Sequence[Array], out: Array, bits: int, threshold: float) -> Work | None:
    """Return a function that unpacks all arrays and writes their sum, from left to right, to ``out[first:last]``.

    Return None if there is no compiled kernel for it. ``bits`` and ``threshold``: as for :func:`compiled_pack`.
    """
    count = len(packed)
    if not _fits(out) or not 1 <= count <= MAX_ARRAYS:
        return None
    entries = library(
        f"unpack-{bits}-{count}",
        lambda target: [_unpack(bits, count, _looks_up(target), past=past) for past in (False, True)],
        ("unpack", "unpack_past"),
    )
    past = out.nbytes >= PAST and address(out) % LINE == 0
    return _work(entries["unpack_past" if past else "unpack"], threshold, [out, *packed])


def _fits(*arrays: Array) -> bool:
    return not isinstance(host(), str) and all(array.dtype == np.float32 for array in arrays)


def _work(entry: Entry, threshold: float, arrays: Sequence[Array]) -> Work:
    words = np.array([0, 0, 0, *map(address, arrays)], np.int64)
    words[2:3].view(np.float32)[0] = threshold

    def work(begin: int, end: int) -> None:
        assert begin % STEP == end % STEP == 0, (begin, end)
        range_words = words.copy()
        range_words[:2] = begin, end
        entry(address(range_words))

    return work


_INTS = f"<{STEP} x i32>"
_FLAGS = f"<{STEP} x i1>"


def _begin(name: str) -> tuple[Function, str, str, str, str]:
    """Return a new function ``name(words)``, and the values of its first three words and of the negative threshold.

    The words: first element, end element, threshold, addresses of arrays.
    """
    f = Function(name, (("ptr", "words"),), "float", STEP)
    up = f.broadcast(f.at("%words", 16))
    return f, f.word("%words", 0), f.word("%words", 1), up, f.value(f"fneg {f.vector} {up}")


def _shifts(bits: int) -> list[int]:
    """Return the shift of each lane's code within its byte, whose first code is in the highest bits."""
    share = 8 // bits
    return [8 - bits * (lane % share + 1) for lane in range(STEP)]


def _numbers(values: Sequence[int], kind: str = "i32") -> str:
    return f"<{', '.join(f'{kind} {value}' for value in values)}>"


def _same(f: Function, value: str) -> str:
    return f"<{', '.join(f'float {value}' for _ in range(f.lanes))}>"


def _pack(bits: int) -> Function:
    def coded(flags: str, code: int, otherwise: str) -> str:
        shifted = _numbers([code << shift for shift in _shifts(bits)])
        return f.value(f"select {_FLAGS} {flags}, {_INTS} {shifted}, {_INTS} {otherwise}")

    f, begin, end, up, down = _begin("pack")
    gradient, residual, packed = (f.pointer("%words", 3 + i) for i in range(3))
    with f.loop(begin, end, STEP) as index:
        offset = f.mul(index, 4)
        residual_at = f.at(residual, offset)
        residue = f.binary("fadd", f.load(residual_at), f.load(f.at(gradient, offset)))
        if bits == 2:
            above = f.value(f"fcmp oge {f.vector} {residue}, {up}")
            below = f.value(f"fcmp ole {f.vector} {residue}, {down}")
            for flags, sent, nothing in ((above, up, "0.0"), (below, down, "-0.0")):  # zeros with the signs of NumPy's
                correction = f.value(f"select {_FLAGS} {flags}, {f.vector} {sent}, {f.vector} {_same(f, nothing)}")
                residue = f.binary("fsub", residue, correction)
            codes = coded(above, 3, coded(below, 2, "zeroinitializer"))
        else:
            above = f.value(f"fcmp ogt {f.vector} {residue}, {up}")
            correction = f.value(
                f"select {_FLAGS} {above}, {f.vector} {_same(f, '-1.0')}, {f.vector} {_same(f, '1.0')}"
            )
            residue = f.binary("fadd", residue, correction)
            codes = coded(above, 1, "zeroinitializer")
        f.store(residue, residual_at)
        # The lanes of a byte are the bytes of one word; a multiplication by ones puts their sum in the highest byte.
        small = f.value(f"trunc {_INTS} {codes} to <{STEP} x i8>")
        share = 8 // bits
        word, count = f"i{8 * share}", STEP // share
        words = f.value(f"bitcast <{STEP} x i8> {small} to <{count} x {word}>")
        all_bytes = int("01" * share, 16)
        summed = f.value(f"mul <{count} x {word}> {words}, {_numbers([all_bytes] * count, word)}")
        high = f.value(f"lshr <{count} x {word}> {summed}, {_numbers([8 * share - 8] * count, word)}")
        packed_bytes = f.value(f"trunc <{count} x {word}> {high} to <{count} x i8>")
        target = f.at(packed, f.value(f"lshr exact i64 {index}, {3 if bits == 1 else 2}"))
        f.emit(f"store <{count} x i8> {packed_bytes}, ptr {target}, align 1")
    return f


def _looks_up(target: Target) -> int:
    """Return the vector bits of the processor's instruction for table look-ups; 0 if it has none."""
    return target.bits if target.bits in _LOOK_UP and target.register else 0


_LOOK_UP = {256: "llvm.x86.avx.vpermilvar.ps.256", 512: "llvm.x86.avx512.vpermilvar.ps.512"}


def _chosen(f: Function, table: str, numbers: str, lanes: int, register_bits: int) -> str:
    """Emit a table look-up: for each of :data:`STEP` lanes, the element that the lowest two bits of ``numbers`` select.

    ``table`` is a vector of ``lanes`` floats that repeats four elements. The instruction of x86-64 ignores other bits.
    """
    name = _LOOK_UP[register_bits]
    floats, ints = f"<{lanes} x float>", f"<{lanes} x i32>"
    f.declare(f"declare {floats} @{name}({floats}, {ints})")
    parts = []
    for begin in range(0, STEP, lanes):
        mask = _numbers(range(begin, begin + lanes))
        part = f.value(f"shufflevector {_INTS} {numbers}, {_INTS} poison, <{lanes} x i32> {mask}")
        parts.append(f.value(f"call {floats} @{name}({floats} {table}, {ints} {part})"))
    if len(parts) == 1:
        return parts[0]
    every = _numbers(range(STEP))
    return f.value(f"shufflevector {floats} {parts[0]}, {floats} {parts[1]}, <{STEP} x i32> {every}")


def _unpack(bits: int, count: int, register_bits: int, *, past: bool) -> Function:
    f, begin, end, up, down = _begin("unpack_past" if past else "unpack")
    out, *sources = (f.pointer("%words", 3 + i) for i in range(count + 1))
    nbytes = STEP * bits // 8
    word = f"i{8 * nbytes}"
    share = 8 // bits
    shifts = [8 * (lane // share) + shift for lane, shift in enumerate(_shifts(bits))]
    lanes, table = register_bits // 32, ""
    if bits == 2 and register_bits:  # the table is indexed by the code; code 1 is never sent
        pair = f.shuffle(down, up, [0, STEP] * (STEP // 2))
        numbers = _numbers([0, 0, STEP, STEP + 1] * (lanes // 4))
        table = f.value(f"shufflevector {f.vector} zeroinitializer, {f.vector} {pair}, <{lanes} x i32> {numbers}")

    def values(source: str, index: str) -> str:
        at = f.at(source, f.value(f"lshr exact i64 {index}, {3 if bits == 1 else 2}"))
        loaded = f.value(f"load {word}, ptr {at}, align 1")
        wide = loaded if bits == 2 else f.value(f"zext {word} {loaded} to i32")
        seed = f.value(f"insertelement {_INTS} poison, i32 {wide}, i64 0")
        every = f.value(f"shufflevector {_INTS} {seed}, {_INTS} poison, <{STEP} x i32> zeroinitializer")
        moved = f.value(f"lshr {_INTS} {every}, {_numbers(shifts)}")
        if table:
            return _chosen(f, table, moved, lanes, register_bits)
        code = f.value(f"and {_INTS} {moved}, {_numbers([2**bits - 1] * STEP)}")

        def sends(number: int) -> str:
            return f.value(f"icmp eq {_INTS} {code}, {_numbers([number] * STEP)}")

        if bits == 1:
            return f.value(f"select {_FLAGS} {sends(1)}, {f.vector} {_same(f, '1.0')}, {f.vector} {_same(f, '-1.0')}")
        lower = f.value(f"select {_FLAGS} {sends(2)}, {f.vector} {down}, {f.vector} zeroinitializer")
        return f.value(f"select {_FLAGS} {sends(3)}, {f.vector} {up}, {f.vector} {lower}")

    with f.loop(begin, end, STEP) as index:
        total = values(sources[0], index)
        for source in sources[1:]:
            total = f.binary("fadd", total, values(source, index))
        (f.store_past if past else f.store)(total, f.at(out, f.mul(index, 4)))
    if past:
        f.fence()
    return f


slots.COMPILED_PACK.fill(compiled_pack)
slots.COMPILED_UNPACK.fill(compiled_unpack)
