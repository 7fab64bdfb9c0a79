"""Linear algebra on stacks of matrices: contract, numeric gradients, panels, inference, wrong inputs."""

import numpy as np
import pytest

import weftplan as mx
from tests.support.ops_harness import check_contract, check_gradient, check_hidden, gradients, prepare, run
from tests.support.together import operator, together
from weftplan.errors import DTypeError, MXNetError, ShapeError
from weftplan.ops.core import registry
from weftplan.ops.linalg import core as linalg_core


def uniform(*shape, seed=0):
    """Return random float64 numbers in [-1, 1)."""
    return np.random.RandomState(seed + sum(shape)).uniform(-1, 1, shape)


def diagonally_dominant(*shape, seed=0):
    """Return random diagonally dominant matrices, whose factorizations are well-conditioned."""
    n = shape[-1]
    return uniform(*shape, seed=seed) / n + 2 * np.eye(n)


def symmetric(*shape):
    """Return random symmetric positive definite matrices."""
    x = diagonally_dominant(*shape)
    return x @ x.swapaxes(-1, -2)


FLAGS = [
    {"transpose": t, "rightside": r, "lower": low, "alpha": 1.5}
    for t in (False, True)
    for r in (False, True)
    for low in (False, True)
]
CASES = [
    ("linalg_gemm", [uniform(2, 3, 4), uniform(2, 4, 2), uniform(2, 3, 2)], {"alpha": 0.5, "beta": 2.0}),
    ("linalg_gemm", [uniform(4, 3), uniform(2, 4), uniform(3, 2)], {"transpose_a": True, "transpose_b": True}),
    ("linalg_gemm", [uniform(3, 2, 4), uniform(4, 2, 5), uniform(3, 2, 5)], {"axis": 0}),
    ("linalg_gemm2", [uniform(3, 2, 4), uniform(4, 2, 5)], {"axis": -3, "alpha": 2.0}),
    ("linalg_syrk", [uniform(2, 3, 2)], {"alpha": 0.5}),
    ("linalg_syrk", [uniform(3, 2)], {"transpose": True}),
    *(
        (op, [diagonally_dominant(2, 3, 3), uniform(*((2, 2, 3) if flags["rightside"] else (2, 3, 2)))], flags)
        for op in ("linalg_trmm", "linalg_trsm")
        for flags in FLAGS
    ),
    ("linalg_potri", [diagonally_dominant(2, 3, 3)], {}),
    ("linalg_potri", [diagonally_dominant(2, 3, 3)], {"lower": False}),
    *(("linalg_gelqf", [uniform(*shape)], {}) for shape in ((2, 3), (3, 3), (1, 1), (2, 2, 5))),
    ("linalg_sumlogdiag", [diagonally_dominant(2, 3, 3)], {}),
    ("linalg_sumlogdiag", [diagonally_dominant(3, 3)], {}),
    *(("linalg_extractdiag", [uniform(2, 4, 4)], {"offset": k}) for k in (0, 1, -2)),
    *(("linalg_extracttrian", [uniform(2, 4, 4)], {"offset": k}) for k in (0, 1, -2)),
    *(("linalg_makediag", [uniform(2, 3)], {"offset": k}) for k in (0, 1, -2)),
    *(("linalg_maketrian", [uniform(2, 6)], {"offset": k, "lower": False}) for k in (0, 1, -2)),
    ("linalg_inverse", [diagonally_dominant(2, 3, 3)[:, ::-1].copy()], {}),
    ("linalg_det", [diagonally_dominant(2, 3, 3)[:, ::-1].copy()], {}),
    ("linalg_slogdet", [diagonally_dominant(4, 4)[::-1].copy()], {}),
]


def ident(case):
    """Return the test ID of a case."""
    return f"{case[0]}{[x.shape for x in case[1]]}{case[2]}"


def test_every_operator_has_a_case():
    """Every operator of the family has a case, except potrf and syevd, which have their own tests."""
    family = {name for name in registry.names(aliases=False) if name.startswith("_linalg_")}
    assert family == {registry.get(op).name for op, _, _ in CASES} | {"_linalg_potrf", "_linalg_syevd"}


@pytest.mark.parametrize("case", CASES, ids=ident)
def test_gradient(case):
    """The gradient rule agrees with central differences."""
    check_gradient(*case)


