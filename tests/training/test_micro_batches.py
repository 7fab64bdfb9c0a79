"""Micro-batches: gradients of the parts of a batch are summed before one update, and memory is planned for a part."""

import numpy as np
import pytest

import weftplan as mx
from tests.support.training import weights
from weftplan.errors import BindError, ParameterError, ShapeError
from weftplan.training.fit.microbatch import BatchPieces, MicroBatchIter, cut_descs

OPTIMIZER = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}


def network(*, norm=False):
    """Return a classifier of two layers, with batch normalization if ``norm``."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=6, name="fc1")
    if norm:
        net = mx.sym.BatchNorm(net, fix_gamma=False, name="bn")
    net = mx.sym.Activation(net, act_type="relu", name="act")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3, name="fc2"), name="softmax")


def data(samples=40, batch=8, **settings):
    """Return an iterator over random samples of three classes."""
    rng = np.random.default_rng(2)
    return mx.io.NDArrayIter(rng.random((samples, 4)), rng.integers(0, 3, samples), batch_size=batch, **settings)


def assert_same_bits(left, right):
    """Check that two dictionaries have the same names and bitwise equal arrays."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


def fit_micro_batches(count, contexts, *, norm=False, **settings):
    """Train a module for two epochs with ``count`` micro-batches per batch; return it."""
    mx.random.seed(4)
    module = mx.mod.Module(network(norm=norm), context=contexts)
    module.fit(
        data(shuffle=True),
        num_epoch=2,
        kvstore="device",
        optimizer_params=OPTIMIZER,
        initializer=mx.init.Xavier(),
        micro_batches=count,
        **settings,
    )
    return module


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("devices", [1, 2])
def test_the_bits_of_the_loop_by_hand(count, norm, devices):
    """``micro_batches=k`` gives the bits of grad_req="add", ``k`` times forward and backward, one update."""
    contexts = [mx.cpu(i) for i in range(devices)]
    mx.random.seed(4)
    batches = data(shuffle=True)
    module = mx.mod.Module(network(norm=norm), context=contexts)
    size = 8 // count
    module.bind([("data", (size, 4))], [("softmax_label", (size,))], grad_req="add")
    module.init_params(mx.init.Xavier())
    module.init_optimizer("device", "sgd", {**OPTIMIZER, "rescale_grad": 1 / 8})
    for _ in range(2):
        for batch in batches:
            for executor in module.group.executors:
                for gradient in executor.grad_dict.values():
                    if gradient is not None:
                        gradient[:] = 0
            for at in range(0, 8, size):
                piece = mx.io.DataBatch([batch.data[0][at : at + size]], [batch.label[0][at : at + size]])
                module.forward_backward(piece)
            module.update()
        module.synchronize()
        batches.reset()
    assert_same_bits(weights(fit_micro_batches(count, contexts, norm=norm)), weights(module))


def test_a_step_is_that_of_the_whole_batch():
    """Without batch normalization the weights equal those of whole batches up to rounding."""
    whole, pieces = weights(fit_micro_batches(1, mx.cpu())), weights(fit_micro_batches(4, mx.cpu()))
    for name, value in whole.items():
        np.testing.assert_allclose(pieces[name], value, rtol=1e-4, atol=1e-6)


def test_the_memory_of_a_piece():
    """Executors are planned for a micro-batch, also if validation data is given, and need less memory."""
    one, four = (fit_micro_batches(count, mx.cpu(), eval_data=data()) for count in (1, 4))
    assert four.group.batch_size == 2
    assert four.group.executors[0].allocated_bytes < one.group.executors[0].allocated_bytes
    assert four.score(data(), "acc") == four.score(MicroBatchIter(data(), 2), "acc")


def test_metrics_count_every_sample():
    """The training metric counts each sample once."""
    seen = []
    fit_micro_batches(4, mx.cpu(), batch_end_callback=lambda param: seen.append(param.eval_metric.num_inst))
    assert seen == [8, 16, 24, 32, 40] * 2


def test_buckets_are_cut_as_well():
    """BucketingModule with micro-batches gives the weights of whole batches up to rounding."""

    def generate(key):
        net = mx.sym.Embedding(mx.sym.Variable("data"), input_dim=7, output_dim=4, name="embed")
        net = mx.sym.FullyConnected(mx.sym.Reshape(net, shape=(-1, 4)), num_hidden=7, name="fc")
        label = mx.sym.Reshape(mx.sym.Variable("softmax_label"), shape=(-1,))
        return mx.sym.SoftmaxOutput(net, label, name="softmax"), ("data",), ("softmax_label",)

    def trained_weights(count):
        mx.random.seed(1)
        rng = np.random.default_rng(0)
        sentences = [list(rng.integers(1, 7, length)) for length in (3, 5) for _ in range(8)]
        it = mx.rnn.BucketSentenceIter(sentences, 4, buckets=[3, 5], invalid_label=0)
        module = mx.mod.BucketingModule(generate, it.default_bucket_key)
        module.fit(it, num_epoch=2, eval_metric=mx.metric.Perplexity(0), micro_batches=count)
        return weights(module)

    whole, pieces = trained_weights(1), trained_weights(2)
    for name, value in whole.items():
        np.testing.assert_allclose(pieces[name], value, rtol=1e-4, atol=1e-6)


def test_padding_is_trained_on_and_not_scored():
    """Micro-batches of padding alone are kept in training and dropped by MicroBatchIter in scoring."""
    batches = data(samples=9)
    *_, last = batches
    pieces = BatchPieces(batches.provide_data, batches.provide_label).cut(last, 2)
    assert [piece.pad for piece in pieces] == [1, 2, 2, 2]
    assert [batch.pad for batch in MicroBatchIter(data(samples=9), 2)] == [0, 0, 0, 0, 1]


def test_samples_along_another_axis():
    """An input with a layout such as TN is split along its batch axis."""
    descs = [mx.io.DataDesc("data", (5, 8), layout="TN"), mx.io.DataDesc("label", (8,), layout="N")]
    assert [desc.shape for desc in cut_descs(descs, 2)] == [(5, 4), (4,)]
    value = mx.nd.array(np.arange(40).reshape(5, 8))
    batch = mx.io.DataBatch([value], [value[0]], provide_data=descs[:1])
    left, right = BatchPieces(descs[:1], descs[1:]).cut(batch, 4)
    np.testing.assert_array_equal(np.hstack([left.data[0].asnumpy(), right.data[0].asnumpy()]), value.asnumpy())
    assert left.provide_data[0].shape == (5, 4)


@pytest.mark.parametrize(
    ("count", "error", "words"),
    [
        (0, ParameterError, "micro_batches must be a whole number >= 1, got 0"),
        (True, ParameterError, "got True"),
        (3, ShapeError, r"a batch of 8 samples .* cannot be cut into 3 equal micro-batches: choose a divisor of 8"),
    ],
)
def test_numbers_that_do_not_work(count, error, words):
    """A number that is no positive integer or no divisor of the batch size raises before bind."""
    module = mx.mod.Module(network())
    with pytest.raises(error, match=words):
        module.fit(data(), num_epoch=1, micro_batches=count)
    assert not module.binded


def test_a_module_that_was_bound_for_something_else():
    """A module bound with grad_req="write" is refused; the error names force_rebind=True."""
    module = fit_micro_batches(1, mx.cpu())
    with pytest.raises(BindError, match=r"is bound for .* with 'write': pass force_rebind=True"):
        module.fit(data(), num_epoch=1, micro_batches=2)
