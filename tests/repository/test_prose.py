"""Docstrings and comments of each folder avoid phrases that are hard to understand."""

from functools import cache
from pathlib import Path

import pytest

from tests.support.prose import GOALS, Counts

ROOT = Path(__file__).parents[2]
LIMITS = {
    "weftplan/compat": 11,
}
"""Most occurrences of all phrases per 10,000 words, for folders that miss the goals. Numbers may only fall."""


@cache
def folders():
    """Return {folder: its Python files}, for each subpackage, each folder of the tests, and other top-level folders."""
    files = {}
    for top in ("weftplan", "tests", "bench", "docs", "examples"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            folder = "/".join(parts[:2]) if top in ("weftplan", "tests") and len(parts) > 2 else top
            if not path.is_symlink():
                files.setdefault(folder, []).append(path)
    return files


@pytest.mark.parametrize("folder", folders())
def test_folder_is_within_its_limit(folder):
    """A folder meets the goal of every phrase, or its limit in the table."""
    counts = Counts(folders()[folder])
    if folder in LIMITS:
        assert counts.total() <= LIMITS[folder], f"{folder}: {counts.hits}"
        return
    above = {phrase: rate for phrase in GOALS if (rate := counts.rate(phrase)) > GOALS[phrase]}
    assert not above, f"{folder}: occurrences per 10,000 words above the goals: {above}; name the subject instead"


def test_limits_name_existing_folders():
    """Each entry of the table is an existing folder."""
    assert LIMITS.keys() <= folders().keys()


def test_counter_finds_every_phrase(tmp_path):
    """A text with each phrase twice, across lines and in comments, misses every goal."""
    sentence = "who says what nobody knows where it\nis, of which another one so many beside"
    path = tmp_path / "module.py"
    path.write_text(f'"""{sentence}"""\n# ' + sentence.replace("\n", " ") + "\n")
    counts = Counts([path])
    assert counts.hits == dict.fromkeys(GOALS, 2)
    assert counts.words == 2 * len(sentence.split())
    assert all(counts.rate(phrase) > goal for phrase, goal in GOALS.items())
