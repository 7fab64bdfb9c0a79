"""Arrays of storage type ``row_sparse``, which are dense: creation, stores and optimizer steps."""

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import KVStoreError, MXNetError, NotImplementedForSymbol, ShapeError


def test_the_type_is_a_name():
    """``tostype`` shares memory; copies have the same storage type, and results of operators are dense.

    ``indices`` and ``data`` give the rows that are not 0. Storage type ``csr`` is refused.
    """
    dense = mx.nd.array([[0, 0], [1, 2], [0, 3]])
    rows = dense.tostype("row_sparse")
    assert (rows.stype, rows.shape, rows.dtype) == ("row_sparse", (3, 2), np.float32)
    assert rows.tostype("row_sparse") is rows
    assert rows.tostype("default").stype == "default"
    assert rows.copy().stype == rows.copyto(mx.cpu(1)).stype == "row_sparse"
    for result in (rows + 1, 1 - rows, rows * dense, dense + rows, rows / rows.copy(), -rows, rows == dense):
        assert result.stype == "default"
    assert (dense + rows).asnumpy().tolist() == [[0, 0], [2, 4], [0, 6]]
    assert rows.indices.asnumpy().tolist() == [1, 2]
    assert rows.indices.dtype == np.int64
    assert rows.data.asnumpy().tolist() == [[1, 2], [0, 3]]
    rows *= 2
    assert rows.stype == "row_sparse"
    assert dense.asnumpy().tolist() == [[0, 0], [2, 4], [0, 6]]
    dense[:] = 1
    assert rows.asnumpy().tolist() == [[1, 1]] * 3
    assert mx.nd.cast_storage(rows, "default").stype == "default"
    assert mx.nd.zeros((2, 2), stype="row_sparse").stype == "row_sparse"
    assert mx.nd.sparse.zeros("row_sparse", (2, 2)).asnumpy().tolist() == [[0, 0], [0, 0]]
    with pytest.raises(MXNetError, match="'csr' is absent on purpose"):
        dense.tostype("csr")
    with pytest.raises(NotImplementedForSymbol, match="csr_matrix is absent on purpose"):
        _ = mx.nd.sparse.csr_matrix


def test_made_from_rows():
    """``row_sparse_array`` takes rows with their indices, a dense array or a shape, and refuses mismatches."""
    result = mx.nd.sparse.row_sparse_array(([[1, 2], [3, 4]], [2, 0]), shape=(4, 2))
    assert result.asnumpy().tolist() == [[3, 4], [0, 0], [1, 2], [0, 0]]
    assert mx.nd.sparse.row_sparse_array(([[1.0]], [2])).shape == (3, 1)
    assert mx.nd.sparse.row_sparse_array(np.eye(2, dtype="float64")).dtype == np.float64
    assert mx.nd.sparse.row_sparse_array((2, 3)).shape == (2, 3)
    assert mx.nd.sparse.array(result).asnumpy().tolist() == result.asnumpy().tolist()
    for bad in (([[1, 2]], [0, 1]), ([[1, 2]], [4]), ([[1, 2, 3]], [0])):
        with pytest.raises(ShapeError, match="row_sparse_array"):
            mx.nd.sparse.row_sparse_array(bad, shape=(4, 2))


@pytest.mark.parametrize("kind", ["local", "device"])
def test_a_store_takes_them_as_dense(kind):
    """A push sums ``row_sparse`` arrays, and ``row_sparse_pull`` fills the given rows.

    ``pull`` skips these arrays unless ``ignore_sparse=False``.
    """
    store = mx.kv.create(kind)
    store.init("w", mx.nd.zeros((4, 2)).tostype("row_sparse"))
    store.push("w", [mx.nd.ones((4, 2), mx.cpu(i)).tostype("row_sparse") for i in range(3)])
    out = mx.nd.full((4, 2), 9).tostype("row_sparse")
    store.pull("w", out=out)
    assert (out.asnumpy() == 9).all()
    store.pull("w", out=out, ignore_sparse=False)
    assert (out.asnumpy() == 3).all()
    store.row_sparse_pull("w", out=out, row_ids=mx.nd.array([[3, 0], [3, 3]]))
    assert out.asnumpy()[:, 0].tolist() == [3, 0, 0, 3]
    outs = [mx.nd.zeros((4, 2), mx.cpu(i)).tostype("row_sparse") for i in range(2)]
    store.row_sparse_pull("w", out=outs, row_ids=[mx.nd.array([1]), mx.nd.array([2])])
    assert [o.asnumpy()[:, 1].tolist() for o in outs] == [[0, 3, 0, 0], [0, 0, 3, 0]]
    with pytest.raises(KVStoreError, match="out must be row_sparse, got 'default'"):
        store.row_sparse_pull("w", out=mx.nd.zeros((4, 2)), row_ids=mx.nd.array([1]))
    with pytest.raises(KVStoreError, match="3 arrays of row_ids for 2"):
        store.row_sparse_pull("w", out=outs, row_ids=[mx.nd.array([1])] * 3)


@pytest.mark.parametrize("kind", ["local", "device"])
def test_pull_skips_array_that_was_pulled_before(kind):
    """After pulls with ``ignore_sparse=False``, a pull without it skips the same ``row_sparse`` array."""
    store, out = mx.kv.create(kind), mx.nd.zeros((4, 2)).tostype("row_sparse")
    store.init("w", mx.nd.zeros((4, 2)))
    for value in (1, 2):
        store.push("w", mx.nd.full((4, 2), value))
        store.pull("w", out=out, ignore_sparse=False)
        assert (out.asnumpy() == value).all()
    store.push("w", mx.nd.full((4, 2), 3))
    for key, array in (("w", out), ("w", [out]), (["w"], [out])):
        store.pull(key, out=array)
        assert (out.asnumpy() == 2).all()


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad"])
def test_optimizers_take_them_as_dense(name):
    """A step with ``row_sparse`` weight and gradient gives the values of the dense step."""
    steps = []
    for stype in ("default", "row_sparse"):
        weight = mx.nd.array([[1.0, 2.0], [3.0, 4.0]]).tostype(stype)
        updater = mx.optimizer.get_updater(mx.optimizer.create(name, learning_rate=0.1))
        for _ in range(2):
            updater(0, mx.nd.array([[0.5, 0.0], [0.0, 0.0]]).tostype(stype), weight)
        steps.append(weight.asnumpy())
    np.testing.assert_array_equal(*steps)
