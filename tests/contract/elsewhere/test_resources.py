"""Storage resources over devices."""

from tests.contract.test_storage import *  # noqa: F403
