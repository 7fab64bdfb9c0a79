"""The weight gradient of a Winograd 3x3 convolution, as LLVM IR.

With d a tile's 4x4 places of a channel, and e the 2x2 gradients of a filter's output in the same tile ::

    v = B^T d B        e' = A e A^T        m[p] = sum over tiles of e'[p] * v[p]        dg = G^T m G

Sums run over tiles, so vectors run over channels: rows of as many channels as a vector has lanes are transposed when
they are copied with their padding. A call computes m for some channels and some filters at a time, one block of tiles
after another. Each block's sum is one chain of additions, and blocks are added in order; a block's size is constant.
"""

from __future__ import annotations

from collections.abc import Callable

from weftplan.kernels.compiled.copies import word
from weftplan.kernels.compiled.ir import Function, Value
from weftplan.kernels.compiled.target import Target
from weftplan.kernels.compiled.winograd.kernels import POSITIONS, ROWS, Words, block_vectors, images, runs, spread

WEIGHTS = ("x", "dy", "dw", "v", "e", "m", "line", "lines_bytes", "first", "last", "some_in", "some_out", "channels",
           "filters", "all_tiles", "block", "tiles", "columns", "lead", "images", "outputs", "row", "place",
           "e_row", "e_place", "m_place")  # fmt: skip
"""Argument words of a call, in bytes and counts. The gradients of channels ``first`` to ``last`` are computed,
``some_in`` channels and ``some_out`` filters at a time. ``images`` and ``outputs`` point to :data:`ROWS_OF`. ``row``:
bytes between adjacent tiles of v, and between adjacent filters of m."""
ROWS_OF = ("image", "plane", "height", "width", "lead", "line")
"""Words that describe images or output gradients: bytes between images and between planes, extents of a plane, leading
columns of padding, bytes of a line."""
POINTERS = ("x", "dy", "dw", "v", "e", "m", "line", "images", "outputs")


def lines(lanes: int) -> Function:
    """Return the function ``lines(src, dst, how, first, count, left)``, which copies ``count`` rows with padding.

    Each place of a copied line is a vector of channels. If fewer than ``lanes`` channels are ``left``, copies of the
    last channel fill the vector.
    """
    arguments = (("ptr", "src"), ("ptr", "dst"), ("ptr", "how"), ("i64", "first"), ("i64", "count"), ("i64", "left"))
    f = Function("lines", arguments, "float", lanes, local=True)
    plane, height, width, lead, line = (
        word(f, "%how", ROWS_OF, name) for name in ("plane", "height", "width", "lead", "line")
    )
    wide = lanes * f.size
    last_channel = f.sub("%left", 1)
    planes = [f.at("%src", f.mul(f.smaller(lane, last_channel), plane)) for lane in range(lanes)]
    with f.loop(0, "%count") as number:
        row = f.add("%first", number)
        to = f.at("%dst", f.mul(number, line))
        inside = f.compare("ult", row, height)
        begin = f.mul(row, width)
        target = f.at(to, f.mul(lead, wide))
        with f.loop(0, f.choose(inside, width, 0), lanes) as column:
            mask = f.mask_below(f.sub(width, column))
            moved = f.mul(f.add(begin, column), f.size)
            turned = f.transposed([f.load_masked(f.at(plane_at, moved), mask) for plane_at in planes])
            columns_at = f.at(target, f.mul(column, wide))
            for lane, vector in enumerate(turned):
                f.store(vector, f.at(columns_at, lane * wide))
        with f.loop(0, f.choose(inside, 0, line), wide) as offset:
            f.store("zeroinitializer", f.at(to, offset))
    return f


