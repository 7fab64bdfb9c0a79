"""Names of modules: what a package re-exports hides none of its modules."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import pytest


@pytest.mark.parametrize("package", ["executor", "planner", "report", "symbol"])
def test_no_function_hides_a_module(package: str) -> None:
    """``import weftplan.planner.recompute.policies`` gives the module: no attribute of a package has its name."""
    root = importlib.import_module(f"weftplan.{package}")
    for info in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
        importlib.import_module(info.name)
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{root.__name__}."):
            parent, _, leaf = name.rpartition(".")
            assert getattr(sys.modules[parent], leaf) is module, name
