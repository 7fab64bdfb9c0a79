"""Kernels of BatchNorm as LLVM IR, forward and backward, which compute one channel of all images at a time.

A channel is read up to three times; only the first read is from memory, later reads are from a cache. Sums run in a
fixed number of chains, one for each element of four vectors of 64 bytes. The chains are added in a fixed order, so bits
do not depend on the width of vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weftplan.kernels.compiled.ir import Function, Value

EARLY, LATE = "early", "late"
"""The phases of a channel that can prefetch: the computation of its sums, and the writing of its results."""
_FETCH = ("at", "image", "channel", "lines")
FETCHED = tuple(f"{when}_{what}" for when in (EARLY, LATE) for what in _FETCH)
"""Words of each phase's prefetch into the second-level cache: address of the first channel, bytes between images and
between channels, and cache lines per :data:`STRETCH` of the current channel (0: no prefetch). Without prefetches,
memory is idle while the kernel reads a channel from a cache, and the kernel waits for the next channel."""

FORWARD = ("x", "y", "gamma", "beta", "mean", "var", "inverse", "constants", "images", "channels", "plane", "given",
           "first", "last", "relu", *FETCHED)  # fmt: skip
BACKWARD = ("dy", "x", "dx", "gamma", "mean", "inverse", "dgamma", "dbeta", "constants", "beta", "images", "channels",
            "plane", "given", "first", "last", "dx_image", "dx_channel", *FETCHED)  # fmt: skip
"""Argument words of the two functions. ``constants``: eps, then 1 / number of elements of a channel. ``given``: whether
the statistics are inputs, so that no gradient flows through them. ``y``, ``dx`` and ``gamma`` (null: 1) may be null.
``relu``: whether a relu follows. In the gradient, ``beta`` is not null if a relu follows: the sign of the relu's input
is recomputed from the data, which reads fewer bytes than the relu's output. ``dx_image`` and ``dx_channel``: bytes
between images of ``dx``, and between its channels."""
SCALES = ("gamma", "beta", "mean", "var", "scale", "shift", "constants", "channels")
"""Argument words of :func:`scales`."""

SAVED_STATISTICS = 2
"""Value of the word ``given`` in a forward pass that reads mean and ``inverse`` of an earlier run of the batch norm."""
LANES = {"float": 16, "double": 8}
"""Number of elements of a 64-byte vector, by scalar type."""
CHAINS = 4
"""Independent chains of additions: about as many as an addition takes cycles, so that none waits for the one before."""
LINE = 64
"""Bytes of a cache line, and of a vector."""
STRETCH = CHAINS * LINE
"""Bytes of a channel that one loop iteration processes."""


class _Channel:
    """Emitter of loops over one channel of all images."""

    def __init__(self, f: Function, words: dict[str, str]) -> None:
        self.f = f
        self.words = words
        self.images, self.channels = words["images"], words["channels"]
        self.plane = f.mul(words["plane"], f.size)
        self.wide = f.lanes * f.size
        self.four = f.mul(f.value(f"sdiv i64 {self.plane}, {CHAINS * self.wide}"), CHAINS * self.wide)
        self.full_bytes = f.mul(f.value(f"sdiv i64 {self.plane}, {self.wide}"), self.wide)
        remainder = f.value(f"sdiv exact i64 {f.sub(self.plane, self.full_bytes)}, {f.size}")
        self.mask = f.mask_below(remainder)
        self.remainder = remainder
        self.has_remainder = f.compare("ne", remainder, 0)
        self.result = ""

    def each_vector(
        self,
        channel: str,
        body: Callable[[Value, int, str | None], None],
        result: tuple[str, Value, Value] | None = None,
        *,
        fetches: str = "",
    ) -> None:
        """Emit ``body(offset, chain, mask)`` for every vector of the channel; the last of a plane may be masked.

        Args:
            result: an array with another layout, as (pointer, bytes between images, bytes between channels). In the
                body, its vector is at the same offset from :attr:`result`.
            fetches: the phase whose prefetches are emitted; empty: none.
        """
        f = self.f
        with f.loop(0, self.images) as image:
            begin = f.mul(f.add(f.mul(image, self.channels), channel), self.plane)
            if result is not None:
                result_at = f.add(f.mul(image, result[1]), f.mul(channel, result[2]))
                self.result = f.at(result[0], f.sub(result_at, begin))
            fetch = self._fetching(fetches, image, channel) if fetches else None
            with f.loop(0, self.four, CHAINS * self.wide) as i:
                if fetch is not None:
                    fetch(i)
                for chain in range(CHAINS):
                    body(f.add(f.add(begin, i), chain * self.wide), chain, None)
            with f.loop(self.four, self.full_bytes, self.wide) as i:
                body(f.add(begin, i), 0, None)
            with f.when(self.has_remainder):
                body(f.add(begin, self.full_bytes), 1, self.mask)

    def _fetching(self, when: str, image: str, channel: str) -> Callable[[str], None]:
        """Return a function that emits the prefetches of phase ``when`` for a position in a plane."""
        f = self.f
        at, image_step, channel_step, lines = (self.words[f"{when}_{what}"] for what in _FETCH)
        begin = f.add(at, f.add(f.mul(image, image_step), f.mul(channel, channel_step)))

        def fetch(position: str) -> None:
            line_begin = f.add(begin, f.mul(f.value(f"udiv exact i64 {position}, {STRETCH // LINE}"), lines))
            with f.loop(line_begin, f.add(line_begin, f.mul(lines, LINE)), LINE) as line:
                f.prefetch(f.value(f"inttoptr i64 {line} to ptr"))

        return fetch

    def load(self, pointer: str, offset: Value, mask: str | None) -> str:
        """Emit a load of a vector of the channel; lanes whose mask is off, after a plane's end, are zero."""
        f = self.f
        vector_at = f.at(pointer, offset)
        return f.load(vector_at) if mask is None else f.load_masked(vector_at, mask)

    def store(self, value: str, pointer: str, offset: Value, mask: str | None) -> None:
        """Emit a store of a vector's lanes whose mask is on; None: of all lanes."""
        f = self.f
        vector_at = f.at(pointer, offset)
        if mask is None:
            f.store(value, vector_at)
        else:
            f.store_masked(value, vector_at, mask)

    def zero_masked(self, value: str, mask: str | None) -> str:
        """Emit ``value`` with zeros in lanes whose mask is off, after a plane's end."""
        return value if mask is None else self.f.chosen(mask, value, "zeroinitializer")


