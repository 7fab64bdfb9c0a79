"""Winograd's convolution F(2x2, 3x3) as LLVM IR: 16 matrix products instead of 36 multiplications.

After Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2015). An output is cut into *tiles* of 2x2
pixels; a tile reads 4x4 places of every channel. With d those places and g a filter's 3x3 taps ::

    u = G g G^T        v = B^T d B        m[p] = sum over channels of u[p] * v[p]        y = A^T m A

for each of the 16 positions p. Vectors run over tiles, except in u, so images and results need no transposition: rows
are split into even and odd columns when they are copied with their padding, and the two columns of a tile are
interleaved when they are stored.

A call computes a range of tiles, in blocks whose v stays in a cache for all filters, and a range of filters, some at a
time. Every sum is one chain over the channels, and the transforms are computed per tile, so bits depend neither on the
width of vectors nor on how a pass is cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from weftplan.kernels.compiled.copies import pointer, word
from weftplan.kernels.compiled.ir import Function, Value
from weftplan.kernels.compiled.target import Target

WINOGRAD = ("x", "w", "y", "bias", "u", "v", "m", "line", "first", "last", "block", "first_in", "last_in", "first_out",
            "last_out", "some", "turns", "channels", "filters", "x_image", "x_plane", "height", "width", "lead",
            "line_bytes", "lines_bytes", "odd", "even_to", "odd_to", "tiles", "columns", "y_image", "y_plane",
            "y_height", "y_width", "w_out", "w_in", "order", "u_place", "v_row", "v_place", "m_row", "m_place",
            "m_out", "adds", "ends", "relu", "scale", "shift")  # fmt: skip
"""Argument words of a call, in bytes and counts.

