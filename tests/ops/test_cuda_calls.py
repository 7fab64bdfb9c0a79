"""CUDA C kernels called as a plan may call them: in place, with unwanted outputs, repeated, and for inference."""

import numpy as np
import pytest

from tests.contract.devices import GPUS, place
from tests.cuda_on_host import build
from tests.cuda_on_host.kernels import on_host
from tests.ops.test_cuda_on_host import CASES, cast_case
from tests.ops.test_on_devices import copy_to, fetch, same
from tests.support import ops_cuda_sources as cuda
from tests.support.ops_harness import differentiate, garbage, prepare, spec_of, subsets
from weftplan import device
from weftplan.ops.core.implementations import choose, provided
from weftplan.ops.core.schema import OpContext


@pytest.fixture(scope="module", params=GPUS)
def where(request):
    """Yield gpu(0): the stand-in with kernels compiled for the host, or a real GPU."""
    if request.param == "gpu":
        with place("gpu") as context:
            yield device.get(context(0))
        return
    if build.missing():
        pytest.skip(build.missing())
    texts = cuda.texts(every=False)
    build.build(text for label, text in texts.items() if not label.startswith(("philox", "updates")))
    with place("standin") as context, on_host((0, 1)):
        yield device.get(context(0))


def calls_of(case, *, is_train=True):
    """Return the calls of a case that have a GPU kernel: its forward call and the calls of its gradient."""
    name, arrays, params = cast_case(case, "float32")
    call = prepare(name, arrays, params, is_train=is_train)
    call()
    result = [call]
    if is_train and call.op.gradient is not None:
        heads = [np.linspace(-1, 2, int(np.prod(s.shape))).reshape(s.shape).astype(s.dtype) for s in call.out_specs]
        result += differentiate(call, heads)[1].calls
    return [call for call in result if call.op.name in provided("gpu")]


def run(where, call, *, alias=None, wanted=None, recompute=False):
    """Return the outputs and auxiliary states after one call on the device.

    ``alias`` is an (input, output) pair that shares memory; ``wanted`` flags the outputs to compute.
    """
    op, params = call.op, call.params
    specs = [spec_of(x) for x in call.inputs]
    chosen = choose(op, params, specs, call.out_specs, "auto", on="gpu").implementation
    assert chosen.name == "cuda", op.name
    ignored = set(op.ignored(params))
    inputs = [None if k in ignored else copy_to(where, x) for k, x in enumerate(call.inputs)]
    outputs = [
        copy_to(where, garbage(s)) if wanted is None or wanted[k] else None for k, s in enumerate(call.out_specs)
    ]
    if alias is not None:
        source, target = alias
        memory = copy_to(where, call.inputs[source])
        outputs[target] = memory.view(call.out_specs[target].dtype).reshape(call.out_specs[target].shape)
        if source not in ignored:
            inputs[source] = memory
    size = chosen.workspace(params, specs, call.out_specs)
    ctx = OpContext(
        where.xp, is_train=call.is_train, workspace=copy_to(where, np.full(size, 0xFF, np.uint8)) if size else None,
        random_key=call.key, recompute=recompute,
        output_shapes=() if wanted is None else [s.shape for s in call.out_specs],
    )  # fmt: skip
    where.launch(lambda: chosen.kernel(ctx, params, inputs, outputs))
    states = [fetch(where, inputs[k]) for k in op.mutated(params)]
    return [None if y is None else fetch(where, y) for y in outputs], states


def bits(arrays):
    """Return the arrays as bytes, so that NaN equals itself; None stays None."""
    return [None if x is None else x.tobytes() for x in arrays]


@pytest.mark.parametrize("case", CASES)
def test_in_place_and_with_unwanted_outputs(where, case):
    """A CUDA kernel gives the same bits in place, and with any subset of its outputs."""
    for call in calls_of(case):
        expected, states = run(where, call)
        for pair in call.op.inplace_pairs(call.params):
            if pair.input >= len(call.inputs) or pair.output >= len(call.out_specs):
                continue
            if call.inputs[pair.input].nbytes != expected[pair.output].nbytes:
                continue
            actual, after = run(where, call, alias=(pair.input, pair.output))
            assert bits(actual) == bits(expected), f"{call.op.name}: output {pair.output} in input {pair.input}"
            assert bits(after) == bits(states)
        for wanted in subsets(len(expected)):
            kept = [y if w else None for y, w in zip(expected, wanted, strict=True)]
            if call.op.has_work(kept):
                actual, after = run(where, call, wanted=wanted)
                assert bits(actual) == bits(kept), f"{call.op.name}: outputs {wanted}"
                assert bits(after) == bits(states), f"{call.op.name}: states with outputs {wanted}"


@pytest.mark.parametrize("case", CASES)
def test_inference_equals_the_host(where, case):
    """Outside of training, GPU kernels equal the host and leave the learnt statistics unchanged."""
    for call in calls_of(case, is_train=False):
        before = [call.inputs[k].copy() for k in call.op.mutated(call.params)]
        expected = [y.copy() for y in call()]
        actual, after = run(where, call)
        assert bits(after) == bits(before)
        for mine, theirs in zip(actual, expected, strict=True):
            same(mine, theirs, call.op.name)


def test_statistics_are_learnt_once(where):
    """A recomputed forward pass gives the same bits and leaves the statistics unchanged."""
    for case in CASES:
        for call in calls_of(case) if CASES[case][0] == "BatchNorm" else ():
            expected, _ = run(where, call)
            actual, after = run(where, call, recompute=True)
            assert bits(actual) == bits(expected)
            assert bits(after) == bits([call.inputs[k] for k in call.op.mutated(call.params)])