def test_gradient_of_the_factor():
    """The gradient of potrf is symmetric, although potrf reads only the lower triangle.

    It equals the derivative along a symmetric change of the matrix.
    """
    a = symmetric(2, 4, 4)
    weights = np.tril(uniform(2, 4, 4, seed=3))
    actual = gradients("linalg_potrf", [a], [weights])[0]
    np.testing.assert_allclose(actual, actual.swapaxes(-1, -2), atol=1e-14)
    change = uniform(2, 4, 4, seed=4)
    change = change + change.swapaxes(-1, -2)
    above, below = ((weights * run("linalg_potrf", [a + s * change])[0]).sum() for s in (1e-6, -1e-6))
    assert (actual * change).sum() == pytest.approx((above - below) / 2e-6, rel=1e-6)


@together(by=operator)
@pytest.mark.parametrize("case", [*CASES, ("linalg_potrf", [symmetric(2, 4, 4)], {})], ids=ident)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_contract(case, dtype):
    """Every case meets the kernel contract: in-place pairs, unwanted outputs, exact workspace."""
    op, arrays, params = case
    check_contract(op, [x.astype(dtype) for x in arrays], params)


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 70])
@pytest.mark.parametrize("panel", [5, 32])
def test_sizes_around_panels(n, panel, monkeypatch):
    """Matrices smaller than, equal to and larger than whole panels give the results of NumPy's LAPACK."""
    monkeypatch.setattr(linalg_core, "PANEL", panel)
    a, spd, b = diagonally_dominant(2, n, n), symmetric(2, n, n), uniform(2, n, 3)
    near = {"rtol": 1e-9, "atol": 1e-9}
    factor = np.linalg.cholesky(spd)
    np.testing.assert_allclose(run("linalg_potrf", [spd])[0], factor, **near)
    np.testing.assert_allclose(run("linalg_potri", [factor])[0], np.linalg.inv(spd), **near)
    np.testing.assert_allclose(run("linalg_inverse", [a[:, ::-1].copy()])[0], np.linalg.inv(a[:, ::-1]), **near)
    np.testing.assert_allclose(run("linalg_det", [a / 2])[0], np.linalg.det(a / 2), **near)
    for ours, theirs in zip(run("linalg_slogdet", [a])[:2], np.linalg.slogdet(a), strict=True):
        np.testing.assert_allclose(ours, theirs, **near)
    for lower in (False, True):
        clean = np.tril(a) if lower else np.triu(a)
        np.testing.assert_allclose(run("linalg_trsm", [a, b], {"lower": lower})[0], np.linalg.solve(clean, b), **near)
    check_contract("linalg_potrf", [spd])
    check_contract("linalg_trsm", [a, b])


def test_rows_are_swapped():
    """Zeros on the diagonal do no harm: the largest element of each column becomes the pivot."""
    a = np.array([[0.0, 1e-20, 1.0], [1e-20, 1.0, 1.0], [1.0, 1.0, 1.0]])
    np.testing.assert_allclose(run("linalg_inverse", [a])[0] @ a, np.eye(3), atol=1e-12)
    assert run("linalg_det", [np.eye(4)[[1, 0, 2, 3]]])[0] == -1


LARGE = [
    ("linalg_gemm", 3, {}),
    ("linalg_trmm", 2, {}),
    ("linalg_trsm", 2, {"rightside": True}),
    ("linalg_potrf", 1, {}),
    ("linalg_potri", 1, {}),
    ("linalg_inverse", 1, {}),
    ("linalg_slogdet", 1, {}),
    ("linalg_extracttrian", 1, {}),
]


@pytest.mark.parametrize(("op", "count", "params"), LARGE, ids=[case[0] for case in LARGE])
def test_memory(op, count, params):
    """Nothing but NumPy's buffers (8192 elements per operand) is allocated outside the workspace."""
    check_hidden(prepare(op, [symmetric(4, 150, 150)] * count, params), 3 * 8192 * 8 + 20_000)


