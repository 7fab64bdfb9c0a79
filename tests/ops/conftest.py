"""Makes the helper modules of this folder importable from its tests, as ``ops_harness`` and ``ops_<family>_cases``."""

import importlib.util
import pathlib
import sys

import pytest

from weftplan.ops.settled import Settled


def _provide(name, file):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, pathlib.Path(__file__).with_name(file))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


_provide("ops_harness", "harness.py")
_provide("ops_tensor_cases", "tensor_cases.py")
_provide("ops_nn_cases", "nn_cases.py")
_provide("ops_cuda_sources", "cuda_sources.py")


@pytest.fixture(autouse=True)
def asked_each_time(monkeypatch):
    """Tests of operators change what rules answer by: sizes of blocks, numbers of parts."""
    monkeypatch.setattr(Settled, "answer", lambda self, op, params, facts, ask: ask())
