"""The tests of storage resources, with GPU or simulated devices in place of CPUs."""

from tests.contract.test_storage import *  # noqa: F403
