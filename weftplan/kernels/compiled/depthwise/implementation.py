"""Kernels of depthwise convolutions (one filter for each channel) as LLVM IR: vectors run along rows.

A plane of one channel is copied into a small buffer, whose padding is cleared once for all planes. With stride 2, even
and odd columns are separated, so that every load is a whole vector. Each output is one chain of additions over taps.
Each tap's gradient is one chain per lane of a 32-byte vector, on every machine; its lanes are added by halves at the
end. 3x3 kernels have special functions with the nine weights, or sums, in registers: on small planes the loop over taps
took most of the time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import product as every

from weftplan.kernels.compiled.copies import PAD, pointer, word
from weftplan.kernels.compiled.ir import Function, Value

VECTOR_BYTES = 32
"""Bytes of a vector on every machine: the order of additions of a weight gradient, and plans, depend on it."""
SLACK = 2 * VECTOR_BYTES
"""Padding bytes after the copy of a plane, which loads of whole vectors may read."""
ROWS = 4
"""Number of output rows that are computed together and share each load of a tap's weight."""
NINE = 9
"""Number of taps of a 3x3 kernel."""
PADDED = (1, 2, 2, 4)
"""Number of taps of each phase of a data gradient with stride 2, for a 3x3 kernel with a padding of one."""
GROUPS = (NINE, 3, 1)
"""Numbers of taps whose gradients are summed together, in the order in which they are tried."""

PASS = ("x", "w", "y", "buffer", "second", "images", "first", "last", "x_image", "x_channel", "y_image", "y_channel",
        "rows", "columns", "row_step", "taps", "tap_table", "pad", "lead", "apart", "pitch", "pad_rows", "phase",
        "counts", "sums", "bias", "relu", "scale", "shift", "before")  # fmt: skip
"""Argument words of a call. ``x_image``, ``x_channel``: bytes between images of ``x``, and between its channels.
``tap_table``: pairs (offset in the buffer, offset in w) in bytes. ``row_step``: bytes in the buffer between the windows
of adjacent output rows. ``apart``: whether even and odd columns are separated, ``phase`` bytes from each other, in rows
of ``pitch`` bytes. ``counts``: for a data gradient of stride 2, the first tap of each of its four phases, and the end
of the last. ``sums``: scratch of a weight gradient, a vector per tap. Outputs begin with ``bias``, are multiplied by
``scale``, and ``shift`` is added; each may be null. A nonzero ``relu`` applies the relu. ``before``: in functions with
``after_norm``, the batch norm's scale and shift, which are applied to ``x``, with a relu, before the convolution."""


def _lanes(scalar: str) -> int:
    return VECTOR_BYTES // (4 if scalar == "float" else 8)


