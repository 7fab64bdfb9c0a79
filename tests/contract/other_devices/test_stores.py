"""The tests of single-process stores, with GPU or simulated devices in place of CPUs."""

from tests.contract.conftest import kv  # noqa: F401 - a fixture
from tests.contract.test_kvstore import *  # noqa: F403

del (
    test_against_a_dictionary,  # noqa: F821 - takes a second or two on each device
    test_failed_init_creates_no_key,  # noqa: F821 - it limits the memory of the host
)
