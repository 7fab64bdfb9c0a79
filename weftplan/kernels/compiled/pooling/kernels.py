"""Kernels of pooling over one to three axes as LLVM IR: vectors run along rows of windows.

For each row of windows, the image rows that it reads are copied with their padding into a small buffer, so windows at
the border need no special code. The padding is minus infinity for a maximum, and -0 for a sum, which changes no number.
A gradient, which exists only for maxima, pads with NaN, which equals no maximum. Each window adds its gradient to its
first element that equals the maximum. Windows run from the last to the first: NumPy's kernel adds gradients in this
order.
"""

from __future__ import annotations

from collections.abc import Callable

from weftplan.kernels.compiled.ir import Function, Value

VECTOR_BYTES = 32
"""Bytes of a vector on every machine, because sizes of buffers, and so plans, depend on it."""
WORDS = ("x", "y", "dy", "dx", "buffer", "constants", "scales", "depth", "height", "width", "out_depth", "out_height",
         "out_width", "kernel_depth", "kernel_height", "kernel_width", "step_depth", "step_height", "step",
         "pad_depth", "pad_height", "pad_width", "pitch", "first", "last", "scale_row")  # fmt: skip
"""Argument words of a call, for planes ``first`` to ``last``; extents are in elements. ``constants``: the padding, and
the initial value of a maximum or a sum. ``scales``: the factor of each window's sum; ``scale_row``: bytes between its
rows, 0 if all rows are equal. ``pitch``: bytes of a row of the buffer."""
_POINTERS = 7
"""Number of :data:`WORDS` that are pointers, from the first on."""


