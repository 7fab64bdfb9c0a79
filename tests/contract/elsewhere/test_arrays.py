"""Arrays on devices."""

from tests.ndarray.test_arithmetic import *  # noqa: F403
from tests.ndarray.test_array import *  # noqa: F403
from tests.ndarray.test_indexing import *  # noqa: F403

del test_contexts_must_agree, test_scalars  # noqa: F821 - they say that the context is a CPU
