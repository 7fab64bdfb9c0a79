"""Executors on devices."""

from tests.executor.test_contexts import *  # noqa: F403
from tests.executor.test_executor import *  # noqa: F403
from tests.executor.test_sharing import *  # noqa: F403
from tests.executor.test_unusual_graphs import *  # noqa: F403

del (
    test_bind_bad_input,  # noqa: F821 - it says that the context is a CPU
    test_bind_says_what_is_wrong,  # noqa: F821
    test_values_may_be_numpy_arrays_but_nothing_else,  # noqa: F821
)