class _Sum:
    """Emitter of a sum in :data:`CHAINS` chains of additions, which the compiler keeps in registers."""

    def __init__(self, f: Function) -> None:
        self.f = f
        self.chains = [f.local(f.vector) for _ in range(CHAINS)]

    def clear(self) -> None:
        """Emit stores of zero to all chains."""
        for chain in self.chains:
            self.f.store("zeroinitializer", chain)

    def put(self, chain: int, change: Callable[[str], str]) -> None:
        """Emit the replacement of a chain's value by ``change(value)``."""
        self.f.store(change(self.f.load(self.chains[chain])), self.chains[chain])

    def total(self) -> str:
        """Emit the sum of the elements of all chains, a scalar."""
        f = self.f
        a, b, c, d = (f.load(chain) for chain in self.chains)
        return f.total(f.binary("fadd", f.binary("fadd", a, b), f.binary("fadd", c, d)))


def _scalars(f: Function) -> Callable[[str, str, str], str]:
    return lambda how, a, b: f.value(f"{how} {f.scalar} {a}, {b}")


def _factor_or_unit(f: Function, pointer: str, offset: Value) -> str:
    """Emit a load of an element, or the constant 1 if ``pointer`` is null."""
    value = f.local(f.scalar)
    f.put_scalar("1.0", value)
    with f.when(f.value(f"icmp ne ptr {pointer}, null")):
        f.put_scalar(f.scalar_at(f.at(pointer, offset)), value)
    return f.scalar_at(value)


def scale_and_shift(f: Function, of: Mapping[str, str], offset: Value, mean: str, inverse: str) -> tuple[str, str]:
    """Emit a channel's (scale, shift).

    Args:
        of: pointers by name, among them gamma and beta.
        offset: the channel's offset in gamma and beta, in bytes.
    """
    op = _scalars(f)
    scale = op("fmul", inverse, _factor_or_unit(f, of["gamma"], offset))
    return scale, op("fsub", f.scalar_at(f.at(of["beta"], offset)), op("fmul", mean, scale))


