"""Processes that tests start import the checkout under test, not an installed weftplan."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import weftplan
from tests.support.checkout import share_checkout

ROOT = Path(__file__).parents[2]


def test_child_imports_this_checkout(tmp_path):
    """A child process in another folder imports the package of this checkout, as this process does."""
    code = "import weftplan, tests; print(weftplan.__file__)"
    actual = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(actual.stdout.strip()) == Path(weftplan.__file__) == ROOT / "weftplan" / "__init__.py"


def test_mix_is_refused(tmp_path):
    """Running tests of one checkout with the package of another checkout raises."""
    with pytest.raises(pytest.UsageError, match="PYTHONPATH="):
        share_checkout(tmp_path, {})


def test_checkout_comes_first():
    """share_checkout puts the checkout first in PYTHONPATH, once, and keeps the other entries."""
    environment = {"PYTHONPATH": "/other"}
    share_checkout(ROOT, environment)
    share_checkout(ROOT, environment)
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/other"]
