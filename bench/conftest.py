"""Collection for ``pytest bench``: pytest collects only ``test_*.py`` of this folder; the scripts run by themselves."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "peers")]

import blas_setting  # noqa: E402, F401  # before NumPy


def pytest_ignore_collect(collection_path):
    """Ignore the scripts: importing some of them runs them."""
    if collection_path.suffix == ".py" and not collection_path.name.startswith("test_"):
        return True
    return None
