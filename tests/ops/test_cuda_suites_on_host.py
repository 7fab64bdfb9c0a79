"""GPU operator tests with kernels compiled for the host, in three orders of threads."""

import pytest

from tests.contract.devices import place
from tests.cuda_on_host import build
from tests.cuda_on_host.kernels import on_host
from tests.device.test_standin_cuda import *  # noqa: F403
from tests.kvstore.test_sums_on_devices import *  # noqa: F403
from tests.ops.test_cuda_ctc import *  # noqa: F403
from tests.ops.test_cuda_random import *  # noqa: F403
from tests.ops.test_cuda_sums import *  # noqa: F403
from tests.ops.test_on_devices import *  # noqa: F403
from weftplan import device

pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "nothing is missing"),
]

del (
    test_what_has_no_fixed_result_is_refused,  # noqa: F821 - the words of the interpreter: tests/device/test_cuda_on_host.py
    test_what_does_not_compile_is_refused,  # noqa: F821
    test_floats_are_not_added_by_atomics,  # noqa: F821
    test_the_document_lists_no_others,  # noqa: F821 - it has to run after the tests of its own file
)


@pytest.fixture(scope="module")
def where():
    """Yield the stand-in's gpu(0) only: a real GPU does not run the host's machine code."""
    with place("standin") as context:
        yield device.get(context(0))


@pytest.fixture(autouse=True)
def kernels():
    """Run all kernels as machine code of the host, in three orders of threads."""
    with on_host((0, 1, 2)) as host:
        yield host
