"""Import of scripts in ``docs/``, which is not a package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def script(name: str) -> ModuleType:
    """Return the script ``docs/<name>.py`` as a new module, which can import other scripts of its folder."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return module
