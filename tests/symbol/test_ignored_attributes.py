"""Attributes that MXNet's operators ignore: accepted, kept in files, and named by one warning for each network."""

import warnings

import pytest

import weftplan as mx

DATA, LABEL = mx.sym.var("data"), mx.sym.var("label")


def network():
    """Return a network whose operators have three attributes without an effect."""
    hidden = mx.sym.relu(DATA, inplace=True, name="act")
    heads = [mx.sym.LinearRegressionOutput(hidden, LABEL, out_grad=True, grad_scale=2, name="box")]
    heads.append(mx.sym.MAERegressionOutput(hidden, LABEL, out_grad=True, name="mark"))
    return mx.sym.Group(heads)


def test_one_warning_names_all_attributes_of_a_network():
    """The first bind warns at the caller's line; other binds of the network are silent."""
    net = network()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in (2, 4):
            net.simple_bind(mx.cpu(), data=(batch, 3))
    assert [str(one.message) for one in caught] == [
        "attributes without an effect, which MXNet ignores, too: relu 'act': inplace; "
        "LinearRegressionOutput 'box': out_grad; MAERegressionOutput 'mark': out_grad"
    ]
    assert caught[0].filename == __file__


def test_files_keep_ignored_attributes():
    """A loaded network has the text of the saved one, and computes with the attributes that count."""
    net = network()
    text = net.tojson()
    loaded = mx.sym.load_json(text)
    assert loaded.tojson() == text
    assert loaded.attr_dict()["box"] == {"grad_scale": "2", "out_grad": "True"}
    with pytest.warns(UserWarning, match="without an effect"):
        executor = loaded.simple_bind(mx.cpu(), data=(1, 2))
    executor.arg_dict["data"][:] = [[1.0, -1.0]]
    executor.forward(is_train=True)
    executor.backward()
    # relu lets the first element through: 2 (1 - 0) / 2 elements of a sample, and sign(1 - 0) / 2
    assert executor.grad_dict["data"].asnumpy().tolist() == [[1.5, 0.0]]


def test_calls_on_arrays_warn_at_their_line():
    """An operator on arrays ignores what it ignores in a network, and says so."""
    with pytest.warns(UserWarning, match="relu ignores inplace, as in MXNet") as caught:
        assert mx.nd.relu(mx.nd.array([-1.0, 7.0]), inplace=True).asnumpy().tolist() == [0.0, 7.0]
    assert caught[0].filename == __file__


def test_operators_with_parameters_refuse_unknown_ones():
    """A misspelt parameter is an error that names the nearest, as in MXNet; a clean network binds in silence."""
    with pytest.raises(mx.MXNetError, match="did you mean 'num_hidden'"):
        mx.sym.FullyConnected(DATA, num_hiden=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mx.sym.relu(DATA, lr_mult=2).simple_bind(mx.cpu(), data=(2, 3))