class _Planes:
    """Emitter of copies of planes into the padded buffer.

    The constructor emits code that clears the buffer once, before the loops over planes.
    """

    def __init__(self, f: Function, get: dict[str, str], *, after_norm: bool = False) -> None:
        self.f, self.get = f, get
        self.norm: tuple[str, str] | None = None
        if after_norm:
            norm_at = pointer(f, "%how", PASS, "before")
            self.norm = f.broadcast(norm_at), f.broadcast(f.at(norm_at, f.size))
        self.buffer, self.second = (pointer(f, "%how", PASS, name) for name in ("buffer", "second"))
        how = pointer(f, "%how", PASS, "pad")
        height, width, to_height, to_width, lead_width = (
            word(f, how, PAD, name) for name in ("height", "width", "to_height", "to_width", "lead_width")
        )
        size, lead = f.size, get["lead"]
        cropped = f.larger(f.sub(0, lead), 0), f.larger(f.sub(0, lead_width), 0)
        zeros = f.larger(lead, 0), f.larger(lead_width, 0)
        self.rows = f.smaller(f.sub(height, cropped[0]), f.sub(to_height, zeros[0]))
        columns = f.larger(f.smaller(f.sub(width, cropped[1]), f.sub(to_width, zeros[1])), 0)
        self.skipped = f.mul(f.add(f.mul(cropped[0], width), cropped[1]), size)
        self.front = f.mul(f.add(f.mul(zeros[0], to_width), zeros[1]), size)
        self.step, self.to_step = f.mul(width, size), f.mul(to_width, size)
        self.full_columns = f.value(f"and i64 {columns}, {-f.lanes}")
        remaining = f.sub(columns, self.full_columns)
        self.has_remainder, self.mask = f.compare("ne", remaining, 0), f.mask_below(remaining)
        self.separates = f.compare("ne", get["apart"], 0)
        nbytes = f.add(f.mul(to_height, self.to_step), SLACK)
        f.emit(f"call void @llvm.memset.p0.i64(ptr {self.buffer}, i8 0, i64 {nbytes}, i1 false)")

    def copy(self, plane: str) -> str:
        """Emit a copy of the plane into the buffer; return the address of the copy.

        A row is copied in whole vectors. The excess of its last vector is zeros, which overwrite padding, or rows that
        are copied later.
        """
        f, get = self.f, self.get
        n, wide = f.lanes, f.lanes * f.size
        begin, to_begin = f.at(plane, self.skipped), f.at(self.buffer, self.front)
        with f.loop(0, self.rows) as row:
            from_, to = f.at(begin, f.mul(row, self.step)), f.at(to_begin, f.mul(row, self.to_step))
            with f.loop(0, self.full_columns, n) as column:
                offset = f.mul(column, f.size)
                f.store(self._normalized(f.load(f.at(from_, offset))), f.at(to, offset))
            with f.when(self.has_remainder):
                offset = f.mul(self.full_columns, f.size)
                f.store(self._normalized(f.load_masked(f.at(from_, offset), self.mask), self.mask), f.at(to, offset))
        with f.when(self.separates), f.loop(0, get["pad_rows"]) as row:
            from_ = f.at(self.buffer, f.mul(f.mul(row, 2), get["pitch"]))
            to = f.at(self.second, f.mul(row, get["pitch"]))
            with f.loop(0, get["pitch"], wide) as i:
                double = f.at(from_, f.mul(i, 2))
                a, b = f.load(double), f.load(f.at(double, wide))
                f.store(f.shuffle(a, b, [2 * lane for lane in range(n)]), f.at(to, i))
                f.store(f.shuffle(a, b, [2 * lane + 1 for lane in range(n)]), f.at(f.at(to, get["phase"]), i))
        return f.value(f"select i1 {self.separates}, ptr {self.second}, ptr {self.buffer}")

    def _normalized(self, value: str, mask: str | None = None) -> str:
        """Emit the vector to convolve: ``value``, or its batch norm and relu with zeros in lanes whose mask is off."""
        if self.norm is None:
            return value
        f = self.f
        normalized = f.floored(f.fma(value, *self.norm))
        return normalized if mask is None else f.chosen(mask, normalized, "zeroinitializer")


def _words(f: Function, names: Sequence[str]) -> dict[str, str]:
    return {name: word(f, "%how", PASS, name) for name in names}


_NUMBERS = ("images", "first", "last", "x_image", "x_channel", "y_image", "y_channel", "rows", "columns", "row_step",
            "taps", "lead", "apart", "pitch", "pad_rows", "phase")  # fmt: skip


def _put_row(f: Function, value: str, target: str, end: str, remaining: Value) -> None:
    """Emit a store of a vector of outputs; its first ``remaining`` elements belong to the row.

    The excess overwrites rows or planes that are stored later. A vector that would pass ``end`` is masked.
    """
    behind = f.value(f"ptrtoint ptr {f.at(target, f.lanes * f.size)} to i64")
    inside = f.compare("sle", behind, end)
    with f.when(inside):
        f.store(value, target)
    with f.when(f.value(f"xor i1 {inside}, true")):
        f.store_masked(value, target, f.mask_below(remaining))


@contextlib.contextmanager
def _each_plane(
    f: Function, get: dict[str, str], x: str, y: str, *, after_norm: bool = False
) -> Iterator[tuple[str, str, str, str]]:
    """Emit a loop over images and channels that copies each plane.

    Yield (channel, address of the plane's copy, address of its result in ``y``, end of the image's last result).
    """
    planes = _Planes(f, get, after_norm=after_norm)
    with f.loop(0, get["images"]) as image:
        to = f.at(y, f.mul(image, get["y_image"]))
        end = f.value(f"ptrtoint ptr {f.at(to, f.mul(get['last'], get['y_channel']))} to i64")
        with f.loop(get["first"], get["last"]) as channel:
            source = planes.copy(f.at(x, f.add(f.mul(image, get["x_image"]), f.mul(channel, get["x_channel"]))))
            yield channel, source, f.at(to, f.mul(channel, get["y_channel"])), end


