"""Any subset of a kernel's outputs may be unwanted.

The planner drops outputs that no node reads; under recomputation that can be any of them. This file tests all operators
with several outputs, in all implementations on a host. ``test_cuda_calls.py`` tests CUDA C kernels.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from tests.ops.test_golden import CASES as GOLDEN
from tests.ops.test_golden import inputs as golden
from tests.support.ops_harness import Call, check_unwanted, differentiate, prepare, subsets
from tests.support.ops_nn_cases import CASES as NN_CASES
from tests.support.ops_nn_cases import narrowed
from tests.support.ops_tensor_cases import CASES as TENSOR_CASES
from tests.support.ops_tensor_cases import UPDATES
from weftplan.ops.core import registry
from weftplan.ops.core.schema import Op, TensorSpec
from weftplan.ops.fusion import relu as joined
from weftplan.ops.fusion.depthwise_block import BLOCK, BLOCK_GRADIENT
from weftplan.ops.fusion.pointwise import GROUP, POINTWISE, Group, Member
from weftplan.ops.fusion.shared_gradient import SHARED_GRADIENT
from weftplan.planner import PlanOptions

MOST_CALLS = 6
"""Most calls tested per operator; they differ in kind (see `_kind`)."""


def may_run(op: Op) -> bool:
    """Return whether an operator may run with an unwanted output: it has other outputs, or it changes a state."""
    return callable(op.outputs) or len(op.outputs) > 1 or bool(op.aux)


def random(*shape: int, low: float = -1.0, seed: int = 0) -> Any:
    """Return random float32 numbers from ``low`` to 1."""
    return np.random.RandomState(seed).uniform(low, 1, shape).astype(np.float32)


def planner_call(op: Op, params: dict[str, Any], arrays: list[Any], outputs: list[tuple[int, ...]]) -> Call:
    """Return a call of an operator whose nodes only the planner makes, with outputs of these shapes."""
    return Call(op, params, arrays, [TensorSpec(shape, arrays[0].dtype) for shape in outputs])


def parse(name: str, **params: Any) -> dict[str, Any]:
    """Return the parsed parameters of operator ``name``."""
    return registry.parse_params(registry.get(name), {key: str(value) for key, value in params.items()})


def block_calls() -> list[Call]:
    """Return calls of depthwise blocks and of their gradients, with each stride, with and without a second relu."""
    calls = []
    for stride, relu, fixed in ((1, True, False), (2, False, True), (2, True, False)):
        norm = parse("BatchNorm", fix_gamma=fixed, eps=1e-3)
        layer = parse("Convolution", kernel=(3, 3), pad=(1, 1), stride=(stride, stride), num_filter=4, num_group=4,
                   no_bias=True)  # fmt: skip
        params = {"before": norm, "layer": layer, "behind": norm, "relu": relu}
        image, grid, vector = (2, 4, 9, 13), (2, 4, -(-9 // stride), -(-13 // stride)), (4,)

        def vectors(seed: int) -> list[Any]:
            return [random(4, low=0.5, seed=seed + k) for k in range(4)]

        data, weight = random(*image), random(4, 1, 3, 3)
        arrays = [data, *vectors(1), weight, *vectors(5)]
        calls.append(planner_call(BLOCK, params, arrays, [grid, grid, *[vector] * 4]))
        arrays = [random(*grid), random(*grid, seed=1), data, weight, *vectors(1), *vectors(5)]
        calls.append(
            planner_call(BLOCK_GRADIENT, params, arrays, [image, vector, vector, weight.shape, vector, vector])
        )
    return calls


def norm_calls() -> list[Call]:
    """Return calls of a batch norm fused with a relu, and of its gradient."""
    image, vector = (3, 4, 5, 7), (4,)
    vectors = [random(4, low=0.5, seed=k) for k in range(4)]
    calls = []
    for fixed in (False, True):
        params = parse("BatchNorm", fix_gamma=fixed, eps=1e-3)
        calls.append(
            planner_call(joined.LAYERS["BatchNorm"], params, [random(*image), *vectors], [image, vector, vector])
        )
        arrays = [random(*image), random(*image, seed=1), *vectors]
        calls.append(planner_call(joined.GRADIENTS["_backward_BatchNorm"], params, arrays, [image, vector, vector]))
    return calls


def normalized_calls() -> list[Call]:
    """Return calls of a convolution fused with a batch norm, whose states change even if its output is unwanted."""
    calls = []
    for op in joined.NORMALIZED.values():
        params = {**parse("Convolution", kernel=(3, 3), num_filter=4, pad=(1, 1)), "norm": parse("BatchNorm", eps=1e-3)}
        arrays = [random(2, 8, 9, 13), random(4, 8, 3, 3), *(random(4, low=0.5, seed=k) for k in range(4)), random(4)]
        calls.append(planner_call(op, params, arrays, [(2, 4, 9, 13)]))
    return calls


def shared_calls() -> list[Call]:
    """Return calls of the shared gradient of three layers with one weight.

    They vary whether data gradients and a bias gradient are computed.
    """
    calls = []
    for whole, no_bias in ((True, False), (False, True), (True, True)):
        params = {"num_hidden": 64, "no_bias": no_bias, "count": 3, "whole": whole}
        arrays = [random(8, 64, seed=k) for k in range(3)] + [random(8, 96, seed=k) for k in range(3)]
        outputs = [(64, 96), *([] if no_bias else [(64,)]), *([(8, 96)] * 3 if whole else [])]
        calls.append(planner_call(SHARED_GRADIENT, params, arrays + [random(64, 96)] * whole, outputs))
    return calls


def pointwise_calls() -> list[Call]:
    """Return a call of a fused node with three results, two inputs of one shape and a broadcast input."""
    exp, add, relu = registry.get("exp"), registry.get("broadcast_add"), registry.get("relu")
    members = (Member(exp, {}, (0,), (3,)), Member(add, {}, (3, 1), (4,)), Member(add, {}, (4, 2), (5,)),
               Member(relu, {}, (5,), (6,)))  # fmt: skip
    group = Group(members, ((4, 5), (4, 5), (1, 5)), (3, 4, 6), (4, 5), np.dtype("float32"))
    arrays = [random(4, 5), random(4, 5, seed=1), random(1, 5, seed=2)]
    return [planner_call(POINTWISE, {GROUP: group}, arrays, [(4, 5)] * 3)]


ALIKE = {
    "_npi_sort": "sort", "_npx_batch_norm": "BatchNorm", "_npx_dropout": "Dropout", "_npx_group_norm": "GroupNorm",
    "_npx_instance_norm": "InstanceNorm", "_npx_layer_norm": "LayerNorm", "_npx_leaky_relu": "LeakyReLU",
    "_npx_multibox_target": "_contrib_MultiBoxTarget", "_npx_rnn": "RNN", "_npx_roi_pooling": "ROIPooling",
    "_npx_topk": "topk",
}  # fmt: skip
"""Operators of MXNet's NumPy interface, mapped to the operator whose cases they use."""


