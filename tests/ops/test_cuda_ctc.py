"""CTCLoss on a GPU: one launch for all steps, and the values of the host."""

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.standin_cupy import meter

STEPS, BATCH, CHANNELS, LABELS = 7, 5, 6, 4


def step(ctx, blank, given, dtype):
    """Return [loss, gradient] of one batch, and the (launches, synchronizations, atomics) of this step.

    The labels of the five samples fit, just fit, repeat, do not fit, and are empty.
    """
    sym = mx.sym
    inputs = {"data": sym.Variable("data"), "label": sym.Variable("label")}
    values = {"data": np.sin(np.arange(STEPS * BATCH * CHANNELS) * 1.7).reshape(STEPS, BATCH, CHANNELS) * 3}
    pad = 0 if blank == "first" else -1
    values["label"] = np.array([[1, 2, 3, 4], [2, 2, 3, pad], [3, 3, 3, 3], [1, 1, 1, 2], [pad] * 4])
    if given:
        inputs |= {"data_lengths": sym.Variable("steps"), "label_lengths": sym.Variable("counts")}
        values |= {"steps": np.array([7, 5, 7, 3, 6]), "counts": np.array([4, 3, 4, 4, 0])}
    net = sym.CTCLoss(**inputs, use_data_lengths=given, use_label_lengths=given, blank_label=blank)
    types = dict.fromkeys(net.list_arguments(), dtype)
    shapes = {name: value.shape for name, value in values.items()}
    executor = net.simple_bind(ctx, grad_req={"data": "write"}, type_dict=types, **shapes)
    for name, value in values.items():
        executor.arg_dict[name][:] = mx.nd.array(value.astype(dtype), dtype=dtype)
    head = mx.nd.array(np.arange(1, BATCH + 1), ctx=ctx, dtype=dtype)
    executor.forward(is_train=True)
    executor.outputs[0].wait_to_read()
    meter.reset()
    executor.forward(is_train=True)
    executor.backward(head)
    counted = (dict(meter.launches), sum(meter.syncs.values()), dict(meter.atomics))
    return [executor.outputs[0].asnumpy(), executor.grad_dict["data"].asnumpy()], counted


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("blank", ["first", "last"])
def test_values_are_those_of_the_host(blank, given, dtype):
    """Loss and gradient equal the host's, with one launch per pass and no atomics.

    The samples have repeated labels, padding, early ends, and labels that no alignment fits.
    """
    with place("standin", kind="NaiveEngine") as context:
        expected, _ = step(mx.cpu(), blank, given, dtype)
        actual, (launches, _, atomics) = step(context(0), blank, given, dtype)
        assert mx.device.get(context(0)).temporaries.reserved == 0
    loose = 2e-2 if dtype == "float16" else 2e-5 if dtype == "float32" else 1e-10
    for mine, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(mine.astype(float), theirs.astype(float), rtol=loose, atol=loose)
    assert (launches["ctc_forward"], launches["ctc_back"]) == (1, 1)
    assert sum(launches.values()) <= 10
    assert not atomics