@pytest.mark.parametrize(
    ("op", "ins", "out", "params", "expected"),
    [
        ("linalg_gemm", [(2, 3, 4), (2, 4, 0), None], (2, 3, 5), {}, ([(2, 3, 4), (2, 4, 5), (2, 3, 5)], (2, 3, 5))),
        ("linalg_gemm2", [(3, 2, 4), (4, 2, 5)], None, {"axis": 0}, ([(3, 2, 4), (4, 2, 5)], (3, 2, 5))),
        ("linalg_trsm", [None, (2, 3, 4)], None, {"rightside": True}, ([(2, 4, 4), (2, 3, 4)], (2, 3, 4))),
        ("linalg_potrf", [(0, 0)], (3, 0), {}, ([(3, 3)], (3, 3))),
        ("linalg_syrk", [(2, 0, 4)], (2, 0, 3), {}, ([(2, 3, 4)], (2, 3, 3))),
        ("linalg_makediag", [None], (2, 5, 5), {"offset": -2}, ([(2, 3)], (2, 5, 5))),
        ("linalg_extracttrian", [None], (2, 6), {"offset": 1}, ([(2, 4, 4)], (2, 6))),
        ("linalg_sumlogdiag", [(2, 3, 3)], None, {}, ([(2, 3, 3)], (2,))),
    ],
)
def test_inference(op, ins, out, params, expected):
    """Known shapes of inputs and outputs complete the unknown shapes."""
    actual = registry.get(op)
    new_ins, new_outs = actual.infer_shape(registry.parse_params(actual, params), ins, [out])
    assert (list(new_ins), list(new_outs)) == (expected[0], [expected[1]])


@pytest.mark.parametrize(
    ("op", "shapes", "params", "words"),
    [
        ("linalg_potrf", [(3, 4)], {}, "rows and columns"),
        ("linalg_potrf", [(3,)], {}, "at least 2 dimensions"),
        ("linalg_gemm", [(2, 3), (4, 2), (2, 2)], {}, "summed over"),
        ("linalg_gemm2", [(2, 3), (3, 2)], {"axis": -1}, "columns"),
        ("linalg_trmm", [(3, 3), (2, 3)], {}, "beside B"),
        ("linalg_trsm", [(3, 4), (3, 2)], {}, "triangular"),
        ("linalg_maketrian", [(5,)], {}, "no triangle"),
        ("linalg_extractdiag", [(3, 3)], {"offset": 3}, "no diagonal 3"),
        ("linalg_syrk", [(3,)], {}, "at least 2"),
    ],
)
def test_wrong_shapes(op, shapes, params, words):
    """Shapes that do not fit are refused, with the reason."""
    with pytest.raises(ShapeError, match=words):
        run(op, [np.ones(shape) for shape in shapes], params)


@pytest.mark.parametrize("dtype", ["float16", "int32"])
def test_wrong_dtypes(dtype):
    """potrf accepts only float32 and float64, as in MXNet."""
    with pytest.raises(DTypeError, match="float32 and float64"):
        run("linalg_potrf", [np.eye(2, dtype=dtype)])


def test_singular_matrices_raise():
    """A matrix that is not positive definite, or singular, raises an error at the wait for the result."""
    with pytest.raises(MXNetError, match="positive definite"):
        mx.nd.linalg_potrf(mx.nd.array([[1.0, 2.0], [2.0, 1.0]])).asnumpy()
    with pytest.raises(MXNetError, match="singular"):
        mx.nd.linalg_inverse(mx.nd.array([[1.0, 2.0], [2.0, 4.0]])).asnumpy()


def test_in_a_bound_graph():
    """The log-determinant by a Cholesky factor runs in a bound graph, and adds its gradient to the given array."""
    a = symmetric(3, 3)
    x = mx.sym.Variable("x")
    factor = mx.sym.linalg_potrf(x)
    out = mx.sym.linalg_sumlogdiag(factor) * 2
    start = mx.nd.ones((3, 3), dtype="float64")
    inputs = {"x": mx.nd.array(a, dtype="float64")}
    executor = out.bind(mx.cpu(), inputs, args_grad={"x": start}, grad_req="add")
    assert executor.forward(is_train=True)[0].asnumpy() == pytest.approx(np.linalg.slogdet(a)[1])
    executor.backward([mx.nd.ones((1,), dtype="float64")])
    np.testing.assert_allclose(start.asnumpy(), 1 + np.linalg.inv(a), rtol=1e-10)


