"""Contract of every single-process store: optimizer states are saved and loaded."""

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import FormatError, KVStoreError
from weftplan.training.optimizers import sgd_adam as optimizers


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_optimizer_on_the_store_and_its_states(kv, name, tmp_path):
    """Training that continues from saved optimizer states gives the same bits as uninterrupted training."""
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal((3, 4)).astype("float32") for _ in range(6)]
    settings_ = {"sgd": {"momentum": 0.9}, "adam": {}}[name]

    def run(store, some, stop=None):
        for g in some:
            store.push("w_weight", [mx.nd.array(g), mx.nd.array(g, ctx=mx.cpu(1))])

    def fresh():
        store = mx.kv.create(kv.type)
        store.init("w_weight", mx.nd.ones((3, 4)))
        store.set_optimizer(optimizers.create(name, learning_rate=0.1, **settings_))
        return store

    whole = fresh()
    run(whole, gradients)
    first = fresh()
    run(first, gradients[:3])
    first.save_optimizer_states(tmp_path / "states")
    half = mx.nd.empty((3, 4))
    first.pull("w_weight", out=half)
    second = fresh()
    second.set_updater(None)
    second.push("w_weight", half)
    optimizer = optimizers.create(name, learning_rate=0.1, begin_num_update=3, **settings_)
    second.set_optimizer(optimizer)
    second.load_optimizer_states(tmp_path / "states")
    run(second, gradients[3:])
    results = []
    for store in (whole, second):
        out = mx.nd.empty((3, 4))
        store.pull("w_weight", out=out)
        results.append(out.asnumpy())
    assert np.array_equal(*results)


def test_damaged_states_change_nothing(kv, tmp_path):
    """A truncated states file raises FormatError, and the states are unchanged."""
    kv.init("w", mx.nd.ones((2,)))
    kv.set_optimizer(optimizers.create("sgd", momentum=0.9))
    kv.push("w", mx.nd.ones((2,)))
    kv.save_optimizer_states(tmp_path / "s")
    data = (tmp_path / "s").read_bytes()
    (tmp_path / "s").write_bytes(data[: len(data) // 2])
    before = kv._states().get_states()
    with pytest.raises(FormatError, match="truncated"):
        kv.load_optimizer_states(tmp_path / "s")
    assert kv._states().get_states() == before
    with pytest.raises(FormatError, match="cannot read"):
        kv.load_optimizer_states(tmp_path / "absent")


SETTINGS = {"plain": ("sgd", {}), "momentum": ("sgd", {"momentum": 0.9}), "adam": ("adam", {})}


@pytest.mark.parametrize(
    ("saved", "shape", "loaded"),
    [
        ("plain", (2,), "momentum"),
        ("momentum", (2,), "adam"),
        ("adam", (2,), "momentum"),
        ("momentum", (3,), "momentum"),
        ("adam", (2, 1), "adam"),
    ],
)
def test_states_of_another_optimizer_or_network(kv, tmp_path, saved, shape, loaded):
    """States of another optimizer or weight shape raise FormatError at the load with the expected state.

    The store continues without them.
    """
    other_store = mx.kv.create("local")
    for store, of, how in ((other_store, shape, saved), (kv, (2,), loaded)):
        store.init("w", mx.nd.ones(of))
        name, settings_ = SETTINGS[how]
        store.set_optimizer(optimizers.create(name, **settings_))
    other_store.push("w", mx.nd.ones(shape))
    other_store.save_optimizer_states(tmp_path / "s")
    for _ in range(2):
        with pytest.raises(FormatError, match=r"state of 'w' is .* needs .* for a weight \(2,\) float32"):
            kv.load_optimizer_states(tmp_path / "s")
    out = mx.nd.empty((2,))
    kv.pull("w", out=out)
    assert out.asnumpy().tolist() == [1, 1]
    kv.push("w", mx.nd.ones((2,)))
    kv.pull("w", out=out)
    assert (out.asnumpy() < 1).all()


@pytest.mark.parametrize("state", [{"mean": 0}, 1.5, "text", (None, [np.ones(2)])], ids=repr)
def test_states_that_cannot_be_saved(kv, tmp_path, state):
    """Saving an unsupported state raises KVStoreError with the supported types and leaves no file."""

    class Own:
        """A user's optimizer whose state cannot be saved."""

        def create_state_multi_precision(self, index, weight):
            return state

        def update_multi_precision(self, index, weight, grad, state):
            weight -= grad

    kv.init("w", mx.nd.ones((2,)))
    kv.set_optimizer(Own())
    kv.push("w", mx.nd.ones((2,)))
    with pytest.raises(KVStoreError, match="to be saved is None, an NDArray, or a tuple"):
        kv.save_optimizer_states(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []
