"""The tests of executors, with GPU or simulated devices in place of CPUs."""

import pytest

from tests.executor.test_contexts import *  # noqa: F403
from tests.executor.test_executor import *  # noqa: F403
from tests.executor.test_invalid_input import *  # noqa: F403
from tests.executor.test_sharing import *  # noqa: F403
from tests.executor.test_unusual_graphs import *  # noqa: F403

del (
    test_allocated_bytes_are_the_plan,  # noqa: F821 - they count what CuPy takes inside kernels, too: see
    test_no_executor_needs_the_cycle_collector,  # noqa: F821 - tests/ops/test_grain.py and device/test_temporaries.py
    test_bind_bad_input,  # noqa: F821 - it says that the context is a CPU
    test_bind_says_what_is_wrong,  # noqa: F821
    test_values_may_be_numpy_arrays_but_nothing_else,  # noqa: F821
)


OF_SINGLE_NODES = {
    "test_monitor_sees_every_output",
    "test_debug_str_and_repr",
    "test_a_failing_kernel_reaches_the_reader",
}
"""Tests that observe single nodes, which a GPU fuses with elementwise nodes after them."""


@pytest.fixture(autouse=True)
def unfused(request, monkeypatch):
    """Bind without fusion in the tests that observe single nodes."""
    if request.node.originalname in OF_SINGLE_NODES:
        monkeypatch.setenv("MXNET_USE_FUSION", "0")
