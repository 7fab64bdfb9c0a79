"""Offset packing: valid packings, known optima, time limits, reproducibility and invalid input."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.packing_instances import planted, skewed_trace, training_trace
from weftplan.cli.pack_csv import read_csv
from weftplan.errors import FormatError, PlanError
from weftplan.planner.packing import Packing, PackingError, Precedence, check_packing, pack, reuse_edges
from weftplan.planner.packing.hard import kernel
from weftplan.planner.packing.hard.search import RULES, Allowance, Searcher
from weftplan.planner.packing.problem import peak_of, sectioned
from weftplan.planner.slabs import judged

DATA = Path(__file__).parents[2] / "bench" / "data"

buffers = st.lists(
    st.tuples(st.integers(-20, 20), st.integers(1, 12), st.integers(1, 40)).map(lambda b: (b[0], b[0] + b[1], b[2])),
    max_size=24,
)


def columns(rows: list[tuple[int, int, int]]) -> tuple[list[int], list[int], list[int]]:
    """Return the rows (lower, upper, size) as three columns."""
    return [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows]


def peak_load(lower: list[int], upper: list[int], size: list[int]) -> int:
    """Return the most bytes that are alive at the same time, by checking every start time."""
    return max((sum(s for a, b, s in zip(lower, upper, size, strict=True) if a <= t < b) for t in lower), default=0)


def optimum(rows: list[tuple[int, int, int]]) -> int:
    """Return the smallest peak of bottom-left placement over all orders, which is the optimum."""
    best = sum(r[2] for r in rows)
    for order in itertools.permutations(rows):
        placed: list[tuple[int, int, int, int]] = []
        for lower, upper, size in order:
            off = 0
            for _, _, low, top in sorted((p for p in placed if p[0] < upper and lower < p[1]), key=lambda p: p[2]):
                if off + size <= low:
                    break
                off = max(off, top)
            placed.append((lower, upper, off, off + size))
        best = min(best, max(p[3] for p in placed))
    return best


@given(buffers, st.sampled_from([1, 3, 64]), st.sampled_from(["fast", "normal"]))
@settings(deadline=None, max_examples=60)
def test_packings_are_valid(rows: list[tuple[int, int, int]], alignment: int, effort: str) -> None:
    """In any packing live buffers do not overlap, and offsets are aligned.

    The reported peak is that of the offsets, and the lower bound is the largest sum of live bytes.
    """
    lower, upper, size = columns(rows)
    packing = pack(lower, upper, size, alignment=alignment, effort=effort)  # type: ignore[arg-type]
    rounded = [-(-s // alignment) * alignment for s in size]
    assert check_packing(lower, upper, rounded, packing.offsets, alignment=alignment) == packing.peak
    assert packing.lower_bound == peak_load(lower, upper, rounded)
    assert packing.lower_bound <= packing.peak <= sum(rounded)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 9)).map(lambda b: (b[0], b[0] + b[1], b[2])),
        min_size=1,
        max_size=6,
    )
)
@settings(deadline=None, max_examples=60)
def test_tiny_problems_reach_the_optimum(rows: list[tuple[int, int, int]]) -> None:
    """For at most six buffers the search finds the optimum."""
    assert pack(*columns(rows), effort="max").peak == optimum(rows)


def fits(rows: list[tuple[int, int, int]], capacity: int) -> bool:
    """Return whether the buffers fit into ``capacity``, by trying all integer offsets."""
    placed: list[tuple[int, int, int, int]] = []

    def try_from(k: int) -> bool:
        if k == len(rows):
            return True
        lower, upper, size = rows[k]
        for off in range(capacity - size + 1):
            if all(u <= lower or upper <= a or top <= off or off + size <= low for a, u, low, top in placed):
                placed.append((lower, upper, off, off + size))
                if try_from(k + 1):
                    return True
                placed.pop()
        return False

    return try_from(0)


NEEDS_MORE_THAN_ITS_LOAD = [
    *((0, 1, 3), (0, 2, 4), (1, 3, 2), (2, 3, 2), (1, 4, 1), (2, 4, 1), (2, 5, 1), (3, 5, 4), (4, 5, 2))
]


def test_optimum_above_the_lower_bound() -> None:
    """Nine buffers with a load of 7 need 8 bytes: the search finds 8, and the bound stays 7."""
    assert not fits(NEEDS_MORE_THAN_ITS_LOAD, 7)
    packing = pack(*columns(NEEDS_MORE_THAN_ITS_LOAD), effort="max")
    assert (packing.peak, packing.lower_bound) == (8, 7)


@pytest.mark.parametrize(("name", "ratio"), [("B", 1.001), ("E", 1.001), ("G", 1.001), ("H", 1.001), ("K", 1.015)])
def test_hard_public_set(name: str, ratio: float) -> None:
    """Challenge problems are packed close to the lower bound without a hint of the capacity."""
    _, lower, upper, size = read_csv(DATA / "minimalloc" / f"{name}.1048576.csv")
    packing = pack(lower, upper, size)
    assert check_packing(lower, upper, size, packing.offsets) == packing.peak
    assert packing.ratio <= ratio


def test_trace_of_resnet50() -> None:
    """The recorded trace of ResNet-50 is packed within 0.4 % of the lower bound."""
    _, lower, upper, size = read_csv(DATA / "somas_resnet50.csv")
    packing = pack(lower, upper, size)
    assert check_packing(lower, upper, size, packing.offsets) == packing.peak
    assert packing.ratio <= 1.004


@pytest.mark.parametrize(
    ("n", "side", "ratio"), [(100, 30, 1.05), (1_000, 30, 1.05), (1_000, 20, 1.05), (20_000, 30, 1.4)]
)
def test_planted_optimum(n: int, side: int, ratio: float) -> None:
    """Buffers cut from a full rectangle are packed within 5 % of the optimum, or within 40 % if there are 20,000."""
    lower, upper, size = planted(n, 3, duration=1 << side, memory=1 << side)
    packing = pack(lower, upper, size)
    assert packing.lower_bound == 1 << side
    assert check_packing(lower, upper, size, packing.offsets) == packing.peak
    assert packing.ratio <= ratio


@pytest.mark.parametrize("trace", [training_trace(30, 60, 1), skewed_trace(6_000, 1)])
def test_large_traces(trace: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Traces of thousands of buffers are packed within 2 % of the bound in less than 20 s of processor time."""
    began = time.process_time()
    packing = pack(*trace)
    assert time.process_time() - began < 20
    assert check_packing(*trace, packing.offsets) == packing.peak
    assert packing.ratio <= 1.02


