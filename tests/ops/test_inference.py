"""Shape and dtype inference: both directions, partially known shapes, and errors that name the conflict."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ops_tensor_cases import CASES, NO_GRADIENT, ident
from tests.support.together import together
from weftplan.errors import DTypeError, ShapeError
from weftplan.ops.core import registry, rules
from weftplan.ops.core.params import format_value
from weftplan.ops.shape.reshape_codes import reshaped

F32, F64 = np.dtype("float32"), np.dtype("float64")


def shapes(op, ins, outs=None, **params):
    """Return the (input shapes, output shapes) that an operator infers."""
    actual = registry.get(op)
    if actual.variadic:
        params.setdefault(actual.variadic, len(ins))
    parsed = registry.parse_params(actual, {k: format_value(v) for k, v in params.items()})
    ins, outs = actual.infer_shape(parsed, list(ins), list(outs or [None] * actual.num_outputs(parsed)))
    return list(ins), list(outs)


@together()
@pytest.mark.parametrize(
    ("op", "ins", "outs", "params", "expected"),
    [
        ("exp", [None], [(2, 0)], {}, ([(2, 0)], [(2, 0)])),
        ("elemwise_add", [(2, 0), (0, 3)], [None], {}, ([(2, 3), (2, 3)], [(2, 3)])),
        ("elemwise_mul", [None, None], [(4,)], {}, ([(4,), (4,)], [(4,)])),
        ("broadcast_add", [(2, 1), (1, 3)], [None], {}, ([(2, 1), (1, 3)], [(2, 3)])),
        ("broadcast_add", [(2, 0), (2, 1)], [(2, 5)], {}, ([(2, 5), (2, 1)], [(2, 5)])),
        ("broadcast_add", [(0, 3), (1, 3)], [None], {}, ([(0, 3), (1, 3)], [(0, 3)])),
        ("broadcast_add", [(3,), (2, 3)], [None], {}, ([(3,), (2, 3)], [(2, 3)])),
        ("broadcast_add", [(0, 1), (0, 1)], [(1, 1)], {}, ([(1, 1), (1, 1)], [(1, 1)])),
        ("Flatten", [(2, 3, 4)], [None], {}, ([(2, 3, 4)], [(2, 12)])),
        ("Flatten", [(0, 3, 0)], [(5, 12)], {}, ([(5, 3, 4)], [(5, 12)])),
        ("Reshape", [(0, 3)], [None], {"shape": (0, -1)}, ([(0, 3)], [(0, 0)])),
        ("Reshape", [(2, 0)], [(4, 3)], {"shape": (4, 3)}, ([(2, 6)], [(4, 3)])),
        ("Reshape", [None], [None], {"shape": (4, 3)}, ([None], [(4, 3)])),
        ("expand_dims", [None], [(2, 1, 3)], {"axis": 1}, ([(2, 3)], [(2, 1, 3)])),
        ("expand_dims", [(2, 3)], [None], {"axis": -1}, ([(2, 3)], [(2, 3, 1)])),
        ("transpose", [None], [(2, 3, 4)], {"axes": (1, 2, 0)}, ([(4, 2, 3)], [(2, 3, 4)])),
        ("transpose", [(2, 0)], [(5, 0)], {}, ([(2, 5)], [(5, 2)])),
        ("SwapAxis", [None], [(2, 3, 4)], {"dim1": 0, "dim2": 2}, ([(4, 3, 2)], [(2, 3, 4)])),
        ("Concat", [(2, 0), (2, 3)], [(2, 7)], {}, ([(2, 4), (2, 3)], [(2, 7)])),
        ("Concat", [(2, 4), (0, 3)], [None], {}, ([(2, 4), (2, 3)], [(2, 7)])),
        ("Concat", [None, (2, 3)], [None], {}, ([(2, 0), (2, 3)], [(2, 0)])),
        ("stack", [None, (2, 3)], [None], {"axis": 1}, ([(2, 3), (2, 3)], [(2, 2, 3)])),
        ("stack", [None, None], [(2, 2, 3)], {}, ([(2, 3), (2, 3)], [(2, 2, 3)])),
        ("SliceChannel", [None], [(2, 3), None], {"num_outputs": 2}, ([(2, 6)], [(2, 3), (2, 3)])),
        (
            "SliceChannel",
            [None],
            [(2, 3), None],
            {"num_outputs": 2, "squeeze_axis": True},
            ([(2, 2, 3)], [(2, 3), (2, 3)]),
        ),
        ("dot", [(2, 0), (3, 4)], [None], {}, ([(2, 3), (3, 4)], [(2, 4)])),
        ("dot", [(0, 3), (3, 0)], [(5, 6)], {}, ([(5, 3), (3, 6)], [(5, 6)])),
        ("batch_dot", [(0, 2, 3), (7, 0, 4)], [None], {}, ([(7, 2, 3), (7, 3, 4)], [(7, 2, 4)])),
        ("sum", [(2, 3)], [None], {}, ([(2, 3)], [(1,)])),
        ("sum", [(2, 3)], [None], {"keepdims": True}, ([(2, 3)], [(1, 1)])),
        ("sum", [(2, 0, 4)], [None], {"axis": 1}, ([(2, 0, 4)], [(2, 4)])),
        ("one_hot", [None], [(5, 3)], {"depth": 3}, ([(5,)], [(5, 3)])),
        ("pick", [(4, 3), None], [None], {}, ([(4, 3), (4,)], [(4,)])),
        ("where", [None, (2, 3), None], [None], {}, ([None, (2, 3), (2, 3)], [(2, 3)])),
        ("_zeros", [], [(2, 3)], {"shape": (0, 3)}, ([], [(2, 3)])),
        ("_zeros", [], [(2, 3)], {}, ([], [(2, 3)])),
    ],
)
def test_two_way(op, ins, outs, params, expected):
    """Known shapes of inputs and outputs complete the unknown shapes."""
    assert shapes(op, ins, outs, **params) == expected


@together()
@pytest.mark.parametrize(
    ("op", "ins", "params", "parts"),
    [
        ("elemwise_add", [(2, 3), (2, 4)], {}, ["(2, 3)", "(2, 4)", "dimension 1"]),
        ("elemwise_add", [(2, 3), (3,)], {}, ["(2, 3)", "(3,)", "rank"]),
        ("broadcast_mul", [(2, 3), (4, 3)], {}, ["(2, 3)", "(4, 3)", "axis -2"]),
        ("dot", [(2, 3), (4, 5)], {}, ["(2, 3)", "(4, 5)", "got 3 and 4"]),
        ("batch_dot", [(2, 2, 3), (3, 3, 4)], {}, ["(2, 2, 3)", "(3, 3, 4)"]),
        ("batch_dot", [(2, 3), (3, 4)], {}, ["at least 3 dimensions", "(2, 3)"]),
        ("Concat", [(2, 3), (3, 3)], {}, ["(2, ?)", "(3, ?)", "input 1"]),
        ("Concat", [(2, 3), (2, 3, 1)], {}, ["(2, 3)", "(2, 3, 1)", "rank"]),
        ("SliceChannel", [(2, 5)], {"num_outputs": 2}, ["(2, 5)", "2 equal parts"]),
        ("Reshape", [(2, 3)], {"shape": (4, -1)}, ["(2, 3)", "(4, -1)", "6 elements", "divisible by 4"]),
        ("Reshape", [(2, 3)], {"shape": (5,)}, ["(2, 3)", "(5,)", "6 elements do not fit into 5"]),
        ("Reshape", [(2, 3)], {"shape": (-1, -1)}, ["only one dimension may be -1"]),
        ("Reshape", [(2, 3)], {"shape": (0, 0, 0)}, ["no dimension left"]),
        ("Reshape", [(2, 3)], {"shape": (-4, 2)}, ["-4 needs two sizes"]),
        ("Reshape", [(6, 3)], {"shape": (-4, 4, -1, 0)}, ["6 cannot be split into 4 x 1"]),
        ("Reshape", [(6, 3)], {"shape": (-7,)}, ["code -7 is unknown"]),
        ("Reshape", [(6, 3)], {}, ["needs the parameter shape"]),
        ("expand_dims", [(2, 3)], {"axis": 4}, ["axis of expand_dims 4", "-3 to 2"]),
        ("squeeze", [(2, 3)], {"axis": 0}, ["dimension 0 of (2, 3) is not 1"]),
        ("transpose", [(2, 3)], {"axes": (0, 0)}, ["(0, 0)", "not a permutation"]),
        ("sum", [(2, 3)], {"axis": (1, 1)}, ["axis (1, 1)", "twice"]),
        ("sum", [(2, 3)], {"axis": 2}, ["axis of a reduction 2", "-2 to 1"]),
        ("slice", [(4, 5)], {"begin": (3,), "end": (2,)}, ["(4, 5)", "selects nothing of axis 0"]),
        ("slice", [(4, 5)], {"begin": (1, 1), "end": (2,)}, ["begin (1, 1), end (2,)"]),
        ("slice_axis", [(4, 5)], {"axis": 1, "begin": 0, "end": 6}, ["exceed dimension 1 of (4, 5)"]),
        ("slice_like", [(2, 3), (4, 3)], {}, ["dimension 0 of (2, 3) is smaller", "(4, 3)"]),
        ("broadcast_to", [(2, 3)], {"shape": (4, 3)}, ["(2, 3)", "(4, 3)"]),
        ("Pad", [(2, 3)], {"mode": "edge", "pad_width": (1, 1)}, ["2 numbers for each of 2"]),
        ("Pad", [(2, 3)], {"mode": "reflect", "pad_width": (2, 0, 0, 0)}, ["cannot reflect 2", "dimension of 2"]),
        ("pick", [(4, 3), (5,)], {}, ["(5,)", "(4,)", "(4, 3)"]),
        ("where", [(3,), (2, 3), (2, 3)], {}, ["(3,)", "(2,)"]),
        ("_arange", [], {"start": 3, "stop": 1}, ["from 3.0 to 1.0 by 1.0 is empty"]),
        ("_arange", [], {"start": 0, "stop": float("inf")}, ["to inf", "no length"]),
        ("_arange", [], {"start": float("nan"), "stop": 3}, ["from nan", "no length"]),
        ("_arange", [], {"start": 0, "stop": 1e300, "step": 1e-300}, ["no length"]),
        ("reshape_like", [(2, 3), (4, 2)], {}, ["(2, 3)", "(4, 2)"]),
    ],
)
def test_conflict(op, ins, params, parts):
    """Conflicting shapes raise a ShapeError that names them."""
    with pytest.raises(ShapeError) as caught:
        shapes(op, ins, **params)
    for part in parts:
        assert part in str(caught.value)


@together()
@pytest.mark.parametrize("case", CASES + NO_GRADIENT, ids=ident)
def test_nothing_known(case):
    """Inference from nothing, or from output shapes alone, contradicts no true shape and raises nothing."""
    op, arrays, params = case
    none = [None] * len(arrays)
    ins, outs = shapes(op, none, **params)
    full = shapes(op, [x.shape for x in arrays], **params)
    for known, guessed in zip(full[0] + full[1], ins + outs, strict=True):
        rules.merge_shape(known, guessed, "inference from nothing")
    ins, outs = shapes(op, none, full[1], **params)
    for known, guessed in zip(full[0] + full[1], ins + outs, strict=True):
        rules.merge_shape(known, guessed, "inference from outputs")


@together()
@pytest.mark.parametrize("case", CASES, ids=ident)
def test_repeating_inference_changes_nothing(case):
    """Inference from inferred shapes returns the same shapes."""
    op, arrays, params = case
    once = shapes(op, [x.shape for x in arrays], **params)
    assert shapes(op, *once, **params) == once


@given(st.data())
def test_broadcast_agrees_with_numpy(data):
    """Broadcast inference equals NumPy's for random shapes."""
    dims = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    a, b = (
        tuple(1 if data.draw(st.booleans()) else dim for dim in dims[data.draw(st.integers(0, len(dims) - 1)) :])
        for _ in range(2)
    )
    assert shapes("broadcast_add", [a, b])[1] == [np.broadcast_shapes(a, b)]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5).map(tuple), st.data())