def other_cases() -> list[tuple[str, list[Any], dict[str, Any], bool]]:
    """Return cases of operators that have neither golden nor contract cases."""
    column = random(2, 2, 5, 6)
    return [
        ("_npi_split", [random(4, 6)], {"indices": (0, 2), "axis": 1, "sections": 0}, True),
        ("_sample_multinomial",
         [np.array([[0.2, 0.8], [0.5, 0.5]], np.float32)], {"shape": (5,), "get_prob": True}, True),
        ("_sample_unique_zipfian", [], {"range_max": 50, "shape": (2, 9)}, True),
        *((f"_{mixed}adamw_update", [random(5, seed=k, low=0.2).astype(kind) for k, kind in enumerate(kinds)]
           + [np.array([0.5], np.float32)], {"lr": 0.1, "eta": 0.9}, True)
          for mixed, kinds in (("", ["float32"] * 4), ("mp_", ["float16"] * 2 + ["float32"] * 3))),
        ("lamb_update", [random(5, seed=k, low=0.2) for k in range(4)], {"lr": 0.1, "wd": 0.1, "t": 1}, True),
        ("_rnn_param_concat", [random(4), random(3), random(2)], {"num_args": 3, "dim": 0}, True),
        ("_contrib_ModulatedDeformableConvolution",
         [column, random(2, 18, 5, 6), random(2, 9, 5, 6), random(3, 2, 3, 3), random(3)],
         {"kernel": (3, 3), "pad": (1, 1), "num_filter": 3}, True),
    ]  # fmt: skip


def _kind(call: Call) -> tuple[Any, ...]:
    """Return a key of the call's number of outputs, training mode, and the inputs' ranks and dtypes."""
    return len(call.out_specs), call.is_train, *((x.ndim, x.dtype.str) for x in call.inputs)


