"""Steps of optimizers: one launch for one weight, and one for all weights of a group.

The formulas round as those of :mod:`weftplan.ops.optimizer.sgd_adam` do, one operation after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from weftplan.ops.core.cuda_source import THREADS, floats, launch
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.schema import Arrays, Kernel, OpContext, Params
from weftplan.support.array_types import ArrayModule, RawArray

GROUP = 24
"""Weights of one launch: parameters of a kernel take at most 4 KiB."""

_STEPS = {
    "sgd": """
        A t = limited((A)g[i] * rescale, limit);
        y[i] = (T)((A)w[i] * keep + t * -lr);""",
    "mom": """
        A t = limited((A)g[i] * rescale, limit);
        if (wd != (A)0) t = t + (A)w[i] * wd;
        A m = (A)s[i] * momentum - t * lr;
        s[i] = (T)m;
        y[i] = (T)((A)w[i] + m);""",
    "adam": """
        A t = limited((A)g[i] * rescale + (A)w[i] * wd, limit);
        A m = (A)s[i] * beta1 + t * rest1;
        A v = (A)r[i] * beta2 + t * t * rest2;
        s[i] = (T)m;
        r[i] = (T)v;
        y[i] = (T)((A)w[i] - m / (sqrt(v) + epsilon) * lr);""",
}
_STATES = {"sgd": "", "mom": "s", "adam": "sr"}
_NUMBERS = {
    "sgd": ("keep", "lr"),
    "mom": ("wd", "lr", "momentum"),
    "adam": ("wd", "lr", "beta1", "rest1", "beta2", "rest2", "epsilon"),
}
_LIMITED = """
__device__ A limited(A x, A limit) {
    if (limit < (A)0) return x;
    return x < -limit ? -limit : (x > limit ? limit : x);
}
"""


@lru_cache(maxsize=256)
def source(rule: str, count: int) -> str:
    """Return the source for the step of ``count`` weights; each weight has a range of blocks."""
    pointers, bodies = [], []
    for k in range(count):
        states = [f"T* {name}{k}" for name in _STATES[rule]]
        numbers = [f"A {name}{k}" for name in _NUMBERS[rule]]
        names = ["w", "g", "y", *_STATES[rule], *_NUMBERS[rule], "n", "end"]
        pointers += [f"const T* w{k}", f"const T* g{k}", f"T* y{k}", *states, *numbers, f"long long n{k}",
                     f"long long end{k}"]  # fmt: skip
        given = ", ".join(f"{name}{k}" for name in names)
        bodies.append(
            f"if (block < end{k}) {{ step({given}, block - first, rescale, limit); return; }} first = end{k};"
        )
    head = ["const T* w", "const T* g", "T* y", *(f"T* {name}" for name in _STATES[rule]),
            *(f"A {name}" for name in _NUMBERS[rule]), "long long n", "long long end"]  # fmt: skip
    return f"""{_LIMITED}
__device__ void step({", ".join(head)}, long long block, A rescale, A limit) {{
    long long i = block * blockDim.x + threadIdx.x;
    if (i < n) {{{_STEPS[rule]}
    }}
}}

extern "C" __global__ void step_{rule}({", ".join(pointers)}, A rescale, A limit) {{
    long long block = blockIdx.x;
    long long first = 0;
    {" ".join(bodies)}
}}
"""


def _numbers(rule: str, params: Params, lr: float, wd: float, kind: Callable[[float], np.generic]) -> list[np.generic]:
    values = {
        "keep": 1.0 - lr * wd, "lr": lr, "wd": wd, "momentum": params.get("momentum", 0.0),
        "beta1": params.get("beta1", 0.0), "rest1": 1.0 - params.get("beta1", 0.0),
        "beta2": params.get("beta2", 0.0), "rest2": 1.0 - params.get("beta2", 0.0),
        "epsilon": params.get("epsilon", 0.0),
    }  # fmt: skip
    return [kind(values[name]) for name in _NUMBERS[rule]]


Row = tuple[RawArray, RawArray, RawArray, Sequence[RawArray], float, float]
"""Weight, gradient, new weight, states, learning rate and weight decay."""


def step(xp: ArrayModule, rule: str, params: Params, weights: Sequence[Row]) -> None:
    """One launch for at most :data:`GROUP` weights: (weight, gradient, result, states, lr, wd) of each."""
    dtype = weights[0][0].dtype
    kind = accumulator(dtype).type
    args: list[Any] = []
    end = 0
    for weight, gradient, out, states, lr, wd in weights:
        end += -(-weight.size // THREADS)
        args += [weight, gradient, out, *states, *_numbers(rule, params, lr, wd, kind), weight.size, end]
    args += [kind(params["rescale_grad"]), kind(params["clip_gradient"])]
    launch(xp, source(rule, len(weights)), f"step_{rule}", end, THREADS, args, T=dtype)


def _single(rule: str) -> Kernel:
    def kernel(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        if outputs[0] is not None:
            row = (inputs[0], inputs[1], outputs[0], inputs[2:], params["lr"], params["wd"])
            step(ctx.xp, rule, params, [row])

    return kernel


def _several(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    rows = [
        (inputs[2 * k], inputs[2 * k + 1], out, (), params["lrs"][k], params["wds"][k])
        for k, out in enumerate(outputs)
        if out is not None
    ]
    for first in range(0, len(rows), GROUP):
        step(ctx.xp, "sgd", params, rows[first : first + GROUP])


def _alike(params: Params, inputs: Specs, outputs: Specs) -> str:
    if len({spec.dtype for spec in (*inputs, *outputs)}) > 1:
        return "written for weights of one dtype"
    if inputs[0].dtype.itemsize < 4:
        return "written for float32 and float64"
    return str(floats(0)(params, inputs, outputs))


def _nothing(params: Params, inputs: Specs, outputs: Specs) -> int:
    return 0


for _name, _kernel in (
    ("sgd_update", _single("sgd")),
    ("sgd_mom_update", _single("mom")),
    ("adam_update", _single("adam")),
    ("multi_sgd_update", _several),
):
    provide(_name, Implementation(name="cuda", kernel=_kernel, workspace=_nothing, refusal=_alike), on="gpu")
