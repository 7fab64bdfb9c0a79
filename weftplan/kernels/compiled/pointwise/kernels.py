"""The product of a 1x1 convolution as LLVM IR: vectors run along an image's pixels.

A few vectors of pixels of some channels are packed, and stay in the first-level cache while all filters are computed.
Partial sums are stored in the result, which does not change their bits. The forward pass reads weights in place. In the
data gradient the weights of a filter are not contiguous, so they are gathered first unless they are few. Every sum is
one chain of fused multiply-adds over the channels, so bits depend neither on the width of vectors nor on the partition
of a pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from weftplan.kernels.compiled.copies import pointer, word
from weftplan.kernels.compiled.ir import Function, Value
from weftplan.kernels.compiled.target import Target
from weftplan.kernels.compiled.winograd.kernels import VECTORS, runs

NEAR = 128
"""Maximum channels whose packed pixels are on the stack, in 6, 12 or 24 KB. Scratch for the first layers of a network,
whose images are the largest, would raise the plan's peak."""

POINTWISE = ("x", "w", "y", "bias", "scale", "shift", "room", "w_room", "first", "last", "first_out", "last_out",
             "units", "block", "unit", "pixels", "plane", "channels", "some", "x_image", "x_plane", "y_image",
             "y_plane", "w_out", "w_in", "relu")  # fmt: skip
"""Argument words of a call, in bytes and counts.

Images of ``pixels`` pixels are cut into ``units`` units of ``unit`` pixels. Units ``first`` to ``last`` are computed
for filters ``first_out`` to ``last_out``, and ``some`` channels are summed at a time. Sums begin with ``bias``, are
multiplied by ``scale``, and ``shift`` is added; each may be null. A nonzero ``relu`` applies the relu. ``room`` is
scratch for packed pixels; null: the stack, for at most :data:`NEAR` channels. ``w_room`` is scratch for the gathered
weights of ``block`` filters at a time; null: weights are read in place.
"""
POINTERS = ("x", "w", "y", "bias", "scale", "shift", "room", "w_room")


def rows_of(target: Target) -> int:
    """Return the number of filters in a register block."""
    return 8 if target.registers > 16 else 4