@functools.cache
def calls_by_operator() -> dict[str, list[Call]]:
    """Return the calls of every operator with several outputs or states.

    They come from the golden cases, the contract cases, and the gradients of both.
    """
    cases = [
        (case["op"], golden.case_inputs(case), case.get("params"), case.get("is_train", True))
        for named in GOLDEN.values()
        for case in named.values()
        if may_run(registry.get(case["op"])) or registry.get(case["op"]).gradient is not None
    ]
    cases += [(op, narrowed(op, arrays, "float32"), params, True) for op, arrays, params in NN_CASES]
    cases += [(op, arrays, params, True) for op, arrays, params in (*TENSOR_CASES, *UPDATES)]
    cases += [(name, *case[1:]) for name, op in ALIKE.items() for case in cases if case[0] == op] + other_cases()
    by_name: dict[str, list[Call]] = {}
    kinds: set[tuple[Any, ...]] = set()

    def add(call: Call) -> None:
        known = by_name.setdefault(call.op.name, [])
        kind = (call.op.name, *_kind(call))
        if (len(call.out_specs) > 1 or call.op.mutated(call.params)) and kind not in kinds and len(known) < MOST_CALLS:
            kinds.add(kind)
            known.append(call)

    for name, arrays, params, is_train in cases:
        call = prepare(name, [np.array(x) for x in arrays], params, is_train=is_train)
        pristine = [x.copy() for x in call.inputs]
        call()
        if call.op.gradient is not None and is_train:
            heads = [np.linspace(-1, 2, int(np.prod(s.shape))).reshape(s.shape).astype(s.dtype) for s in call.out_specs]
            for backward in differentiate(call, heads)[1].calls:
                add(backward)
        call.inputs = pristine
        add(call)
    for call in (*block_calls(), *norm_calls(), *normalized_calls(), *shared_calls(), *pointwise_calls()):
        add(call)
    return {name: calls for name, calls in by_name.items() if calls}


NAMES = sorted({*registry.names(aliases=False), *registry._PLANNERS})


@pytest.mark.parametrize("name", [name for name in NAMES if may_run(registry.find(name) or registry._PLANNERS[name])])
def test_any_subset_of_outputs_may_be_unwanted(name: str) -> None:
    """A wanted output has the same bits whichever other outputs are wanted, also when the call is replayed."""
    calls = calls_by_operator().get(name, ())
    assert calls, f"no case of {name} has several outputs or a state: add one to the golden cases, or to this file"
    for call in calls:
        check_unwanted(call)


def test_a_kernel_that_needs_an_output_is_noticed() -> None:
    """The check fails for a kernel that reads one output's memory to compute another output."""
    right = prepare("moments", [random(3, 4)], {"axes": (1,)})
    check_unwanted(right)

    def wrong(ctx: Any, params: Any, inputs: Any, outputs: Any) -> None:
        mean, var = outputs
        inputs[0].mean(axis=1, out=mean)
        if var is not None:
            np.square(inputs[0] - mean[:, None]).mean(axis=1, out=var)

    right.op = replace(right.op, forward=wrong, workspace=None)
    with pytest.raises((AssertionError, TypeError)):
        check_unwanted(right)


def test_subsets_are_all_or_many() -> None:
    """For few outputs, ``subsets`` returns every proper subset.

    For many it returns each single output, all but one, none, and random subsets.
    """
    assert subsets(1) == [(False,)]
    assert len(set(subsets(6))) == 63
    many = subsets(9)
    assert {(n, kind) for n in range(9) for kind in (True, False)} <= {
        (wanted.index(kind), kind) for wanted in many for kind in (True, False) if wanted.count(kind) == 1
    }
    assert (False,) * 9 in many


@pytest.mark.parametrize("kernels", ["auto", "native", "numpy"])
@pytest.mark.parametrize("relu", [False, True])
def test_moving_statistics_change_without_the_output(kernels: str, relu: bool) -> None:
    """A fused convolution and batch norm updates its statistics even if its result is read only for its shape.

    The statistics have the bits of unfused execution.
    """
    net = mx.sym.BatchNorm(mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=4), name="norm")
    net = mx.sym.zeros_like(mx.sym.Activation(net, act_type="relu") if relu else net)
    seen = set()
    for fusion in (True, False):
        options = PlanOptions(kernels=kernels, fusion=fusion)
        executor = net.simple_bind(mx.cpu(), grad_req="null", plan_options=options, data=(2, 3, 8, 8))
        for k, array in enumerate(executor.arg_arrays):
            array[:] = np.abs(random(*array.shape, seed=k))
        executor.forward(is_train=True)
        seen.add(b"".join(state.asnumpy().tobytes() for state in executor.aux_arrays))
    assert len(seen) == 1
