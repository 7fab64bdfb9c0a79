"""The weight gradient of a 1x1 convolution, a matrix times a transposed matrix, as LLVM IR.

Vectors run along channels of the image. A chunk of pixels of a few vectors of channels is transposed, so that the
channels of a pixel are contiguous, and stays in a cache while the output gradients of all filters are read in place.
The size of chunks follows from the number of pixels alone. Each chunk is one chain of fused multiply-adds, and chunks
are added in order, so bits depend neither on the width of vectors nor on the partition of a pass.
"""

from __future__ import annotations

from weftplan.kernels.compiled.copies import pointer, word
from weftplan.kernels.compiled.ir import Function, Value
from weftplan.kernels.compiled.pointwise.kernels import rows_of
from weftplan.kernels.compiled.target import Target
from weftplan.kernels.compiled.winograd.kernels import VECTORS, runs

WEIGHTS = ("x", "dy", "dw", "first", "last", "first_out", "last_out", "images", "together", "pixels", "chunk",
           "x_image", "x_plane", "dy_image", "dy_plane", "dw_row", "bias")  # fmt: skip
"""Argument words of a call, in bytes and counts. The gradients of channels ``first`` to ``last`` and filters
``first_out`` to ``last_out`` are computed. One chain sums ``chunk`` pixels of an image, or all pixels of ``together``
images. The first chain begins with the channel's ``bias``, unless that is null."""
LINE = 64
"""Bytes of a cache line on most machines."""
POINTERS = ("x", "dy", "dw", "bias")
CHUNK = 256
"""Pixels in one chain of additions. Those of a register block take at most 52 KB, which fit the stack. The number
determines the result's bits."""


def _turn(
    f: Function, get: dict[str, str], room: str, x: str, left: Value, vectors: int, length: Value, images: Value
) -> None:  # fmt: skip
    """Emit code that transposes ``length`` pixels of some images into ``room``, for ``left`` channels from ``x`` on.

    The next image overwrites the excess after an image's last pixel; ``room`` has space for the last excess.
    """
    n, size = f.lanes, f.size
    step = vectors * n * size
    whole = f.value(f"and i64 {length}, {-n}")
    remainder = f.sub(length, whole)
    mask = f.mask_below(remainder)
    most = f.sub(left, 1)
    with f.loop(0, images) as image:
        source = f.at(x, f.mul(image, get["x_image"]))
        target = f.at(room, f.mul(f.mul(image, length), step))
        for vector in range(vectors):
            planes = [f.at(source, f.mul(f.smaller(most, vector * n + lane), get["x_plane"])) for lane in range(n)]

            def put(turned: list[str], pixel: Value, vector: int = vector, target: str = target) -> None:
                place = f.at(target, f.mul(pixel, step))
                for lane, value in enumerate(turned):
                    f.store(value, f.at(place, lane * step + vector * n * size))

            with f.loop(0, whole, n) as pixel:
                moved = f.mul(pixel, size)
                put(f.transposed([f.load(f.at(plane, moved)) for plane in planes]), pixel)
            with f.when(f.compare("sgt", remainder, 0)):
                moved = f.mul(whole, size)
                put(f.transposed([f.load_masked(f.at(plane, moved), mask) for plane in planes]), whole)