@pytest.mark.parametrize("shape", [(40, 40), (3, 33, 50), (1, 5)])
def test_lq_of_larger_matrices(shape):
    """L · Q equals the input, Q has orthonormal rows, L is lower triangular, with the signs of LAPACK."""
    a = uniform(*shape)
    q, factor = run("linalg_gelqf", [a])
    np.testing.assert_allclose(factor @ q, a, atol=1e-12)
    np.testing.assert_allclose(q @ q.swapaxes(-1, -2), np.broadcast_to(np.eye(shape[-2]), factor.shape), atol=1e-12)
    assert not np.triu(factor, 1).any()
    expected = np.linalg.qr(a.swapaxes(-1, -2))[1].swapaxes(-1, -2)
    np.testing.assert_allclose(factor, expected, atol=1e-12)


def test_lq_of_rows_of_zeros():
    """A row of zeros gives zeros in L, and no NaN."""
    q, factor = run("linalg_gelqf", [np.array([[0.0, 0, 0], [1, 2, 2]])])
    np.testing.assert_allclose(factor @ q, [[0, 0, 0], [1, 2, 2]], atol=1e-15)


def test_eigenvalues():
    """Uᵀ diag(L) U equals the input, with ascending eigenvalues.

    The largest element of each eigenvector is positive.
    """
    a = symmetric(2, 5, 5)
    u, values = run("_linalg_syevd", [a])
    np.testing.assert_allclose(u.swapaxes(-1, -2) @ (values[..., None] * u), a, atol=1e-12)
    assert (np.diff(values) > 0).all()
    greatest = np.take_along_axis(u, np.abs(u).argmax(axis=-1)[..., None], axis=-1)
    assert (greatest > 0).all()


@pytest.mark.parametrize("op", ["_linalg_syevd", "linalg_potrf"])
def test_gradients_of_symmetric_matrices(op):
    """Gradients of syevd and potrf equal central differences along symmetric changes.

    This holds for both outputs of syevd and for lower and upper factors of potrf.
    """
    a, change = symmetric(3, 3) + np.diag([0.0, 1.0, 2.5]), uniform(3, 3)
    change = change + change.T
    for params in [{}] if op == "_linalg_syevd" else [{}, {"lower": False}]:
        weights = [uniform(*y.shape, seed=k) for k, y in enumerate(run(op, [a], params))]

        def value(x, weights=weights, params=params):
            return sum((w * y).sum() for w, y in zip(weights, run(op, [x], params), strict=True))

        actual = (gradients(op, [a], weights, params)[0] * change).sum()
        assert actual == pytest.approx((value(a + 1e-6 * change) - value(a - 1e-6 * change)) / 2e-6, rel=1e-6)


@pytest.mark.parametrize("known", [(4, 3, 0), (4, 0, 3)])
def test_shape_of_the_factor_gives_the_rows(known):
    """A side of L that a consumer knows is the number of rows of the input, of L and of Q."""
    q = mx.sym.linalg.gelqf(mx.sym.Variable("a", shape=(4, 0, 5)))
    both = mx.sym.Group([q[0], q[1] + mx.sym.Variable("l", shape=known)])
    assert both.infer_shape()[1] == [(4, 3, 5), (4, 3, 3)]


@pytest.mark.parametrize("op", ["_linalg_syevd", "linalg_gelqf", "linalg_potrf"])
def test_contract_of_factorizations(op):
    """Factorizations meet the kernel contract for one matrix and for a stack of two."""
    for a in (symmetric(3, 3), symmetric(2, 4, 4)):
        for params in [{"lower": False}, {}] if op == "linalg_potrf" else [{}]:
            check_contract(op, [a], params)


def test_lq_inference():
    """The shapes of input, Q and L complete each other; fewer columns than rows are refused."""
    op = registry.get("linalg_gelqf")
    assert op.infer_shape({}, [(2, 3, 5)], [None, None]) == ([(2, 3, 5)], [(2, 3, 5), (2, 3, 3)])
    assert op.infer_shape({}, [None], [(3, 0), (0, 3)]) == ([(3, 0)], [(3, 0), (3, 3)])
    assert op.infer_shape({}, [None], [None, (3, 0)]) == ([(3, 0)], [(3, 0), (3, 3)])
    with pytest.raises(ShapeError, match="at least as many columns"):
        op.infer_shape({}, [(3, 2)], [None, None])
    with pytest.raises(ShapeError, match="at least 2 dimensions"):
        op.infer_shape({}, [(3,)], [None, None])
