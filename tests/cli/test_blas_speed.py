"""The doctor's warning about an OpenBLAS that does not use the processor's vector instructions."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from weftplan.cli.doctor import blas_speed

AVX2 = {"AVX2": True, "FMA3": True}
AVX512 = {**AVX2, "AVX512F": True, "AVX512VL": True, "AVX512BW": True, "AVX512DQ": True}


def blas_library(architecture: str | None, api: str = "openblas"):
    """Return a library in the form that threadpoolctl gives."""
    return {"user_api": "blas", "internal_api": api, "version": "0.3.31", "architecture": architecture}


@pytest.mark.parametrize(
    ("architecture", "features", "offered"),
    [
        ("Haswell", AVX512, "AVX-512"),
        ("Zen", AVX512, "AVX-512"),
        ("Prescott", AVX2, "AVX2"),
        ("Prescott", AVX512, "AVX-512"),
        ("SkylakeX", AVX512, None),
        ("Cooperlake", AVX512, None),
        ("Haswell", AVX2, None),
        ("Zen", AVX2, None),
        ("Haswell", {**AVX512, "AVX512VL": False}, None),
        ("Zen", {"X86_V4": True}, "AVX-512"),
        ("Prescott", {}, None),
        ("NEOVERSEN1", {"NEON": True}, None),
        (None, AVX512, None),
    ],
)
def test_what_is_below_the_processor(architecture: str | None, features: dict[str, bool], offered: str | None):
    """A library built for older instructions than the processor has gives a warning; other libraries give none."""
    actual = blas_speed.warnings([blas_library(architecture)], features, {})
    if offered is None:
        assert actual == []
    else:
        assert len(actual) == 1
        assert f"its kernels for {architecture}, and the processor offers {offered}:" in actual[0]


def test_other_libraries_are_left_alone():
    """MKL gives no warning, since its architecture names are not OpenBLAS's."""
    assert blas_speed.warnings([blas_library("Haswell", "mkl")], AVX512, {}) == []


def test_variables_are_named():
    """A variable that fixes OpenBLAS's kernels is named, whether or not it slows this processor."""
    (only,) = blas_speed.warnings([blas_library("Haswell")], AVX2, {"OPENBLAS_CORETYPE": "Haswell"})
    assert only == ("OPENBLAS_CORETYPE=Haswell is set, which holds OpenBLAS back on newer processors: unset it")
    both = {"OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_L2_SIZE": "512"}
    slow, pinned = blas_speed.warnings([blas_library("Haswell")], AVX512, both)
    assert "AVX-512" in slow
    assert pinned == "OPENBLAS_CORETYPE=Haswell and OPENBLAS_L2_SIZE=512 are set, which makes it so: unset it"


def test_doctor_prints_them():
    """doctor prints the warning and exits with 0."""
    code = "from weftplan.cli import main; main(['doctor'])"
    environment = {"OPENBLAS_CORETYPE": "Haswell", "PATH": "", "COLUMNS": "200"}
    environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "OPENBLAS_CORETYPE=Haswell is set" in done.stdout