def _block(
    f: Function, get: dict[str, str], rows: int, near: str, dy: str, dw: str, bias: str, out: str, left: Value,
    vectors: int, length: Value, images: Value, goes_on: str,
) -> None:  # fmt: skip
    """Emit the sum of one chunk in registers, for a block of filters from ``out`` on.

    ``goes_on``: a condition; if true the sum is added to the result of earlier chunks.
    """
    n, size = f.lanes, f.size
    most = f.sub(get["last_out"], 1)
    numbers = [f.smaller(f.add(out, r), most) for r in range(rows)]
    sums = [[f.local(f.vector) for _ in range(vectors)] for _ in numbers]
    planes = [f.at(dy, f.mul(number, get["dy_plane"])) for number in numbers]
    whole = f.compare("sge", left, vectors * n)
    partly = f.value(f"xor i1 {whole}, true")
    mask = f.mask_below(f.sub(left, (vectors - 1) * n))
    begins = [f.load(f.at(bias, vector * n * size)) for vector in range(vectors - 1)]
    begins.append(f.load_masked(f.at(bias, (vectors - 1) * n * size), mask))
    for row in sums:
        for start, one in zip(begins, row, strict=True):
            f.store(start, one)
    with f.loop(0, images) as image:
        room = f.at(near, f.mul(f.mul(image, length), vectors * n * size))
        moved_image = f.mul(image, get["dy_image"])
        sources = [f.at(plane, moved_image) for plane in planes]
        with f.loop(0, length) as pixel:
            here = f.at(room, f.mul(pixel, vectors * n * size))
            values = [f.load(f.at(here, vector * n * size)) for vector in range(vectors)]
            moved = f.mul(pixel, size)
            for row, plane in zip(sums, sources, strict=True):
                factor = f.broadcast(f.at(plane, moved))
                for one, value in zip(row, values, strict=True):
                    f.store(f.fma(factor, value, f.load(one)), one)
    results = [f.at(dw, f.mul(number, get["dw_row"])) for number in numbers]
    # Duplicate rows, after the last filter, are read before any row is written.
    with f.when(goes_on):
        for row, place in zip(sums, results, strict=True):
            for vector, one in enumerate(row[:-1]):
                f.store(f.binary("fadd", f.load(f.at(place, vector * n * size)), f.load(one)), one)
        for condition, some in ((whole, None), (partly, mask)):
            with f.when(condition):
                for row, place in zip(sums, results, strict=True):
                    there = f.at(place, (vectors - 1) * n * size)
                    old = f.load(there) if some is None else f.load_masked(there, some)
                    f.store(f.binary("fadd", old, f.load(row[-1])), row[-1])
    for row, place in zip(sums, results, strict=True):
        for vector, one in enumerate(row[:-1]):
            f.store(f.load(one), f.at(place, vector * n * size))
    with f.when(whole):
        for row, place in zip(sums, results, strict=True):
            f.store(f.load(row[-1]), f.at(place, (vectors - 1) * n * size))
    with f.when(partly):
        for row, place in zip(sums, results, strict=True):
            f.store_masked(f.load(row[-1]), f.at(place, (vectors - 1) * n * size), mask)


def weights(scalar: str, target: Target) -> Function:
    """Return the function ``pointwise_weights(how)``, which computes a weight gradient as :data:`WEIGHTS` describes."""
    lanes = target.lanes(4 if scalar == "float" else 8)
    f = Function("pointwise_weights", (("ptr", "how"),), scalar, lanes)
    get = {name: (pointer if name in POINTERS else word)(f, "%how", WEIGHTS, name) for name in WEIGHTS}
    size, rows = f.size, rows_of(target)
    channels = f.sub(get["last"], get["first"])
    blocks = runs(f, channels)
    room = f.local(f.vector, (CHUNK + lanes) * VECTORS)
    zeros = f.local(f.vector, VECTORS)
    for vector in range(VECTORS):
        f.store("zeroinitializer", f.at(zeros, vector * lanes * size))
    biased = f.value(f"icmp ne ptr {get['bias']}, null")
    with f.loop(0, get["images"], get["together"]) as image, f.loop(0, get["pixels"], get["chunk"]) as begin:
        images = f.smaller(get["together"], f.sub(get["images"], image))
        length = f.smaller(get["chunk"], f.sub(get["pixels"], begin))
        goes_on = f.compare("ne", f.add(image, begin), 0)
        starts = f.value(f"and i1 {biased}, {f.value(f'xor i1 {goes_on}, true')}")
        x = f.at(f.at(get["x"], f.mul(image, get["x_image"])), f.mul(begin, size))
        dy = f.at(f.at(get["dy"], f.mul(image, get["dy_image"])), f.mul(begin, size))
        done: Value = 0
        nbytes = f.mul(length, size)
        lines = f.add(f.value(f"udiv i64 {nbytes}, {LINE}"), 1)
        share = f.add(f.value(f"udiv i64 {f.mul(lines, lanes)}, {channels}"), 1)
        for vectors, until in blocks:
            with f.loop(done, until, vectors * lanes) as some:
                channel, left = f.add(get["first"], some), f.sub(channels, some)
                _turn(f, get, room, f.at(x, f.mul(channel, get["x_plane"])), left, vectors, length, images)
                dw = f.at(get["dw"], f.mul(channel, size))
                own = f.at(get["bias"], f.mul(channel, size))
                bias = f.value(f"select i1 {starts}, ptr {own}, ptr {zeros}")
                first_line = f.mul(f.value(f"udiv i64 {some}, {lanes}"), share)
                last_line = f.smaller(lines, f.add(first_line, f.mul(share, vectors)))
                with f.loop(get["first_out"], get["last_out"], rows) as out:
                    # Prefetch a share of the next chunk of these filters' output gradients.
                    for r in range(rows):
                        plane = f.at(f.at(dy, nbytes), f.mul(f.add(out, r), get["dy_plane"]))
                        with f.loop(first_line, last_line) as line:
                            f.prefetch(f.at(plane, f.mul(line, LINE)))
                    _block(f, get, rows, room, dy, dw, bias, out, left, vectors, length, images, goes_on)
            done = until
    return f
