"""The tests of arrays, with GPU or simulated devices in place of CPUs."""

from tests.ndarray.test_arithmetic import *  # noqa: F403
from tests.ndarray.test_array import *  # noqa: F403
from tests.ndarray.test_chunks import *  # noqa: F403
from tests.ndarray.test_indexing import *  # noqa: F403

del (
    test_random_basic_keys_agree_with_numpy,  # noqa: F821 - takes a second or two on each device
    test_random_index_arrays_agree_with_numpy,  # noqa: F821
    test_contexts_must_agree,  # noqa: F821 - it says that the context is a CPU
    test_chunk_parts_have_own_vars_and_hold_it,  # noqa: F821 - it reads the bytes on the host
    test_scalars,  # noqa: F821
)