class _Pooling:
    """Emitter of the code that all pooling functions share: fills of the buffer, and loops over vectors of windows.

    The constructor emits code that fills the buffer with padding.
    """

    def __init__(self, name: str, scalar: str, step: int) -> None:
        self.f = f = Function(name, (("ptr", "words"),), scalar, VECTOR_BYTES // (4 if scalar == "float" else 8))
        self.static_step = step
        self.of = {
            word: f.pointer("%words", index) if index < _POINTERS else f.word("%words", index)
            for index, word in enumerate(WORDS)
        }
        self.step: Value = step or self.of["step"]
        self.wide = f.lanes * f.size
        self.padding = f.broadcast(self.of["constants"])
        self.row_bytes = f.mul(self.of["width"], f.size)
        self.plane_bytes = f.mul(f.mul(self.of["depth"], self.of["height"]), self.row_bytes)
        self.rows = f.mul(self.of["kernel_depth"], self.of["kernel_height"])
        with f.loop(0, f.mul(self.rows, self.of["pitch"]), self.wide) as i:
            f.store(self.padding, f.at(self.of["buffer"], i))

    def full_vectors(self, extent: Value) -> Value:
        """Emit ``extent`` rounded down to whole vectors."""
        return self.f.value(f"and i64 {extent}, {-self.f.lanes}")

    def fill(self, source: str, depth: Value, height: Value) -> None:
        """Emit copies of all rows of the plane at ``source`` that the windows at (``depth``, ``height``) read.

        Rows outside the plane become padding.
        """
        f, of = self.f, self.of
        full_bytes = f.mul(self.full_vectors(of["width"]), f.size)
        remainder = f.sub(of["width"], self.full_vectors(of["width"]))
        mask = f.mask_below(remainder)
        begin = f.at(of["buffer"], f.mul(of["pad_width"], f.size))
        with f.loop(0, of["kernel_depth"]) as a, f.loop(0, of["kernel_height"]) as b:
            d = f.sub(f.add(f.mul(depth, of["step_depth"]), a), of["pad_depth"])
            h = f.sub(f.add(f.mul(height, of["step_height"]), b), of["pad_height"])
            target = f.at(begin, f.mul(f.add(f.mul(a, of["kernel_height"]), b), of["pitch"]))
            # As unsigned numbers, positions before the image are far after its end.
            inside = f.value(f"and i1 {f.compare('ult', d, of['depth'])}, {f.compare('ult', h, of['height'])}")
            with f.when(inside):
                row = f.at(source, f.mul(f.add(f.mul(d, of["height"]), h), self.row_bytes))
                with f.loop(0, full_bytes, self.wide) as i:
                    f.store(f.load(f.at(row, i)), f.at(target, i))
                with f.when(f.compare("ne", remainder, 0)):
                    f.store_masked(f.load_masked(f.at(row, full_bytes), mask), f.at(target, full_bytes), mask)
            with f.when(f.value(f"xor i1 {inside}, true")), f.loop(0, self.row_bytes, self.wide) as i:
                f.store(self.padding, f.at(target, i))

    def each_vector(self, body: Callable[[Value, str | None], None], *, turned: bool = False) -> None:
        """Emit ``body(first window, mask)`` for each vector of a row of windows; the mask of a whole vector is None.

        ``turned``: from the last vector to the first.
        """
        f, count = self.f, self.of["out_width"]
        full_count = self.full_vectors(count)
        remainder = f.sub(count, full_count)

        def tail() -> None:
            with f.when(f.compare("ne", remainder, 0)):
                body(full_count, f.mask_below(remainder))

        if turned:
            tail()
        with f.loop(0, full_count, f.lanes) as i:
            body(f.sub(f.sub(full_count, f.lanes), i) if turned else i, None)
        if not turned:
            tail()

    def elements(self, first_at: str) -> str:
        """Emit a load of a vector of elements from ``first_at`` on, each one step after the previous."""
        f = self.f
        if self.static_step == 1:
            return f.load(first_at)
        if self.static_step == 2:
            return f.shuffle(f.load(first_at), f.load(f.at(first_at, self.wide)), [2 * lane for lane in range(f.lanes)])
        vector = "poison"
        for lane in range(f.lanes):
            element = f.scalar_at(f.at(first_at, f.mul(self.step, lane * f.size)))
            vector = f.value(f"insertelement {f.vector} {vector}, {f.scalar} {element}, i64 {lane}")
        return vector


def forward(scalar: str, step: int) -> Function:
    """Return the function that writes each window's maximum to ``y``; a window with a NaN gives NaN.

    Args:
        step: distance between windows of a row, if 1 or 2; 0: the function reads it from its words.
    """
    p = _Pooling("forward", scalar, step)
    f = p.f

    def larger(a: str, b: str) -> str:
        is_nan = f.value(f"fcmp uno {f.vector} {b}, {b}")
        return f.chosen(is_nan, b, f.floored(a, b))

    _reduce(p, larger, scaled=False)
    return f


def sums(scalar: str, step: int) -> Function:
    """Return the function that adds each window's elements in order, and writes the sum times its scale to ``y``.

    Args:
        step: distance between windows of a row, if 1 or 2; 0: the function reads it from its words.
    """
    p = _Pooling("sums", scalar, step)
    _reduce(p, lambda a, b: p.f.binary("fadd", a, b), scaled=True)
    return p.f


def _reduce(p: _Pooling, joined: Callable[[str, str], str], *, scaled: bool) -> None:
    """Emit the reduction of each window into ``y``; ``scaled``: times the window's scale.

    ``joined`` emits the combination of the partial result and the next element.
    """
    f, of = p.f, p.of
    start = f.broadcast(f.at(of["constants"], f.size))
    out_row = f.mul(of["out_width"], f.size)
    so_far = f.local(f.vector)
    with f.loop(of["first"], of["last"]) as plane:
        source = f.at(of["x"], f.mul(plane, p.plane_bytes))
        with f.loop(0, of["out_depth"]) as depth, f.loop(0, of["out_height"]) as height:
            p.fill(source, depth, height)
            row_of_plane = f.add(f.mul(depth, of["out_height"]), height)
            row = f.add(f.mul(plane, f.mul(of["out_depth"], of["out_height"])), row_of_plane)
            target = f.at(of["y"], f.mul(row, out_row))
            scales = f.at(of["scales"], f.mul(row_of_plane, of["scale_row"]))

            def windows(first_window: Value, mask: str | None, target: str = target, scales: str = scales) -> None:
                f.store(start, so_far)
                begin = f.at(of["buffer"], f.mul(f.mul(first_window, p.step), f.size))
                with f.loop(0, p.rows) as r, f.loop(0, of["kernel_width"]) as t:
                    b = p.elements(f.at(begin, f.add(f.mul(r, of["pitch"]), f.mul(t, f.size))))
                    f.store(joined(f.load(so_far), b), so_far)
                target_at, total = f.at(target, f.mul(first_window, f.size)), f.load(so_far)
                if scaled:
                    scales_at = f.at(scales, f.mul(first_window, f.size))
                    total = f.binary(
                        "fmul", total, f.load(scales_at) if mask is None else f.load_masked(scales_at, mask)
                    )
                if mask is None:
                    f.store(total, target_at)
                else:
                    f.store_masked(total, target_at, mask)

            p.each_vector(windows)


def backward(scalar: str, step: int) -> Function:
    """Return the function that writes to ``dx``, for each element, the sum of the gradients of the windows whose first
    maximum it is.

    Args:
        step: distance between windows of a row, if 1 or 2; 0: the function reads it from its words.
    """
    p = _Pooling("backward", scalar, step)
    f, of = p.f, p.of
    out_row = f.mul(of["out_width"], f.size)
    numbers = f"<{f.lanes} x i32>"
    first_maxima = f.local(numbers)
    with f.loop(of["first"], of["last"]) as plane:
        source, target = (f.at(of[name], f.mul(plane, p.plane_bytes)) for name in ("x", "dx"))
        f.emit(f"call void @llvm.memset.p0.i64(ptr {target}, i8 0, i64 {p.plane_bytes}, i1 false)")
        with f.loop(0, of["out_depth"]) as d, f.loop(0, of["out_height"]) as h:
            depth, height = f.sub(f.sub(of["out_depth"], 1), d), f.sub(f.sub(of["out_height"], 1), h)
            p.fill(source, depth, height)
            row = f.add(f.mul(f.add(f.mul(plane, of["out_depth"]), depth), of["out_height"]), height)
            outs, grads = (f.at(of[name], f.mul(row, out_row)) for name in ("y", "dy"))
            # Start of the row's first window, which may be in the padding.
            begins = f.mul(f.sub(f.mul(depth, of["step_depth"]), of["pad_depth"]), of["height"])
            begins = f.add(begins, f.sub(f.mul(height, of["step_height"]), of["pad_height"]))
            corner = f.sub(f.mul(begins, of["width"]), of["pad_width"])

            def windows(
                first_window: Value, mask: str | None, outs: str = outs, grads: str = grads, corner: Value = corner,
                target: str = target,
            ) -> None:  # fmt: skip
                offset = f.mul(first_window, f.size)
                outs_at = f.at(outs, offset)
                if mask is None:
                    greatest = f.load(outs_at)
                else:
                    nan = f.constant("0x7FF8000000000000")
                    greatest = f.value(f"select <{f.lanes} x i1> {mask}, {f.vector} {f.load_masked(outs_at, mask)}, "
                                       f"{f.vector} {nan}")  # fmt: skip
                f.emit(f"store {numbers} splat (i32 -1), ptr {first_maxima}, align 64")
                begin = f.at(of["buffer"], f.mul(f.mul(first_window, p.step), f.size))
                with (
                    f.loop(0, of["kernel_depth"]) as i,
                    f.loop(0, of["kernel_height"]) as j,
                    f.loop(0, of["kernel_width"]) as k,
                ):  # from the last element to the first, so that the first maximum is written last
                    a, b, t = (
                        f.sub(f.sub(of[name], 1), index)
                        for name, index in (("kernel_depth", i), ("kernel_height", j), ("kernel_width", k))
                    )
                    r = f.add(f.mul(a, of["kernel_height"]), b)
                    elements = p.elements(f.at(begin, f.add(f.mul(r, of["pitch"]), f.mul(t, f.size))))
                    equal = f.value(f"fcmp oeq {f.vector} {elements}, {greatest}")
                    tap = f.add(f.mul(f.add(f.mul(a, of["height"]), b), of["width"]), t)
                    number = f.value(f"trunc i64 {tap} to i32")
                    every = f.value(f"insertelement {numbers} poison, i32 {number}, i64 0")
                    every = f.value(f"shufflevector {numbers} {every}, {numbers} poison, "
                                    f"<{f.lanes} x i32> zeroinitializer")  # fmt: skip
                    old = f.value(f"load {numbers}, ptr {first_maxima}, align 64")
                    new = f.value(f"select <{f.lanes} x i1> {equal}, {numbers} {every}, {numbers} {old}")
                    f.emit(f"store {numbers} {new}, ptr {first_maxima}, align 64")
                gradient = f.value(f"load {numbers}, ptr {first_maxima}, align 64")
                origin = f.add(corner, f.mul(first_window, p.step))
                for lane in reversed(range(f.lanes)):
                    tap = f.value(f"sext i32 {f.value(f'extractelement {numbers} {gradient}, i64 {lane}')} to i64")
                    with f.when(f.compare("sge", tap, 0)):
                        moved = f.mul(f.add(f.add(origin, f.mul(p.step, lane)), tap), f.size)
                        to = f.at(target, moved)
                        change = f.scalar_at(f.at(grads, f.add(offset, lane * f.size)))
                        f.put_scalar(f.value(f"fadd {scalar} {f.scalar_at(to)}, {change}"), to)

            p.each_vector(windows, turned=True)
    return f


def backward_of_pairs(scalar: str) -> Function:
    """Return the function that computes ``dx`` as in :func:`backward`, for adjacent unpadded windows of width two.

    No two windows share an element, so each element is written once, without the buffer: the window's gradient if it is
    the first that equals the maximum, else 0.
    """
    p = _Pooling("backward_of_pairs", scalar, 2)
    f, of = p.f, p.of
    n = f.lanes
    out_row = f.mul(of["out_width"], f.size)
    unclaimed_slot = f.local(f.vector)
    even, odd = [2 * lane for lane in range(n)], [2 * lane + 1 for lane in range(n)]
    woven = [lane // 2 + n * (lane % 2) for lane in range(2 * n)]
    with f.loop(of["first"], of["last"]) as plane:
        source, target = (f.at(of[name], f.mul(plane, p.plane_bytes)) for name in ("x", "dx"))
        covered = f.mul(f.mul(of["out_depth"], of["kernel_depth"]), f.mul(of["out_height"], of["kernel_height"]))
        plane_rows = f.mul(of["depth"], of["height"])
        covers = f.compare("eq", covered, plane_rows), f.compare("eq", f.mul(of["out_width"], 2), of["width"])
        with f.when(f.value(f"xor i1 {f.value(f'and i1 {covers[0]}, {covers[1]}')}, true")):
            f.emit(f"call void @llvm.memset.p0.i64(ptr {target}, i8 0, i64 {p.plane_bytes}, i1 false)")
        with f.loop(0, of["out_depth"]) as depth, f.loop(0, of["out_height"]) as height:
            row = f.add(f.mul(f.add(f.mul(plane, of["out_depth"]), depth), of["out_height"]), height)
            outs, grads = (f.at(of[name], f.mul(row, out_row)) for name in ("y", "dy"))
            corner = f.mul(f.mul(depth, of["kernel_depth"]), of["height"])
            corner = f.mul(f.add(corner, f.mul(height, of["kernel_height"])), p.row_bytes)

            def windows(
                first_window: Value, mask: str | None, outs: str = outs, grads: str = grads, corner: Value = corner,
                source: str = source, target: str = target,
            ) -> None:  # fmt: skip
                offset = f.mul(first_window, f.size)
                begin = f.add(corner, f.mul(offset, 2))
                masks: tuple[str, str] | None = None
                if mask is not None:
                    unclaimed = f.mul(f.sub(of["out_width"], first_window), 2)
                    masks = f.mask_below(unclaimed), f.mask_below(f.sub(unclaimed, n))

                def load(pointer: str, lanes_mask: str | None) -> str:
                    return f.load(pointer) if lanes_mask is None else f.load_masked(pointer, lanes_mask)

                greatest = load(f.at(outs, offset), mask)
                f.store(f.binary("fadd", load(f.at(grads, offset), mask), f.constant("0.0")), unclaimed_slot)
                with f.loop(0, of["kernel_depth"]) as a, f.loop(0, of["kernel_height"]) as b:
                    offset_in_plane = f.add(begin, f.mul(f.add(f.mul(a, of["height"]), b), p.row_bytes))
                    pair = [
                        load(f.at(f.at(source, offset_in_plane), side * p.wide), None if masks is None else masks[side])
                        for side in range(2)
                    ]
                    gradients = []
                    for lanes in (even, odd):
                        elements = f.shuffle(pair[0], pair[1], lanes)
                        hit = f.value(f"fcmp oeq {f.vector} {elements}, {greatest}")
                        unclaimed = f.load(unclaimed_slot)
                        gradients.append(f.chosen(hit, unclaimed, "zeroinitializer"))
                        f.store(f.chosen(hit, "zeroinitializer", unclaimed), unclaimed_slot)
                    for side in range(2):
                        to = f.at(f.at(target, offset_in_plane), side * p.wide)
                        value = f.shuffle(gradients[0], gradients[1], woven[side * n : (side + 1) * n])
                        if masks is None:
                            f.store(value, to)
                        else:
                            f.store_masked(value, to, masks[side])

            p.each_vector(windows)
    return f
