"""Makes the operator harness importable as ``ops_harness`` from every test of this folder."""

import importlib.util
import pathlib
import sys

_NAME = "ops_harness"

if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_NAME, pathlib.Path(__file__).with_name("harness.py"))
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[_NAME] = _module
    _spec.loader.exec_module(_module)
