"""Every claimed effect of a setting has a test, and marks of tests name existing settings."""

from pathlib import Path

import pytest

from tests.support import scripts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    """Return the module ``docs/list_settings.py``."""
    return scripts.script("list_settings")


def test_exactly_the_effects_have_tests(script):
    """Each setting with an effect has a test that observes it; a setting without an effect has none."""
    rows = script.rows()
    silent = [name for _, name, _, effect, tests in rows if not effect.startswith("no effect") and not tests]
    assert silent == []
    boasting = [name for _, name, _, effect, tests in rows if effect.startswith("no effect") and tests]
    assert boasting == []


def test_marks_name_existing_settings(script):
    """Every mark of a test names an existing setting."""
    names = [row[1] for row in script.rows()]
    for pattern, test in script.shown(ROOT / "tests"):
        assert any(script.fnmatch(name, pattern) for name in names), (pattern, test)
