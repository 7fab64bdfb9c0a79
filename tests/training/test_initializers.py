"""Custom, combined and loaded initializers, and initializers named in symbol files."""

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import ParameterError, ShapeError


def initialized_array(rule, name, shape, attrs=None):
    """Return the values that the initializer ``rule`` gives to a parameter with this name and shape."""
    array = mx.nd.zeros(shape) + 0.5
    rule(mx.init.InitDesc(name, attrs), array)
    return array.asnumpy()


def network():
    """Return a classifier of two layers."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name="fc1")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3, name="fc2"), name="softmax")


def bound_module():
    """Return a bound module whose parameters have no values yet."""
    module = mx.mod.Module(network())
    module.bind([("data", (2, 5))], [("softmax_label", (2,))])
    return module


class Own(mx.init.Initializer):
    """A custom initializer in MXNet's style: weights are 7 and biases 2."""

    def _init_weight(self, name, arr):
        arr[:] = 7

    def _init_bias(self, name, arr):
        arr[:] = 2


def test_custom_initializer():
    """Overridden ``_init_*`` methods decide their parameters; other parameters keep the default rules."""
    module = bound_module()
    module.init_params(Own())
    args, _ = module.get_params()
    assert np.unique(args["fc1_weight"].asnumpy()).tolist() == [7]
    assert np.unique(args["fc2_bias"].asnumpy()).tolist() == [2]
    assert initialized_array(Own(), "bn_gamma", (2,)).tolist() == [1, 1]
    with pytest.raises(ParameterError, match="no rule to initialize 'state'"):
        initialized_array(Own(), "state", (2,))


def test_equality():
    """Initializers of one class with equal settings are equal, as in MXNet 1.9.1, and have equal hashes."""
    init = mx.init
    assert init.Xavier() == init.Xavier()
    assert init.Constant(2) == init.Constant(2)
    assert init.Xavier() != init.Xavier(magnitude=2)
    assert init.Zero() != init.One()
    assert init.Zero() != 0
    assert len({init.Constant([1, 2]), init.Constant([1, 2]), init.Constant([1, 3])}) == 2


def test_registered_initializer():
    """A registered initializer is found by class name and alias, also in ``__init__`` attributes."""
    mx.init.alias("seven-two")(mx.init.register(Own))
    try:
        for spec in ("own", "seven-two", '["own", {}]'):
            assert initialized_array(mx.init.Uniform(), "x_gamma", (2,), {"__init__": spec}).tolist() == [7, 7]
    finally:
        for name in ("own", "seven-two"):
            del mx.init.Initializer.registry[name]
    with pytest.raises(ParameterError, match=r"unknown initializer .own.*@mx\.init\.register"):
        mx.init.create("own")


def test_a_function():
    """A function of (description, array) works as an initializer; a class in place of an instance raises."""
    module = bound_module()
    module.init_params(lambda desc, arr: arr.__setitem__(slice(None), len(desc)))
    assert np.unique(module.get_params()[0]["fc1_weight"].asnumpy()).tolist() == [len("fc1_weight")]
    with pytest.raises(ParameterError, match=r"an object of mx\.init"):
        bound_module().init_params(mx.init.Xavier)


def test_mixed():
    """Mixed uses the first pattern that matches the name; an ``__init__`` attribute takes precedence."""
    rule = mx.init.Mixed(["fc1_bias", ".*bias", ".*"], ["one", Own(), mx.init.Constant(3)])
    module = bound_module()
    module.init_params(rule)
    args, _ = module.get_params()
    assert {name: value.asnumpy().ravel()[0] for name, value in args.items()} == {
        "fc1_weight": 3,
        "fc1_bias": 0,
        "fc2_weight": 3,
        "fc2_bias": 2,
    }
    assert initialized_array(rule, "x", (2,), {"__init__": '["one", {}]'}).tolist() == [1, 1]
    with pytest.raises(ParameterError, match=r"'fc1_bias' matches none of \['bias'\]; add '\.\*'"):
        bound_module().init_params(mx.init.Mixed(["bias"], [mx.init.Zero()]))
    with pytest.raises(ParameterError, match="an initializer a pattern"):
        mx.init.Mixed(["a", "b"], [mx.init.Zero()])


