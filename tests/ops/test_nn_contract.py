"""The contract of every neural-network operator.

It covers numeric gradients, in-place pairs, unwanted outputs, exact workspace and dtypes.
"""

import numpy as np
import pytest

from tests.support import ops_harness
from tests.support.ops_harness import check_contract, check_gradient, check_hidden, differentiate, prepare
from tests.support.ops_nn_cases import CASES, DIFFERENTIABLE, SYNC, ident, narrowed
from tests.support.together import operator, together
from weftplan.ops.core import registry, tiling
from weftplan.ops.nn import embedding, softmax_output


def wrt(case):
    """Return the inputs of a case to differentiate, or None for all floats.

    Statistics, labels and a fixed gamma are excluded.
    """
    op, _, params = case
    if op in ("Crop", "softmax_cross_entropy", "ROIPooling"):
        return (0,)
    if op in ("BatchNorm", SYNC):
        return (0, 1, 2) if params.get("fix_gamma") is False else (0, 2)
    return None


@together(by=operator)
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=ident)
def test_gradient(case):
    """The gradient rule agrees with central differences in float64."""
    op, arrays, params = case
    check_gradient(op, arrays, params, wrt=wrt(case))


@pytest.mark.parametrize("shape", [(3, 2), (6, 50)])
def test_one_wrong_element_of_a_gradient_is_noticed(shape, monkeypatch):
    """``check_gradient`` rejects a gradient with one element off by a thousandth, among few elements and many."""
    actual = ops_harness.differentiate

    def off(call, ograds):
        grads, backward = actual(call, ograds)
        grads[0].flat[5] += 1e-3
        return grads, backward

    case = "LeakyReLU", [np.random.RandomState(1).uniform(0.5, 1, shape)], {"act_type": "leaky"}
    check_gradient(*case)
    monkeypatch.setattr(ops_harness, "differentiate", off)
    with pytest.raises(AssertionError, match="LeakyReLU: input 0"):
        check_gradient(*case)


@together(by=operator)
@pytest.mark.parametrize("case", CASES, ids=ident)
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_contract(case, dtype):
    """Forward and backward calls meet the contract: in-place pairs, unwanted outputs, exact workspace."""
    op, arrays, params = case
    check_contract(op, narrowed(op, arrays, dtype), params)


@together(by=operator)
@pytest.mark.parametrize("case", CASES, ids=ident)
def test_contract_outside_training(case):
    """Outside training, the forward call meets the contract: exact workspace and in-place pairs."""
    op, arrays, params = case
    call = prepare(op, arrays, params, is_train=False)
    expected = [y.copy() for y in call()]
    assert call.taken == call.declared
    for pair in call.op.inplace_pairs(call.params):
        if call.inputs[pair.input].nbytes == call.out_specs[pair.output].nbytes:
            for got, want in zip(call(alias=(pair.input, pair.output)), expected, strict=True):
                np.testing.assert_array_equal(got, want)


def shrink(monkeypatch, elements):
    """Make blocks, tiles and batches of labels small, so that each loop over them repeats."""
    monkeypatch.setattr(tiling._thread, "grain", tiling.Grain(elements, 64 * elements))
    monkeypatch.setattr(softmax_output, "_LABELS", 3)
    monkeypatch.setattr(embedding, "_INDICES", 3)


@together(by=operator)
@pytest.mark.parametrize("case", CASES, ids=ident)
@pytest.mark.parametrize("elements", [1, 7, 40])
def test_contract_in_small_blocks(case, elements, monkeypatch):
    """With tiny blocks and tiles the contract is met and results stay the same, forward and backward."""
    op, arrays, params = case
    random = registry.get(op).random and params.get("act_type", "rrelu") == "rrelu"

    def evaluate():
        call = prepare(op, [x.copy() for x in arrays], params)
        outputs = [y.copy() for y in call()]
        return outputs + differentiate(call, [np.full(s.shape, 0.5, s.dtype) for s in call.out_specs])[0]

    whole = evaluate()
    shrink(monkeypatch, elements)
    try:
        check_contract(op, arrays, params)
        if not random:  # the numbers drawn depend on the blocks only through how a generator pairs float32 draws
            for got, want in zip(evaluate(), whole, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-13)
    finally:
        monkeypatch.undo()


