"""Arrays that a bind creates are zeros, whatever their memory contained, and few operations fill them."""

from __future__ import annotations

import pytest

import weftplan as mx
from weftplan import storage
from weftplan.device import cpu, sim
from weftplan.executor import new_arrays
from weftplan.storage import NaivePool, PoisonResource, RawResource, RoundPool

BELOW, ABOVE, LARGE = 100, 40_000, 1_500_000
"""Elements of arrays that are filled inline, together with other arrays, and by a separate operation."""
SIZES = (BELOW, ABOVE, LARGE, ABOVE, BELOW, ABOVE, LARGE)


def bound(context: mx.Context, **more: object) -> mx.executor.Executor:
    """Return an executor with arguments of all sizes and their gradients."""
    variables = [mx.sym.Variable(f"x{k}") for k in range(len(SIZES))]
    shapes = {f"x{k}": (size,) for k, size in enumerate(SIZES)}
    return mx.sym.Group([2 * variable for variable in variables]).simple_bind(context, **shapes, **more)


def all_zero(executor: mx.executor.Executor) -> bool:
    """Return whether all elements of arguments and gradients are zero."""
    return not any(array.asnumpy().any() for array in (*executor.arg_arrays, *executor.grad_arrays))


@pytest.mark.parametrize("make", [RawResource, NaivePool, RoundPool, lambda place: PoisonResource(NaivePool(place))])
def test_reused_memory_is_zero(make):
    """Arguments and gradients are zero also in memory that another executor has written to."""
    with storage.using(make(mx.device.get(cpu(0)))):
        for _ in range(2):
            executor = bound(cpu())
            assert all_zero(executor)
            for array in (*executor.arg_arrays, *executor.grad_arrays):
                array[:] = 7
            mx.nd.waitall()
            del executor, array


def test_on_a_simulated_device_they_are_zero():
    """On a simulated device, whose new memory is poisoned, arguments and gradients are zero."""
    assert all_zero(bound(sim(0)))


def test_operations_fill_several_arrays(monkeypatch):
    """Each operation fills at least 4 MiB of arrays, except for the last; small arrays need no operation."""
    pushed = []
    real = new_arrays.push

    def push(work, reads, writes, *rest, **more):
        pushed.append(len(writes))
        real(work, reads, writes, *rest, **more)

    monkeypatch.setattr(new_arrays, "push", push)
    executor = bound(cpu())
    assert all_zero(executor)
    # Gradients come first, in reverse order. 1.5 M elements are 6 MB, which is one operation; 160 KB wait until 4 MiB
    # are complete. Gradients of outputs are filled one by one.
    assert pushed == [1, 3, 3, 3, *[1] * 5]
    pushed.clear()
    bound(cpu(), grad_req="null")
    assert pushed == [2, 3]


def test_unset_parameters_are_known():
    """A large parameter that was never set has one write, of zeros; once it is set, forward uses its value."""
    executor = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=200, name="fc").simple_bind(
        mx.cpu(), data=(2, 400)
    )
    assert executor.arg_dict["fc_weight"].nbytes > 1 << 16 > executor.arg_dict["fc_bias"].nbytes
    executor.copy_params_from({"fc_bias": mx.nd.ones((200,))}, allow_missing=True, allow_extra_params=True)
    assert new_arrays.writes_of_zeros(executor.arg_dict["fc_weight"]) == 1
    executor.arg_dict["fc_weight"][:] = 1
    executor.forward()
    assert executor.outputs[0].asnumpy().tolist() == [[1.0] * 200] * 2


def test_small_arrays_share_one_block():
    """Small arguments and states are parts of one block with separate vars; a large argument has its own block."""
    normed = mx.sym.BatchNorm(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=200, name="fc"), name="bn")
    executor = normed.simple_bind(mx.cpu(), grad_req="null", data=(2, 400))
    large = executor.arg_dict["fc_weight"]
    small = [array for array in (*executor.arg_arrays, *executor.aux_arrays) if array is not large]
    assert len({id(array.raw().base) for array in small}) == 1
    assert large.raw().base is not small[0].raw().base
    assert len({id(array.var) for array in (*small, large)}) == len(small) + 1
