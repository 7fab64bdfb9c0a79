"""Optimizer states pickled by MXNet 1.9.1: arrays and settings are read, and no code of the pickle runs."""

import base64
import os
import pickle
import pickletools

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import FormatError
from weftplan.kvstore.mxnet_states import read_mxnet_states

SGD = """
gASV5AAAAAAAAAB9lChLAIwVbXhuZXQubmRhcnJheS5uZGFycmF5lIwHTkRBcnJheZSTlE6FlFKUfZSMBmhhbmRsZZSMCGJ1aWx0aW5zlIwJYn
l0ZWFycmF5lJOUQ0DJ+pP5AAAAAAIAAAACAAAAAAAAAAMAAAAAAAAAAQAAAAAAAAAAAAAAkoYWPLitGrxOIMG8GkMuu+crRTyxkV88lIWUUpRz
YksBaANoBFKUfZRoB2gKQzDJ+pP5AAAAAAEAAAAEAAAAAAAAAAEAAAAAAAAAAAAAAKCvMLrOxag86DFRuoSwgzyUhZRSlHNidS4=
"""
"""``Updater.get_states()`` of SGD with momentum 0.9 after three steps of parameters (2, 3) and (4,)."""
HALF = """
gASVggEAAAAAAAB9lChLAIwVbXhuZXQubmRhcnJheS5uZGFycmF5lIwHTkRBcnJheZSTlE6FlFKUfZSMBmhhbmRsZZSMCGJ1aWx0aW5zlIwJYn
l0ZWFycmF5lJOUQ0DJ+pP5AAAAAAIAAAACAAAAAAAAAAMAAAAAAAAAAQAAAAAAAAAAAAAANFUWPPixGryeJMG8wJYuuzwbRTywkF88lIWUUpRz
YmgDaARSlH2UaAdoCkNAyfqT+QAAAAACAAAAAgAAAAAAAAADAAAAAAAAAAEAAAAAAAAAAAAAAGsCfT/UMXk/Gj13P3MAgj97JoI/oCCDP5SFlF
KUc2KGlEsBaANoBFKUfZRoB2gKQzDJ+pP5AAAAAAEAAAAEAAAAAAAAAAEAAAAAAAAAAAAAAIgoMbqyzKg8YMVQuq2ngzyUhZRSlHNiaANoBFKU
fZRoB2gKQzDJ+pP5AAAAAAEAAAAEAAAAAAAAAAEAAAAAAAAAAAAAABvQgD9rJIY/iX59P2ughD+UhZRSlHNihpR1Lg==
"""
"""The states of ``SGD`` with multi_precision and float16 weights: (momentum, float32 weight) of each parameter."""
ADAM = """
gASVGgMAAAAAAAB9lChLAIwVbXhuZXQubmRhcnJheS5uZGFycmF5lIwHTkRBcnJheZSTlE6FlFKUfZSMBmhhbmRsZZSMCGJ1aWx0aW5zlIwJYn
l0ZWFycmF5lJOUQ0DJ+pP5AAAAAAIAAAACAAAAAAAAAAMAAAAAAAAAAQAAAAAAAAAAAAAAOii8vSpZwT1maHE+4tPZPOR29r0Suwu+lIWUUpRz
YmgDaARSlH2UaAdoCkNAyfqT+QAAAAACAAAAAgAAAAAAAAADAAAAAAAAAAEAAAAAAAAAAAAAACElzztX74Q6PTREO9AR0zuxxZM6xhJROpSFlF
KUc2KGlEsBaANoBFKUfZRoB2gKQzDJ+pP5AAAAAAEAAAAEAAAAAAAAAAEAAAAAAAAAAAAAAJDb3DtF91K+OL8CPKicJL6UhZRSlHNiaANoBFKU
fZRoB2gKQzDJ+pP5AAAAAAEAAAAEAAAAAAAAAAEAAAAAAAAAAAAAAEQoNjo6+jc7JhfMOjV4wzqUhZRSlHNihpR1jBlteG5ldC5vcHRpbWl6ZX
Iub3B0aW1pemVylIwEQWRhbZSTlCmBlH2UKIwMcmVzY2FsZV9ncmFklEc/8AAAAAAAAIwMbHJfc2NoZWR1bGVylE6MAmxylEc/UGJN0vGp/IwC
d2SURwAAAAAAAAAAjAdscl9tdWx0lH2UjAd3ZF9tdWx0lH2UjBBiZWdpbl9udW1fdXBkYXRllEsAjApudW1fdXBkYXRllEsDjBhfYWxsX2luZG
V4X3VwZGF0ZV9jb3VudHOUfZRLAH2UKEsASwNLAUsDdXOME19pbmRleF91cGRhdGVfY291bnSUaDCMDWNsaXBfZ3JhZGllbnSUTowPbXVsdGlf
cHJlY2lzaW9ulImMDWFnZ3JlZ2F0ZV9udW2USwCMCGlkeDJuYW1llH2UjAhzeW1faW5mb5QpjA5hbGxvd19ucF9hcnJheZSJjAViZXRhMZRHP+
zMzMzMzM2MBWJldGEylEc/7/fO2RaHK4wHZXBzaWxvbpRHPkV5juIwjDqMC2xhenlfdXBkYXRllIh1YoaULg==
"""
"""``get_states(dump_optimizer=True)`` of Adam, which includes the settings of the optimizer."""
MOMENTUM = [[0.009187357500195503, -0.0094408318400383, -0.02357497438788414],
            [-0.002659028861671686, 0.012034392915666103, 0.013645575381815434]]  # fmt: skip


