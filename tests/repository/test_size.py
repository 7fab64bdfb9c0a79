"""Each room of the package and of the tests has at most the listed number of lines."""

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMITS = {
    "tests/.": 214,
    "tests/basics": 2_412,
    "tests/cli": 3_411,
    "tests/compat": 2_095,
    "tests/contract": 3_637,
    "tests/convert": 1_303,
    "tests/cuda_on_host": 331,
    "tests/data": 2_991,
    "tests/device": 2_573,
    "tests/engine": 11_156,
    "tests/executor": 5_989,
    "tests/first_contact": 703,
    "tests/golden": 4_013,
    "tests/gpu": 80,
    "tests/kernels": 4_122,
    "tests/kvstore": 7_192,
    "tests/models": 161,
    "tests/ndarray": 3_205,
    "tests/ops": 9_375,
    "tests/planner": 8_617,
    "tests/profiler": 815,
    "tests/report": 642,
    "tests/repository": 3_235,
    "tests/rnn": 295,
    "tests/standin_cudnn": 400,
    "tests/standin_cupy": 3_577,
    "tests/storage": 3_124,
    "tests/stress": 3_987,
    "tests/support": 2_349,
    "tests/symbol": 1_874,
    "tests/torch": 2_843,
    "tests/training": 7_055,
    "weftplan/.": 1_855,
    "weftplan/cli": 5_725,
    "weftplan/compat": 2_896,
    "weftplan/convert": 2_616,
    "weftplan/data": 6_890,
    "weftplan/device": 3_418,
    "weftplan/engine": 6_017,
    "weftplan/executor": 4_310,
    "weftplan/kernels": 11_957,
    "weftplan/kvstore": 9_642,
    "weftplan/models": 634,
    "weftplan/ndarray": 6_797,
    "weftplan/ops": 26_884,
    "weftplan/planner": 13_225,
    "weftplan/profiler": 780,
    "weftplan/report": 2_673,
    "weftplan/rnn": 1_243,
    "weftplan/storage": 3_301,
    "weftplan/support": 2_475,
    "weftplan/symbol": 3_005,
    "weftplan/tasks": 2_550,
    "weftplan/torch": 4_153,
    "weftplan/training": 10_873,
}
"""Most lines of Python in each room; ``.`` stands for the files directly in ``weftplan`` or ``tests``.

A number may fall. It rises only in the commit that adds what was asked for by name, and the body of that commit says
why, and what became smaller beside it.
"""


@cache
def lines() -> Counter[str]:
    """Return {room: number of lines} of the package and of the tests."""
    counts: Counter[str] = Counter()
    for top in ("weftplan", "tests"):
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).parts
            counts[f"{top}/{parts[1] if len(parts) > 2 else '.'}"] += len(path.read_bytes().splitlines())
    return counts


@pytest.mark.parametrize("room", sorted(lines()))
def test_rooms_do_not_grow(room: str):
    """A room has at most its number of lines; a room that is not listed may have none."""
    limit = LIMITS.get(room, 0)
    assert lines()[room] <= limit, (
        f"{room} has {lines()[room]} lines, at most {limit} are allowed: make something smaller beside what you add, "
        "or say in the commit why the number rises"
    )


def test_limits_name_existing_rooms():
    """Each entry of the table is an existing room, and the sizes are those of the whole package."""
    assert LIMITS.keys() <= lines().keys()
    assert sum(count for room, count in lines().items() if room.startswith("weftplan/")) > 100_000