class _Block:
    """Emitter of a register block: sums of a few filters and vectors of pixels."""

    def __init__(self, f: Function, get: dict[str, str], rows: int) -> None:
        self.f, self.get, self.rows = f, get, rows
        self.biased = f.value(f"icmp ne ptr {get['bias']}, null")
        self.zero = f.local(f.scalar)
        f.put_scalar("0.0", self.zero)
        self.scaled = f.value(f"icmp ne ptr {get['scale']}, null")
        behind = f.compare("ne", get["relu"], 0)
        self.changed = f.value(f"or i1 {self.scaled}, {behind}")
        self.least = f.splat(f.value(f"select i1 {behind}, {f.scalar} 0.0, {f.scalar} 0xFFF0000000000000"))
        has_scratch = f.value(f"icmp ne ptr {get['room']}, null")
        near = f.local(f.vector, (NEAR + 1) * VECTORS)
        self.panel = f.value(f"select i1 {has_scratch}, ptr {get['room']}, ptr {near}")

    def compute(
        self,
        out: str,
        weights: list[str],
        w_in: str,
        y: str,
        y_plane: str,
        remaining: Value,
        vectors: int,
        first_channel: str,
        count: str,
    ) -> None:
        """Emit the addition of ``count`` channels, from ``first_channel`` on, to the results of one block of filters.

        Args:
            out: the first filter of the block.
            weights: addresses of each filter's weights, which are ``w_in`` bytes apart.
            y: address of filter 0's pixels; filters are ``y_plane`` bytes apart.
            remaining: number of pixels that remain.
            vectors: number of vectors of pixels in the block.
        """
        f, get = self.f, self.get
        n, size = f.lanes, f.size
        last_filter = f.sub(get["last_out"], 1)
        numbers = [f.smaller(f.add(out, r), last_filter) for r in range(self.rows)]
        sums = [[f.local(f.vector) for _ in range(vectors)] for _ in numbers]
        results = [f.at(y, f.mul(number, y_plane)) for number in numbers]
        for number in numbers:
            address = f.at(y, f.mul(f.add(number, self.rows), y_plane))
            for byte in [*range(0, vectors * n * size, 64), vectors * n * size - 1]:
                f.prefetch(f.at(address, byte))
        begins = f.compare("eq", first_channel, 0)
        ends = f.compare("eq", f.add(first_channel, count), get["channels"])
        is_full = f.compare("sge", remaining, vectors * n)
        partly = f.value(f"xor i1 {is_full}, true")
        mask = f.mask_below(f.sub(remaining, (vectors - 1) * n))
        with f.when(begins):
            for number, row in zip(numbers, sums, strict=True):
                address = f.at(get["bias"], f.mul(number, size))
                start = f.broadcast(f.value(f"select i1 {self.biased}, ptr {address}, ptr {self.zero}"))
                for accumulator in row:
                    f.store(start, accumulator)
        goes_on = f.value(f"xor i1 {begins}, true")
        with f.when(goes_on):
            with f.when(is_full):
                for row, result in zip(sums, results, strict=True):
                    f.store(f.load(f.at(result, (vectors - 1) * n * size)), row[-1])
            with f.when(partly):
                for row, result in zip(sums, results, strict=True):
                    f.store(f.load_masked(f.at(result, (vectors - 1) * n * size), mask), row[-1])
            for row, result in zip(sums, results, strict=True):
                for vector, accumulator in enumerate(row[:-1]):
                    f.store(f.load(f.at(result, vector * n * size)), accumulator)
        with f.loop(0, count) as channel:
            pixels_at = f.at(self.panel, f.mul(channel, vectors * n * size))
            values = [f.load(f.at(pixels_at, vector * n * size)) for vector in range(vectors)]
            moved = f.mul(channel, w_in)
            for row, weight in zip(sums, weights, strict=True):
                factor = f.broadcast(f.at(weight, moved))
                for accumulator, value in zip(row, values, strict=True):
                    f.store(f.fma(factor, value, f.load(accumulator)), accumulator)
        for row, result in zip(sums, results, strict=True):
            for vector, accumulator in enumerate(row[:-1]):
                f.store(f.load(accumulator), f.at(result, vector * n * size))
        with f.when(is_full):
            for row, result in zip(sums, results, strict=True):
                f.store(f.load(row[-1]), f.at(result, (vectors - 1) * n * size))
        with f.when(partly):
            for row, result in zip(sums, results, strict=True):
                f.store_masked(f.load(row[-1]), f.at(result, (vectors - 1) * n * size), mask)
        with f.when(f.value(f"and i1 {ends}, {self.changed}")):
            self._change(out, y, y_plane, vectors, is_full, partly, mask)

    def _change(self, out: str, y: str, y_plane: str, vectors: int, is_full: str, partly: str, mask: str) -> None:
        """Emit scale, shift and relu of complete sums, in memory: in registers they would slow down other passes."""
        f, get = self.f, self.get
        n, size = f.lanes, f.size
        with f.loop(out, f.smaller(f.add(out, self.rows), get["last_out"])) as number:
            plane = f.at(y, f.mul(number, y_plane))
            factor, shift = f.local(f.vector), f.local(f.vector)
            f.store(f.constant("1.0"), factor)
            f.store(f.constant("-0.0"), shift)  # x * 1 - 0 is x, also if x is -0
            with f.when(self.scaled):
                for pointer, name in ((factor, "scale"), (shift, "shift")):
                    f.store(f.broadcast(f.at(get[name], f.mul(number, size))), pointer)

            def changed(value: str) -> str:
                return f.floored(f.fma(value, f.load(factor), f.load(shift)), self.least)

            for vector in range(vectors - 1):
                vector_at = f.at(plane, vector * n * size)
                f.store(changed(f.load(vector_at)), vector_at)
            last_vector = f.at(plane, (vectors - 1) * n * size)
            with f.when(is_full):
                f.store(changed(f.load(last_vector)), last_vector)
            with f.when(partly):
                f.store_masked(changed(f.load_masked(last_vector, mask)), last_vector, mask)


