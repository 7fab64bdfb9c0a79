"""Mutated CUDA C kernels: the host run detects a missing barrier or a missing bounds check."""

import collections
import re

import pytest

from tests.contract.devices import place
from tests.cuda_on_host import build
from tests.cuda_on_host.kernels import on_host
from tests.ops.test_cuda_on_host import CASES, cast_case, compare
from tests.standin_cupy.cuda.memory import KernelError
from tests.support import ops_cuda_sources as cuda
from weftplan import device

pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "nothing is missing"),
]

MISTAKE = re.compile(r"__syncthreads\(\);|if \(i >= count\) return;|if \(i < count\) ")
HEAD = re.compile(r"int t = threadIdx.x;\s*$")
"""Text before the first barrier of ``total`` and ``largest``, which separates them from an earlier reduction."""


def mutants(text):
    """Yield copies of the source, each without one barrier or bounds check."""
    for matches in MISTAKE.finditer(text):
        if not HEAD.search(text[: matches.start()]):
            yield text[: matches.start()] + text[matches.end() :]


# Operators that draw by philox are not compared with the host.
LABELS = [label for label, text in cuda.texts(every=False).items() if any(mutants(text)) and label[:6] != "philox"]


@pytest.fixture(scope="module")
def users():
    """Yield the stand-in's first GPU, and the cases that launch each source."""
    build.build(cuda.texts(every=False).values())
    actual = collections.defaultdict(list)
    with place("standin") as context:
        where = device.get(context(0))
        for case in CASES:
            with on_host() as host:
                compare(where, *cast_case(case, "float32"))
            for code, _ in host.executed:
                actual[code].append(case)
        yield where, actual


@pytest.mark.parametrize("label", LABELS)
def test_mistakes_are_noticed(users, label):
    """Every mutant fails a case, by wrong values or by a refused access."""
    where, actual = users
    text = cuda.texts(every=False)[label]
    for bad in mutants(text):
        for case in actual[text]:
            try:
                with on_host((0, 1), lambda code, bad=bad: bad if code == text else code):
                    compare(where, *cast_case(case, "float32"))
            except (KernelError, AssertionError):
                break
        else:
            pytest.fail(f"nobody notices that something is missing:\n{bad}")
