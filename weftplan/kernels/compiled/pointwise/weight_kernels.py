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
    f: Function, get: dict[str, str], panel: str, x: str, remaining: Value, vectors: int, length: Value, images: Value
) -> None:  # fmt: skip
    """Emit code that transposes ``length`` pixels of some images into ``panel``, for ``remaining`` channels from ``x``
    on.

    The next image overwrites the excess after an image's last pixel; ``panel`` has space for the last excess.
    """
    n, size = f.lanes, f.size
    step = vectors * n * size
    full_length = f.value(f"and i64 {length}, {-n}")
    remainder = f.sub(length, full_length)
    mask = f.mask_below(remainder)
    last_channel = f.sub(remaining, 1)
    with f.loop(0, images) as image:
        source = f.at(x, f.mul(image, get["x_image"]))
        target = f.at(panel, f.mul(f.mul(image, length), step))
        for vector in range(vectors):
            planes = [
                f.at(source, f.mul(f.smaller(last_channel, vector * n + lane), get["x_plane"])) for lane in range(n)
            ]

            def put(turned: list[str], pixel: Value, vector: int = vector, target: str = target) -> None:
                pixel_at = f.at(target, f.mul(pixel, step))
                for lane, value in enumerate(turned):
                    f.store(value, f.at(pixel_at, lane * step + vector * n * size))

            with f.loop(0, full_length, n) as pixel:
                moved = f.mul(pixel, size)
                put(f.transposed([f.load(f.at(plane, moved)) for plane in planes]), pixel)
            with f.when(f.compare("sgt", remainder, 0)):
                moved = f.mul(full_length, size)
                put(f.transposed([f.load_masked(f.at(plane, moved), mask) for plane in planes]), full_length)


def _block(
    f: Function, get: dict[str, str], rows: int, near: str, dy: str, dw: str, bias: str, out: str, remaining: Value,
    vectors: int, length: Value, images: Value, goes_on: str,
) -> None:  # fmt: skip
    """Emit the sum of one chunk in registers, for a block of filters from ``out`` on.

    ``goes_on``: a condition; if true the sum is added to the result of earlier chunks.
    """
    n, size = f.lanes, f.size
    last_filter = f.sub(get["last_out"], 1)
    numbers = [f.smaller(f.add(out, r), last_filter) for r in range(rows)]
    sums = [[f.local(f.vector) for _ in range(vectors)] for _ in numbers]
    planes = [f.at(dy, f.mul(number, get["dy_plane"])) for number in numbers]
    is_full = f.compare("sge", remaining, vectors * n)
    partly = f.value(f"xor i1 {is_full}, true")
    mask = f.mask_below(f.sub(remaining, (vectors - 1) * n))
    begins = [f.load(f.at(bias, vector * n * size)) for vector in range(vectors - 1)]
    begins.append(f.load_masked(f.at(bias, (vectors - 1) * n * size), mask))
    for row in sums:
        for start, accumulator in zip(begins, row, strict=True):
            f.store(start, accumulator)
    with f.loop(0, images) as image:
        panel = f.at(near, f.mul(f.mul(image, length), vectors * n * size))
        moved_image = f.mul(image, get["dy_image"])
        sources = [f.at(plane, moved_image) for plane in planes]
        with f.loop(0, length) as pixel:
            pixel_at = f.at(panel, f.mul(pixel, vectors * n * size))
            values = [f.load(f.at(pixel_at, vector * n * size)) for vector in range(vectors)]
            moved = f.mul(pixel, size)
            for row, plane in zip(sums, sources, strict=True):
                factor = f.broadcast(f.at(plane, moved))
                for accumulator, value in zip(row, values, strict=True):
                    f.store(f.fma(factor, value, f.load(accumulator)), accumulator)
    results = [f.at(dw, f.mul(number, get["dw_row"])) for number in numbers]
    # Duplicate rows, after the last filter, are read before any row is written.
    with f.when(goes_on):
        for row, row_at in zip(sums, results, strict=True):
            for vector, accumulator in enumerate(row[:-1]):
                f.store(f.binary("fadd", f.load(f.at(row_at, vector * n * size)), f.load(accumulator)), accumulator)
        for condition, lanes_mask in ((is_full, None), (partly, mask)):
            with f.when(condition):
                for row, row_at in zip(sums, results, strict=True):
                    last_at = f.at(row_at, (vectors - 1) * n * size)
                    old = f.load(last_at) if lanes_mask is None else f.load_masked(last_at, lanes_mask)
                    f.store(f.binary("fadd", old, f.load(row[-1])), row[-1])
    for row, row_at in zip(sums, results, strict=True):
        for vector, accumulator in enumerate(row[:-1]):
            f.store(f.load(accumulator), f.at(row_at, vector * n * size))
    with f.when(is_full):
        for row, row_at in zip(sums, results, strict=True):
            f.store(f.load(row[-1]), f.at(row_at, (vectors - 1) * n * size))
    with f.when(partly):
        for row, row_at in zip(sums, results, strict=True):
            f.store_masked(f.load(row[-1]), f.at(row_at, (vectors - 1) * n * size), mask)


def weights(scalar: str, target: Target) -> Function:
    """Return the function ``pointwise_weights(how)``, which computes a weight gradient as :data:`WEIGHTS` describes."""
    lanes = target.lanes(4 if scalar == "float" else 8)
    f = Function("pointwise_weights", (("ptr", "how"),), scalar, lanes)
    get = {name: (pointer if name in POINTERS else word)(f, "%how", WEIGHTS, name) for name in WEIGHTS}
    size, rows = f.size, rows_of(target)
    channels = f.sub(get["last"], get["first"])
    blocks = runs(f, channels)
    panel = f.local(f.vector, (CHUNK + lanes) * VECTORS)
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
        begin_channel: Value = 0
        nbytes = f.mul(length, size)
        lines = f.add(f.value(f"udiv i64 {nbytes}, {LINE}"), 1)
        share = f.add(f.value(f"udiv i64 {f.mul(lines, lanes)}, {channels}"), 1)
        for vectors, until in blocks:
            with f.loop(begin_channel, until, vectors * lanes) as offset:
                channel, remaining = f.add(get["first"], offset), f.sub(channels, offset)
                _turn(f, get, panel, f.at(x, f.mul(channel, get["x_plane"])), remaining, vectors, length, images)
                dw = f.at(get["dw"], f.mul(channel, size))
                bias_at = f.at(get["bias"], f.mul(channel, size))
                bias = f.value(f"select i1 {starts}, ptr {bias_at}, ptr {zeros}")
                first_line = f.mul(f.value(f"udiv i64 {offset}, {lanes}"), share)
                last_line = f.smaller(lines, f.add(first_line, f.mul(share, vectors)))
                with f.loop(get["first_out"], get["last_out"], rows) as out:
                    # Prefetch a share of the next chunk of these filters' output gradients.
                    for r in range(rows):
                        plane = f.at(f.at(dy, nbytes), f.mul(f.add(out, r), get["dy_plane"]))
                        with f.loop(first_line, last_line) as line:
                            f.prefetch(f.at(plane, f.mul(line, LINE)))
                    _block(f, get, rows, panel, dy, dw, bias, out, remaining, vectors, length, images, goes_on)
            begin_channel = until
    return f