def read(text):
    """Return the states and the counts of updates that ``text``, one of the constants above, encodes."""
    return read_mxnet_states(base64.b64decode(text))


def test_arrays_and_settings():
    """Arrays have the values that MXNet shows; counts of updates are read if the file contains the optimizer."""
    states, counts = read(SGD)
    np.testing.assert_array_equal(states[0].asnumpy(), np.array(MOMENTUM, "float32"))
    assert (sorted(states), states[1].shape, counts) == ([0, 1], (4,), {})
    states, _ = read(HALF)
    assert [(a.shape, a.dtype) for a in states[1]] == [((4,), np.float32)] * 2
    np.testing.assert_allclose(states[0][1].asnumpy()[0], [0.988318145275116, 0.9734165668487549, 0.9657760858535767])
    states, counts = read(ADAM)
    assert counts == {0: 3, 1: 3}
    assert len(states[0]) == 2


@pytest.mark.parametrize(
    ("text", "name", "settings", "dtype"),
    [
        (SGD, "sgd", {"momentum": 0.9}, "float32"),
        (HALF, "sgd", {"momentum": 0.9, "multi_precision": True}, "float16"),
        (ADAM, "adam", {}, "float32"),
    ],
)
def test_an_updater_goes_on_from_them(text, name, settings, dtype):
    """``set_states`` reads MXNet's bytes, and the next step continues from their momentum or count of updates."""
    updater = mx.optimizer.get_updater(mx.optimizer.create(name, **settings))
    updater.set_states(base64.b64decode(text))
    weights = [mx.nd.ones(shape, dtype=dtype) for shape in ((2, 3), (4,))]
    for k, weight in enumerate(weights):
        updater(k, mx.nd.zeros(weight.shape, dtype=dtype), weight)
    if name == "adam":
        assert updater.optimizer.num_update == 4
    else:
        start = 1 if dtype == "float32" else 0.988318145275116
        momentum = MOMENTUM[0][0] if dtype == "float32" else 0.009175587445497513
        assert weights[0].asnumpy()[0, 0] == pytest.approx(start + 0.9 * momentum, rel=1e-3)


def test_a_module_goes_on_from_them(tmp_path):
    """``Module.load_optimizer_states`` reads MXNet's file and assigns states to parameters by their numbers."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, no_bias=True, name="fc")
    offset = mx.sym.reshape(mx.sym.Variable("offset", shape=(4,), init=mx.init.Zero()), shape=(1, 4))
    module = mx.mod.Module(mx.sym.broadcast_add(mx.sym.tile(net, reps=(1, 2)), offset), label_names=None)
    module.bind([("data", (5, 3))])
    module.init_params(mx.init.Uniform())
    module.init_optimizer(optimizer_params={"learning_rate": 0.1, "momentum": 0.9})
    (tmp_path / "net.states").write_bytes(base64.b64decode(SGD))
    module.load_optimizer_states(tmp_path / "net.states")
    assert module._updater.states[1].shape == (4,)


class Evil:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "value",
    [
        {0: Evil(os.system, ("touch gone",))},
        {0: Evil(eval, ("1",))},
        {0: Evil(bytearray, (1 << 40,))},
        {0: Evil(getattr, ("", "join"))},
        {0: np.ones(3)},
    ],
)
def test_everything_else_is_refused(tmp_path, monkeypatch, value, protocol):
    """A pickle that names a function, or creates bytes from a number, is refused; no function is called."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormatError, match=r"it is not read|bytes made of int|damaged pickle"):
        read_mxnet_states(pickle.dumps(value, protocol))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [[1, 2], {0: "text"}, {(1, 2): None}, {0: {1: 2}}, ({}, 1, 2)])
def test_no_states(value):
    """A pickle of any object that is not a dictionary of optimizer states raises a FormatError."""
    with pytest.raises(FormatError, match="optimizer states"):
        read_mxnet_states(pickle.dumps(value))


@pytest.mark.parametrize("text", [SGD, HALF, ADAM], ids=["sgd", "half", "adam"])
def test_damage(text):
    """Truncated and changed files either give states or raise a FormatError; over 1,000 of 3,000 raise."""
    whole = base64.b64decode(text)
    rng = np.random.default_rng(5)
    refused = 0
    for k in range(3000):
        data = bytearray(whole)
        if k < len(whole):
            data = data[:k]
        else:
            for _ in range(rng.integers(1, 4)):
                data[rng.integers(2, len(data))] = rng.integers(0, 256)
        try:
            read_mxnet_states(bytes(data))
        except FormatError:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize(("name", "settings"), [("sgd", {"momentum": 0.9}), ("adam", {}), ("sgd", {}), ("ftrl", {})])
def test_states_in_the_form_of_mxnet(name, settings, tmp_path):
    """States that are written in MXNet's form are a pickle of its arrays alone, and are read here like its own."""
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc"), name="softmax")
    module = mx.mod.Module(net)
    module.bind([("data", (2, 3))], [("softmax_label", (2,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(kvstore=None, optimizer=name, optimizer_params=settings)
    batch = mx.io.DataBatch([mx.nd.array(np.arange(6).reshape(2, 3))], [mx.nd.array([0, 1])])
    module.forward_backward(batch)
    module.update()
    path = tmp_path / "net.states"
    module.save_optimizer_states(path, mxnet=True)
    names = {argument for code, argument, _ in pickletools.genops(path.read_bytes()) if code.name == "GLOBAL"}
    assert names <= {"mxnet.ndarray.ndarray NDArray", "builtins bytearray"}
    before = dict(module._updater.states)
    module._updater.states = {}
    module.load_optimizer_states(path)
    assert module._updater.states.keys() == before.keys()
    for key, state in before.items():
        for ours, theirs in zip(flat(state), flat(module._updater.states[key]), strict=True):
            np.testing.assert_array_equal(ours.asnumpy(), theirs.asnumpy())


def flat(state):
    """Return the arrays of a state."""
    parts = state if isinstance(state, (tuple, list)) else []
    return [state] if isinstance(state, mx.nd.NDArray) else [array for part in parts for array in flat(part)]
