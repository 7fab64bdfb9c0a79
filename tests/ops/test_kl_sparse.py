"""IdentityAttachKLSparseReg: MXNet 1.9.1's values over three steps, contract, recomputation, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

import weftplan as mx
from tests.support.ops_harness import check_contract
from weftplan.errors import DTypeError, ShapeError

GRADIENTS = [
    [[-0.31784188747406006, 0.15851670503616333, 0.17304739356040955, -0.06388019770383835],
     [0.2640163004398346, -0.28770849108695984, 0.010646499693393707, -0.0447826012969017]],
    [[-0.12776699662208557, -0.055364299565553665, -0.1048675999045372, -0.1871522068977356],
     [0.04337019845843315, -0.09425300359725952, -0.280595600605011, 0.10175660252571106]],
    [[0.3427470028400421, -0.27492889761924744, -0.29904109239578247, 0.1426853984594345],
     [-0.1750383973121643, 0.22172090411186218, -0.07292529940605164, -0.18294109404087067]],
]  # fmt: skip
AVERAGES = [
    [0.38769513, 0.3381064, 0.3668301, 0.3623191],
    [0.3778543, 0.34423947, 0.35367745, 0.41673446],
    [0.39681602, 0.43159294, 0.3989212, 0.44032854],
]
"""Gradients (two rows) and moving averages of MXNet 1.9.1 with penalty 0.01, target 0.2, momentum 0.8."""


def test_three_steps_of_mxnet() -> None:
    """Output, gradient and moving average equal MXNet's after each of three training steps.

    Outside of training the average does not change.
    """
    random = np.random.RandomState(0)
    sigmoid = mx.sym.Activation(mx.sym.Variable("x"), act_type="sigmoid")
    net = mx.sym.IdentityAttachKLSparseReg(sigmoid, sparseness_target=0.2, penalty=0.01, momentum=0.8, name="kl")
    assert (net.list_auxiliary_states(), net.list_outputs()) == (["kl_moving_avg"], ["kl_output"])
    executor = net.simple_bind(mx.cpu(), x=(5, 4))
    executor.aux_dict["kl_moving_avg"][:] = 0.3
    for gradient, average in zip(GRADIENTS, AVERAGES, strict=True):
        data = random.randn(5, 4)
        executor.arg_dict["x"][:] = mx.nd.array(data)
        (out,) = executor.forward(is_train=True)
        np.testing.assert_allclose(out.asnumpy(), 1 / (1 + np.exp(-data)), rtol=1e-5)
        executor.backward(mx.nd.array(random.randn(5, 4)))
        np.testing.assert_allclose(executor.grad_dict["x"].asnumpy()[:2], gradient, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(executor.aux_dict["kl_moving_avg"].asnumpy(), average, rtol=1e-6)
    executor.forward(is_train=False)
    np.testing.assert_allclose(executor.aux_dict["kl_moving_avg"].asnumpy(), AVERAGES[-1], rtol=1e-6)


def test_contract_of_kernels() -> None:
    """The operator meets the kernel contract: in place, unwanted outputs, exact workspace."""
    data = np.random.RandomState(0).uniform(0.1, 0.9, (3, 4))
    check_contract("IdentityAttachKLSparseReg", [data, np.full(4, 0.3)])


def test_recomputation_keeps_the_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward pass repeated by mirroring updates the moving average only once.

    The gradients have the bits of a step without mirroring.
    """

    def step() -> list[np.ndarray]:
        x = mx.sym.Variable("x")
        for k in range(4):
            x = mx.sym.sigmoid(mx.sym.FullyConnected(x, num_hidden=4, name=f"fc{k}"))
            x = mx.sym.IdentityAttachKLSparseReg(x, penalty=0.1, name=f"kl{k}")
        executor = x.simple_bind(mx.cpu(), x=(5, 4))
        random = np.random.RandomState(0)
        for array in (*executor.arg_arrays, *executor.aux_arrays):
            array[:] = mx.nd.array(random.uniform(0.1, 0.9, array.shape))
        executor.forward(is_train=True)
        executor.backward(mx.nd.ones((5, 4)))
        return [array.asnumpy() for array in (*executor.grad_arrays, *executor.aux_arrays)]

    plain = step()
    monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", "1")
    for left, right in zip(plain, step(), strict=True):
        np.testing.assert_array_equal(left, right)


def test_wrong_inputs_are_refused() -> None:
    """Data of other than two axes, and integers, are refused."""
    with pytest.raises(ShapeError, match=r"data must be \(samples, units\), got \(2, 3, 4\); flatten it first"):
        mx.sym.IdentityAttachKLSparseReg(mx.sym.Variable("x")).infer_shape(x=(2, 3, 4))
    with pytest.raises(DTypeError, match="int32"):
        mx.nd.IdentityAttachKLSparseReg(mx.nd.ones((2, 3), dtype="int32"), moving_avg=mx.nd.ones(3))
