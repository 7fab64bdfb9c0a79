"""The operator table against MXNet 1.9.1's own list (``tests/golden/data/operators.json``)."""

import json
import pathlib

import pytest

from tests.support.together import together
from weftplan.ops.core import registry

MXNET = json.loads((pathlib.Path(__file__).resolve().parents[1] / "golden" / "data" / "operators.json").read_text())
NAMES = sorted(
    name
    for name in registry.names()
    if registry.get(name).in_mxnet
    and not name.startswith("_sample_")  # MXNet lists them without the underscore
    and registry.get(name).backward_of is None
    and "_contrib" not in name
    and not name.startswith("_np")
)


@together()
@pytest.mark.parametrize("name", NAMES)
def test_signature(name):
    """Every name declared as MXNet's is in MXNet, with all its parameters and its inputs in order.

    Inputs are compared only if their number is fixed.
    """
    assert name in MXNET, "MXNet 1.9.1 has no such operator: declare it with Op(in_mxnet=False)"
    inputs, params = MXNET[name]
    op = registry.get(name)
    ours = {param.name for param in op.params}
    # MXNet lists Crop's inputs among its parameters, and those of _arange, which it refuses, as _linspace's.
    wrong = {"Crop": {"data"}, "_linspace": {"step", "repeat", "infer_range"}}.get(name, set())
    assert set(params) - ours - {op.variadic} == wrong
    if not callable(op.inputs) and name not in ("_CrossDeviceCopy", "_copyto"):  # MXNet documents none for these two
        without_states = [one for k, one in enumerate(op.inputs) if k not in op.aux]
        assert inputs in (list(op.inputs), without_states)  # some of MXNet's lists leave auxiliary states out


def test_own_operators_are_not_in_mxnet():
    """No operator declared as weftplan's own exists in MXNet 1.9.1."""
    own = [name for name in registry.names() if not registry.get(name).in_mxnet]
    assert "digamma" in own
    assert [name for name in own if name in MXNET] == []


def test_no_operator_is_lost():
    """The operators of old symbol files are registered under the names in those files."""
    text = """
        elemwise_add elemwise_sub elemwise_mul elemwise_div _plus_scalar _minus_scalar _rminus_scalar _mul_scalar
        _div_scalar _rdiv_scalar _power _power_scalar _rpower_scalar _mod _mod_scalar _rmod_scalar _maximum _minimum
        _maximum_scalar _minimum_scalar _equal _not_equal _greater _greater_equal _lesser _lesser_equal _equal_scalar
        broadcast_add broadcast_sub broadcast_mul broadcast_div broadcast_power broadcast_maximum broadcast_minimum
        broadcast_mod broadcast_to broadcast_axis broadcast_like add_n _grad_add dot batch_dot _linalg_gemm2 sum mean
        max min prod norm argmax argmin exp expm1 log log1p log2 log10 sqrt rsqrt cbrt square abs sign negative
        reciprocal sin cos tanh sigmoid relu erf round floor ceil trunc softsign hard_sigmoid clip Cast zeros_like
        ones_like _zeros _ones _full _arange _zeros_without_dtype _copy _identity_with_attr_like_rhs _CrossDeviceCopy
        slice_axis slice slice_like expand_dims squeeze Reshape Flatten transpose SwapAxis Concat stack SliceChannel
        reshape_like repeat tile Pad take pick one_hot where _random_uniform _random_normal sgd_update sgd_mom_update
        adam_update
    """
    wanted = text.split()
    assert [name for name in wanted if name not in set(registry.names(aliases=False))] == []


def test_backward_operators_belong_to_a_forward_one():
    """Every backward operator names a forward operator.

    Its outputs are gradients of that operator's inputs.
    """
    for name in registry.names(aliases=False):
        op = registry.get(name)
        if op.backward_of is not None:
            forward = registry.get(op.backward_of)
            assert name.startswith("_backward_")
            assert forward.gradient is not None
            if not callable(op.grad_inputs) and not callable(forward.inputs):
                assert max(op.grad_inputs) < len(forward.inputs)
                assert len(op.grad_inputs) == len(op.output_names({}))