def test_load(tmp_path):
    """Load takes values by name and uses default_init for the rest; a wrong shape or missing value raises."""
    path = tmp_path / "net.params"
    mx.nd.save(str(path), {"arg:fc1_weight": mx.nd.ones((4, 5)) * 4, "aux:fc1_bias": mx.nd.ones((4,)) * 6})
    module = bound_module()
    module.init_params(mx.init.Load(path, default_init="zero"))
    args, _ = module.get_params()
    assert [args[n].asnumpy().ravel()[0] for n in ("fc1_weight", "fc1_bias", "fc2_weight")] == [4, 6, 0]
    with pytest.raises(ParameterError, match="no value is given for 'fc2_bias'"):
        bound_module().init_params(mx.init.Load(str(path)))
    with pytest.raises(ShapeError, match=r"'fc1_weight' has shape \(4, 5\), the value given for it \(2,\)"):
        bound_module().init_params(mx.init.Load({"fc1_weight": mx.nd.ones((2,))}, "zero"))
    mx.nd.save(str(path), [mx.nd.ones((2,))])
    with pytest.raises(ParameterError, match="without names"):
        mx.init.Load(path)


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (6, 2, 3), (5,)])
@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_orthogonal(shape, kind):
    """The rows of a wide weight or columns of a tall weight are orthogonal, with length ``scale``."""
    weight = initialized_array(mx.init.Orthogonal(scale=2.0, rand_type=kind), "a_weight", shape).reshape(shape[0], -1)
    product = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
    np.testing.assert_allclose(product, 4 * np.eye(len(product)), atol=1e-5)


def test_what_symbol_files_name():
    """Bilinear and LSTMBias in ``__init__`` attributes of a symbol file override Module's initializer."""
    weight = mx.sym.Variable("up_kernel", init=mx.init.Bilinear())
    bias = mx.sym.Variable("gates", init=mx.init.LSTMBias(forget_bias=3.0), shape=(8,))
    up = mx.sym.Deconvolution(mx.sym.Variable("data"), weight, kernel=(4, 4), stride=(2, 2), num_filter=1, no_bias=True)
    symbol = mx.sym.load_json(mx.sym.Group([mx.sym.MakeLoss(up), mx.sym.BlockGrad(bias)]).tojson())
    module = mx.mod.Module(symbol, label_names=None)
    module.bind([("data", (2, 1, 3, 3))])
    module.init_params(mx.init.Zero())
    args, _ = module.get_params()
    assert args["gates"].asnumpy().tolist() == [0, 0, 3, 3, 0, 0, 0, 0]
    assert args["up_kernel"].asnumpy()[0, 0, 1].tolist() == [0.1875, 0.5625, 0.5625, 0.1875]


@pytest.mark.parametrize(
    ("rule", "shape", "words"),
    [
        (mx.init.Bilinear(), (3, 3), "4 dimensions"),
        (mx.init.LSTMBias(), (6,), "four gates"),
        (mx.init.Orthogonal(), (), "at least 1 dimension"),
        (mx.init.Xavier(), (3,), "at least 2 dimensions"),
    ],
)
def test_weights_of_a_shape_that_does_not_suit(rule, shape, words):
    """A weight whose shape the initializer cannot fill raises, with the required number of dimensions."""
    with pytest.raises(ParameterError, match=words):
        initialized_array(rule, "a_weight", shape)


def test_create_with_settings():
    """``create`` passes settings to a class given by name; an instance or its JSON takes no settings."""
    array = mx.nd.zeros((2,))
    mx.init.create("constant", value=3)(mx.init.InitDesc("a_weight"), array)
    assert array.asnumpy().tolist() == [3, 3]
    for result in (mx.init.One(), mx.init.One().dumps()):
        with pytest.raises(ParameterError, match="takes no settings"):
            mx.init.create(result, value=3)
