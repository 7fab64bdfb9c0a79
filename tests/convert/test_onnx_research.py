"""ONNX files of research code: tied weights stay tied; slices, choices and comparisons go there and back."""

from __future__ import annotations

import numpy as np
import pytest

import weftplan as mx

pytest.importorskip("onnx")
SHAPE = (4, 5)
X = mx.sym.var("data")


def there_and_back(net, path):
    """Export, import and run both networks and ONNX's reference; return the parameters of the imported network."""
    from onnx.reference import ReferenceEvaluator

    rng = np.random.default_rng(0)
    shapes = dict(zip(net.list_arguments(), net.infer_shape(data=SHAPE)[0], strict=True))
    args = {name: mx.nd.array(rng.random(shape)) for name, shape in shapes.items() if name != "data"}
    mx.onnx.export_model(net, args, [SHAPE], np.float32, str(path))
    loaded, params, _ = mx.onnx.import_model(str(path))
    values = rng.integers(-2, 3, SHAPE).astype("float32")
    (name,) = set(loaded.list_arguments()) - set(params)
    expected = net.bind(mx.cpu(), {**args, "data": mx.nd.array(values)}, grad_req="null").forward()[0].asnumpy()
    again = loaded.bind(mx.cpu(), {**params, name: mx.nd.array(values)}, grad_req="null").forward()[0].asnumpy()
    (reference,) = ReferenceEvaluator(str(path)).run(None, {"data": values})
    np.testing.assert_allclose(again, expected, rtol=1e-5)
    np.testing.assert_allclose(reference, expected, rtol=1e-5)
    assert reference.dtype == expected.dtype
    return params


@pytest.mark.parametrize(
    "net",
    [
        mx.sym.slice(X, begin=(1, None), end=(3, -1)),
        mx.sym.slice(X, begin=(None, -1), end=(None, 0), step=(1, -2)),
        mx.sym.slice(X, begin=(None, None), end=(None, None), step=(1, -1)),
        X > 0.5, X >= 0, X < 0, X <= 1, X == 1, X != 1,
        mx.sym.FullyConnected(X, num_hidden=2, name="fc") < 1,
        mx.sym.broadcast_greater(X, mx.sym.BlockGrad(X * X)),
        mx.sym.broadcast_not_equal(X, X * X),
        X * 2 > X,
        mx.sym.where(X > 0, X * 2, -X),
        mx.sym.where(mx.sym.sum(X, axis=1), X * 2, -X),
    ],
)  # fmt: skip
def test_slices_choices_and_comparisons(net, tmp_path):
    """The exported and the imported network compute the values of the original; comparisons keep their dtype."""
    there_and_back(net, tmp_path / "net.onnx")


def test_tied_weights_stay_tied(tmp_path):
    """Layers that read one weight are one parameter in the file and after its import."""
    weight, net = mx.sym.var("weight", shape=(5, 5)), X
    for number in range(4):
        net = mx.sym.FullyConnected(net, weight, num_hidden=5, no_bias=True, name=f"layer{number}")
    assert [*there_and_back(net, tmp_path / "tied.onnx")] == ["weight"]
    assert (tmp_path / "tied.onnx").stat().st_size < 1000