def test_reshape_codes_keep_size(source, data):
    """Random legal reshape codes give a shape of the same size."""
    codes, position = [], 0
    while position < len(source):
        code = data.draw(st.sampled_from([0, -2, -3, -4]))
        if code == -3 and position + 1 >= len(source):
            code = 0
        codes += [-4, 1, -1] if code == -4 else [code]
        position += {0: 1, -2: len(source), -3: 2, -4: 1}[code]
    assert np.prod(reshaped(source, codes)) == np.prod(source)


@pytest.mark.parametrize(
    ("source", "codes", "reverse", "expected"),
    [
        ((2, 3, 4), (4, 0, 2), False, (4, 3, 2)),
        ((2, 3, 4), (2, 0, 0), False, (2, 3, 4)),
        ((2, 3, 4), (6, 1, -1), False, (6, 1, 4)),
        ((2, 3, 4), (3, -1, 8), False, (3, 1, 8)),
        ((2, 3, 4), (-1,), False, (24,)),
        ((2, 3, 4), (-2,), False, (2, 3, 4)),
        ((2, 3, 4), (2, -2), False, (2, 3, 4)),
        ((2, 3, 4), (-2, 1, 1), False, (2, 3, 4, 1, 1)),
        ((2, 3, 4), (-3, 4), False, (6, 4)),
        ((2, 3, 4, 5), (-3, -3), False, (6, 20)),
        ((2, 3, 4), (0, -3), False, (2, 12)),
        ((2, 3, 4), (-3, -2), False, (6, 4)),
        ((2, 3, 4), (-4, 1, 2, -2), False, (1, 2, 3, 4)),
        ((2, 3, 4), (2, -4, -1, 3, -2), False, (2, 1, 3, 4)),
        ((10, 5, 4), (-1, 0), False, (40, 5)),
        ((10, 5, 4), (-1, 0), True, (50, 4)),
        ((8, 3, 4, 4), (-4, 2, 4, 0, -3), True, (2, 4, 3, 16)),
        ((4, 6), (0, 2, 3, -4), True, (4, 2, 3)),  # this and the next four equal MXNet 1.9.1's results
        ((4, 6), (2, 2, -4, 0), True, (2, 2, 6)),
        ((4, 6), (2, -1, -4, 6), True, (2, 2, 6)),
        ((4, 6, 5), (0, 3, 2, -4, 0), True, (4, 3, 2, 5)),
        ((4, 6), (2, 2, -4, 2, 3, -4), True, (2, 2, 2, 3)),
        ((4, 6), (0, -4, 2, 3), True, (4, 2, 3)),  # MXNet 1.9.1 refuses this case
        ((0, 3), (-3,), False, (0,)),
        ((0, 3), (0, -1), False, (0, 0)),
    ],
)
def test_reshape_codes(source, codes, reverse, expected):
    """Reshape codes give the shapes of MXNet's documentation, also for unknown dimensions and splits from the right."""
    assert reshaped(source, codes, reverse=reverse) == expected


def test_dtype_conflict():
    """elemwise_add refuses different dtypes; the error names both and the remedy."""
    op = registry.get("elemwise_add")
    for ins in ([F32, F64], [F64, F32]):
        with pytest.raises(DTypeError, match=r"float(32|64) and float(32|64) differ; cast"):
            op.infer_dtype({}, ins, [None])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64", "bool"])
def test_dtype_spreads(dtype):
    """One known dtype, at any position, determines the others.

    float64 is included because NumPy compares it equal to None.
    """
    op, known = registry.get("elemwise_add"), np.dtype(dtype)
    for hole in range(3):
        inputs = [None, None, None]
        inputs[hole] = known
        ins, outs = op.infer_dtype({}, inputs[:2], inputs[2:])
        assert [x is not None and x == known for x in (*ins, *outs)] == [True] * 3


def test_merge_keeps_its_arguments():
    """Inference rules return new lists and do not change their arguments."""
    ins, outs = [(2, 0), (0, 3)], [None]
    rules.same_shape({}, ins, outs)
    rules.broadcast_shape({}, ins, outs)
    assert ins == [(2, 0), (0, 3)]
    assert outs == [None]
