"""Random networks with batch normalisation, compared with the same networks after folding for inference."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

import weftplan as mx
from weftplan.convert import fold_batch_norm

sym = mx.sym
TOLERANCE = {"float64": 1e-9, "float32": 2e-3, "float16": 6e-2}


def network(rng: random.Random) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Return a random network (symbol, input shapes) with chains, branches, shared parameters and inner outputs."""
    axes = rng.choice((0, 1, 2, 2, 2, 3))
    data = sym.Variable("data")
    shape = (rng.randrange(1, 4), rng.choice((2, 4, 6)), *(rng.randrange(3, 9) for _ in range(axes)))
    pool, heads = [data], []
    shared = sym.Variable("shared_gamma")
    for number in range(rng.randrange(1, 9)):
        x, name = pool[max(0, len(pool) - 1 - int(rng.expovariate(1.0)))], f"n{number}"
        kind = rng.randrange(10)
        filters = rng.choice((2, 4, 6))
        no_bias = rng.random() < 0.5
        if kind < 5 and axes:
            groups = rng.choice((1, 1, 2))
            y = sym.Convolution(
                x, kernel=(rng.choice((1, 3)),) * axes, pad=(1,) * axes, num_filter=filters, num_group=groups,
                no_bias=no_bias, name=name,
            )  # fmt: skip
        elif kind < 5:
            y = sym.FullyConnected(x, num_hidden=filters, no_bias=no_bias, flatten=rng.random() < 0.8, name=name)
        elif kind == 5:
            y = sym.Activation(x, act_type=rng.choice(("relu", "tanh")), name=name)
        elif kind == 6:
            y = sym.Dropout(x, p=0.5, name=name)
        elif kind == 7:
            y = x + sym.identity(x)
        else:
            y = sym.identity(x, name=name)
        if rng.random() < 0.2:
            pool.append(y)
        if rng.random() < 0.75:
            shared_gamma = {"gamma": shared} if rng.random() < 0.1 else {}
            wide = rng.random() < 0.15
            y = sym.BatchNorm(
                y, fix_gamma=rng.random() < 0.5, eps=rng.choice((1e-3, 2e-5)), use_global_stats=rng.random() < 0.2,
                output_mean_var=wide, axis=rng.choice((1, 1, 1, 1, 1, 0)), name=f"norm{number}", **shared_gamma,
            )  # fmt: skip
            if wide and rng.random() < 0.5:
                heads.append(y[rng.randrange(1, 3)])
            y = y[0]
        pool.append(y)
        if rng.random() < 0.15:
            heads.append(y)
    return sym.Group([pool[-1], *heads]), {"data": shape}


def trial(seed: str) -> bool:
    """Check that the folded network has equal outputs within rounding, and equal names.

    Return False for an invalid network.
    """
    rng = random.Random(seed)
    symbol, shapes = network(rng)
    dtype = rng.choice(("float64", "float32", "float32", "float16"))
    try:
        before = symbol.simple_bind(mx.cpu(), "null", {"data": dtype}, **shapes)
    except mx.errors.MXNetError as error:
        if "hape" in str(error):
            return False
        raise
    draw = np.random.default_rng(rng.randrange(1 << 30))
    for name, array in before.arg_dict.items():
        scale = 0.5 if name.endswith("weight") else 1.0
        array[:] = (draw.normal(size=array.shape) * scale).astype(array.dtype)
    for array in before.aux_dict.values():
        array[:] = draw.uniform(0.5, 2.0, array.shape).astype(array.dtype)
    wanted = [out.asnumpy().astype("float64") for out in before.forward(is_train=False)]
    parameters = {name: array for name, array in before.arg_dict.items() if name != "data"}
    withheld = rng.choice(sorted(parameters)) if parameters and rng.random() < 0.15 else None
    known = {name: array for name, array in parameters.items() if name != withheld}
    held = {name: array.asnumpy() for name, array in (*known.items(), *before.aux_dict.items())}
    folded, args, aux = fold_batch_norm(symbol, known, before.aux_dict)
    for name, array in (*known.items(), *before.aux_dict.items()):
        np.testing.assert_array_equal(array.asnumpy(), held[name], err_msg=f"{name} was changed")
    if withheld is not None and withheld in folded.list_arguments():
        args = {**args, withheld: parameters[withheld]}
    folded = mx.sym.load_json(folded.tojson())
    assert folded.list_outputs() == symbol.list_outputs()
    assert set(folded.list_arguments()) - {"data"} == set(args), "parameters do not fit the folded network"
    assert set(folded.list_auxiliary_states()) == set(aux)
    after = folded.bind(mx.cpu(), {**args, "data": before.arg_dict["data"]}, aux_states=aux)
    outputs = [out.asnumpy().astype("float64") for out in after.forward(is_train=False)]
    for name, one, second in zip(symbol.list_outputs(), wanted, outputs, strict=True):
        scale = max(1.0, float(np.abs(one).max(initial=0.0)))
        np.testing.assert_allclose(second / scale, one / scale, atol=TOLERANCE[dtype], rtol=0, err_msg=name)
    return True
