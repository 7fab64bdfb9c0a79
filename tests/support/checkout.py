"""One checkout per test run: child processes of tests import the package next to the tests."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import MutableMapping
from pathlib import Path

import pytest


def share_checkout(root: Path, environment: MutableMapping[str, str]) -> None:
    """Put ``root`` first in the PYTHONPATH of ``environment``, for child processes.

    Raise UsageError if weftplan would be imported from another checkout: an editable install points at a single one.
    """
    spec = importlib.util.find_spec("weftplan")
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parents[1] != root:
        raise pytest.UsageError(
            f"these tests belong to {root}, but weftplan would be imported from {spec and spec.origin}: run "
            f"PYTHONPATH={root} python -m pytest"
        )
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(root))]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), *others])
