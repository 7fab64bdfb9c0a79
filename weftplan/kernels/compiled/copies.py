"""Copies that prepare compiled convolutions, as LLVM IR: padded planes and packed left operands.

:func:`word` and :func:`pointer` read argument words by name, for all kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from weftplan.kernels.compiled.ir import Function

PAD = ("planes_step", "depth", "height", "width", "to_depth", "to_height", "to_width", "lead_depth",
       "lead_width")  # fmt: skip
"""Argument words of a padded copy of planes: bytes between source planes, extents of the source and of the copy in
elements, and the number of leading zeros."""
PACK = ("rows", "row_step", "step", "length", "transposes", "panel_step")
"""Argument words for packing the left operand: number of channels, bytes between channels and between outer positions,
number of inner positions (adjacent elements), whether packing transposes (0: channels are adjacent), and bytes of a
packed panel."""


def word(function: Function, words: str, names: Sequence[str], name: str) -> str:
    """Emit a load of the integer called ``name`` from ``words``, a block of words called ``names``."""
    return function.word(words, names.index(name))


def pointer(function: Function, words: str, names: Sequence[str], name: str) -> str:
    """Emit a load of the pointer called ``name`` from ``words``, a block of words called ``names``."""
    return function.pointer(words, names.index(name))


class _Source:
    """Emitter of loads from the source of a copy, whose elements have the function's type or are float16."""

    def __init__(self, f: Function, *, halves: bool) -> None:
        self.f = f
        self.size = f.size // 2 if halves else f.size
        self._load = f.load_halves if halves else f.load
        self._load_masked = f.load_halves if halves else f.load_masked

    def load(self, pointer: str) -> str:
        return self._load(pointer)

    def load_masked(self, pointer: str, mask: str) -> str:
        return self._load_masked(pointer, mask)


def pad(scalar: str, lanes: int, *, halves: bool = False) -> Function:
    """Return the function ``pad(src, dst, how, planes, lead_height)``, which copies planes, or bands, with padding.

    Rows are written in order, in whole vectors. Each row overwrites the previous row's excess, so the copy needs room
    for one vector after its end. ``halves``: the planes are float16, their copies float32.
    """
    arguments = (("ptr", "src"), ("ptr", "dst"), ("ptr", "how"), ("i64", "planes"), ("i64", "lead_height"))
    f = Function("pad", arguments, scalar, lanes, local=True)
    reader = _Source(f, halves=halves)
    get = {name: word(f, "%how", PAD, name) for name in PAD}
    size, wide = f.size, f.lanes * f.size
    row_bytes = f.mul(get["to_width"], size)
    skip = f.larger(f.sub(0, get["lead_width"]), 0)
    zeros = f.larger(get["lead_width"], 0)
    count = f.larger(f.smaller(f.sub(get["width"], skip), f.sub(get["to_width"], zeros)), 0)
    behind = f.add(zeros, count)
    front_bytes, right_bytes = f.mul(zeros, size), f.mul(behind, size)
    count_bytes, skip_bytes = f.mul(count, size), f.mul(skip, reader.size)

    def in_source(nbytes: str) -> str:
        return f.value(f"sdiv exact i64 {nbytes}, 2") if halves else nbytes

    with f.loop(0, "%planes") as plane:
        source = f.at("%src", f.mul(plane, get["planes_step"]))
        target = f.at("%dst", f.mul(plane, f.mul(f.mul(get["to_depth"], get["to_height"]), row_bytes)))
        with f.loop(0, get["to_depth"]) as deep, f.loop(0, get["to_height"]) as high:
            d, h = f.sub(deep, get["lead_depth"]), f.sub(high, "%lead_height")
            inside = f.value(f"and i1 {f.compare('ult', d, get['depth'])}, {f.compare('ult', h, get['height'])}")
            row = f.at(target, f.mul(f.add(f.mul(deep, get["to_height"]), high), row_bytes))
            line = f.at(source, f.mul(f.add(f.mul(d, get["height"]), h), f.mul(get["width"], reader.size)))
            from_ = f.at(line, skip_bytes)
            to = f.at(row, front_bytes)
            data_bytes = f.choose(inside, count_bytes, 0)
            data_end = f.choose(inside, right_bytes, 0)
            front = f.choose(inside, front_bytes, 0)
            with f.loop(0, front, wide) as i:
                f.store("zeroinitializer", f.at(row, i))
            full_bytes = f.value(f"and i64 {data_bytes}, {-wide}")
            with f.loop(0, full_bytes, wide) as i:
                f.store(reader.load(f.at(from_, in_source(i))), f.at(to, i))
            with f.when(f.compare("slt", full_bytes, data_bytes)):
                remaining = f.value(f"sdiv exact i64 {f.sub(data_bytes, full_bytes)}, {size}")
                f.store(
                    reader.load_masked(f.at(from_, in_source(full_bytes)), f.mask_below(remaining)),
                    f.at(to, full_bytes),
                )
            with f.loop(data_end, row_bytes, wide) as i:
                f.store("zeroinitializer", f.at(row, i))
    return f