def _columns(f: Function, get: dict[str, str], by: int) -> list[Value]:
    """Return the offset of each column of a 3x3 kernel in the copy of a plane, in bytes, for the stride ``by``."""
    return [0, get["phase"], f.size] if by == 2 else [0, f.size, 2 * f.size]


def forward(scalar: str, by: int = 0, *, after_norm: bool = False) -> Function:
    """Return the function ``forward(how)``, which computes outputs, or with reversed taps a data gradient of stride 1.

    Args:
        by: the stride, for 3x3 kernels without dilation; 0: a function for all kernels and strides.
        after_norm: whether the function applies a batch norm and a relu to the one channel that it convolves.
    """
    f = Function(f"forward{by or ''}{'_after_norm' * after_norm}", (("ptr", "how"),), scalar, _lanes(scalar))
    get = _words(f, _NUMBERS)
    x, w, y, table = (pointer(f, "%how", PASS, name) for name in ("x", "w", "y", "tap_table"))
    n, size = f.lanes, f.size
    blocks = f.value(f"sdiv i64 {f.add(get['columns'], n - 1)}, {n}")
    by_four = f.value(f"and i64 {get['rows']}, {-ROWS}")
    taps_bytes = f.mul(get["taps"], size)
    row_bytes = f.mul(get["columns"], size)
    optional = {name: pointer(f, "%how", PASS, name) for name in ("bias", "scale", "shift")}
    biased, scaled = (f.value(f"icmp ne ptr {optional[name]}, null") for name in ("bias", "scale"))
    behind = f.compare("ne", word(f, "%how", PASS, "relu"), 0)
    least = f.splat(f.value(f"select i1 {behind}, {scalar} 0.0, {scalar} 0xFFF0000000000000"))
    zero, unit, less = (f.local(scalar) for _ in range(3))
    for slot_at, number in ((zero, "0.0"), (unit, "1.0"), (less, "-0.0")):  # x * 1 - 0 is x, also if x is -0
        f.put_scalar(number, slot_at)

    def chosen(condition: str, name: str, channel: str, otherwise: str) -> str:
        factor_at = f.at(optional[name], f.mul(channel, size))
        return f.broadcast(f.value(f"select i1 {condition}, ptr {factor_at}, ptr {otherwise}"))

    weights_at = [f.word(table, 2 * tap + 1) for tap in range(NINE)] if by else []
    columns = _columns(f, get, by)
    with _each_plane(f, get, x, y, after_norm=after_norm) as (channel, source, target, end):
        weight = f.at(w, f.mul(channel, taps_bytes))
        start = chosen(biased, "bias", channel, zero)
        scaling = chosen(scaled, "scale", channel, unit), chosen(scaled, "shift", channel, less)
        factors = [f.broadcast(f.at(weight, slot_at)) for slot_at in weights_at]

        def sums_of_nine(begin: str, count: int, start: str = start, factors: Sequence[str] = factors) -> list[str]:
            sums = [start] * count
            for line in range(by * (count - 1) + 3):  # each line is read once for all output rows
                line_at = f.at(begin, f.mul(get["pitch"], line))
                values = [f.load(f.at(line_at, column)) for column in columns]
                for row in range(count):
                    i = line - by * row
                    if 0 <= i < 3:
                        for j, value in enumerate(values):
                            sums[row] = f.fma(value, factors[3 * i + j], sums[row])
            return sums

        def sums_of_all(begin: str, count: int, start: str = start, weight: str = weight) -> list[str]:
            sums = [f.local(f.vector) for _ in range(count)]
            for accumulator in sums:
                f.store(start, accumulator)
            with f.loop(0, get["taps"]) as tap:
                pair = f.mul(tap, 2)
                source_at = f.at(begin, f.word(table, pair))
                factor = f.broadcast(f.at(weight, f.word(table, f.add(pair, 1))))
                for row, accumulator in enumerate(sums):
                    value = f.load(f.at(source_at, f.mul(get["row_step"], row)))
                    f.store(f.fma(value, factor, f.load(accumulator)), accumulator)
            return [f.load(accumulator) for accumulator in sums]

        sums_of = sums_of_nine if by else sums_of_all

        def rows(
            first_row: Value, count: int, source: str = source, target: str = target, end: str = end,
            scaling: tuple[str, str] = scaling,
        ) -> None:  # fmt: skip
            with f.loop(0, blocks) as turned:
                block = f.sub(f.sub(blocks, 1), turned)  # from the last block to the first: see _put_row
                column = f.mul(block, n)
                begin = f.at(source, f.add(f.mul(first_row, get["row_step"]), f.mul(column, size)))
                for row, total in enumerate(sums_of(begin, count)):
                    slot_at = f.at(target, f.add(f.mul(f.add(first_row, row), row_bytes), f.mul(column, size)))
                    _put_row(f, f.floored(f.fma(total, *scaling), least), slot_at, end, f.sub(get["columns"], column))

        with f.loop(0, by_four, ROWS) as first_row:
            rows(first_row, ROWS)
        with f.loop(by_four, get["rows"]) as first_row:
            rows(first_row, 1)
    return f