@pytest.mark.parametrize(("n", "effort"), [(200, "fast"), (800, "normal")])
def test_a_chain_is_packed_at_the_bound(n: int, effort: Any) -> None:
    """The buffers of a chain, of two neighbours alive at a time, are packed at the bound."""
    size = np.random.default_rng(0).integers(1, 1000, n) * 64
    lower = np.arange(n)
    packing = pack(lower, lower + 2, size, effort=effort)
    assert check_packing(lower, lower + 2, size, packing.offsets) == packing.peak == packing.lower_bound


def test_later_part_does_not_raise_the_peak() -> None:
    """Appending a copy of all buffers at later times gives the same peak."""
    _, lower, upper, size = read_csv(DATA / "minimalloc" / "B.1048576.csv")
    alone = pack(lower, upper, size)
    later = int(upper.max()) + 5
    twice = pack(np.r_[lower, lower + later], np.r_[upper, upper + later], np.r_[size, size])
    assert twice.peak == alone.peak
    assert check_packing(np.r_[lower, lower + later], np.r_[upper, upper + later], np.r_[size, size], twice.offsets)


def test_same_input_same_offsets() -> None:
    """Two packings of one problem are equal, because effort limits work and not time; offsets are read-only."""
    _, lower, upper, size = read_csv(DATA / "minimalloc" / "H.1048576.csv")
    first, second = pack(lower, upper, size), pack(lower.copy(), upper, size)
    assert first == second
    assert isinstance(first, Packing)
    with pytest.raises(ValueError, match="read-only"):
        first.offsets[0] = 1


def test_time_limit_cuts_the_search_short() -> None:
    """With a time limit of 0.1 s the search ends within 5 s of processor time with a valid packing."""
    lower, upper, size = planted(1_500, 5, duration=1 << 11, memory=1 << 12)
    began = time.process_time()
    packing = pack(lower, upper, size, effort="max", time_limit=0.1)
    assert time.process_time() - began < 5
    assert check_packing(lower, upper, size, packing.offsets) == packing.peak


def test_sizes_near_the_limit() -> None:
    """Sizes of about 2**57 bytes are packed without overflow of 64 bits."""
    rows = [(0, 1, 3), (0, 2, 4), (1, 3, 2), (2, 3, 2), (1, 4, 1), (2, 4, 1), (2, 5, 1), (3, 5, 4), (4, 5, 2)]
    lower, upper, size = columns(rows)
    huge = [s * 2**57 + k for k, s in enumerate(size)]
    packing = pack(lower, upper, huge, effort="max")
    assert check_packing(lower, upper, huge, packing.offsets) == packing.peak < 9 * 2**57


@pytest.mark.parametrize("alignment", [np.int8(64), np.uint8(128)])
def test_alignment_of_a_small_dtype(alignment: np.integer[Any]) -> None:
    """An alignment of any integer dtype of NumPy gives the packing of the same Python integer."""
    rows = [0, 0, 1], [2, 2, 2], [300, 700, 9]
    assert pack(*rows, alignment=alignment) == pack(*rows, alignment=int(alignment))  # type: ignore[arg-type]


