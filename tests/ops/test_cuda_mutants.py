"""Kernels in CUDA C with a mistake in them: a barrier or a bound that is missing is noticed on the host."""

import collections
import re

import pytest

from tests.contract.devices import place
from tests.cuda_on_host import build
from tests.cuda_on_host.kernels import on_host
from tests.ops.test_cuda_on_host import CASES, compare, of
from tests.standin_cupy.cuda.memory import KernelError
from tests.support import ops_cuda_sources as cuda
from weftplan import device

pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(bool(build.missing()), reason=build.missing() or "nothing is missing"),
]

MISTAKE = re.compile(r"__syncthreads\(\);|if \(i >= count\) return;|if \(i < count\) ")
HEAD = re.compile(r"int t = threadIdx.x;\s*$")
"""The text before the first barrier of ``total`` and ``largest``, which separates them from an earlier reduction."""


def mutants(text):
    """Yield the source without one of its barriers or bounds."""
    for matches in MISTAKE.finditer(text):
        if not HEAD.search(text[: matches.start()]):
            yield text[: matches.start()] + text[matches.end() :]


# Operators that draw by philox are not compared with the host.
LABELS = [label for label, text in cuda.texts(every=False).items() if any(mutants(text)) and label[:6] != "philox"]


@pytest.fixture(scope="module")
def users():
    """The stand-in's first GPU, and the cases that launch each source."""
    build.build(cuda.texts(every=False).values())
    actual = collections.defaultdict(list)
    with place("standin") as context:
        where = device.get(context(0))
        for case in CASES:
            with on_host() as host:
                compare(where, *of(case, "float32"))
            for code, _ in host.executed:
                actual[code].append(case)
        yield where, actual


@pytest.mark.parametrize("label", LABELS)
def test_mistakes_are_noticed(users, label):
    """Mistakes show as wrong values or as refused accesses."""
    where, actual = users
    text = cuda.texts(every=False)[label]
    for bad in mutants(text):
        for case in actual[text]:
            try:
                with on_host((0, 1), lambda code, bad=bad: bad if code == text else code):
                    compare(where, *of(case, "float32"))
            except (KernelError, AssertionError):
                break
        else:
            pytest.fail(f"nobody notices that something is missing:\n{bad}")
