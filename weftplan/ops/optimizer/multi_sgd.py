"""Gradient descent steps for several weights in one call: multi_sgd_update and its seven variants.

Each operator applies ``sgd_update`` or ``sgd_mom_update`` to each weight in turn, or to its float32 copy (``mp``).
Inputs are grouped by weight. Learning rates and weight decays are two parameters, or (``preloaded``) two more inputs:
float32 vectors whose values the host does not read. The ``mp`` variants update the copy for weights of any float dtype;
MXNet 1.9.1 does so only for float16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from weftplan.errors import DTypeError, ParameterError
from weftplan.ops.core.floats import is_float
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.formula_kernel import FormulaKernel
from weftplan.ops.core.params import p_float, p_inputs, p_tuple
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, merge_dtype, merge_shape
from weftplan.ops.core.schema import Arrays, InplacePair, Op, Param, Params, TensorSpec, Workspace
from weftplan.ops.elementwise.add_n import numbered
from weftplan.ops.optimizer.mixed_precision import mixed_dtype, mixed_kernel
from weftplan.ops.optimizer.sgd_adam import COMMON, MOMENTUM, Rule, sgd, sgd_mom, step_kernel
from weftplan.support.array_types import RawArray

_WIDE = np.dtype(np.float32)
_RATES = (
    Param("lrs", p_tuple(p_float), doc="learning rate of each weight"),
    Param("wds", p_tuple(p_float), doc="weight decay of each weight"),
)
_COUNT = Param("num_weights", p_inputs, 1, "number of weights")


def _weights(params: Params) -> range:
    return range(params["num_weights"])


@dataclass(frozen=True, slots=True)
class _Group:
    """One operator of this module: its properties, and the functions that its declaration needs."""

    name: str
    kernel: FormulaKernel
    """The step of one weight."""
    inputs: tuple[str, ...]
    """Names of the arrays of one weight: weight, gradient, states."""
    mixed: bool
    preloaded: bool

    def op(self) -> Op:
        """Return the operator's declaration."""
        momentum = (MOMENTUM,) if "mom" in self.inputs else ()
        return Op(
            name=self.name,
            forward=workspace_kernel(self.compute),
            infer_shape=self.shapes,
            infer_dtype=self.dtypes,
            params=(*(() if self.preloaded else _RATES), *momentum, *COMMON[1:3], _COUNT),
            inputs=self.input_names,
            positions=(),
            outputs=lambda params: numbered("output", params["num_weights"]),
            aux=self.states if len(self.inputs) > 2 else (),
            inplace=lambda params: tuple(InplacePair(self.begin(k), k) for k in _weights(params)),
            ignored_inputs=(lambda params: tuple(self.begin(k) for k in _weights(params))) if self.mixed else (),
            workspace=self.workspace,
            doc=self.doc(),
        )

    def doc(self) -> str:
        """Return the operator's documentation."""
        single = ("mp_" if self.mixed else "") + ("sgd_mom_update" if "mom" in self.inputs else "sgd_update")
        rates = "; then the vectors of all learning rates and weight decays, in float32" if self.preloaded else ""
        return f"{single} of several weights; inputs are {', '.join(self.inputs)} of one after the other{rates}."

    def begin(self, k: int) -> int:
        """Return the index of weight ``k`` in the inputs."""
        return k * len(self.inputs)

    def states(self, params: Params) -> tuple[int, ...]:
        """Return the indices of all states in the inputs, float32 copies included."""
        return tuple(self.begin(k) + i for k in _weights(params) for i in range(2, len(self.inputs)))

    def input_names(self, params: Params) -> tuple[str, ...]:
        """Return MXNet's names of the inputs."""
        names = [f"{what}_{k}" for k in _weights(params) for what in self.inputs]
        return (*names, *(("lrs", "wds") if self.preloaded else ()))

    def shapes(self, params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
        """Infer shapes: all arrays of a weight share its shape; rates have one element for each weight."""
        self.check(params)
        new_ins, new_outs = [], []
        for k, out in enumerate(outs):
            merged = out
            for what, shape in zip(self.inputs, ins[self.begin(k) :], strict=False):
                words = "output" if what == "weight" else "gradient" if what == "grad" else what
                merged = merge_shape(merged, shape, f"{self.name}: weight and {words} {k}")
            new_ins.append(merged)
            new_outs += [merged] * len(self.inputs)
        for what, shape in zip(("lrs", "wds"), ins[len(new_outs) :], strict=False):
            new_outs.append(merge_shape((len(outs),), shape, f"{self.name}: {what}, one for each weight"))
        return new_outs, new_ins

    def dtypes(self, params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
        """Infer dtypes: all arrays of a weight share its dtype; states and copies of ``mp`` variants are float32."""
        new_ins, new_outs = [], []
        for k, out in enumerate(outs):
            mine = ins[self.begin(k) : self.begin(k + 1)]
            if self.mixed:
                inferred, (merged,) = mixed_dtype(params, mine, [out])
                new_outs += inferred
            else:
                merged = out
                for what, dtype in zip(self.inputs, mine, strict=True):
                    merged = merge_dtype(merged, dtype, f"{self.name}: weight and {what} {k}")
                if merged is not None and not is_float(merged):
                    raise DTypeError(f"{self.name} expects floats, got {merged}: cast the weight first (Cast, astype)")
                new_outs += [merged] * len(mine)
            new_ins.append(merged)
        for dtype in ins[len(new_outs) :]:
            new_outs.append(merge_dtype(_WIDE, dtype, f"{self.name}: lrs and wds"))
        return new_outs, new_ins

    def check(self, params: Params) -> None:
        """Raise ParameterError unless parameters give one learning rate and one weight decay for each weight."""
        for name in () if self.preloaded else ("lrs", "wds"):
            if len(params[name]) != params["num_weights"]:
                raise ParameterError(
                    f"{self.name}: {name} has {len(params[name])} items, expected num_weights={params['num_weights']}"
                )

    def workspace(self, params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        """Return the scratch bytes of all weights."""
        decays = [None] * len(outputs) if self.preloaded else params["wds"]
        return sum(
            self.kernel.workspace({**params, "wd": decay}, inputs[self.begin(k) : self.begin(k + 1)], [output])
            for k, (output, decay) in enumerate(zip(outputs, decays, strict=True))
        )

    def rates(self, params: Params, inputs: Arrays) -> Iterator[tuple[RawArray | float, RawArray | float]]:
        """Yield (lr, wd) of each weight: numbers, or arrays of one element in the computing dtype."""
        self.check(params)
        if not self.preloaded:
            yield from zip(params["lrs"], params["wds"], strict=True)
            return
        for k in _weights(params):
            dtype = _WIDE if self.mixed else inputs[self.begin(k)].dtype
            lr, wd = (rates[k : k + 1].astype(dtype) for rates in inputs[-2:])
            yield lr, wd

    def compute(self, ctx: Workspace, params: Params, *arrays: Any) -> None:
        """Compute the new weights and states; if an output is not needed, the states of its weight do not change."""
        count = params["num_weights"]
        inputs, outputs = arrays[:-count], arrays[-count:]
        for k, (rate, decay) in enumerate(self.rates(params, inputs)):
            weight_inputs = inputs[self.begin(k) : self.begin(k + 1)]
            self.kernel(ctx, {**params, "lr": rate, "wd": decay}, weight_inputs, [outputs[k]])


_KINDS: tuple[tuple[str, Rule, tuple[str, ...]], ...] = (("sgd", sgd, ()), ("sgd_mom", sgd_mom, ("mom",)))

for _preloaded, _mixed, (_word, _rule, _mom) in product((False, True), (False, True), _KINDS):
    _name = f"{'preloaded_' if _preloaded else ''}multi_{'mp_' if _mixed else ''}{_word}_update"
    _inputs = ("weight", "grad", *_mom, *(("weight32",) if _mixed else ()))
    _kernel = (mixed_kernel if _mixed else step_kernel)(_rule, len(_mom))
    register(_Group(_name, _kernel, _inputs, _mixed, _preloaded).op())