def test_a_time_limit_beyond_all_floats_is_none() -> None:
    """A limit of any size is accepted."""
    assert pack([0], [1], [4], time_limit=10**400).peak == 4


def test_nothing_to_pack() -> None:
    """Packing no buffers takes 0 bytes."""
    packing = pack([], [], [])
    assert (packing.peak, packing.lower_bound, packing.ratio, len(packing.offsets)) == (0, 0, 1.0, 0)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([0], [1, 2], [3]), {}, "one length, got 1, 2 and 1"),
        (([0, 5], [1, 5], [3, 4]), {}, "buffer 1 has an empty lifetime: lower=5, upper=5"),
        (([0], [1], [0]), {}, "buffer 0 has no positive size.*size=0"),
        (([0], [1], [-4]), {}, "size=-4"),
        (([0.0], [1], [4]), {}, "lower: expected integers.*float64"),
        (([True], [2], [4]), {}, "lower: expected integers.*bool"),
        (([0], [1], [2**63]), {}, r"size\[0\] = 9223372036854775808 does not fit int64"),
        (([0], [1], [2**70]), {}, "size: expected integers that fit 64 bits"),
        (([0, 0], [1, 1], [2**61, 2**61]), {}, r"expected less than 2\*\*62"),
        (([[0]], [[1]], [[4]]), {}, r"one dimension, got shape \(1, 1\)"),
        (([0], [1], [4]), {"alignment": 0}, "alignment: expected a positive integer"),
        (([0], [1], [4]), {"alignment": 2.0}, "alignment"),
        (([0], [1], [4]), {"alignment": 10**400}, "alignment: expected a positive integer"),
        (([0], [1], [4]), {"time_limit": 0}, "time_limit: expected a positive number"),
        (([0], [1], [4]), {"effort": []}, "effort: expected one of fast, normal, max"),
        (([0], [1], [4]), {"room": "8"}, "room: expected an integer"),
        (
            ([0], [1], [4]),
            {"order": Precedence([1, 2], [1, 3])},
            "order: expected a Precedence with 1 users",
        ),
        (([0], [1], [4]), {"order": [1]}, "order: expected a Precedence"),
        (([0], [1], [4]), {"effort": "huge"}, "effort: expected one of fast, normal, max"),
    ],
)
def test_bad_input_is_refused(arguments: tuple[object, ...], options: dict[str, object], message: str) -> None:
    """Invalid input raises an error with the array, the buffer or the value."""
    with pytest.raises(PackingError, match=message):
        pack(*arguments, **options)  # type: ignore[arg-type]


def test_the_check_names_both_buffers() -> None:
    """``check_packing`` names two buffers that overlap in time and bytes; buffers that only touch are valid."""
    with pytest.raises(PlanError, match=r"buffers 0 and 2 overlap at time 1: 0 lives 0..3 in bytes 0..8, 2 lives 1..2"):
        check_packing([0, 0, 1], [3, 1, 2], [8, 8, 8], [0, 8, 7])
    with pytest.raises(PlanError, match="multiple of 4"):
        check_packing([0], [1], [8], [2], alignment=4)
    assert check_packing([0, 0, 3], [3, 1, 4], [8, 8, 8], [0, 8, 0]) == 16


@given(buffers)
@settings(deadline=None, max_examples=60)
def test_reuse_edges_order_every_overlap(rows: list[tuple[int, int, int]]) -> None:
    """Buffers that share bytes are ordered by a path of edges, and each edge joins buffers that share bytes."""
    lower, upper, size = columns(rows)
    packing = pack(lower, upper, size, effort="fast")
    off = packing.offsets.tolist()
    pointers, earlier = reuse_edges(np.array(lower), np.array(size), packing.offsets)
    direct = [set(earlier[pointers[i] : pointers[i + 1]].tolist()) for i in range(len(rows))]
    reach: list[set[int]] = [set() for _ in rows]
    for i in sorted(range(len(rows)), key=lambda k: lower[k]):
        for k in direct[i]:
            assert upper[k] <= lower[i]
            assert off[k] < off[i] + size[i]
            assert off[i] < off[k] + size[k]
            reach[i] |= {k} | reach[k]
    for i, k in itertools.permutations(range(len(rows)), 2):
        if upper[k] <= lower[i] and off[k] < off[i] + size[i] and off[i] < off[k] + size[k]:
            assert k in reach[i]


