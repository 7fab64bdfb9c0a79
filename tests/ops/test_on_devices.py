"""Every operator case on a device equals the host, without memory and waits that kernels for GPUs must avoid."""

import collections
import contextlib
import pathlib
import re

import numpy as np
import pytest

from tests import standin_cupy
from tests.contract.devices import GPUS, place
from tests.standin_cupy import meter
from tests.support.ops_harness import Call, differentiate, garbage, prepare, spec_of
from tests.support.ops_nn_cases import CASES as NN_CASES
from tests.support.ops_tensor_cases import CASES as TENSOR_CASES
from tests.support.ops_tensor_cases import NO_GRADIENT, UPDATES
from weftplan import device
from weftplan.errors import DTypeError
from weftplan.ops.core import tiling
from weftplan.ops.core.implementations import choose, provided
from weftplan.ops.core.schema import OpContext

CASES = [*TENSOR_CASES, *NO_GRADIENT, *UPDATES, *NN_CASES]
BY_OPERATOR = collections.defaultdict(list)
for _case in CASES:
    BY_OPERATOR[_case[0]].append(_case)

DRAWS = {"Dropout", "RNN", "LeakyReLU", "_backward_RNN"}
"""Operators that draw from a generator, which differs on a GPU."""


DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "gpus.md"
WAITING = set(re.findall(r"^\| `(\w+)` \|", DOCUMENT.read_text(), re.MULTILINE))
"""Operators that the document lists as making the host wait."""
SEEN, RAN = set[str](), set[str]()
"""SEEN: operators that made the host wait. RAN: operators whose cases this process has run."""
WAITS = {"_backward_gather_nd": 1}
"""Number of waits of the host by GPU kernel; they serve to raise an error for indices out of range."""


def refuse(nbytes):
    """Refuse an allocation by CuPy: a kernel for GPUs takes no memory but its workspace."""
    raise AssertionError(f"CuPy allocates {nbytes} bytes")


def copy_to(where, array):
    """Return a copy of a host array on the device ``where``."""
    raw = where.allocate(max(array.nbytes, 1))
    result = raw[: array.nbytes].view(array.dtype).reshape(array.shape)
    where.copy(result, np.ascontiguousarray(array).reshape(array.shape))
    return result


def fetch(where, array):
    """Return a host copy of an array of the device ``where``."""
    out = np.empty(array.shape, array.dtype)
    where.copy(out, array)
    return out


def on_device(where, call: Call, inputs, mode="numpy"):
    """Run one kernel on a device; return its outputs and the new contents of its inputs, on the host.

    With mode ``auto`` the kernel is a plan's choice for the device.
    """
    op, params = call.op, call.params
    chosen = choose(op, params, [spec_of(x) for x in inputs], call.out_specs, mode, on=where.context.device_type)
    ignored = set(op.ignored(params))
    arguments = [None if k in ignored else copy_to(where, array) for k, array in enumerate(inputs)]
    outputs = [copy_to(where, garbage(spec)) for spec in call.out_specs]
    pieces = tiling.of(where.context.device_type)
    with tiling.using(pieces):
        size = chosen.implementation.workspace(params, [spec_of(x) for x in inputs], call.out_specs)
    ctx = OpContext(
        where.xp,
        is_train=call.is_train,
        workspace=copy_to(where, np.full(size, 0xFF, np.uint8)) if size else None,
        random_key=call.key,
        recompute=call.recompute,
    )

    ours = chosen.implementation.name == "cuda"
    counting = isinstance(where.xp, standin_cupy.Namespace)  # the real CuPy has no counters

    def run():
        allocator = where.xp.cuda.using_allocator(refuse) if ours else contextlib.nullcontext()
        with np.errstate(all="ignore"), tiling.using(pieces), allocator:
            meter.reset()
            chosen.implementation.kernel(ctx, params, arguments, outputs)
            if mode == "auto" and meter.syncs:
                SEEN.add(op.name)
                assert op.name in WAITING, f"{op.name} makes the host wait, and docs/gpus.md does not say so"
            if ours and counting:
                assert sum(meter.syncs.values()) == WAITS.get(op.name, 0), op.name
                assert not meter.atomics, op.name
                assert not meter.uploads, op.name
                assert meter.total <= 16, op.name

    where.launch(run)
    return [fetch(where, y) for y in outputs], [None if x is None else fetch(where, x) for x in arguments]


def same(found, expected, what):
    """Check that two arrays are equal within rounding, since libraries multiply and add in another order."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
    loose = 2e-2 if expected.dtype == np.float16 else 1e-4 if expected.dtype == np.float32 else 1e-8
    scale = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0.0)))
    np.testing.assert_allclose(
        found.astype(np.float64), expected.astype(np.float64), rtol=loose, atol=loose * scale, err_msg=what
    )


def check(where, name, arrays, params):
    """Check the forward call and every gradient call on the device against the host, in every implementation."""
    arrays = [np.array(x) for x in arrays]
    call = prepare(name, [x.copy() for x in arrays], params)
    expected = [y.copy() for y in call()]
    calls = [(call, arrays, expected, [x.copy() for x in call.inputs])]
    if call.op.gradient is not None:
        ograds = [np.ones(s.shape, s.dtype) for s in call.out_specs]
        for result in differentiate(call, ograds)[1].calls:
            calls.append((result, result.inputs, [y.copy() for y in result.outputs], None))
    for result, inputs, wanted, after in calls:
        for mode in ("numpy", "auto") if result.op.name in provided("gpu") else ("auto",):
            actual, left = on_device(where, result, inputs, mode)
            if result.op.random or result.op.name in DRAWS:
                continue
            for k, (mine, theirs) in enumerate(zip(actual, wanted, strict=True)):
                same(mine, theirs, f"{result.op.name} ({mode}): output {k}")
            for k in result.op.mutated(result.params) if after is not None else ():
                same(left[k], after[k], f"{result.op.name} ({mode}): state {k}")


@pytest.fixture(scope="module", params=GPUS)
def where(request):
    """Yield the device gpu(0), of the stand-in or real."""
    with place(request.param) as context:
        yield device.get(context(0))


@pytest.mark.parametrize("name", BY_OPERATOR)
def test_as_on_the_host(where, name):
    """Every case of the operator equals the host; float64 cases run in float32 and, if supported, in float16."""
    if isinstance(where.xp, standin_cupy.Namespace):  # a real device does not count waits
        RAN.add(name)
    for _, arrays, params in BY_OPERATOR[name]:
        if not all(np.asarray(x).dtype == np.float64 for x in arrays):
            check(where, name, arrays, params)
            continue
        check(where, name, [np.asarray(x, np.float32) for x in arrays], params)
        with contextlib.suppress(DTypeError):
            check(where, name, [np.asarray(x, np.float16) for x in arrays], params)


def test_the_document_lists_no_others():
    """Every operator that the document lists makes the host wait.

    This runs after the tests of operators, and checks only those that ran in this process.
    """
    assert SEEN | {"take"} >= WAITING & RAN  # no case has mode="raise"
