"""Compiled loops that sum several arrays, or copy one array to several, in a single pass over memory.

The additions of an element follow the requested order, so results have NumPy's bits. Results too large for the caches
are written with non-temporal stores, which do not read the overwritten memory. A kernel is compiled on first use, for
one number of arrays. Any thread may call; only compiled functions are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from weftplan.kernels.compiled.ir import Function, Value
from weftplan.kernels.compiled.jit import Entry, library
from weftplan.kernels.compiled.target import host
from weftplan.ops.core.implementations import PAST, Array
from weftplan.support import slots
from weftplan.support.addresses import address
from weftplan.support.array_types import DType
from weftplan.support.slots import Work

MAX_ARRAYS = 32
"""Maximum arrays of a loop; each array needs a register for its address and a stream of the hardware prefetcher."""

LINE = 64
"""Bytes of a step: a cache line."""

BLOCK = 1 << 15
"""Bytes that are copied to one target by non-temporal stores before the next target; the source stays in a first-level
cache. Alternating targets line by line took up to 50 times as long at some distances between the arrays, for unknown
reasons."""

_SCALARS = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}


def compiled_sum(sources: Sequence[Array], out: Array, *, grouped: bool) -> Work | None:
    """Return a function that writes the sum of the sources to ``out[first:last]``; None if there is no compiled kernel.

    Args:
        sources: contiguous arrays of one dimension, one size and one dtype.
        out: a similar array; it may be ``sources[0]``, but no other source.
        grouped: add ``x0 + (((x1 + x2) + x3) + x4) + …``, with four terms in each bracket; else from left to right.
    """
    scalar = _SCALARS.get(out.dtype)
    if scalar is None or not 2 <= len(sources) <= MAX_ARRAYS or isinstance(host(), str):
        return None
    count = len(sources)
    name = f"sum-{'grouped' if grouped else 'sequential'}-{count}-{scalar}"
    entries = library(
        name,
        lambda target: [_sum(scalar, count, grouped=grouped, past=past) for past in (False, True)],
        ("sum", "sum_past"),
    )
    past = _goes_past([out]) and not any(np.may_share_memory(source, out) for source in sources)
    return _work(entries["sum_past" if past else "sum"], [out, *sources], out.itemsize)


def compiled_spread(source: Array, targets: Sequence[Array]) -> Work | None:
    """Return a function that copies ``source[first:last]`` to every target; None if there is no compiled kernel.

    Args:
        source: a contiguous array of one dimension.
        targets: similar arrays; none shares memory with the source or another target.
    """
    if source.dtype not in _SCALARS or not 1 <= len(targets) <= MAX_ARRAYS or isinstance(host(), str):
        return None
    entry = _spreads(_SCALARS[source.dtype], len(targets))["spread_past" if _goes_past(targets) else "spread"]
    return _work(entry, [source, *targets], source.itemsize)


def copy_past(source: Array, target: Array) -> bool:
    """Copy ``source`` to ``target`` with non-temporal stores; return False, without a copy, if no kernel can do it.

    Both are contiguous and one-dimensional, have the same size and dtype, and share no memory. They need no alignment.
    """
    start, itemsize = address(target), target.itemsize
    head = -start % LINE
    full_bytes = (target.nbytes - head) // LINE * LINE
    if full_bytes <= 0 or head % itemsize or isinstance(host(), str):
        return False
    head_elements, end = head // itemsize, (head + full_bytes) // itemsize
    target[:head_elements] = source[:head_elements]
    target[end:] = source[end:]
    words = np.array([0, full_bytes, address(source) + head, start + head], np.int64)
    _spreads("float", 1)["spread_past"](address(words))
    return True


class Pieces:
    """A call that writes, for each piece, the sum of its terms to all its targets; see :func:`compiled_pieces`."""

    __slots__ = ("_entry", "_start", "_table")

    def __init__(self, pieces: Sequence[Sequence[int]], terms: int, scalar: str) -> None:
        targets = len(pieces[0]) - 1 - terms
        name = f"pieces-{terms}-{targets}-{scalar}"
        entries = library(name, lambda target: [_pieces_function("pieces", scalar, terms, targets)], ("pieces",))
        self._entry = entries["pieces"]
        self._table = np.array([len(pieces), *chain.from_iterable(pieces)], np.int64)
        self._start = address(self._table)

    def __call__(self) -> None:
        self._entry(self._start)


def compiled_pieces(pieces: Sequence[Sequence[int]], terms: int, dtype: DType) -> Pieces | None:
    """Return a call that writes, for each piece, the sum of its terms, from left to right, to all its targets.

    Return None if there is no compiled kernel for it. One call computes many pieces, because a call takes longer than a
    small piece.

    Args:
        pieces: for each piece (bytes, address of each term, address of each target); all have the same number of
            targets. A target is one of the terms, or shares no memory with them. The caller keeps the arrays alive.
        terms: number of terms of each piece; a piece of one term is copied.
    """
    scalar = _SCALARS.get(dtype)
    if scalar is None or not pieces or isinstance(host(), str):
        return None
    return Pieces(pieces, terms, scalar) if len(pieces[0]) - 1 <= MAX_ARRAYS else None


def _spreads(scalar: str, count: int) -> dict[str, Entry]:
    return library(
        f"spread-{count}-{scalar}",
        lambda target: [_spread(scalar, count, past=past) for past in (False, True)],
        ("spread", "spread_past"),
    )


def _goes_past(results: Sequence[Array]) -> bool:
    """Return whether to write results with non-temporal stores: they are large and aligned to cache lines."""
    return sum(result.nbytes for result in results) >= PAST and all(address(r) % LINE == 0 for r in results)


def _work(entry: Entry, arrays: Sequence[Array], itemsize: int) -> Work:
    words = np.array([0, 0, *map(address, arrays)], np.int64)

    def work(begin: int, end: int) -> None:
        # Ranges begin at cache lines, since non-temporal stores to unaligned addresses fault.
        assert begin * itemsize % LINE == 0, begin
        range_words = words.copy()
        range_words[:2] = begin * itemsize, end * itemsize
        entry(address(range_words))

    return work


def _sum(scalar: str, count: int, *, grouped: bool, past: bool) -> Function:
    f, begin, end = _begin("sum_past" if past else "sum", scalar)
    out, *sources = (f.pointer("%words", 2 + i) for i in range(count + 1))

    _each_line(f, begin, end, _total(f, sources, 4 if grouped else 1), [out], past=past)
    return f


def _total(f: Function, sources: Sequence[str], bracketed: int) -> Callable[[Callable[[str], str]], str]:
    def total(load: Callable[[str], str]) -> str:
        partial, remaining = load(sources[0]), sources[1:]
        for start in range(0, len(remaining), bracketed):
            share, *more = remaining[start : start + bracketed]
            bracket = load(share)
            for term in more:
                bracket = f.binary("fadd", bracket, load(term))
            partial = f.binary("fadd", partial, bracket)
        return partial

    return total


def _pieces_function(name: str, scalar: str, terms: int, targets: int) -> Function:
    """Return the function ``name(words)``, which computes pieces.

    The words: number of pieces, then for each piece its bytes and the addresses of its terms and targets.
    """
    f = Function(name, (("ptr", "words"),), scalar, LINE // (4 if scalar == "float" else 8))
    width = 1 + terms + targets
    with f.loop(0, f.word("%words", 0)) as number:
        piece = f.at("%words", f.add(f.mul(number, 8 * width), 8))
        nbytes, *pointers = f.word(piece), *(f.pointer(piece, 1 + i) for i in range(terms + targets))
        _each_line(f, 0, nbytes, _total(f, pointers[:terms], 1), pointers[terms:], past=False)
    return f


def _spread(scalar: str, count: int, *, past: bool) -> Function:
    f, start, stop = _begin("spread_past" if past else "spread", scalar)
    source, *targets = (f.pointer("%words", 2 + i) for i in range(count + 1))
    full_end, remaining = _lines(f, start, stop)
    if past:
        with f.loop(start, full_end, BLOCK) as begin:
            end = f.smaller(f.add(begin, BLOCK), full_end)
            for target in targets:
                with f.loop(begin, end, LINE) as offset:
                    f.store_past(f.load(f.at(source, offset)), f.at(target, offset))
        f.fence()
    else:
        with f.loop(start, full_end, LINE) as offset:
            line = f.load(f.at(source, offset))
            for target in targets:
                f.store(line, f.at(target, offset))
    with f.when(f.compare("sgt", remaining, 0)):
        mask = f.mask_below(remaining)
        for target in targets:
            f.store_masked(f.load_masked(f.at(source, full_end), mask), f.at(target, full_end), mask)
    return f


def _lines(f: Function, begin: Value, end: str) -> tuple[str, str]:
    """Emit the end of the last whole cache line of a range of bytes, and the number of elements after it."""
    length = f.sub(end, begin)
    full_end = f.add(begin, f.value(f"and i64 {length}, {-LINE}"))
    return str(full_end), f.value(f"sdiv exact i64 {f.sub(end, full_end)}, {f.size}")


def _begin(name: str, scalar: str) -> tuple[Function, str, str]:
    """Return a new function ``name(words)``, and the values of its first two words.

    The words: first byte, end byte, addresses of arrays.
    """
    f = Function(name, (("ptr", "words"),), scalar, LINE // (4 if scalar == "float" else 8))
    return f, f.word("%words", 0), f.word("%words", 1)


def _each_line(
    f: Function,
    begin: Value,
    end: str,
    value: Callable[[Callable[[str], str]], str],
    outs: Sequence[str],
    *,
    past: bool,
) -> None:
    """Emit a loop that stores ``value`` of every cache line to all ``outs``; the last line may be masked.

    ``past``: use non-temporal stores for the first of ``outs``.
    """
    full_end, remaining = _lines(f, begin, end)
    with f.loop(begin, full_end, LINE) as offset:
        line = value(lambda pointer: f.load(f.at(pointer, offset)))
        for out in outs:
            (f.store_past if past and out == outs[0] else f.store)(line, f.at(out, offset))
    _masked(f, full_end, remaining, value, outs)
    if past:
        f.fence()


def _masked(
    f: Function, offset: Value, count: str, value: Callable[[Callable[[str], str]], str], outs: Sequence[str]
) -> None:
    """Emit stores of ``value`` of ``count`` elements, less than a cache line, to all ``outs``."""
    with f.when(f.compare("sgt", count, 0)):
        mask = f.mask_below(count)
        line = value(lambda pointer: f.load_masked(f.at(pointer, offset), mask))
        for out in outs:
            f.store_masked(line, f.at(out, offset), mask)


slots.COMPILED_SUM.fill(compiled_sum)
slots.COMPILED_SPREAD.fill(compiled_spread)
slots.COPY_PAST.fill(copy_past)
slots.COMPILED_PIECES.fill(compiled_pieces)