def test_reuse_edges_of_many_buffers() -> None:
    """Reuse edges of 20,000 buffers are found within 5 s of processor time."""
    lower, upper, size = planted(20_000, 2)
    offsets = pack(lower, upper, size).offsets
    began = time.process_time()
    pointers, earlier = reuse_edges(lower, size, offsets)
    assert time.process_time() - began < 5
    assert len(pointers) == 20_001
    assert (upper[earlier] <= np.repeat(lower, np.diff(pointers))).all()


def test_csv_with_other_columns_and_blank_lines(tmp_path: Path) -> None:
    """Columns of a CSV file may be in any order; other columns, blank lines and a byte order mark are ignored."""
    path = tmp_path / "a.csv"
    path.write_text("\ufeffsize, id ,upper,lower,note\n8,x,3,0,big\n\n16,y,4,2,\n", encoding="utf-8")
    names, lower, upper, size = read_csv(path)
    assert (names, lower.tolist(), upper.tolist(), size.tolist()) == (["x", "y"], [0, 2], [3, 4], [8, 16])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty file"),
        ("id,lower,upper\n1,0,2\n", "missing: size"),
        ("id,lower,upper,size\na,0,2,4\nb,0,x,4\n", "line 3: expected integers"),
        ("id,lower,upper,size\na,0,2\n", "line 2: expected integers"),
        ("id,lower,upper,size\na,0,2,9223372036854775808\n", "line 2: a value does not fit"),
        ("lower,upper,size,id\n0,2,4\n", "line 2: expected integers .* in a row of lower,upper,size,id, got '0,2,4'"),
        ("id,lower,upper,size\n0,2,3,4\n1,2,2,4\n", "line 3: expected lower < upper and size > 0, got '1,2,2,4'"),
        ("id,lower,upper,size\na,1,2,0\n", "line 2: expected lower < upper and size > 0"),
    ],
)
def test_malformed_csv_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    """A malformed CSV file raises an error with the problem and the line."""
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FormatError, match=message):
        read_csv(path)


def test_planted_pieces_tile_the_rectangle() -> None:
    """The pieces of ``planted`` fill the rectangle at every time, so that the optimum is known."""
    lower, upper, size = planted(500, 7, duration=4000, memory=3000)
    events = np.zeros(4001, np.int64)
    np.add.at(events, lower, size)
    np.subtract.at(events, upper, size)
    assert (np.cumsum(events)[:-1] == 3000).all()
    assert len(size) == 500
    with pytest.raises(ValueError, match="enlarge"):
        planted(100, duration=3, memory=3)


@settings(deadline=None)
@given(buffers, st.data())
def test_check_by_reuse_edges_agrees(rows: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """``judged``, which uses reuse edges, accepts the offsets that ``check_packing`` accepts, and raises its errors."""
    even, any_place = st.integers(0, 24).map(lambda half: 2 * half), st.integers(-1, 48)
    offsets = data.draw(st.one_of([st.lists(one, min_size=len(rows), max_size=len(rows)) for one in (even, any_place)]))
    lower, upper, size, place = (np.array(column, np.int64) for column in (*columns(rows), offsets))
    wrong = None
    try:
        check_packing(lower, upper, size, place, alignment=2)
    except PlanError as error:
        wrong = str(error)
    if wrong is None:
        actual = judged(lower, upper, size, place, alignment=2)
        for mine, edges in zip(actual, reuse_edges(lower, size, place), strict=True):
            assert mine.tolist() == edges.tolist()
    else:
        with pytest.raises(PlanError, match=re.escape(wrong)):
            judged(lower, upper, size, place, alignment=2)


@pytest.mark.parametrize("rule", range(4))
def test_search_decides_as_all_placements_do(rule: int) -> None:
    """For small problems the search finds a placement at a capacity exactly if one exists, by each of its rules."""
    rng = np.random.default_rng(7)
    counts = {kernel.SOLVED: 0, kernel.REFUTED: 0}
    for _ in range(250):
        rows = NEEDS_MORE_THAN_ITS_LOAD.copy()
        begin, changed = int(rng.integers(0, 5)), int(rng.integers(0, 10))  # the tenth is added
        rows[changed : changed + 1] = [(begin, begin + int(rng.integers(1, 4)), int(rng.integers(1, 4)))]
        problem = sectioned(*np.array(columns(rows)), np.arange(len(rows)))
        bound = peak_load(*columns(rows))
        for capacity in (bound, bound + 1):
            searcher = Searcher(problem)
            searcher.runs = RULES.index(rule)
            verdict, offsets = searcher.ask(capacity, 1 << 20, allowance=Allowance(1 << 40))
            assert verdict == (kernel.SOLVED if fits(rows, capacity) else kernel.REFUTED), (rows, capacity)
            counts[verdict] += 1
            if offsets is not None:
                assert peak_of(problem, offsets) <= capacity
                check_packing(*columns(rows), offsets.tolist())
    assert min(counts.values()) > 3, counts