def pack(scalar: str, lanes: int, *, halves: bool = False) -> Function:
    """Return the function ``pack(src, dst, how, outer, length)``, which packs a product's left operand into panels.

    It packs ``outer`` outer positions of ``length`` inner positions each. ``halves``: the source is float16.
    """
    arguments = (("ptr", "src"), ("ptr", "dst"), ("ptr", "how"), ("i64", "outer"), ("i64", "length"))
    f = Function("pack", arguments, scalar, lanes, local=True)
    reader = _Source(f, halves=halves)
    rows, row_step, step, transposes, panel_step = (
        word(f, "%how", PACK, name) for name in ("rows", "row_step", "step", "transposes", "panel_step")
    )
    n = f.lanes
    wide = n * f.size
    buffer = f.local(f.scalar, n * n)
    panels = f.value(f"udiv i64 {f.add(rows, n - 1)}, {n}")
    turning = f.compare("ne", transposes, 0)
    with f.loop(0, panels) as panel:
        first_row = f.mul(panel, n)
        remaining = f.sub(rows, first_row)
        source = f.at("%src", f.mul(first_row, row_step))
        target = f.at("%dst", f.mul(panel, panel_step))
        with f.when(f.value(f"xor i1 {turning}, true")):
            mask = f.mask_below(remaining)
            with f.loop(0, "%outer") as a:
                f.store(reader.load_masked(f.at(source, f.mul(a, step)), mask), f.at(target, f.mul(a, wide)))
        outer = f.choose(turning, "%outer", 0)
        with f.loop(0, outer) as a:
            begin = f.at(source, f.mul(a, step))
            to = f.at(target, f.mul(f.mul(a, "%length"), wide))
            is_full = f.compare("sge", remaining, n)
            full_length = f.choose(is_full, f.value(f"and i64 %length, {-n}"), 0)
            with f.loop(0, full_length, n) as b:
                source_at = f.at(begin, f.mul(b, reader.size))
                turned = f.transposed([reader.load(f.at(source_at, f.mul(lane, row_step))) for lane in range(n)])
                target_at = f.at(to, f.mul(b, wide))
                for lane, vector in enumerate(turned):
                    f.store(vector, f.at(target_at, lane * wide))
            with f.loop(full_length, "%length", n) as b:
                source_at = f.at(begin, f.mul(b, reader.size))
                count = f.smaller(f.sub("%length", b), n)
                mask = f.mask_below(count)
                vectors = []
                for lane in range(n):
                    target_at = f.compare("slt", lane, remaining)
                    kind = f"<{n} x i1>"
                    row_mask = f.value(f"select i1 {target_at}, {kind} {mask}, {kind} zeroinitializer")
                    offset = f.choose(target_at, f.mul(lane, row_step), 0)
                    vectors.append(reader.load_masked(f.at(source_at, offset), row_mask))
                for lane, vector in enumerate(f.transposed(vectors)):
                    f.store(vector, f.at(buffer, lane * wide))
                with f.loop(0, count) as lane_number:
                    moved = f.load(f.at(buffer, f.mul(lane_number, wide)))
                    f.store(moved, f.at(to, f.mul(f.add(b, lane_number), wide)))
    return f