def _block(f: Function, names: Sequence[str], pointers: int) -> dict[str, str]:
    """Emit loads of the words called ``names``; return them by name. The first ``pointers`` words are pointers."""
    return {
        name: f.pointer("%words", index) if index < pointers else f.word("%words", index)
        for index, name in enumerate(names)
    }


def forward(scalar: str) -> Function:
    """Return the function ``forward(words)``, which computes each channel's statistics and normalised data.

    The statistics are mean, variance and 1 / sqrt(variance + eps).
    """
    f = Function("forward", (("ptr", "words"),), scalar, LANES[scalar])
    of = _block(f, FORWARD, 8)
    op = _scalars(f)
    eps = f.scalar_at(of["constants"])
    share = f.scalar_at(f.at(of["constants"], f.size))
    walk, total = _Channel(f, of), _Sum(f)
    computes = f.compare("eq", of["given"], 0)
    writes = f.value(f"icmp ne ptr {of['y']}, null")
    with f.loop(of["first"], of["last"]) as channel:
        channel_at = f.mul(channel, f.size)
        with f.when(computes):
            total.clear()

            def add(offset: Value, chain: int, mask: str | None) -> None:
                x = walk.load(of["x"], offset, mask)
                total.put(chain, lambda old: f.binary("fadd", old, x))

            walk.each_vector(channel, add)
            mean = op("fmul", total.total(), share)
            f.put_scalar(mean, f.at(of["mean"], channel_at))
            every = f.splat(mean)
            total.clear()

            def square(offset: Value, chain: int, mask: str | None) -> None:
                d = walk.zero_masked(f.binary("fsub", walk.load(of["x"], offset, mask), every), mask)
                total.put(chain, lambda old: f.fma(d, d, old))

            walk.each_vector(channel, square, fetches=EARLY)
            f.put_scalar(op("fmul", total.total(), share), f.at(of["var"], channel_at))
        mean = f.scalar_at(f.at(of["mean"], channel_at))
        with f.when(f.compare("ne", of["given"], SAVED_STATISTICS)):
            root = f.root(op("fadd", f.scalar_at(f.at(of["var"], channel_at)), eps))
            f.put_scalar(op("fdiv", "1.0", root), f.at(of["inverse"], channel_at))
        inverse = f.scalar_at(f.at(of["inverse"], channel_at))
        scales, shifts = map(f.splat, scale_and_shift(f, of, channel_at, mean, inverse))

        def write(offset: Value, chain: int, mask: str | None) -> None:
            x = walk.load(of["x"], offset, mask)
            walk.store(f.fma(x, scales, shifts), of["y"], offset, mask)

        def write_positive(offset: Value, chain: int, mask: str | None) -> None:
            x = walk.load(of["x"], offset, mask)
            walk.store(f.floored(f.fma(x, scales, shifts)), of["y"], offset, mask)

        behind = f.compare("ne", of["relu"], 0)
        with f.when(f.value(f"and i1 {writes}, {behind}")):
            walk.each_vector(channel, write_positive, fetches=LATE)
        with f.when(f.value(f"and i1 {writes}, {f.value(f'xor i1 {behind}, true')}")):
            walk.each_vector(channel, write, fetches=LATE)
    return f


def scales(scalar: str) -> Function:
    """Return the function ``scales(words)``, which computes each channel's scale and shift from given statistics."""
    f = Function("scales", (("ptr", "words"),), scalar, LANES[scalar])
    of = _block(f, SCALES, 7)
    eps, units = f.broadcast(of["constants"]), f.constant("1.0")
    learnt = f.value(f"icmp ne ptr {of['gamma']}, null")
    with f.loop(0, of["channels"], f.lanes) as channel:
        mask = f.mask_below(f.sub(of["channels"], channel))
        channel_at = f.mul(channel, f.size)
        beta, mean, var = (f.load_masked(f.at(of[name], channel_at), mask) for name in ("beta", "mean", "var"))
        inverse = f.binary("fdiv", units, f.function("sqrt", f.binary("fadd", var, eps)))
        gamma = f.local(f.vector)
        f.store(units, gamma)
        with f.when(learnt):
            f.store(f.load_masked(f.at(of["gamma"], channel_at), mask), gamma)
        scale = f.binary("fmul", inverse, f.load(gamma))
        f.store_masked(scale, f.at(of["scale"], channel_at), mask)
        f.store_masked(f.binary("fsub", beta, f.binary("fmul", mean, scale)), f.at(of["shift"], channel_at), mask)
    return f