def data_by_two(scalar: str, taps: Sequence[int] = ()) -> Function:
    """Return the function ``data_by_two(how)``, which computes the data gradient of stride 2.

    Positions with the same parities of row and column (a phase) have the same taps, so even and odd columns are
    computed separately and then interleaved. ``taps``: the number of taps of each of the four phases, to specialise the
    function for; empty: any.
    """
    f = Function(f"data_by_two{'_of_nine' if taps else ''}", (("ptr", "how"),), scalar, _lanes(scalar))
    get = _words(f, _NUMBERS)
    x, w, y, table, counts = (pointer(f, "%how", PASS, name) for name in ("x", "w", "y", "tap_table", "counts"))
    n, size = f.lanes, f.size
    pairs = f.value(f"sdiv i64 {f.add(get['columns'], 2 * n - 1)}, {2 * n}")
    taps_bytes = f.mul(get["taps"], size)
    row_bytes = f.mul(get["columns"], size)
    tap_offsets = [(f.word(table, 2 * tap), f.word(table, 2 * tap + 1)) for tap in range(sum(taps))]
    with _each_plane(f, get, x, y) as (channel, source, target, end):
        weight = f.at(w, f.mul(channel, taps_bytes))
        factors = [f.broadcast(f.at(weight, offset)) for _, offset in tap_offsets]

        def sum_of(begin: str, phase: Value, weight: str = weight, factors: Sequence[str] = factors) -> str:
            if isinstance(phase, int):
                result = "zeroinitializer"
                first_tap = sum(taps[:phase])
                for tap in range(first_tap, first_tap + taps[phase]):
                    result = f.fma(f.load(f.at(begin, tap_offsets[tap][0])), factors[tap], result)
                return result
            accumulator = f.local(f.vector)
            f.store("zeroinitializer", accumulator)
            with f.loop(f.word(counts, phase), f.word(counts, f.add(phase, 1))) as number:
                pair = f.mul(number, 2)
                value = f.load(f.at(begin, f.word(table, pair)))
                factor = f.broadcast(f.at(weight, f.word(table, f.add(pair, 1))))
                f.store(f.fma(value, factor, f.load(accumulator)), accumulator)
            return f.load(accumulator)

        def row_of(
            row: str, half: str, parity: Value, source: str = source, target: str = target, end: str = end
        ) -> None:
            with f.loop(0, pairs) as turned:
                block = f.sub(f.sub(pairs, 1), turned)
                column = f.mul(block, 2 * n)
                begin = f.at(source, f.add(f.mul(half, get["row_step"]), f.mul(f.mul(block, n), size)))
                sums = [sum_of(begin, f.add(f.mul(parity, 2), side)) for side in range(2)]
                low = [lane // 2 + n * (lane % 2) for lane in range(n)]
                high = [n // 2 + lane for lane in low]
                target_at = f.at(target, f.add(f.mul(row, row_bytes), f.mul(column, size)))
                remaining = f.sub(get["columns"], column)
                with f.when(f.compare("sgt", remaining, n)):
                    _put_row(f, f.shuffle(sums[0], sums[1], high), f.at(target_at, n * size), end, f.sub(remaining, n))
                _put_row(f, f.shuffle(sums[0], sums[1], low), target_at, end, remaining)

        with f.loop(0, get["rows"]) as row:
            half = f.value(f"sdiv i64 {row}, 2")
            parity = f.sub(row, f.mul(half, 2))
            if not taps:
                row_of(row, half, parity)
            for row_parity in range(2 if taps else 0):
                with f.when(f.compare("eq", parity, row_parity)):
                    row_of(row, half, row_parity)
    return f


def weights(scalar: str, by: int = 0, *, after_norm: bool = False) -> Function:
    """Return the function ``weights(how)``, which computes the gradient ``w`` of the weight.

    Its words ``x`` and ``y`` are the image and the output gradient. ``by`` and ``after_norm``: see :func:`forward`.
    """
    f = Function(f"weights{by or ''}{'_after_norm' * after_norm}", (("ptr", "how"),), scalar, _lanes(scalar))
    get = _words(f, _NUMBERS)
    x, w, y, table = (pointer(f, "%how", PASS, name) for name in ("x", "w", "y", "tap_table"))
    n, size = f.lanes, f.size
    taps_bytes = f.mul(get["taps"], size)
    row_bytes = f.mul(get["columns"], size)
    full_columns = f.value(f"and i64 {get['columns']}, {-n}")
    remainder = f.sub(get["columns"], full_columns)
    mask = f.mask_below(remainder)
    has_remainder = f.compare("ne", remainder, 0)
    next_tap = f.local("i64")
    scratch = pointer(f, "%how", PASS, "sums")
    planes = _Planes(f, get, after_norm=after_norm)
    with f.loop(get["first"], get["last"]) as channel:
        result = f.at(w, f.mul(channel, taps_bytes))
        with f.loop(0, get["images"]) as image:
            source = planes.copy(f.at(x, f.add(f.mul(image, get["x_image"]), f.mul(channel, get["x_channel"]))))
            dy = f.at(y, f.add(f.mul(image, get["y_image"]), f.mul(channel, get["y_channel"])))
            f.keep(0, next_tap)
            for group in (NINE,) if by else GROUPS:
                end = f.sub(get["taps"], group - 1)
                with f.loop(f.word(next_tap), end, group) as tap:
                    lines: list[Value] = [f.mul(get["pitch"], i) for i in range(3)] if by else [0]
                    columns = (
                        _columns(f, get, by) if by else [f.word(table, f.mul(f.add(tap, k), 2)) for k in range(group)]
                    )
                    stored = [f.at(scratch, f.mul(f.add(tap, k), n * size)) for k in range(group)]
                    sums = [f.local(f.vector) for _ in range(group)]
                    fresh = f.compare("eq", image, 0)
                    for accumulator, slot_at in zip(sums, stored, strict=True):
                        old = f.load(slot_at)
                        f.store(
                            f.value(f"select i1 {fresh}, {f.vector} zeroinitializer, {f.vector} {old}"), accumulator
                        )
                    with f.loop(0, get["rows"]) as row:
                        line = f.at(dy, f.mul(row, row_bytes))
                        begin = f.at(source, f.mul(row, get["row_step"]))
                        rows = [f.at(begin, offset) for offset in lines]
                        with f.loop(0, full_columns, n) as column:
                            offset = f.mul(column, size)
                            d = f.load(f.at(line, offset))
                            for accumulator, (row_at, moved) in zip(sums, every(rows, columns), strict=True):
                                value = f.load(f.at(f.at(row_at, offset), moved))
                                f.store(f.fma(value, d, f.load(accumulator)), accumulator)
                        with f.when(has_remainder):
                            offset = f.mul(full_columns, size)
                            d = f.load_masked(f.at(line, offset), mask)
                            for accumulator, (row_at, moved) in zip(sums, every(rows, columns), strict=True):
                                value = f.load_masked(f.at(f.at(row_at, offset), moved), mask)
                                f.store(f.fma(value, d, f.load(accumulator)), accumulator)
                    for accumulator, slot_at in zip(sums, stored, strict=True):
                        f.store(f.load(accumulator), slot_at)
                    f.keep(f.add(tap, group), next_tap)
        with f.loop(0, get["taps"]) as tap:
            slot_at = f.at(result, f.word(table, f.add(f.mul(tap, 2), 1)))
            total = f.total(f.load(f.at(scratch, f.mul(tap, n * size))))
            f.put_scalar(total, slot_at)
    return f


def functions(scalar: str) -> list[Function]:
    """Return all functions of the module of depthwise convolutions."""
    strides = (0, 1, 2)
    return [
        *(forward(scalar, by) for by in strides),
        data_by_two(scalar),
        data_by_two(scalar, PADDED),
        *(weights(scalar, by) for by in strides),
    ]