def tiles(
    name: str, lanes: int, copy: Function, side: int, values: Callable[[Function, list[list[str]]], list[list[str]]]
) -> Function:
    """Return the function ``name(src, dst, how, rows, begin, end, count, row, place, lead)``, which transforms tiles.

    It transforms the tiles ``begin`` to ``end`` of ``count`` channels. ``values`` emits the transform of a tile of
    ``side`` times ``side`` places.
    """
    arguments = (("ptr", "src"), ("ptr", "dst"), ("ptr", "how"), ("ptr", "rows"), ("i64", "begin"), ("i64", "end"),
                 ("i64", "count"), ("i64", "row"), ("i64", "place"), ("i64", "lead"))  # fmt: skip
    f = Function(name, arguments, "float", lanes, local=True)
    get = Words(f, WEIGHTS, ("line", "lines_bytes", "tiles", "columns"), POINTERS)
    wide = lanes * f.size
    line = word(f, "%rows", ROWS_OF, "line")
    image_step, plane = (word(f, "%rows", ROWS_OF, name_of) for name_of in ("image", "plane"))
    # Copies of rows do not write the padding before a row, so it is cleared here.
    f.emit(f"call void @llvm.memset.p0.i64(ptr {get['line']}, i8 0, i64 {get['lines_bytes']}, i1 false)")
    with images(f, get, "%begin", "%end") as (number, above, below, low, high, at):
        count = f.add(f.mul(f.sub(below, above), 2), side - 2)
        first_row = f.sub(f.mul(above, 2), "%lead")
        source = f.at("%src", f.mul(number, image_step))
        with f.loop(0, "%count", lanes) as channel:
            remaining = f.sub("%count", channel)
            f.call(copy, f.at(source, f.mul(channel, plane)), get["line"], "%rows", first_row, count, remaining)
            target = f.at("%dst", f.mul(channel, f.size))
            with f.loop(above, below) as row:
                top = f.at(get["line"], f.mul(f.sub(row, above), f.mul(line, 2)))
                row_begin = f.mul(row, get["columns"])
                begin = f.larger(f.sub(low, row_begin), 0)
                end = f.smaller(f.sub(high, row_begin), get["columns"])
                row_begin = f.add(row_begin, at)
                with f.loop(begin, end) as column:
                    tile_at = f.at(top, f.mul(column, 2 * wide))
                    d = [
                        [f.load(f.at(f.at(tile_at, f.mul(line, i)), j * wide)) for j in range(side)]
                        for i in range(side)
                    ]
                    to = f.at(target, f.mul(f.add(row_begin, column), "%row"))
                    for i, row_values in enumerate(values(f, d)):
                        for j, value in enumerate(row_values):
                            f.store(value, f.at(to, f.mul("%place", 4 * i + j)))
    return f


def along_both_axes(
    f: Function, d: list[list[str]], transform: Callable[[Function, list[str]], list[str]]
) -> list[list[str]]:
    """Emit the transform ``transform`` of every column of ``d``, then of every row of the result."""
    down = [transform(f, list(column)) for column in zip(*d, strict=True)]
    return [transform(f, list(row)) for row in zip(*down, strict=True)]


def _widened(f: Function, e: list[str]) -> list[str]:
    """Emit A times a vector of two values."""
    return [
        e[0],
        f.binary("fadd", e[0], e[1]),
        f.binary("fsub", e[0], e[1]),
        f.binary("fsub", "zeroinitializer", e[1]),
    ]


def _narrowed(f: Function, m: list[str]) -> list[str]:
    """Emit G^T times a vector of four values."""
    half = f.constant("0.5")
    ends, middle = (f.binary("fmul", f.binary(how, m[1], m[2]), half) for how in ("fadd", "fsub"))
    return [f.binary("fadd", m[0], ends), middle, f.binary("fadd", ends, m[3])]


def multiply(lanes: int, max_vectors: int) -> Function:
    """Return the function ``multiply(how, ins, outs, tiles, adds)``, which sums a block of tiles into m.

    It computes ``ins`` channels and ``outs`` filters; a nonzero ``adds`` adds the sums to m. ``max_vectors``: maximum
    number of vectors in a register block.
    """
    arguments = (("ptr", "how"), ("i64", "ins"), ("i64", "outs"), ("i64", "tiles"), ("i64", "adds"))
    f = Function("multiply", arguments, "float", lanes, local=True)
    get = Words(f, WEIGHTS, ("v", "e", "m", "row", "place", "e_row", "e_place", "m_place"), POINTERS)
    n, size = lanes, f.size
    adds = f.compare("ne", "%adds", 0)
    zeros = f.local(f.vector)
    f.store("zeroinitializer", zeros)

    def block(e: str, v: str, m: str, vectors: int) -> None:
        sums = [[f.local(f.vector) for _ in range(vectors)] for _ in range(ROWS)]
        for row in sums:
            for accumulator in row:
                f.store("zeroinitializer", accumulator)
        with f.loop(0, "%tiles") as tile:
            v_at = f.at(v, f.mul(tile, get["row"]))
            values = [f.load(f.at(v_at, vector * n * size)) for vector in range(vectors)]
            factors = f.at(e, f.mul(tile, get["e_row"]))
            for r, row in enumerate(sums):
                factor = f.broadcast(f.at(factors, r * size))
                for vector, accumulator in enumerate(row):
                    f.store(f.fma(factor, values[vector], f.load(accumulator)), accumulator)
        for r, row in enumerate(sums):
            to = f.at(m, f.mul(get["row"], r))
            for vector, accumulator in enumerate(row):
                m_at = f.at(to, vector * n * size)
                earlier = f.load(f.value(f"select i1 {adds}, ptr {m_at}, ptr {zeros}"))
                f.store(f.binary("fadd", earlier, f.load(accumulator)), m_at)

    blocks = runs(f, "%ins", max_vectors)
    with f.loop(0, POSITIONS) as p:
        e, v, m = (f.at(get[operand], f.mul(p, get[step])) for operand, step in
                   (("e", "e_place"), ("v", "place"), ("m", "m_place")))  # fmt: skip
        begin_channel: Value = 0
        for vectors, end in blocks:
            with f.loop(begin_channel, end, vectors * n) as channel, f.loop(0, "%outs", ROWS) as out:
                block(
                    f.at(e, f.mul(out, size)),
                    f.at(v, f.mul(channel, size)),
                    f.at(f.at(m, f.mul(out, get["row"])), f.mul(channel, size)),
                    vectors,
                )
            begin_channel = end
    return f


def results(lanes: int) -> Function:
    """Return the function ``results(how, dst, ins, outs)``, which computes the weight gradient from m.

    It computes ``ins`` channels and ``outs`` filters.
    """
    arguments = (("ptr", "how"), ("ptr", "dst"), ("i64", "ins"), ("i64", "outs"))
    f = Function("results", arguments, "float", lanes, local=True)
    get = Words(f, WEIGHTS, ("m", "row", "m_place", "channels"), POINTERS)
    size, first_taps = f.size, min(lanes, 8)
    buffer = f.local("float", 9 * lanes)
    with f.loop(0, "%outs") as out, f.loop(0, "%ins", lanes) as channel:
        m_at = f.at(f.at(get["m"], f.mul(out, get["row"])), f.mul(channel, size))
        m = [[f.load(f.at(m_at, f.mul(get["m_place"], 4 * i + j))) for j in range(4)] for i in range(4)]
        taps = [tap for row in along_both_axes(f, m, _narrowed) for tap in row]
        dw_at = f.at("%dst", f.mul(f.add(f.mul(out, get["channels"]), channel), 9 * size))
        remaining = f.sub("%ins", channel)
        is_full = f.compare("sge", remaining, lanes)
        to = f.value(f"select i1 {is_full}, ptr {dw_at}, ptr {buffer}")
        for start in range(0, 8, first_taps):
            for lane, vector in enumerate(f.transposed(taps[start : start + first_taps])):
                f.store_first(vector, f.at(to, (9 * lane + start) * size), first_taps)
        for lane in range(lanes):
            ninth = f.value(f"extractelement {f.vector} {taps[8]}, i64 {lane}")
            f.put_scalar(ninth, f.at(to, (9 * lane + 8) * size))
        with f.loop(0, f.choose(is_full, 0, f.mul(remaining, 9))) as number:
            moved = f.mul(number, size)
            f.put_scalar(f.scalar_at(f.at(buffer, moved)), f.at(dw_at, moved))
    return f


def weights(lanes: int, helpers: dict[str, Function]) -> Function:
    """Return the function ``weights(how)``, which computes the weight gradient of some channels and all filters."""
    f = Function("weights", (("ptr", "how"),), "float", lanes)
    get = Words(f, WEIGHTS, WEIGHTS, POINTERS)
    channel_bytes, filter_bytes = (word(f, get[rows_of], ROWS_OF, "plane") for rows_of in ("images", "outputs"))
    several = f.compare("sgt", get["all_tiles"], get["block"])
    with f.loop(get["first"], get["last"], get["some_in"]) as channel:
        ins = f.smaller(f.sub(get["last"], channel), get["some_in"])
        x = f.at(get["x"], f.mul(channel, channel_bytes))
        with f.loop(0, get["filters"], get["some_out"]) as out:
            outs = f.smaller(f.sub(get["filters"], out), get["some_out"])
            dy = f.at(get["dy"], f.mul(out, filter_bytes))
            begins = f.compare("eq", out, 0)
            with f.loop(0, get["all_tiles"], get["block"]) as begin:
                end = f.smaller(f.add(begin, get["block"]), get["all_tiles"])
                with f.when(f.value(f"or i1 {begins}, {several}")):  # else v was computed for the previous filters
                    f.call(
                        helpers["image"], x, get["v"], "%how", get["images"], begin, end, ins, get["row"], get["place"],
                        get["lead"],
                    )  # fmt: skip
                f.call(
                    helpers["output"], dy, get["e"], "%how", get["outputs"], begin, end, outs, get["e_row"],
                    get["e_place"], 0,
                )  # fmt: skip
                f.call(helpers["multiply"], "%how", ins, outs, f.sub(end, begin), begin)
            first_tap = f.add(f.mul(out, get["channels"]), channel)
            f.call(helpers["results"], "%how", f.at(get["dw"], f.mul(first_tap, 9 * f.size)), ins, outs)
    return f


def functions(target: Target) -> list[Function]:
    """Return all functions of the module of Winograd weight gradients."""
    lanes = target.lanes(4)
    copy = lines(lanes)
    helpers = {
        "image": tiles("image", lanes, copy, 4, lambda f, d: along_both_axes(f, d, spread)),
        "output": tiles("output", lanes, copy, 2, lambda f, d: along_both_axes(f, d, _widened)),
        "multiply": multiply(lanes, block_vectors(target)),
        "results": results(lanes),
    }
    return [copy, *helpers.values(), weights(lanes, helpers)]
