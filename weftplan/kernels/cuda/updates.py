"""Steps of optimizers: one launch for one weight or for a group of weights.

A step's formula (:mod:`weftplan.ops.optimizer.fused_update`) is written as CUDA C, operation by operation, so it rounds
as on a CPU. The constants of each weight's formula are arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from weftplan.kernels.cuda.pointwise import lines_of, reachable
from weftplan.ops.core.cuda_source import THREADS, floats, launch
from weftplan.ops.core.formulas import Computation, Formula
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.schema import Arrays, Kernel, OpContext, Params
from weftplan.ops.optimizer.fused_update import formula_of
from weftplan.support.array_types import ArrayModule, RawArray

GROUP = 24
"""Maximum number of weights of one launch, to bound compile time."""
WORDS = 500
"""Maximum number of arguments of one launch, because CUDA passes at most 4 KiB."""


class WeightStep(NamedTuple):
    """A step of one weight.

    Attributes:
        computation: the formula of the step.
        arrays: the weight, its gradient and its states.
        out: receives the new weight; may be the weight.
        narrow: None, or the low-precision weight that receives the rounded new weight; the gradient then has its dtype.
    """

    computation: Computation
    arrays: Sequence[RawArray]
    out: RawArray
    narrow: RawArray | None = None


@lru_cache(maxsize=256)
def source(formula: Formula, count: int, *, narrow: bool) -> str:
    """Return the CUDA C for the steps of ``count`` weights; each weight has a range of blocks.

    Args:
        formula: the formula that all steps share.
        count: number of weights.
        narrow: whether the rows have low-precision weights; ``H`` is the dtype of these weights and of gradients.
    """
    arrays = ["w", "g", *(f"s{k}" for k in range(2, formula.arrays))]
    heads = ["const T* w", f"const {'H' if narrow else 'T'}* g", "T* y", *["H* h"] * narrow]
    heads += [f"T* {name}" for name in arrays[2:]]
    heads += [f"T c{operation.operands[0]}" for operation in formula.operations if operation.name == "constant"]
    heads.append("long long n")
    parameters, bodies = [], []
    for k in range(count):
        parameters += [*(f"{head}_{k}" for head in heads), f"long long end_{k}"]
        arguments = ", ".join(f"{head.split()[-1]}_{k}" for head in heads)
        bodies.append(f"if (block < end_{k}) {{ step({arguments}, block - first); return; }} first = end_{k};")
    needed = reachable(formula)
    names = {k: f"v{k}" for k in range(formula.arrays)}
    lines = [f"T v{k} = (T){array}[i];" for k, array in enumerate(arrays) if k in needed]
    lines += lines_of(formula, needed, names, "")
    for array, value in formula.results:
        lines.append(f"{arrays[array] if array else 'y'}[i] = {names[value]};")
        if narrow and not array:
            lines.append(f"h[i] = (H){names[value]};")
    body = "\n        ".join(lines)
    return f"""
__device__ void step({", ".join(heads)}, long long block) {{
    long long i = block * blockDim.x + threadIdx.x;
    if (i < n) {{
        {body}
    }}
}}

extern "C" __global__ void optimizer_step({", ".join(parameters)}) {{
    long long block = blockIdx.x;
    long long first = 0;
    {" ".join(bodies)}
}}
"""


def step(xp: ArrayModule, rows: Sequence[WeightStep]) -> None:
    """Launch the steps of weights of one dtype: one launch for each formula, or more if there are too many weights."""
    for formula in dict.fromkeys([row.computation.formula for row in rows]):
        for group in _groups([row for row in rows if row.computation.formula == formula]):
            _launch(xp, formula, group)


def _groups(rows: list[WeightStep]) -> Iterator[list[WeightStep]]:
    """Yield the rows of one formula in groups that fit one launch."""
    words = len(rows[0].arrays) + len(rows[0].computation.constants) + 4
    group_size = max(1, min(GROUP, WORDS // words))
    for begin in range(0, len(rows), group_size):
        yield rows[begin : begin + group_size]


def _launch(xp: ArrayModule, formula: Formula, rows: list[WeightStep]) -> None:
    dtype, narrow = rows[0].arrays[0].dtype, rows[0].narrow is not None
    args: list[object] = []
    end = 0
    for computation, (weight, gradient, *states), out, rounded in rows:
        end += -(-weight.size // THREADS)
        args += [weight, gradient, out, *([rounded] if narrow else []), *states]
        args += [*map(dtype.type, computation.constants), weight.size, end]
    types = {"T": dtype, "H": rows[0].arrays[1].dtype} if narrow else {"T": dtype}
    launch(xp, source(formula, len(rows), narrow=narrow), "optimizer_step", end, THREADS, args, **types)


def _row(name: str, params: Params, arrays: Sequence[RawArray], out: RawArray) -> WeightStep:
    computation = formula_of(name, params, len(arrays), arrays[0].dtype)
    assert computation is not None  # the operators below have formulas
    return WeightStep(computation, arrays, out)


def _single(name: str) -> Kernel:
    def kernel(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        if outputs[0] is not None:
            step(ctx.xp, [_row(name, params, inputs, outputs[0])])

    return kernel


def _several(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    common = {name: params[name] for name in ("rescale_grad", "clip_gradient")}
    rates = zip(params["lrs"], params["wds"], strict=True)
    rows = [
        _row("sgd_update", {"lr": lr, "wd": wd, **common}, inputs[2 * k : 2 * k + 2], out)
        for k, (out, (lr, wd)) in enumerate(zip(outputs, rates, strict=True))
        if out is not None
    ]
    if rows:
        step(ctx.xp, rows)


def _alike(params: Params, inputs: Specs, outputs: Specs) -> str:
    if len({spec.dtype for spec in (*inputs, *outputs)}) > 1:
        return "written for weights of one dtype"
    if inputs[0].dtype.itemsize < 4:
        return "written for float32 and float64"
    return str(floats(0)(params, inputs, outputs))


def _nothing(params: Params, inputs: Specs, outputs: Specs) -> int:
    return 0


for _name, _kernel in (
    ("sgd_update", _single("sgd_update")),
    ("sgd_mom_update", _single("sgd_mom_update")),
    ("adam_update", _single("adam_update")),
    ("multi_sgd_update", _several),
):
    provide(_name, Implementation(name="cuda", kernel=_kernel, workspace=_nothing, refusal=_alike), on="gpu")