def _gather_weights(
    f: Function, get: dict[str, str], rows: int, w: str, begin_out: str, end_out: str, channels: str
) -> None:
    """Emit code that gathers the weights of filters ``begin_out`` to ``end_out`` into ``w_room``.

    In ``w`` the weights of a channel are contiguous. In ``w_room`` those of a block of ``rows`` filters are, channel by
    channel.
    """
    size = f.size
    kind = f"<{rows} x {f.scalar}>"
    step = f.mul(channels, rows * size)
    full_end = f.add(begin_out, f.value(f"and i64 {f.sub(end_out, begin_out)}, {-rows}"))
    four = f.value(f"and i64 {channels}, -4")
    for begin, end, step_channels in ((0, four, 4), (four, channels, 1)):
        with f.loop(begin, end, step_channels) as channel:
            row = f.at(w, f.mul(channel, get["w_in"]))
            to = f.at(get["w_room"], f.mul(channel, rows * size))
            with f.loop(begin_out, full_end, rows) as out:
                number = f.value(f"udiv exact i64 {f.sub(out, begin_out)}, {rows}")
                panel_at, row_at = f.at(to, f.mul(number, step)), f.at(row, f.mul(out, size))
                for k in range(step_channels):
                    from_ = f.at(row_at, f.mul(get["w_in"], k))
                    value = f.value(f"load {kind}, ptr {from_}, align {size}")
                    f.emit(f"store {kind} {value}, ptr {f.at(panel_at, k * rows * size)}, align {size}")
    with f.when(f.compare("slt", full_end, end_out)), f.loop(0, channels) as channel:
        row = f.at(w, f.mul(channel, get["w_in"]))
        number = f.value(f"udiv exact i64 {f.sub(full_end, begin_out)}, {rows}")
        panel_at = f.at(f.at(get["w_room"], f.mul(number, step)), f.mul(channel, rows * size))
        for r in range(rows):
            out = f.smaller(f.add(full_end, r), f.sub(end_out, 1))
            f.put_scalar(f.scalar_at(f.at(row, f.mul(out, size))), f.at(panel_at, r * size))


def _panel(
    f: Function, get: dict[str, str], panel: str, from_: str, remaining: Value, vectors: int, channels: str
) -> None:  # fmt: skip
    """Emit the packing of ``vectors`` vectors of pixels, of all ``channels``, into contiguous memory."""
    n, size = f.lanes, f.size
    mask = f.mask_below(f.sub(remaining, (vectors - 1) * n))
    is_full = f.compare("sge", remaining, vectors * n)
    partly = f.value(f"xor i1 {is_full}, true")
    for condition, masked in ((is_full, None), (partly, mask)):
        with f.when(condition), f.loop(0, channels) as channel:
            plane = f.at(from_, f.mul(channel, get["x_plane"]))
            to = f.at(panel, f.mul(channel, vectors * n * size))
            for vector in range(vectors):
                vector_at = f.at(plane, vector * n * size)
                vector_mask = masked if vector == vectors - 1 else None
                value = f.load(vector_at) if vector_mask is None else f.load_masked(vector_at, vector_mask)
                f.store(value, f.at(to, vector * n * size))


@contextlib.contextmanager
def _each_image(
    f: Function, get: dict[str, str], image: Value, offset: Value, pixels: Value
) -> Iterator[tuple[Value, Value, Value, Value]]:
    """Emit a loop over the images that contain ``pixels`` wanted pixels, from pixel ``offset`` of ``image`` on.

    Yield (image, its first wanted pixel, number of its wanted pixels, number of wanted pixels before them).
    """
    beyond = f.larger(f.sub(pixels, f.sub(get["plane"], offset)), 0)
    more = f.value(f"udiv i64 {f.add(beyond, f.sub(get['plane'], 1))}, {get['plane']}")
    with f.loop(0, f.add(more, 1)) as number:
        begins = f.compare("eq", number, 0)
        begin = f.choose(begins, offset, 0)
        skipped = f.choose(begins, 0, f.sub(f.mul(number, get["plane"]), offset))
        count = f.smaller(f.sub(pixels, skipped), f.sub(get["plane"], begin))
        yield f.add(image, number), begin, count, skipped


def _panel_of_several(
    f: Function, get: dict[str, str], panel: str, x: str, image: Value, offset: Value, pixels: Value, vectors: int,
    channels: str,
) -> None:  # fmt: skip
    """Emit the packing of ``pixels`` pixels, which lie in several images.

    The next image or channel overwrites the excess after an image; ``panel`` has space for the last excess.
    """
    n, size = f.lanes, f.size
    with f.loop(0, channels) as channel:
        plane = f.at(x, f.mul(channel, get["x_plane"]))
        to = f.at(panel, f.mul(channel, vectors * n * size))
        with _each_image(f, get, image, offset, pixels) as (number, begin, count, skipped):
            source = f.at(f.at(plane, f.mul(number, get["x_image"])), f.mul(begin, size))
            target = f.at(to, f.mul(skipped, size))
            for vector in range(vectors):
                mask = f.mask_below(f.sub(count, vector * n))
                f.store(f.load_masked(f.at(source, vector * n * size), mask), f.at(target, vector * n * size))


def _exchange(
    f: Function, get: dict[str, str], y: str, buffer: str, row_bytes: int, rows: Value, image: Value, offset: Value,
    pixels: Value, *, puts: bool,
) -> None:  # fmt: skip
    """Emit copies of several images' results from ``y`` to a buffer of rows; ``puts``: from the buffer to ``y``."""
    size = f.size
    kind = f"<4 x {f.scalar}>"
    with _each_image(f, get, image, offset, pixels) as (number, begin, count, skipped):
        corner = f.at(f.at(y, f.mul(number, get["y_image"])), f.mul(begin, size))
        near = f.at(buffer, f.mul(skipped, size))
        fours = f.value(f"and i64 {count}, -4")
        with f.loop(0, rows) as row:
            far, near_row = f.at(corner, f.mul(row, get["y_plane"])), f.at(near, f.mul(row, row_bytes))
            from_, to = (near_row, far) if puts else (far, near_row)
            with f.loop(0, fours, 4) as i:
                moved = f.mul(i, size)
                four = f.value(f"load {kind}, ptr {f.at(from_, moved)}, align {size}")
                f.emit(f"store {kind} {four}, ptr {f.at(to, moved)}, align {size}")
            with f.loop(fours, count) as i:
                moved = f.mul(i, size)
                f.put_scalar(f.scalar_at(f.at(from_, moved)), f.at(to, moved))


