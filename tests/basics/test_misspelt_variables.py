"""Misspelt environment variables cause a warning with the nearest name."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest

from weftplan import config
from weftplan.errors import ConfigWarning

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("MXNET_CPU_WORKER_NTHREAD", "MXNET_CPU_WORKER_NTHREADS"),
        ("MXNET_ENGINE_TYP", "MXNET_ENGINE_TYPE"),
        ("mxnet_engine_type", "MXNET_ENGINE_TYPE"),
        ("FLAGS_alocator_strategy", "FLAGS_allocator_strategy"),
        ("FLAGS_ALLOCATOR_STRATEGY", "FLAGS_allocator_strategy"),
        ("NNVM_EXEC_MATCH_RANG", "NNVM_EXEC_MATCH_RANGE"),
        ("WEFTPLAN_EROR", "WEFTPLAN_ERRORS"),
    ],
)
def test_names_the_nearest(monkeypatch: pytest.MonkeyPatch, wrong: str, right: str):
    """The warning has the wrong name and the nearest variable."""
    monkeypatch.setenv(wrong, "1")
    with pytest.warns(ConfigWarning, match=rf"{wrong}, which is ignored: did you mean {right}\?"):
        config.check_environment()


@pytest.mark.parametrize(
    "name",
    ["MXNET_ENGINE_INFO", "MXNET_GPU_WORKER_NSTREAMS", "FLAGS_logtostderr", "PATHS", "MXNET_EXEC_MATCH_RANGE"],
)
def test_silent(monkeypatch: pytest.MonkeyPatch, name: str):
    """Other variables of MXNet, other programs' variables and correct names cause no warning."""
    monkeypatch.setenv(name, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.check_environment()


def test_our_own_prefix_always_warns(monkeypatch: pytest.MonkeyPatch):
    """An unknown name with the prefix WEFTPLAN_ always warns."""
    monkeypatch.setenv("WEFTPLAN_XYZ", "1")
    with pytest.warns(ConfigWarning, match="unknown environment variable WEFTPLAN_XYZ"):
        config.check_environment()


def test_at_import():
    """``import weftplan`` warns about a misspelt variable and succeeds despite a bad value."""
    environment = os.environ | {"MXNET_CPU_WORKER_NTHREAD": "2", "MXNET_CPU_WORKER_NTHREADS": "0"}
    done = subprocess.run(
        [sys.executable, "-c", "import weftplan"], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "did you mean MXNET_CPU_WORKER_NTHREADS?" in done.stderr