Tiles ``first`` to ``last`` are computed in blocks of ``block``. v is computed for channels ``first_in`` to ``last_in``.
Filters ``first_out`` to ``last_out`` are multiplied, ``some`` at a time; with a nonzero ``turns`` their u is computed
first. ``m_out``: bytes between the m of adjacent filters, 0 if all groups of ``some`` filters use the same m. With a
nonzero ``adds`` products are added to m; with a nonzero ``ends`` m is complete, and y is computed from it.
``order`` points to the offset of u for each position. A line has a row's even columns, and from ``odd`` on its odd
columns. Results are multiplied by ``scale``, and ``shift`` is added, unless these are null; then follows the relu.
"""
POSITIONS = 16
"""Number of positions of a transformed tile, and of matrix products."""
ROWS = 4
"""Filters of a register block."""
VECTORS = 3
"""Vectors of a register block on a processor with 16 vector registers."""
CHAIN = 64
"""Channels that a register block sums at a time: their u and v stay in the first-level cache. Between these runs,
partial sums are stored in m, which does not change their bits."""


POINTERS = ("x", "w", "y", "bias", "u", "v", "m", "line", "order", "scale", "shift")


def block_vectors(target: Target) -> int:
    """Return the number of vectors in a register block: the most that fit the registers with their operands."""
    return 4 if target.registers > 16 else VECTORS


class Words:
    """Argument words by name; the constructor emits their loads."""

    def __init__(self, f: Function, of: Sequence[str], names: Sequence[str], pointers: Sequence[str]) -> None:
        self._values = {name: (pointer if name in pointers else word)(f, "%how", of, name) for name in names}

    def __getitem__(self, name: str) -> str:
        return self._values[name]


@contextlib.contextmanager
def images(f: Function, get: Words, begin: Value, end: Value) -> Iterator[tuple[str, str, str, str, str, Value]]:
    """Emit a loop over the images that have tiles in the range ``begin`` to ``end``.

    Yield (image, first row of tiles, end row, first tile, end tile, position of the image's tile 0 in the range).
    """
    begin_image = f.value(f"udiv i64 {begin}, {get['tiles']}")
    end_image = f.value(f"udiv i64 {f.add(end, f.sub(get['tiles'], 1))}, {get['tiles']}")
    with f.loop(begin_image, end_image) as image:
        skipped = f.mul(image, get["tiles"])
        low = f.larger(f.sub(begin, skipped), 0)
        high = f.smaller(f.sub(end, skipped), get["tiles"])
        above = f.value(f"udiv i64 {low}, {get['columns']}")
        below = f.value(f"udiv i64 {f.add(high, f.sub(get['columns'], 1))}, {get['columns']}")
        yield image, above, below, low, high, f.sub(skipped, begin)


@contextlib.contextmanager
def _tiles(f: Function, get: Words, row: str, low: str, high: str) -> Iterator[tuple[str, str]]:
    """Emit a loop over the vectors of tiles in a row: yield (first column of the vector, end column of the row).

    ``low`` and ``high`` limit the tiles of the image.
    """
    row_begin = f.mul(row, get["columns"])
    begin = f.larger(f.sub(low, row_begin), 0)
    end = f.smaller(f.sub(high, row_begin), get["columns"])
    with f.loop(begin, end, f.lanes) as column:
        yield column, end


def lines(scalar: str, lanes: int) -> Function:
    """Return the function ``lines(src, dst, how, first, count)``, which copies ``count`` padded rows as lines.

    A line has a row's even columns, then its odd columns.
    """
    f = Function("lines", (("ptr", "src"), ("ptr", "dst"), ("ptr", "how"), ("i64", "first"), ("i64", "count")),
                 scalar, lanes, local=True)  # fmt: skip
    get = Words(f, WINOGRAD, ("height", "width", "line_bytes", "even_to", "odd_to"), POINTERS)
    n, size = lanes, f.size
    full_columns = f.value(f"and i64 {get['width']}, {-2 * n}")
    remaining = f.sub(get["width"], full_columns)
    has_remainder = f.compare("sgt", remaining, 0)
    near, far = f.mask_below(remaining), f.mask_below(f.sub(remaining, n))
    second = f.choose(f.compare("sgt", remaining, n), n * size, 0)

    def split(a: str, b: str, to: str, column: Value) -> None:
        moved = f.mul(column, size // 2) if isinstance(column, int) else f.value(f"mul nsw i64 {column}, {size // 2}")
        f.store(f.shuffle(a, b, range(0, 2 * n, 2)), f.at(f.at(to, get["even_to"]), moved))
        f.store(f.shuffle(a, b, range(1, 2 * n, 2)), f.at(f.at(to, get["odd_to"]), moved))

    with f.loop(0, "%count") as number:
        row = f.add("%first", number)
        to = f.at("%dst", f.mul(number, get["line_bytes"]))
        inside = f.compare("ult", row, get["height"])
        from_ = f.at("%src", f.mul(row, f.mul(get["width"], size)))
        with f.loop(0, f.choose(inside, full_columns, 0), 2 * n) as column:
            columns_at = f.at(from_, f.mul(column, size))
            split(f.load(columns_at), f.load(f.at(columns_at, n * size)), to, column)
        with f.when(f.value(f"and i1 {inside}, {has_remainder}")):
            columns_at = f.at(from_, f.mul(full_columns, size))
            split(f.load_masked(columns_at, near), f.load_masked(f.at(columns_at, second), far), to, full_columns)
        with f.loop(0, f.choose(inside, 0, get["line_bytes"]), n * size) as offset:
            f.store("zeroinitializer", f.at(to, offset))
    return f


def image(scalar: str, lanes: int, lines: Function) -> Function:
    """Return the function ``image(how, begin, end)``, which computes v of the tiles ``begin`` to ``end``."""
    f = Function("image", (("ptr", "how"), ("i64", "begin"), ("i64", "end")), scalar, lanes, local=True)
    get = Words(f, WINOGRAD, ("x", "v", "line", "first_in", "last_in", "x_image", "x_plane", "lead", "line_bytes",
                              "odd", "tiles", "columns", "v_row", "v_place"), POINTERS)  # fmt: skip
    size = f.size
    with images(f, get, "%begin", "%end") as (number, above, below, low, high, at):
        count = f.add(f.mul(f.sub(below, above), 2), 2)
        first_row = f.sub(f.mul(above, 2), get["lead"])
        plane = f.at(get["x"], f.mul(number, get["x_image"]))
        with f.loop(get["first_in"], get["last_in"]) as channel:
            f.call(lines, f.at(plane, f.mul(channel, get["x_plane"])), get["line"], "%how", first_row, count)
            target = f.at(get["v"], f.mul(channel, get["v_row"]))
            with f.loop(above, below) as row:
                top = f.at(get["line"], f.mul(f.sub(row, above), f.mul(get["line_bytes"], 2)))
                to = f.at(target, f.mul(f.add(at, f.mul(row, get["columns"])), size))
                with _tiles(f, get, row, low, high) as (column, _):
                    moved = f.mul(column, size)
                    columns = []
                    for i in range(4):
                        even = f.at(f.at(top, f.mul(get["line_bytes"], i)), moved)
                        odd = f.at(even, get["odd"])
                        columns.append([f.load(even), f.load(odd), f.load(f.at(even, size)), f.load(f.at(odd, size))])
                    v_at = f.at(to, moved)
                    down = [spread(f, [columns[i][j] for i in range(4)]) for j in range(4)]
                    for i in range(4):
                        for j, value in enumerate(spread(f, [down[j][i] for j in range(4)])):
                            f.store(value, f.at(v_at, f.mul(get["v_place"], 4 * i + j)))
    return f


def spread(f: Function, d: list[str]) -> list[str]:
    """Emit B^T times a vector of four values."""
    return [
        f.binary("fsub", d[0], d[2]),
        f.binary("fadd", d[1], d[2]),
        f.binary("fsub", d[2], d[1]),
        f.binary("fsub", d[1], d[3]),
    ]


def _gathered(f: Function, m: list[str]) -> list[str]:
    """Emit A^T times a vector of four values."""
    return [
        f.binary("fadd", f.binary("fadd", m[0], m[1]), m[2]),
        f.binary("fsub", f.binary("fsub", m[1], m[2]), m[3]),
    ]


def filters(scalar: str, lanes: int) -> Function:
    """Return the function ``filters(how, u, first, last)``, which computes u of filters, in panels of one per lane."""
    f = Function(
        "filters", (("ptr", "how"), ("ptr", "u"), ("i64", "first"), ("i64", "last")), scalar, lanes, local=True
    )
    get = Words(f, WINOGRAD, ("w", "channels", "filters", "w_out", "w_in", "order", "u_place"), POINTERS)
    size, last_filter = f.size, f.sub(get["filters"], 1)
    panel_bytes = f.mul(get["channels"], lanes * size)
    offsets = [f.word(get["order"], p) for p in range(POSITIONS)]
    first_taps = min(lanes, 8)
    half = f.constant("0.5")
    with f.loop("%first", "%last", lanes) as out:
        to = f.at("%u", f.mul(f.value(f"udiv i64 {f.sub(out, '%first')}, {lanes}"), panel_bytes))
        rows = [f.at(get["w"], f.mul(f.smaller(f.add(out, lane), last_filter), get["w_out"])) for lane in range(lanes)]
        with f.loop(0, get["channels"]) as channel:
            moved = f.mul(channel, get["w_in"])
            sources = [f.at(row, moved) for row in rows]
            taps: list[str] = []
            for start in range(0, 8, first_taps):
                vectors = [f.load_first(f.at(source, start * size), first_taps) for source in sources]
                taps += f.transposed(vectors)[:first_taps]
            last_tap = "poison"
            for lane, source in enumerate(sources):
                tap = f.scalar_at(f.at(source, 8 * size))
                last_tap = f.value(f"insertelement {f.vector} {last_tap}, {f.scalar} {tap}, i64 {lane}")
            taps.append(last_tap)

            def turned(g: list[str]) -> list[str]:
                ends = f.binary("fadd", g[0], g[2])
                middle = [f.binary(how, ends, g[1]) for how in ("fadd", "fsub")]
                return [g[0], *(f.binary("fmul", tap, half) for tap in middle), g[2]]

            down = [turned([taps[3 * i + j] for i in range(3)]) for j in range(3)]
            u_at = f.at(to, f.mul(channel, lanes * size))
            for i in range(4):
                for j, value in enumerate(turned([down[j][i] for j in range(3)])):
                    f.store(value, f.at(u_at, offsets[4 * i + j]))
    return f


def runs(f: Function, count: Value, max_vectors: int = VECTORS) -> list[tuple[int, Value]]:
    """Emit a cut of ``count`` elements into register blocks; return (vectors of a block, end of such blocks) pairs.

    A block of one vector takes as long as a block of two, so there is one only if all elements fit a single vector.
    """
    every = f.value(f"udiv i64 {f.add(count, f.lanes - 1)}, {f.lanes}")
    remainder = f.value(f"urem i64 {every}, {max_vectors}")
    single = f.compare("eq", every, 1)
    leaves_single = f.value(f"and i1 {f.compare('eq', remainder, 1)}, {f.value(f'xor i1 {single}, true')}")
    end = f.sub(every, f.choose(leaves_single, max_vectors + 1, remainder))
    blocks = [(max_vectors, f.mul(end, f.lanes))]
    for vectors in range(
        max_vectors - 1, 1, -1
    ):  # less than two of the largest blocks remain, for one or two smaller blocks
        remaining = f.sub(every, end)
        takes = f.compare("sge", remaining, vectors)
        if vectors > 2:  # a block of this size must not leave a single vector
            takes = f.value(f"and i1 {takes}, {f.compare('ne', remaining, vectors + 1)}")
        end = f.add(end, f.choose(takes, vectors, 0)) if vectors > 2 else f.choose(single, 0, every)
        blocks.append((vectors, f.mul(end, f.lanes)))
    return [*blocks, (1, f.mul(every, f.lanes))]


def multiply(scalar: str, lanes: int, max_vectors: int) -> Function:
    """Return the function ``multiply(how, u, m, outs, tiles)``, which computes m from u and v.

    It computes ``outs`` filters and ``tiles`` tiles. ``max_vectors``: maximum number of vectors in a register block.
    """
    arguments = (("ptr", "how"), ("ptr", "u"), ("ptr", "m"), ("i64", "outs"), ("i64", "tiles"))
    f = Function("multiply", arguments, scalar, lanes, local=True)
    get = Words(f, WINOGRAD, ("v", "channels", "u_place", "v_row", "v_place", "m_row", "m_place", "adds"), POINTERS)
    n, size = lanes, f.size
    fresh = f.compare("eq", get["adds"], 0)
    panel_bytes = f.mul(get["channels"], n * size)

    zeros = f.local(f.vector, max_vectors)
    for vector in range(max_vectors):
        f.store("zeroinitializer", f.at(zeros, vector * n * size))

    def block(u: str, v: str, m: str, vectors: int, begin_channel: str, end_channel: str) -> None:
        sums = [[f.local(f.vector) for _ in range(vectors)] for _ in range(ROWS)]
        begins = f.value(f"and i1 {fresh}, {f.compare('eq', begin_channel, 0)}")
        source = f.value(f"select i1 {begins}, ptr {zeros}, ptr {m}")
        step = f.choose(begins, 0, get["m_row"])
        for r, row in enumerate(sums):
            for vector, accumulator in enumerate(row):
                f.store(f.load(f.at(f.at(source, f.mul(step, r)), vector * n * size)), accumulator)
        with f.loop(begin_channel, end_channel) as channel:
            v_at = f.at(v, f.mul(channel, get["v_row"]))
            values = [f.load(f.at(v_at, vector * n * size)) for vector in range(vectors)]
            moved: Value = f.mul(channel, n * size)
            for r, row in enumerate(sums):
                factor = f.broadcast(f.at(f.at(u, moved), r * size))
                for vector, accumulator in enumerate(row):
                    new = f.fma(factor, values[vector], f.load(accumulator))
                    f.store(new, accumulator)
        for r, row in enumerate(sums):
            to = f.at(m, f.mul(get["m_row"], r))
            for vector, accumulator in enumerate(row):
                f.store(f.load(accumulator), f.at(to, vector * n * size))

    blocks = runs(f, "%tiles", max_vectors)
    with f.loop(0, POSITIONS) as p, f.loop(0, get["channels"], CHAIN) as first_channel:
        last_channel = f.smaller(f.add(first_channel, CHAIN), get["channels"])
        u = f.at("%u", f.mul(p, get["u_place"]))
        v = f.at(get["v"], f.mul(p, get["v_place"]))
        m = f.at("%m", f.mul(p, get["m_place"]))
        begin_tile: Value = 0
        for vectors, end in blocks:
            with f.loop(begin_tile, end, vectors * n) as tile, f.loop(0, "%outs", ROWS) as out:
                panel = f.at(u, f.mul(f.value(f"udiv i64 {out}, {n}"), panel_bytes))
                block(
                    f.at(panel, f.mul(f.value(f"urem i64 {out}, {n}"), size)),
                    f.at(v, f.mul(tile, size)),
                    f.at(f.at(m, f.mul(out, get["m_row"])), f.mul(tile, size)),
                    vectors,
                    first_channel,
                    last_channel,
                )
            begin_tile = end
    return f


def results(scalar: str, lanes: int) -> Function:
    """Return the function ``results(how, m, first, last, begin, end)``, which computes y from m.

    It computes filters ``first`` to ``last`` and tiles ``begin`` to ``end``.
    """
    arguments = (("ptr", "how"), ("ptr", "m"), ("i64", "first"), ("i64", "last"), ("i64", "begin"), ("i64", "end"))
    f = Function("results", arguments, scalar, lanes, local=True)
    get = Words(f, WINOGRAD, ("y", "bias", "tiles", "columns", "y_image", "y_plane", "y_height", "y_width",
                              "m_row", "m_place", "relu", "scale", "shift"), POINTERS)  # fmt: skip
    n, size = lanes, f.size
    row_bytes = f.mul(get["y_width"], size)
    behind = f.compare("ne", get["relu"], 0)
    least = f.splat(f.value(f"select i1 {behind}, {f.scalar} 0.0, {f.scalar} 0xFFF0000000000000"))
    biased, scaled = (f.value(f"icmp ne ptr {get[name]}, null") for name in ("bias", "scale"))
    slot = f.local(f.scalar, 2 * n)
    nothing, unit, less = (f.local(f.scalar) for _ in range(3))
    for slot_at, number in ((nothing, "0.0"), (unit, "1.0"), (less, "-0.0")):  # x * 1 - 0 is x, also if x is -0
        f.put_scalar(number, slot_at)

    def chosen(condition: str, name: str, out: str, otherwise: str) -> str:
        factor_at = f.at(get[name], f.mul(out, size))
        return f.broadcast(f.value(f"select i1 {condition}, ptr {factor_at}, ptr {otherwise}"))

    def put(pair: list[str], to: str, count: str) -> None:
        is_full = f.compare("sge", count, 2 * n)
        with f.when(is_full):
            f.store(pair[0], to)
            f.store(pair[1], f.at(to, n * size))
        with f.when(f.value(f"xor i1 {is_full}, true")):
            for number, row in enumerate(pair):
                f.store(row, f.at(slot, number * n * size))
            stored: Value = 0
            piece = n
            while piece:
                bit = f.value(f"and i64 {count}, {piece}")
                with f.when(f.compare("ne", bit, 0)):
                    kind = f"<{piece} x {f.scalar}>"
                    moved = f.mul(stored, size)
                    pixels = f.value(f"load {kind}, ptr {f.at(slot, moved)}, align {size}")
                    f.emit(f"store {kind} {pixels}, ptr {f.at(to, moved)}, align {size}")
                stored = f.add(stored, bit)
                piece //= 2

    with images(f, get, "%begin", "%end") as (number, above, below, low, high, at):
        image_at = f.at(get["y"], f.mul(number, get["y_image"]))
        with f.loop("%first", "%last") as out:
            plane = f.at(image_at, f.mul(out, get["y_plane"]))
            bias = chosen(biased, "bias", out, nothing)
            scale, shift = chosen(scaled, "scale", out, unit), chosen(scaled, "shift", out, less)
            source = f.at("%m", f.mul(f.sub(out, "%first"), get["m_row"]))
            with f.loop(above, below) as row:
                from_ = f.at(source, f.mul(f.add(at, f.mul(row, get["columns"])), size))
                line = f.at(plane, f.mul(f.mul(row, 2), row_bytes))
                with _tiles(f, get, row, low, high) as (column, end):
                    m_at = f.at(from_, f.mul(column, size))
                    m = [f.load(f.at(m_at, f.mul(get["m_place"], p))) for p in range(POSITIONS)]
                    down = [_gathered(f, [m[4 * i + j] for i in range(4)]) for j in range(4)]
                    remaining = f.sub(get["y_width"], f.mul(column, 2))
                    count = f.smaller(f.mul(f.sub(end, column), 2), remaining)
                    to = f.at(line, f.mul(column, 2 * size))
                    for i in range(2):
                        halves = [
                            f.floored(f.fma(f.binary("fadd", value, bias), scale, shift), least)
                            for value in _gathered(f, [down[j][i] for j in range(4)])
                        ]
                        lanes_of = [lane // 2 + (n if lane % 2 else 0) for lane in range(2 * n)]
                        pair = [
                            f.shuffle(halves[0], halves[1], lane_numbers)
                            for lane_numbers in (lanes_of[:n], lanes_of[n:])
                        ]
                        row_at = f.at(to, f.mul(row_bytes, i))
                        is_inside = f.compare("slt", f.add(f.mul(row, 2), i), get["y_height"])
                        with f.when(is_inside):
                            put(pair, row_at, count)
    return f


def winograd(scalar: str, lanes: int, helpers: dict[str, Function]) -> Function:
    """Return the function ``winograd(how)``, which computes a convolution as :data:`WINOGRAD` describes."""
    f = Function("winograd", (("ptr", "how"),), scalar, lanes)
    get = Words(f, WINOGRAD, ("u", "line", "lines_bytes", "first", "last", "block", "first_in", "last_in", "first_out",
                              "last_out", "some", "turns", "channels", "m", "m_out", "ends"), POINTERS)  # fmt: skip
    turns, ends = (f.compare("ne", get[name], 0) for name in ("turns", "ends"))
    u_row = f.mul(get["channels"], f.size)
    # The padding before and after a row is never copied into a line, so it is cleared here.
    f.emit(f"call void @llvm.memset.p0.i64(ptr {get['line']}, i8 0, i64 {get['lines_bytes']}, i1 false)")
    with f.loop(get["first"], get["last"], get["block"]) as begin:
        end = f.smaller(f.add(begin, get["block"]), get["last"])
        with f.when(f.compare("slt", get["first_in"], get["last_in"])):
            f.call(helpers["image"], "%how", begin, end)
        with f.loop(get["first_out"], get["last_out"], get["some"]) as first_filter:
            end_filter = f.smaller(f.add(first_filter, get["some"]), get["last_out"])
            u = f.at(get["u"], f.choose(turns, 0, f.mul(first_filter, u_row)))
            with f.when(turns):
                f.call(helpers["filters"], "%how", u, first_filter, end_filter)
            m = f.at(get["m"], f.mul(first_filter, get["m_out"]))
            f.call(helpers["multiply"], "%how", u, m, f.sub(end_filter, first_filter), f.sub(end, begin))
            with f.when(ends):
                f.call(helpers["results"], "%how", m, first_filter, end_filter, begin, end)
    return f


def turned(scalar: str, lanes: int, helpers: dict[str, Function]) -> Function:
    """Return the function ``turned(how)``, which computes u of the filters ``first_out`` to ``last_out``."""
    f = Function("turned", (("ptr", "how"),), scalar, lanes)
    get = Words(f, WINOGRAD, ("u", "first_out", "last_out", "channels"), POINTERS)
    u = f.at(get["u"], f.mul(get["first_out"], f.mul(get["channels"], f.size)))
    f.call(helpers["filters"], "%how", u, get["first_out"], get["last_out"])
    return f


def functions(scalar: str, target: Target) -> list[Function]:
    """Return all functions of the module of Winograd convolutions."""
    lanes = target.lanes(4 if scalar == "float" else 8)
    rows = lines(scalar, lanes)
    helpers = {
        "image": image(scalar, lanes, rows),
        "filters": filters(scalar, lanes),
        "multiply": multiply(scalar, lanes, block_vectors(target)),
        "results": results(scalar, lanes),
    }
    return [rows, *helpers.values(), turned(scalar, lanes, helpers), winograd(scalar, lanes, helpers)]
