"""The page of flags is made from the table of variables and the tests' marks, and no effect is without a test."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    """``docs/list_settings.py``."""
    spec = importlib.util.spec_from_file_location("list_settings", ROOT / "docs/list_settings.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["list_settings"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_today(script):
    """A change of an effect or of a test's mark is on the page."""
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "make it again: python docs/list_settings.py"


def test_every_effect_has_a_test_and_no_other(script):
    """A setting that claims an effect is changed and observed somewhere; one without effect has no such test."""
    rows = script.rows()
    silent = [name for _, name, _, effect, tests in rows if not effect.startswith("no effect") and not tests]
    assert silent == []
    boasting = [name for _, name, _, effect, tests in rows if effect.startswith("no effect") and tests]
    assert boasting == []


def test_marks_name_settings_that_exist(script):
    """A mark with a misspelt name would show nothing."""
    names = [row[1] for row in script.rows()]
    for pattern, test in script.shown(ROOT / "tests"):
        assert any(script.fnmatch(name, pattern) for name in names), (pattern, test)
