"""Collection for ``pytest bench``: of this folder pytest takes ``test_*.py`` alone; the scripts run by themselves."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "peers")]

import blas_setting  # noqa: E402, F401  # before NumPy


def pytest_ignore_collect(collection_path):
    """Leave the scripts out: importing some of them runs them."""
    if collection_path.suffix == ".py" and not collection_path.name.startswith("test_"):
        return True
    return None