def pointwise(scalar: str, target: Target) -> Function:
    """Return the function ``pointwise(how)``, which computes a 1x1 convolution as :data:`POINTWISE` describes."""
    lanes = target.lanes(4 if scalar == "float" else 8)
    f = Function("pointwise", (("ptr", "how"),), scalar, lanes)
    get = {name: (pointer if name in POINTERS else word)(f, "%how", POINTWISE, name) for name in POINTWISE}
    n, size, rows = f.lanes, f.size, rows_of(target)
    block = _Block(f, get, rows)
    ahead, buffer = f.local("i64"), f.local(f.vector, rows * VECTORS)
    gathers = f.value(f"icmp ne ptr {get['w_room']}, null")
    w_in = f.choose(gathers, rows * size, get["w_in"])
    w_out = f.choose(gathers, size, get["w_out"])
    begin = f.value(f"udiv i64 {get['first']}, {get['units']}")
    end = f.value(f"udiv i64 {f.add(get['last'], f.sub(get['units'], 1))}, {get['units']}")

    def image_of(image: str, first_channel: str, channels: str, w: str, begin_out: str, end_out: str) -> None:
        skipped = f.mul(image, get["units"])
        low = f.mul(f.larger(f.sub(get["first"], skipped), 0), get["unit"])
        high = f.smaller(f.mul(f.sub(get["last"], skipped), get["unit"]), get["pixels"])
        count = f.sub(high, low)
        x, y = f.at(get["x"], f.mul(image, get["x_image"])), f.at(get["y"], f.mul(image, get["y_image"]))
        begins = f.at(x, f.mul(first_channel, get["x_plane"]))
        goes_on = f.compare("ne", first_channel, 0)
        outs = f.add(f.sub(end_out, begin_out), rows - 1)
        rows_each = f.add(f.value(f"udiv i64 {f.mul(channels, rows)}, {outs}"), 1)
        last_filter = f.sub(get["last_out"], 1)
        begin_pixel: Value = 0
        for vectors, until in runs(f, count):
            with f.loop(begin_pixel, until, vectors * n) as pixel:
                remaining = f.sub(count, pixel)
                position = f.add(low, pixel)
                number = f.value(f"udiv i64 {position}, {get['plane']}")
                offset = f.sub(position, f.mul(number, get["plane"]))
                moved = f.mul(offset, size)
                from_ = f.at(f.at(begins, f.mul(number, get["x_image"])), moved)
                target_ = f.at(f.at(y, f.mul(number, get["y_image"])), moved)
                pixels = f.smaller(remaining, vectors * n)
                crosses = f.compare("sgt", f.add(offset, pixels), get["plane"])
                with f.when(f.value(f"xor i1 {crosses}, true")):
                    _panel(f, get, block.panel, from_, remaining, vectors, channels)
                with f.when(crosses):
                    _panel_of_several(f, get, block.panel, begins, number, offset, pixels, vectors, channels)
                row_bytes = vectors * n * size
                y_plane = f.choose(crosses, row_bytes, get["y_plane"])
                result_pixels = f.choose(crosses, vectors * n, remaining)
                f.keep(0, ahead)
                with f.loop(begin_out, end_out, rows) as out:
                    # Each block of filters prefetches a share of the next vectors of pixels.
                    later = f.word(ahead)
                    until_row = f.smaller(channels, f.add(later, rows_each))
                    with f.loop(later, until_row) as row:
                        ahead_at = f.at(from_, f.add(f.mul(row, get["x_plane"]), vectors * n * size))
                        for byte in [*range(63, vectors * n * size, 64), vectors * n * size - 1]:
                            f.prefetch(f.at(ahead_at, byte))
                    f.keep(until_row, ahead)
                    near = f.at(w, f.mul(f.sub(out, begin_out), f.mul(channels, size)))
                    origin = f.value(f"select i1 {gathers}, ptr {near}, ptr {w}")
                    weights = [
                        f.at(origin, f.mul(f.choose(gathers, r, f.smaller(f.add(out, r), last_filter)), w_out))
                        for r in range(rows)
                    ]
                    block_filters = f.smaller(rows, f.sub(end_out, out))
                    far = f.at(y, f.mul(out, get["y_plane"]))
                    with f.when(f.value(f"and i1 {crosses}, {goes_on}")):
                        _exchange(f, get, far, buffer, row_bytes, block_filters, number, offset, pixels, puts=False)
                    buffered = f.at(buffer, f.sub(0, f.mul(out, row_bytes)))
                    result = f.value(f"select i1 {crosses}, ptr {buffered}, ptr {target_}")
                    block.compute(out, weights, w_in, result, y_plane, result_pixels, vectors, first_channel, channels)
                    with f.when(crosses):
                        _exchange(f, get, far, buffer, row_bytes, block_filters, number, offset, pixels, puts=True)
            begin_pixel = until

    with f.loop(0, get["channels"], get["some"]) as first_channel:
        channels = f.smaller(f.sub(get["channels"], first_channel), get["some"])
        w = f.at(get["w"], f.mul(first_channel, get["w_in"]))
        with f.loop(get["first_out"], get["last_out"], get["block"]) as begin_out:
            end_out = f.smaller(get["last_out"], f.add(begin_out, get["block"]))
            with f.when(gathers):
                _gather_weights(f, get, rows, w, begin_out, end_out, channels)
            weights_at = f.value(f"select i1 {gathers}, ptr {get['w_room']}, ptr {w}")
            with f.loop(begin, end) as image:
                image_of(image, first_channel, channels, weights_at, begin_out, end_out)
    return f