@together(by=operator)
@pytest.mark.parametrize("case", CASES, ids=ident)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtype(case, dtype):
    """float16 and float32 inputs give outputs of their dtype, close to the float64 result, forward and backward."""
    op, arrays, params = case
    rounded = [x.astype(dtype).astype(np.float64) if x.dtype == np.float64 else x for x in arrays]
    exact = prepare(op, rounded, params)
    narrow = prepare(op, narrowed(op, rounded, dtype), params)
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    ograds = [np.full(s.shape, 0.5) for s in exact.out_specs]
    pairs = list(zip(narrow(), exact(), strict=True))
    actual = differentiate(narrow, [g.astype(s.dtype) for g, s in zip(ograds, narrow.out_specs, strict=True)])[0]
    pairs += zip(actual, differentiate(exact, ograds)[0], strict=True)
    assert narrow.out_specs[0].dtype == dtype
    for got, want in pairs:
        scale = max(1.0, float(np.abs(want).max(initial=0.0)))
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=tolerance * scale)


@together(by=operator)
@pytest.mark.parametrize("case", CASES, ids=ident)
def test_recomputing_repeats(case):
    """A recomputed call, on the states that the first call left, gives the same bits, even random ones."""
    op, arrays, params = case
    left = [x.copy() for x in arrays]
    runs = [prepare(op, left, params, recompute=repeated)() for repeated in (False, True)]
    for first, second in zip(*runs, strict=True):
        np.testing.assert_array_equal(first, second)


BIG = np.random.RandomState(0).uniform(0.1, 1.0, (8, 32, 64, 64)).astype(np.float32)
ONES = np.ones(32, np.float32)
LARGE = [
    *(("Activation", [BIG], {"act_type": kind}) for kind in ("relu", "sigmoid", "tanh", "softrelu", "softsign")),
    *(("LeakyReLU", [BIG], {"act_type": kind}) for kind in ("leaky", "elu", "selu", "gelu", "rrelu")),
    ("LeakyReLU", [BIG, ONES], {"act_type": "prelu"}),
    (
        "Convolution",
        [BIG, np.ones((8, 32, 3, 3), np.float32)],
        {"kernel": (3, 3), "num_filter": 8, "pad": (1, 1), "no_bias": True},
    ),
    ("Convolution", [BIG, np.ones((8, 32, 1, 1), np.float32), ONES[:8]], {"kernel": (1, 1), "num_filter": 8}),
    ("FullyConnected", [BIG, np.ones((4, 32 * 64 * 64), np.float32), ONES[:4]], {"num_hidden": 4}),
    *(
        ("Pooling", [BIG], {"kernel": (2, 2), "stride": (2, 2), "pool_type": kind, "p_value": 2})
        for kind in ("max", "avg", "sum", "lp")
    ),
    *(("Pooling", [BIG], {"global_pool": True, "pool_type": kind}) for kind in ("max", "avg")),
    ("BatchNorm", [BIG, *[ONES] * 4], {"fix_gamma": False}),
    ("LayerNorm", [BIG, ONES[:32].repeat(2), ONES[:32].repeat(2)], {}),
    ("InstanceNorm", [BIG, ONES, ONES], {}),
    *(("L2Normalization", [BIG], {"mode": mode}) for mode in ("channel", "spatial")),
    *((name, [BIG], {"axis": axis}) for name in ("softmax", "log_softmax") for axis in (1, -1)),
    ("SoftmaxOutput", [BIG, np.zeros((8, 64, 64), np.float32)], {"multi_output": True, "use_ignore": True}),
    ("Dropout", [BIG], {}),
    ("_contrib_BilinearResize2D", [BIG], {"height": 90, "width": 70}),
    ("_contrib_AdaptiveAvgPooling2D", [BIG], {"output_size": (7, 7)}),
    ("_contrib_interleaved_matmul_selfatt_qk", [BIG.reshape(-1)[: 128 * 8 * 768].reshape(128, 8, 768)], {"heads": 4}),
    ("Embedding", [BIG.reshape(-1)[:9000], BIG.reshape(256, -1)[:, :64]], {"input_dim": 256, "output_dim": 64}),
    ("MakeLoss", [BIG], {"normalization": "valid"}),
]


@pytest.mark.parametrize("case", LARGE, ids=ident)
def test_no_hidden_memory(case):
    """On 4 MiB of data no kernel allocates more than 600,000 bytes outside its workspace, forward or backward."""
    op, arrays, params = case
    call = prepare(op, [np.ascontiguousarray(x) for x in arrays], params)
    check_hidden(call, 600_000)
    ograds = [np.ones(s.shape, s.dtype) for s in call.out_specs]
    for result in differentiate(call, ograds)[1].calls:
        check_hidden(result, 600_000)