def backward(scalar: str) -> Function:
    """Return the function ``backward(words)``: gradients of gamma and beta, and of the data unless ``dx`` is null."""
    f = Function("backward", (("ptr", "words"),), scalar, LANES[scalar])
    of = _block(f, BACKWARD, 10)
    op = _scalars(f)
    behind = f.value(f"icmp ne ptr {of['beta']}, null")
    keeps_sign = f.value(f"xor i1 {behind}, true")

    share = f.scalar_at(f.at(of["constants"], f.size))
    walk, sums, products = _Channel(f, of), _Sum(f), _Sum(f)
    dx = of["dx"], of["dx_image"], of["dx_channel"]
    through = f.compare("eq", of["given"], 0)
    writes = f.value(f"icmp ne ptr {of['dx']}, null")
    shift_slot = f.local(f.scalar)
    f.put_scalar("0.0", shift_slot)
    with f.loop(of["first"], of["last"]) as channel:
        channel_at = f.mul(channel, f.size)
        mean, inverse = (f.scalar_at(f.at(of[name], channel_at)) for name in ("mean", "inverse"))
        scale = op("fmul", inverse, _factor_or_unit(f, of["gamma"], channel_at))
        with f.when(behind):
            f.put_scalar(op("fsub", f.scalar_at(f.at(of["beta"], channel_at)), op("fmul", mean, scale)), shift_slot)
        means, scales, shifts = f.splat(mean), f.splat(scale), f.splat(f.scalar_at(shift_slot))

        def incoming(
            offset: Value, x: str, mask: str | None, *, masked: bool, scales: str = scales, shifts: str = shifts
        ) -> str:
            dy = walk.load(of["dy"], offset, mask)
            return f.binary("fmul", dy, f.positive(f.fma(x, scales, shifts))) if masked else dy

        sums.clear()
        products.clear()

        def adding(masked: bool) -> Callable[[Value, int, str | None], None]:
            def add(offset: Value, chain: int, mask: str | None) -> None:
                x = walk.load(of["x"], offset, mask)
                dy = incoming(offset, x, mask, masked=masked)
                d = f.binary("fsub", x, means)
                if mask is not None:
                    d = walk.zero_masked(d, mask)
                sums.put(chain, lambda old: f.binary("fadd", old, dy))
                products.put(chain, lambda old: f.fma(dy, d, old))

            return add

        with f.when(keeps_sign):
            walk.each_vector(channel, adding(False), fetches=EARLY)
        with f.when(behind):
            walk.each_vector(channel, adding(True), fetches=EARLY)
        total = sums.total()
        dgamma = op("fmul", products.total(), inverse)
        f.put_scalar(dgamma, f.at(of["dgamma"], channel_at))
        f.put_scalar(total, f.at(of["dbeta"], channel_at))
        # dx = slope x + scale dy + offset
        slope = op("fmul", op("fmul", op("fmul", dgamma, inverse), scale), share)
        slope = op("fsub", "0.0", slope)
        constant = op("fsub", "0.0", op("fmul", op("fmul", total, scale), share))
        constant = op("fsub", constant, op("fmul", slope, mean))
        slopes, constants = f.splat(slope), f.splat(constant)

        def writing(masked: bool) -> Callable[[Value, int, str | None], None]:
            def write(offset: Value, chain: int, mask: str | None) -> None:
                x = walk.load(of["x"], offset, mask)
                dy = incoming(offset, x, mask, masked=masked)
                walk.store(f.fma(dy, scales, f.fma(x, slopes, constants)), walk.result, offset, mask)

            return write

        def simply(masked: bool) -> Callable[[Value, int, str | None], None]:
            def write(offset: Value, chain: int, mask: str | None) -> None:
                dy = incoming(offset, walk.load(of["x"], offset, mask), mask, masked=masked)
                walk.store(f.binary("fmul", dy, scales), walk.result, offset, mask)

            return write

        stops = f.value(f"xor i1 {through}, true")
        for flows, body in ((through, writing), (stops, simply)):
            for condition, masked in ((keeps_sign, False), (behind, True)):
                with f.when(f.value(f"and i1 {writes}, {f.value(f'and i1 {flows}, {condition}')}")):
                    walk.each_vector(channel, body(masked), dx, fetches=LATE)
    return f
