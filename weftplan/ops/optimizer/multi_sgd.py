"""Gradient descent steps for several weights in one call: multi_sgd_update and its seven variants.

Each operator applies an operator of one weight to each weight in turn: ``sgd_update``, ``sgd_mom_update``, or the
multi-precision form of either. Inputs are grouped by weight. Learning rates and weight decays are two parameters, or
(``preloaded``) two more inputs: float32 vectors whose values the host does not read. The ``mp`` variants update the
copy for weights of any float dtype; MXNet 1.9.1 does so only for float16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from weftplan.errors import DTypeError, ParameterError, ShapeError
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.params import p_float, p_inputs, p_tuple
from weftplan.ops.core.registry import get, register
from weftplan.ops.core.rules import merge_dtype, merge_shape
from weftplan.ops.core.schema import InplacePair, Op, OpContext, Param, Params, TensorSpec
from weftplan.ops.elementwise.add_n import numbered
from weftplan.ops.optimizer.step import WIDE, Fact, Facts, Inference, Merge

_RATES = (
    Param("lrs", p_tuple(p_float), doc="learning rate of each weight"),
    Param("wds", p_tuple(p_float), doc="weight decay of each weight"),
)
_COUNT = Param("num_weights", p_inputs, 1, "number of weights")
_OF_ONE_WEIGHT = ("lr", "wd", "lazy_update")
"""Parameters of a step of one weight that the operators of several do not have."""


@dataclass(frozen=True, slots=True)
class _Group:
    """One operator of this module: the operator of one weight, and the functions that its declaration needs."""

    single: Op
    names: tuple[str, ...]
    """Names of the arrays of one weight: weight, gradient, states."""
    preloaded: bool

    def op(self) -> Op:
        """Return the operator's declaration."""
        single = self.single
        own = tuple(param for param in single.params if param.name not in _OF_ONE_WEIGHT)
        rates = "; then the vectors of all learning rates and weight decays, in float32" if self.preloaded else ""
        return Op(
            name=self.name,
            forward=workspace_kernel(self.compute),
            infer_shape=partial(self.inferred, single.infer_shape, merge_shape, lambda count: (count,)),
            infer_dtype=partial(self.inferred, single.infer_dtype, merge_dtype, lambda count: WIDE),
            params=(*(() if self.preloaded else _RATES), *own, _COUNT),
            inputs=self.input_names,
            positions=(),
            outputs=lambda params: numbered("output", params["num_weights"]),
            aux=self.indices(single.mutated({})),
            inplace=lambda params: tuple(InplacePair(self.arrays(k).start, k) for k in range(params["num_weights"])),
            ignored_inputs=self.indices(single.ignored({})),
            workspace=self.workspace,
            doc=f"{single.name} of several weights; inputs are {', '.join(self.names)} of one after the other{rates}.",
        )

    @property
    def name(self) -> str:
        """The name of the operator."""
        return f"{'preloaded_' if self.preloaded else ''}multi_{self.single.name}"

    def arrays(self, k: int) -> slice:
        """Return the range of the arrays of weight ``k`` in the inputs."""
        size = len(self.names)
        return slice(k * size, (k + 1) * size)

    def indices(self, of_one: tuple[int, ...]) -> tuple[int, ...] | Callable[[Params], tuple[int, ...]]:
        """Return a function that returns the indices of inputs for all weights, from those for one."""
        size = len(self.names)
        return of_one and (lambda params: tuple(k * size + i for k in range(params["num_weights"]) for i in of_one))

    def input_names(self, params: Params) -> tuple[str, ...]:
        """Return MXNet's names of the inputs."""
        names = [f"{what}_{k}" for k in range(params["num_weights"]) for what in self.names]
        return (*names, *(("lrs", "wds") if self.preloaded else ()))

    def inferred(
        self, rule: Inference[Fact], merge: Merge[Fact], rates: Callable[[int], Fact], params: Params,
        ins: list[Fact | None], outs: list[Fact | None],
    ) -> tuple[Facts[Fact], Facts[Fact]]:  # fmt: skip
        """Infer shapes or dtypes: by the rule of one weight for each, and ``rates(number of weights)`` for lrs, wds.

        Raises:
            ParameterError: parameters do not give one learning rate and one weight decay for each weight.
        """
        for name in () if self.preloaded else ("lrs", "wds"):
            if len(params[name]) != params["num_weights"]:
                raise ParameterError(
                    f"{self.name}: {name} has {len(params[name])} items, expected num_weights={params['num_weights']}"
                )
        new_ins: list[Fact | None] = []
        new_outs: list[Fact | None] = []
        for k, out in enumerate(outs):
            try:
                arrays, (new,) = rule(params, ins[self.arrays(k)], [out])
            except (ShapeError, DTypeError) as error:
                raise type(error)(f"{self.name}: weight {k}: {error}") from None
            new_ins += arrays
            new_outs.append(new)
        for name, fact in zip(("lrs", "wds"), ins[len(new_ins) :], strict=False):
            new_ins.append(merge(rates(len(outs)), fact, f"{self.name}: {name}, one for each weight"))
        return new_ins, new_outs

    def workspace(self, params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        """Return the scratch bytes of all weights."""
        return sum(
            self.single.workspace_bytes(
                {**params, "wd": None if self.preloaded else params["wds"][k]}, inputs[self.arrays(k)], [output]
            )
            for k, output in enumerate(outputs)
        )

    def compute(self, ctx: OpContext, params: Params, *arrays: Any) -> None:
        """Compute the new weights and states; if an output is not needed, the states of its weight do not change."""
        count = params["num_weights"]
        for k in range(count):
            inputs = arrays[self.arrays(k)]
            if self.preloaded:  # arrays of one element, in the dtype of the computation, which the last state has
                lr, wd = (rates[k : k + 1].astype(inputs[-1].dtype) for rates in arrays[-count - 2 : -count])
            else:
                lr, wd = params["lrs"][k], params["wds"][k]
            self.single.forward(ctx, {**params, "lr": lr, "wd": wd}, inputs, [arrays[k - count]])


_SINGLES = ("sgd_update", "sgd_mom_update", "mp_sgd_update", "mp_sgd_mom_update")
for _preloaded, _single in product((False, True), map(get, _SINGLES)):
    register(_Group(_single, _single.input_names({}), _preloaded).op())
