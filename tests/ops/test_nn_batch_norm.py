"""BatchNorm: updates and uses of the moving statistics, fixed gamma, accuracy."""

import numpy as np
import pytest

from tests.support.ops_harness import differentiate, prepare, run
from tests.support.ops_nn_cases import uniform

F32 = np.float32


def batch_norm(is_train=True, recompute=False, **params):
    """Return a BatchNorm call that has run, and the original inputs."""
    arrays = [uniform(4, 3, 2, 2), *(uniform(3, seed=k) for k in range(3)), uniform(3, low=0.5, high=2.0)]
    call = prepare(
        "BatchNorm", [x.copy() for x in arrays], {"momentum": 0.7, **params}, is_train=is_train, recompute=recompute
    )
    call()
    return call, arrays


def test_moving_statistics_follow_the_batch_in_training():
    """Training updates the moving statistics as momentum·old + (1 - momentum)·batch, with the biased variance.

    gamma and beta do not change.
    """
    call, (data, gamma, beta, mean, var) = batch_norm()
    np.testing.assert_allclose(call.inputs[3], 0.7 * mean + 0.3 * data.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(call.inputs[4], 0.7 * var + 0.3 * data.var((0, 2, 3)), rtol=1e-12)
    np.testing.assert_array_equal(call.inputs[1], gamma)
    np.testing.assert_array_equal(call.inputs[2], beta)


@pytest.mark.parametrize(
    "how", [{"recompute": True}, {"is_train": False}, {"use_global_stats": True}], ids=lambda how: next(iter(how))
)
def test_moving_statistics_stay(how):
    """Recomputing, predicting and use_global_stats do not change the moving statistics."""
    call, arrays = batch_norm(**how)
    np.testing.assert_array_equal(call.inputs[3], arrays[3])
    np.testing.assert_array_equal(call.inputs[4], arrays[4])


def test_recomputed_batch_norm_gives_the_same_bits():
    """A recomputed forward call normalises by the batch and gives the bits of the first call."""
    for first, repeated in zip(batch_norm()[0].outputs, batch_norm(recompute=True)[0].outputs, strict=True):
        np.testing.assert_array_equal(first, repeated)


def test_prediction_uses_the_moving_statistics():
    """Outside training the output is gamma·(x - moving_mean) / sqrt(moving_var + eps) + beta."""
    call, (data, gamma, beta, mean, var) = batch_norm(is_train=False, fix_gamma=False, eps=0.2)
    shape = (1, 3, 1, 1)
    expected = (data - mean.reshape(shape)) / np.sqrt(var.reshape(shape) + 0.2) * gamma.reshape(shape)
    np.testing.assert_allclose(call.outputs[0], expected + beta.reshape(shape), rtol=1e-12)
    np.testing.assert_array_equal(call.outputs[1], mean)
    np.testing.assert_allclose(call.outputs[2], 1 / np.sqrt(var + 0.2), rtol=1e-12)


def test_fixed_gamma_counts_as_one_and_gets_no_gradient():
    """With fix_gamma any stored gamma acts as 1, and its gradient is 0."""
    call, (data, _, beta, mean, var) = batch_norm(fix_gamma=True)
    ones = run("BatchNorm", [data, np.ones(3), beta, mean, var], {"fix_gamma": False, "momentum": 0.7})
    np.testing.assert_array_equal(call.outputs[0], ones[0])
    actual = differentiate(call, [np.ones(s.shape) for s in call.out_specs])[0]
    assert not actual[1].any()
    assert actual[2].all()


def test_batch_norm_of_a_far_mean():
    """A mean a thousand deviations from 0 does not reduce the accuracy of the variance."""
    rng = np.random.RandomState(0)
    data = (1000 + rng.standard_normal((64, 2, 8, 8))).astype(F32)
    vectors = [np.ones(2, F32), np.zeros(2, F32), np.zeros(2, F32), np.ones(2, F32)]
    out = run("BatchNorm", [data, *vectors], {"eps": 1e-5})[0]
    np.testing.assert_allclose(out.var((0, 2, 3)), 1.0, rtol=1e-3)
