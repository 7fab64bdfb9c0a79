"""Training that is disturbed: a kernel that fails, an interrupt at any step, many rebinds, a store that dies."""

import contextlib
import gc

import numpy as np
import pytest

import weftplan as mx
from tests.support.training import small_network as network
from weftplan import engine, storage
from weftplan.executor import Executor, prepared_calls
from weftplan.training.fit.callbacks import StopAtBatchEnd

CONTEXTS = [mx.cpu(0), mx.cpu(1)]


def batches():
    """Five batches of eight."""
    rng = np.random.default_rng(2)
    return mx.io.NDArrayIter(rng.random((40, 4)), rng.integers(0, 3, 40), batch_size=8)


def ready(contexts=CONTEXTS):
    """Return a bound module with parameters and an optimizer with momentum on a device store."""
    mx.random.seed(4)
    module = mx.mod.Module(network(), context=contexts)
    data = batches()
    module.bind(data.provide_data, data.provide_label)
    module.init_params(mx.init.Xavier())
    with_optimizer(module)
    return module


def with_optimizer(module):
    """A fresh optimizer and store."""
    module.init_optimizer("device", "sgd", {"learning_rate": 0.1, "momentum": 0.9}, force_init=True)


def steps(module, count):
    """That many steps on the first batch; the weights after them."""
    batch = next(batches())
    for _ in range(count):
        module.forward_backward(batch)
        module.update()
    return {name: value.asnumpy() for name, value in module.get_params()[0].items()}


def test_training_goes_on_after_a_failing_kernel(monkeypatch):
    """A kernel fails once: the weights that depend on it fail too, and restored weights train as if nothing had been.

    The failed step taints weights and momentum alike, so both are reset: set_params and init_optimizer.
    """
    broken = []
    real = prepared_calls.StepBuilder._kernel_call

    def sometimes(builder, step, *sizes):
        bind = real(builder, step, *sizes)

        def fail():
            raise FloatingPointError("kernel failed")

        return (lambda run: lambda: fail() if broken else bind(run)()) if step.node.name == "act" else bind

    monkeypatch.setattr(prepared_calls.StepBuilder, "_kernel_call", sometimes)
    module, expected = ready(), steps(ready(), 3)
    good = module.get_params()
    broken.append(True)
    with pytest.raises(FloatingPointError, match="kernel failed"):
        steps(module, 1)
    with contextlib.suppress(FloatingPointError):  # the second context's failure
        engine.get().wait_for_all()
    broken.clear()
    with_optimizer(module)
    module.set_params(*good)
    got = steps(module, 3)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize("moment", range(6))
def test_an_interrupt_between_pushes_leaves_a_module_that_trains(monkeypatch, moment):
    """KeyboardInterrupt raised inside a step, before its n-th run of a pass: nothing hangs, later steps are finite."""
    module = ready()
    steps(module, 1)
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
        steps(module, 2)
    weights = steps(module, 2)
    assert all(np.isfinite(value).all() for value in weights.values())


def test_stop_at_batch_end_saves_whole_steps(tmp_path):
    """A signal in the middle of a batch stops fit after it; weights and optimizer states of the checkpoint agree.

    Continuing from the checkpoint equals never having stopped.
    """
    expected = steps(ready(), 5)
    module, stop, data = ready(), StopAtBatchEnd(), batches()

    def signal_in_the_third_batch(param):
        if param.nbatch == 2:
            stop._on_signal(2, None)

    same = next(data)
    data.next = lambda: same
    with pytest.raises(KeyboardInterrupt):
        module.fit(data, num_epoch=1, batch_end_callback=[signal_in_the_third_batch, stop])
    module.save_checkpoint(tmp_path / "net", 0, save_optimizer_states=True)
    reloaded = mx.mod.Module.load(tmp_path / "net", 0, load_optimizer_states=True, context=CONTEXTS)
    reloaded.bind(data.provide_data, data.provide_label)
    reloaded.init_params()
    with_optimizer(reloaded)
    got = steps(reloaded, 2)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def test_rebinding_many_times_returns_all_memory():
    """Fit, other batch sizes, predict, rebinding: when the module is gone, so are its bytes on every context."""

    def live():
        gc.collect()
        for _ in range(5):
            mx.nd.zeros((1,)).wait_to_read()
            mx.nd.waitall()
        return [storage.get(ctx).statistics().requested_bytes for ctx in CONTEXTS]

    steps(ready(), 1)
    start = live()
    for _ in range(3):
        module = ready()
        steps(module, 2)
        for rows in (2, 6, 4, 10):
            module.forward(mx.io.DataBatch([mx.nd.ones((rows, 4))]), is_train=False)
            assert module.get_outputs()[0].shape == (rows, 3)
        module.bind([("data", (4, 4))], [("softmax_label", (4,))], force_rebind=True)
        module.predict(batches())
        del module
    assert live() == start


def test_batches_of_changing_size_train_like_small_modules():
    """Sizes 8, 4, 8, 6: gradients, summed over contexts, equal those of a fresh module bound for that size alone."""
    rng = np.random.default_rng(6)
    module = ready()
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
