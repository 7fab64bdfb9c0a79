"""Training after a failed kernel, an interrupt, or many rebinds."""

import contextlib
import gc

import numpy as np
import pytest

import weftplan as mx
from tests.support.training import small_network as network
from weftplan import engine, storage
from weftplan.executor import Executor, prepared_calls
from weftplan.training.fit.interruption import StopAtBatchEnd

CONTEXTS = [mx.cpu(0), mx.cpu(1)]


def five_batches():
    """Return an iterator over five batches of eight samples."""
    rng = np.random.default_rng(2)
    return mx.io.NDArrayIter(rng.random((40, 4)), rng.integers(0, 3, 40), batch_size=8)


def ready_module(contexts=CONTEXTS):
    """Return a bound, initialized module with a momentum optimizer on a device store."""
    mx.random.seed(4)
    module = mx.mod.Module(network(), context=contexts)
    data = five_batches()
    module.bind(data.provide_data, data.provide_label)
    module.init_params(mx.init.Xavier())
    reset_optimizer(module)
    return module


def reset_optimizer(module):
    """Give the module a new optimizer and store."""
    module.init_optimizer("device", "sgd", {"learning_rate": 0.1, "momentum": 0.9}, force_init=True)


def train_steps(module, count):
    """Train ``count`` steps on the first batch; return the weights after them."""
    batch = next(five_batches())
    for _ in range(count):
        module.forward_backward(batch)
        module.update()
    return {name: value.asnumpy() for name, value in module.get_params()[0].items()}


def test_training_goes_on_after_a_failing_kernel(monkeypatch):
    """After a kernel failed, restored weights train as if the failure had not happened.

    The failure reaches weights and momentum, so the test resets both, with set_params and init_optimizer.
    """
    broken = []
    real = prepared_calls.StepBuilder._kernel_call

    def sometimes(builder, step, *sizes):
        bind = real(builder, step, *sizes)

        def fail():
            raise FloatingPointError("kernel failed")

        return (lambda run: lambda: fail() if broken else bind(run)()) if step.node.name == "act" else bind

    monkeypatch.setattr(prepared_calls.StepBuilder, "_kernel_call", sometimes)
    module, expected = ready_module(), train_steps(ready_module(), 3)
    good = module.get_params()
    broken.append(True)
    with pytest.raises(FloatingPointError, match="kernel failed"):
        train_steps(module, 1)
    with contextlib.suppress(FloatingPointError):  # the second context fails, too
        engine.get().wait_for_all()
    broken.clear()
    reset_optimizer(module)
    module.set_params(*good)
    got = train_steps(module, 3)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize("moment", range(6))
def test_an_interrupt_between_pushes_leaves_a_module_that_trains(monkeypatch, moment):
    """After KeyboardInterrupt between two pushes of a step, later steps run and give finite weights."""
    module = ready_module()
    train_steps(module, 1)
    left = [moment]
    real = Executor._push

    def push(self, *args):
        if left[0] == 0:
            left[0] = -1
            raise KeyboardInterrupt
        left[0] -= 1
        real(self, *args)

    monkeypatch.setattr(Executor, "_push", push)
    with pytest.raises(KeyboardInterrupt):
        train_steps(module, 2)
    weights = train_steps(module, 2)
    assert all(np.isfinite(value).all() for value in weights.values())


def test_stop_at_batch_end_saves_whole_steps(tmp_path):
    """A signal during a batch stops ``fit`` at the batch's end; a checkpoint then continues like an unstopped run."""
    expected = train_steps(ready_module(), 5)
    module, stop, data = ready_module(), StopAtBatchEnd(), five_batches()

    def signal_in_the_third_batch(param):
        if param.nbatch == 2:
            stop._on_signal(2, None)

    first_batch = next(data)
    data.next = lambda: first_batch
    with pytest.raises(KeyboardInterrupt):
        module.fit(data, num_epoch=1, batch_end_callback=[signal_in_the_third_batch, stop])
    module.save_checkpoint(tmp_path / "net", 0, save_optimizer_states=True)
    reloaded = mx.mod.Module.load(tmp_path / "net", 0, load_optimizer_states=True, context=CONTEXTS)
    reloaded.bind(data.provide_data, data.provide_label)
    reloaded.init_params()
    reset_optimizer(reloaded)
    got = train_steps(reloaded, 2)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def test_rebinding_many_times_returns_all_memory():
    """After training, reshaping and rebinding, deleting the module frees its memory on every context."""

    def requested_bytes():
        gc.collect()
        for _ in range(5):
            mx.nd.zeros((1,)).wait_to_read()
            mx.nd.waitall()
        return [storage.get(ctx).statistics().requested_bytes for ctx in CONTEXTS]

    train_steps(ready_module(), 1)
    start = requested_bytes()
    for _ in range(3):
        module = ready_module()
        train_steps(module, 2)
        for rows in (2, 6, 4, 10):
            module.forward(mx.io.DataBatch([mx.nd.ones((rows, 4))]), is_train=False)
            assert module.get_outputs()[0].shape == (rows, 3)
        module.bind([("data", (4, 4))], [("softmax_label", (4,))], force_rebind=True)
        module.predict(five_batches())
        del module
    assert requested_bytes() == start


def test_batches_of_changing_size_train_like_small_modules():
    """Gradients of batches of changing size equal those of a module that is bound for that size."""
    rng = np.random.default_rng(6)
    module = ready_module()
    for rows in (8, 4, 8, 6):
        data, label = rng.random((rows, 4)).astype("float32"), rng.integers(0, 3, rows).astype("float32")
        before = module.get_params()
        reference = mx.mod.Module(network(), context=mx.cpu())
        reference.bind([("data", (rows, 4))], [("softmax_label", (rows,))])
        reference.init_params(arg_params=before[0], aux_params=before[1])
        batch = mx.io.DataBatch([mx.nd.array(data)], [mx.nd.array(label)])
        for each in (module, reference):
            each.forward_backward(batch)
        for index, grads in enumerate(module.group.grad_arrays):
            total = sum(grad.asnumpy() for grad in grads)
            single = reference.group.grad_arrays[index][0].asnumpy()
            np.testing.assert_allclose(total, single, rtol=1e-4, atol=1e-6)
        module.update()
