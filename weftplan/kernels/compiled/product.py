"""The kernel of dense convolutions, as LLVM IR: a product whose right operand is read from an image.

For channels k and positions q::

    y[k, q] (+)= sum over outer a, inner b of  w[k, a, b] * x[offset(q) + outer(a) + inner(b)]

In a forward pass, the positions are output pixels, and the sum runs over channels and taps. In a weight gradient, the
positions are channels and taps, and the sum runs over pixels. All offsets come from tables of byte offsets that Python
computes from shapes, so one function serves every kernel, stride, dilation and number of axes.

The left operand is *packed*: panels of as many channels as a vector has lanes, ``[panel][a, b][lane]``. The sums of a
tile, two panels times a few positions, stay in registers. Every sum is one chain of fused multiply-adds in the order of
(a, b), so its bits depend neither on the width of vectors nor on tiles, and calls may be cut anywhere between positions
or panels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weftplan.kernels.compiled.copies import PACK, pack, pad, pointer, word
from weftplan.kernels.compiled.ir import Function, Value
from weftplan.kernels.compiled.target import Target

PRODUCT = ("panel_step", "channels", "channel_step", "outer_table", "inner", "inner_table", "rows", "row_table",
           "columns", "column_table", "outer")  # fmt: skip
"""Argument words of a product. Tables hold pairs of byte offsets: (x, w) for the sum, (x, y) for the positions.
Positions are rows times columns; ``rows`` is the number of rows of one image."""
GATHER = ("x", "w", "y", "bias", "padded", "packed", "first", "last", "x_image", "y_image", "groups", "x_group",
          "w_group", "packed_group", "y_group", "bias_group", "copies", "pad", "planes", "pack", "outer", "phases",
          "phase_table", "together", "clears", "bands", "lead", "lead_step", "y_step", "relu",
          "packs", "scale", "shift")  # fmt: skip
"""Argument words of :func:`gather`, for images ``first`` to ``last``, ``together`` images per product; steps between
images, groups and bands are in bytes. With a nonzero ``copies`` each band of images is copied to ``padded`` as ``pad``
describes. ``phase_table``: addresses of the products of a band, one per phase, then of those of the last band. A
nonzero ``clears`` clears ``y`` first."""
NARROW = ("x", "y", "count")
"""Argument words of :func:`narrow`, which rounds ``count`` float32 numbers to float16."""
WEIGHTS = ("x", "dy", "dw", "padded", "packed", "images", "together", "x_image", "dy_image", "groups", "x_group",
           "dy_group", "dw_group", "copies", "pad", "planes", "lead", "pack", "product", "outer",
           "chunk")  # fmt: skip
"""Argument words of :func:`weights`. A product sums ``chunk`` of an image's ``outer`` outer positions, or all pixels of
``together`` images. Copies are described as in :data:`GATHER`."""


class _Positions:
    """Emitter of an iteration over positions; a position's offset is its row's offset plus its column's, from two
    tables.

    The addresses in x and offsets in y of the current tile's positions are in two small arrays on the stack.
    """

    def __init__(self, f: Function, how: str, rows: str, max_positions: int) -> None:
        self.f = f
        self.rows, self.columns = rows, word(f, how, PRODUCT, "columns")
        self.row_table, self.column_table = (pointer(f, how, PRODUCT, name) for name in ("row_table", "column_table"))
        self.row, self.column = f.local("i64"), f.local("i64")
        self.sources, self.targets = f.local("ptr", max_positions), f.local("i64", max_positions)

    def begin(self) -> None:
        """Emit a reset to the first position."""
        self.f.keep(0, self.row)
        self.f.keep(0, self.column)

    def take(self, x: str, count: int) -> tuple[list[str], list[str]]:
        """Emit a read of the next ``count`` positions; return (their addresses in x, their offsets in y).

        The iteration advances past these positions. If fewer positions remain, the last position is repeated.
        """
        f = self.f
        row, column = f.word(self.row), f.word(self.column)
        next_position = f.add(column, count)
        inside = f.compare("slt", next_position, self.columns)
        with f.when(inside):  # all positions are in one row, which does not end with them
            pair = f.mul(row, 2)
            source = f.at(x, f.word(self.row_table, pair))
            target = f.word(self.row_table, f.add(pair, 1))
            begin = f.mul(column, 2)
            for position in range(count):
                moved = f.word(self.column_table, f.add(begin, 2 * position))
                f.emit(f"store ptr {f.at(source, moved)}, ptr {f.at(self.sources, 8 * position)}, align 8")
                moved = f.word(self.column_table, f.add(begin, 2 * position + 1))
                f.keep(f.add(target, moved), self.targets, position)
            f.keep(next_position, self.column)
        with f.when(f.value(f"xor i1 {inside}, true")), f.loop(0, count) as number:
            row, column = f.word(self.row), f.word(self.column)
            row_pair, column_pair = f.mul(row, 2), f.mul(column, 2)
            moved = f.word(self.row_table, row_pair)
            from_ = f.at(f.at(x, moved), f.word(self.column_table, column_pair))
            moved = f.word(self.row_table, f.add(row_pair, 1))
            to = f.add(moved, f.word(self.column_table, f.add(column_pair, 1)))
            f.emit(f"store ptr {from_}, ptr {f.at(self.sources, f.mul(number, 8))}, align 8")
            f.keep(to, self.targets, number)
            next_column = f.add(column, 1)
            wraps = f.compare("eq", next_column, self.columns)
            next_row = f.choose(wraps, f.add(row, 1), row)
            ended = f.compare("eq", next_row, self.rows)
            f.keep(f.choose(ended, row, next_row), self.row)
            f.keep(f.choose(ended, column, f.choose(wraps, 0, next_column)), self.column)
        sources = [f.pointer(self.sources, position) for position in range(count)]
        return sources, [f.word(self.targets, position) for position in range(count)]


def product(scalar: str, lanes: int, tile_sizes: Sequence[int], *, register: str, halves: bool = False) -> Function:
    """Return the function ``product(x, w, y, bias, how, rows, first, outers, adds, relu, scale, shift)``.

    It computes sums over ``outers`` outer positions, from ``first`` on. They begin with ``bias``, are multiplied by
    ``scale``, and ``shift`` is added; each of these may be null. A nonzero ``relu`` replaces negative results by 0.
    Results are stored to ``y``; with a nonzero ``adds`` they are added to it, and the caller passes no scale or relu.

    Args:
        tile_sizes: numbers of positions that a tile may have, largest first; the last takes the smallest that suffices.
        register: see :meth:`Function.ordered <weftplan.kernels.compiled.ir.Function.ordered>`.
        halves: whether ``y`` is float16; ``adds`` must then be 0.
    """
    arguments = (("ptr", "x"), ("ptr", "w"), ("ptr", "y"), ("ptr", "bias"), ("ptr", "how"), ("i64", "rows"),
                 ("i64", "first"), ("i64", "outers"), ("i64", "adds"), ("i64", "relu"), ("ptr", "scale"),
                 ("ptr", "shift"))  # fmt: skip
    f = Function("product_of_halves" if halves else "product", arguments, scalar, lanes, local=True)
    tile = _Tile(f, tile_sizes, register=register, halves=halves)
    n, tile_size = f.lanes, tile_sizes[0]
    total = f.mul("%rows", tile.walk.columns)
    # All tiles have the largest size except the last, which has the smallest that suffices.
    remainder = f.value(f"urem i64 {total}, {tile_size}")
    next_position = f.local("i64")

    def panels_from(begin_channel: Value, end: Value, panels: int) -> None:
        with f.loop(begin_channel, end, n * panels) as channel:
            tile.channels_from(channel, panels)
            tile.walk.begin()
            f.keep(0, next_position)
            for size_index, count in enumerate(tile_sizes):
                until: Value = total
                if size_index + 1 < len(tile_sizes):
                    small = f.compare("sle", remainder, tile_sizes[size_index + 1])
                    until = f.choose(small, f.sub(total, remainder), total)
                with f.loop(f.word(next_position), until, count) as position:
                    tile.compute(f.sub(total, position), count)
                    f.keep(f.add(position, count), next_position)

    pairs = f.mul(f.value(f"udiv i64 {f.add(tile.channels, n - 1)}, {2 * n}"), 2 * n)
    panels_from(0, pairs, 2)
    panels_from(pairs, tile.channels, 1)
    return f


class _Tile:
    """Emitter of a tile: the sums of a few positions and one or two panels in registers, then their stores to ``y``."""

    def __init__(self, f: Function, tile_sizes: Sequence[int], *, register: str, halves: bool) -> None:
        self.f = f
        self.register = register
        self.halves = halves
        self.walk = _Positions(f, "%how", "%rows", tile_sizes[0])
        self.panel_step, self.channels, self.channel_step, self.inner = (
            word(f, "%how", PRODUCT, name) for name in ("panel_step", "channels", "channel_step", "inner")
        )
        self.outer_table, self.inner_table = (
            pointer(f, "%how", PRODUCT, name) for name in ("outer_table", "inner_table")
        )
        self.end_outer = f.add("%first", "%outers")
        self.adds = f.compare("ne", "%adds", 0)
        self.biased = f.value("icmp ne ptr %bias, null")
        self.scaled = f.value("icmp ne ptr %scale, null")
        behind = f.compare("ne", "%relu", 0)
        self.least = f.splat(f.value(f"select i1 {behind}, {f.scalar} 0.0, {f.scalar} 0xFFF0000000000000"))
        # One row of positions for each channel; a row is as wide as whole vectors.
        self.row = -(-tile_sizes[0] // f.lanes) * f.lanes
        self.buffer = f.local(f.scalar, 2 * f.lanes * self.row)

    def channels_from(self, channel: str, panels: int) -> None:
        """Emit the addresses of the weights, results and factors of ``panels`` panels, from ``channel`` on."""
        f = self.f
        n = f.lanes
        self.panels = panels
        self.remaining = f.smaller(f.sub(self.channels, channel), n * panels)
        self.w = f.at("%w", f.mul(f.value(f"udiv i64 {channel}, {n}"), self.panel_step))
        self.y = f.at("%y", f.mul(channel, self.channel_step))
        # A masked load from an address that cannot be read is correct, but takes hundreds of cycles.
        bias_at = f.at("%bias", f.mul(channel, f.size))
        self.bias = f.value(f"select i1 {self.biased}, ptr {bias_at}, ptr %w")
        self.scale, self.shift = (f.at(name, f.mul(channel, f.size)) for name in ("%scale", "%shift"))

    def compute(self, positions_remaining: Value, count: int) -> None:
        """Emit the computation of the next ``count`` positions, or of ``positions_remaining`` if those are fewer."""
        f = self.f
        sources, targets = self.walk.take("%x", count)
        sums = self._sum(sources)
        n, panels = f.lanes, self.panels
        with f.when(self.scaled):
            for panel in range(panels):
                offset, mask = panel * n * f.size, f.mask_below(f.sub(self.remaining, panel * n))
                scale, shift = (f.load_masked(f.at(factors, offset), mask) for factors in (self.scale, self.shift))
                for accumulators in sums:
                    f.store(f.fma(f.load(accumulators[panel]), scale, shift), accumulators[panel])
        size = f.size // 2 if self.halves else f.size
        store = f.store_halves if self.halves else f.store_first
        put = f.put_half if self.halves else f.put_scalar
        results = [
            [f.floored(f.load(sums[position][panel]), self.least) for panel in range(panels)]
            for position in range(count)
        ]
        span = f.sub(targets[-1], targets[0])
        runs = f.value(
            f"and i1 {f.compare('eq', span, (count - 1) * size)}, {f.compare('sge', positions_remaining, count)}"
        )
        is_full = f.compare("eq", self.remaining, n * panels)
        adds = self.adds
        overwrites = f.value(f"xor i1 {adds}, true")
        modes = [(overwrites, False)] if self.halves else [(overwrites, False), (adds, True)]
        for condition, added in modes:
            direct = f.value(f"and i1 {runs}, {is_full}")
            with f.when(f.value(f"and i1 {direct}, {condition}")):
                begin = f.at(self.y, targets[0])
                for panel, start, lane, turned, lanes_used in self._turned(results, count):
                    to = f.at(begin, f.add(f.mul(self.channel_step, panel * n + lane), start * size))
                    value = f.binary("fadd", f.load_first(to, lanes_used), turned) if added else turned
                    store(value, to, lanes_used)
        neither = f.value(f"xor i1 {f.value(f'and i1 {runs}, {is_full}')}, true")
        with f.when(neither):
            for panel, start, lane, turned, _ in self._turned(results, count):
                f.store(turned, f.at(self.buffer, ((panel * n + lane) * self.row + start) * f.size))
            scattered = f.choose(runs, 0, f.smaller(positions_remaining, count))
            for condition, added in modes:
                limit = f.choose(condition, self.remaining, 0)
                with f.loop(0, limit) as number:
                    from_ = f.at(self.buffer, f.mul(number, self.row * f.size))
                    to = f.at(self.y, f.mul(number, self.channel_step))
                    with f.when(runs):
                        for start in range(0, count, n):
                            lanes_used = min(n, count - start)
                            target_at = f.at(to, f.add(targets[0], start * size))
                            value = f.load_first(f.at(from_, start * f.size), lanes_used)
                            if added:
                                value = f.binary("fadd", f.load_first(target_at, lanes_used), value)
                            store(value, target_at, lanes_used)
                    with f.loop(0, scattered) as position:
                        target_at = f.at(to, f.word(self.walk.targets, position))
                        value = f.scalar_at(f.at(from_, f.mul(position, f.size)))
                        if added:
                            value = f.value(f"fadd {f.scalar} {f.scalar_at(target_at)}, {value}")
                        put(value, target_at)

    def _turned(self, results: list[list[str]], count: int) -> Iterator[tuple[int, int, int, str, int]]:
        """Emit the transpose of a tile's results, so that a vector has several positions of one channel.

        Yield (panel, first position, lane, vector of the lane's channel, number of positions).
        """
        f = self.f
        for panel in range(self.panels):
            for start in range(0, count, f.lanes):
                lanes_used = min(f.lanes, count - start)
                turned = f.transposed([results[start + position][panel] for position in range(lanes_used)])
                for lane in range(f.lanes):
                    yield panel, start, lane, turned[lane], lanes_used

    def _sum(self, sources: list[str]) -> list[list[str]]:
        """Emit the sums of a tile; return their stack slots, by place and panel. The compiler makes them registers."""
        f = self.f
        n, panels = f.lanes, self.panels
        sums = [[f.local(f.vector) for _ in range(panels)] for _ in sources]
        for panel in range(panels):
            mask = f.mask_below(f.choose(self.biased, f.sub(self.remaining, panel * n), 0))
            offset = f.choose(self.biased, panel * n * f.size, 0)
            begin = f.load_masked(f.at(self.bias, offset), mask)
            for accumulators in sums:
                f.store(begin, accumulators[panel])
        with f.loop("%first", self.end_outer) as a:
            pair = f.mul(a, 2)
            x_outer = f.word(self.outer_table, pair)
            w_outer = f.at(self.w, f.word(self.outer_table, f.add(pair, 1)))
            with f.loop(0, self.inner) as b:
                pair = f.mul(b, 2)
                x_offset: Value = f.add(f.word(self.inner_table, pair), x_outer)
                w_at = f.at(w_outer, f.word(self.inner_table, f.add(pair, 1)))
                factors = [f.load(f.at(w_at, f.mul(self.panel_step, panel))) for panel in range(panels)]
                for accumulators, source in zip(sums, sources, strict=True):
                    x = f.broadcast(f.at(source, x_offset))
                    for panel in range(panels):
                        new = f.fma(x, factors[panel], f.load(accumulators[panel]))
                        if self.register:
                            new, x_offset = f.ordered(new, x_offset, self.register)
                        f.store(new, accumulators[panel])
        return sums


def gather(scalar: str, lanes: int, helpers: dict[str, Function]) -> Function:
    """Return the function ``gather(how)``, which computes a convolution, or its data gradient, of some images.

    It first packs the weights of the first ``packs`` groups. ``helpers``: the functions ``pad``, ``pack``, ``product``.
    """
    f = Function("gather", (("ptr", "how"),), scalar, lanes)
    get = {name: word(f, "%how", GATHER, name) for name in GATHER}
    x, w, y, bias, padded, packed, pad_how, pack_how, table, scale, shift = (
        pointer(f, "%how", GATHER, name)
        for name in ("x", "w", "y", "bias", "padded", "packed", "pad", "pack", "phase_table", "scale", "shift")
    )
    length = word(f, pack_how, PACK, "length")
    with f.loop(0, get["packs"]) as group:
        f.call(
            helpers["pack"],
            f.at(w, f.mul(group, get["w_group"])),
            f.at(packed, f.mul(group, get["packed_group"])),
            pack_how,
            get["outer"],
            length,
        )
    copies = f.compare("ne", get["copies"], 0)
    biased, scaled = (f.value(f"icmp ne ptr {optional}, null") for optional in (bias, scale))
    with f.loop(get["first"], get["last"], get["together"]) as image:
        count = f.smaller(f.sub(get["last"], image), get["together"])
        direct = f.at(x, f.mul(image, get["x_image"]))
        source = f.value(f"select i1 {copies}, ptr {padded}, ptr {direct}")
        out = f.at(y, f.mul(image, get["y_image"]))
        with f.when(f.compare("ne", get["clears"], 0)):
            nbytes = f.mul(count, get["y_image"])
            f.emit(f"call void @llvm.memset.p0.i64(ptr {out}, i8 0, i64 {nbytes}, i1 false)")
        with f.loop(0, get["bands"]) as band:
            with f.when(copies):
                lead = f.sub(get["lead"], f.mul(band, get["lead_step"]))
                f.call(helpers["pad"], direct, padded, pad_how, f.mul(count, get["planes"]), lead)
            ends = f.compare("eq", f.add(band, 1), get["bands"])
            products = f.at(table, f.choose(ends, f.mul(get["phases"], 8), 0))
            target = f.at(out, f.mul(band, get["y_step"]))
            with f.loop(0, get["groups"]) as group:
                bias_at = f.at(bias, f.choose(biased, f.mul(group, get["bias_group"]), 0))
                moved = f.choose(scaled, f.mul(group, get["bias_group"]), 0)
                with f.loop(0, get["phases"]) as phase:
                    how = f.pointer(products, phase)
                    f.call(
                        helpers["product"],
                        f.at(source, f.mul(group, get["x_group"])),
                        f.at(packed, f.mul(group, get["packed_group"])),
                        f.at(target, f.mul(group, get["y_group"])),
                        bias_at,
                        how,
                        f.mul(count, word(f, how, PRODUCT, "rows")),
                        0,
                        word(f, how, PRODUCT, "outer"),
                        0,
                        get["relu"],
                        f.at(scale, moved),
                        f.at(shift, moved),
                    )
    return f


def weights(scalar: str, lanes: int, helpers: dict[str, Function], *, halves: bool = False) -> Function:
    """Return the function ``weights(how)``, which computes the gradient of a convolution's weight.

    With ``halves`` the arrays are float16, and the gradient float32. The sum over pixels is cut into chunks whose size
    depends on shapes alone; each chunk is one chain of additions, and chunks are added in order.
    """
    f = Function("weights", (("ptr", "how"),), scalar, lanes)
    get = {name: word(f, "%how", WEIGHTS, name) for name in WEIGHTS}
    x, dy, dw, padded, packed, pad_how, pack_how, how = (
        pointer(f, "%how", WEIGHTS, name) for name in ("x", "dy", "dw", "padded", "packed", "pad", "pack", "product")
    )
    copies = f.compare("ne", get["copies"], 0)
    inner = word(f, how, PRODUCT, "inner")
    image_pixels = f.mul(get["outer"], inner)
    several = f.compare("sgt", get["together"], 1)
    with f.loop(0, get["images"], get["together"]) as image:
        count = f.smaller(f.sub(get["images"], image), get["together"])
        direct = f.at(x, f.mul(image, get["x_image"]))
        with f.when(copies):
            f.call(helpers["pad"], direct, padded, pad_how, f.mul(count, get["planes"]), get["lead"])
        source = f.value(f"select i1 {copies}, ptr {padded}, ptr {direct}")
        end = f.mul(count, get["outer"])
        chunk = f.choose(several, end, get["chunk"])
        with f.loop(0, end, chunk) as first_outer:
            outers = f.smaller(f.sub(end, first_outer), chunk)
            length = f.choose(several, image_pixels, f.mul(outers, inner))
            earlier = f.value(f"or i64 {image}, {first_outer}")
            adds = f.value(f"zext i1 {f.compare('ne', earlier, 0)} to i64")
            pixels = f.mul(f.mul(first_outer, inner), f.size)
            stored = f.mul(f.mul(first_outer, inner), f.size // 2) if halves else pixels
            with f.loop(0, get["groups"]) as group:
                begin = f.add(f.mul(image, get["dy_image"]), f.mul(group, get["dy_group"]))
                f.call(helpers["pack"], f.at(dy, f.add(begin, stored)), packed, pack_how, count, length)
                f.call(
                    helpers["product"],
                    f.at(source, f.mul(group, get["x_group"])),
                    f.at(packed, f.sub(0, f.mul(pixels, lanes))),
                    f.at(dw, f.mul(group, get["dw_group"])),
                    "null",
                    how,
                    word(f, how, PRODUCT, "rows"),
                    first_outer,
                    outers,
                    adds,
                    0,
                    "null",
                    "null",
                )
    return f


def narrow(lanes: int) -> Function:
    """Return the function ``narrow(how)``, which rounds float32 numbers to float16."""
    f = Function("narrow", (("ptr", "how"),), "float", lanes)
    x, y = (pointer(f, "%how", NARROW, name) for name in ("x", "y"))
    count = word(f, "%how", NARROW, "count")
    full_count = f.value(f"and i64 {count}, {-lanes}")
    with f.loop(0, full_count, lanes) as i:
        f.store_halves(f.load(f.at(x, f.mul(i, 4))), f.at(y, f.mul(i, 2)), lanes)
    with f.loop(full_count, count) as i:
        f.put_half(f.scalar_at(f.at(x, f.mul(i, 4))), f.at(y, f.mul(i, 2)))
    return f


def functions(scalar: str, target: Target, *, halves: bool = False) -> list[Function]:
    """Return all functions of the module of dense convolutions; ``halves``: on float16 arrays, computed in float32."""
    lanes = target.lanes(4 if scalar == "float" else 8)
    helpers = {
        "pad": pad(scalar, lanes, halves=halves),
        "pack": pack(scalar, lanes, halves=halves),
        "product": product(scalar, lanes, target.tile_sizes, register=target.register),
    }
    weights_of = weights(scalar, lanes, helpers, halves=halves)
    if not halves:
        return [*helpers.values(), gather(scalar, lanes, helpers), weights_of]
    rounding = product(scalar, lanes, target.tile_sizes, register=target.register, halves=True)
    gather_of = gather(scalar, lanes, {**helpers, "product": rounding})
    return [*helpers.values(), rounding, gather_of, weights_of, narrow(lanes)]
