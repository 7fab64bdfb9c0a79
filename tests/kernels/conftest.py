"""Fixtures of all tests of kernels: those of the tests of operators."""

from tests.ops.conftest import asked_each_time  # noqa: F401
