"""Variants of gradient descent: Signum, SGLD, DCASGD, LARS, LBSGD.

Each class owns only its formula and the shapes of its states; ``base.py`` holds the common part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from weftplan import ndarray as nd
from weftplan.errors import ParameterError
from weftplan.ndarray import NDArray, random
from weftplan.training.keyword_checks import number
from weftplan.training.optimizers.base import Optimizer, State, one_step
from weftplan.training.optimizers.composed import clipped, rescaled, zeros_as


@Optimizer.register
class Signum(Optimizer):
    """Steps of one size, in the direction of the sign of the averaged gradient (Bernstein et al., 2018).

    Args:
        momentum: decay of the average; 0: the sign of the gradient itself.
        wd_lh: decay of the weight that is no part of the gradient.
    """

    def __init__(
        self, learning_rate: float | None = None, momentum: float = 0.9, wd_lh: float = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.momentum = number(momentum, "Signum: momentum", low=0)
        self.wd_lh = number(wd_lh, "Signum: wd_lh", low=0)

    def create_state(self, index: Any, weight: NDArray) -> State:
        return zeros_as(weight) if self.momentum else None

    @one_step
    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        self._update_count(index)
        lr, wd = self._rates(index)
        if state is None:
            self.apply("signsgd_update", weight, grad, lr=lr, wd=wd, **self._common())
        else:
            settings = {"momentum": self.momentum, "wd_lh": self.wd_lh, **self._common()}
            self.apply("signum_update", weight, grad, state, lr=lr, wd=wd, **settings)

    def state_bytes(self, weight_nbytes: int) -> int:
        return weight_nbytes if self.momentum else 0


@Optimizer.register
class SGLD(Optimizer):
    """Stochastic gradient Langevin dynamics, which samples from a posterior (Welling and Teh, 2011).

    A step is half a gradient step plus normal noise whose variance is the learning rate.
    """

    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        self._update_count(index)
        lr, wd = self._rates(index)
        g = clipped(grad * self.rescale_grad, self.clip_gradient)
        noise = random.normal(0, math.sqrt(lr), shape=weight.shape, dtype=weight.dtype, ctx=weight.context)
        weight[:] = weight - (g + weight * wd) * (lr / 2) + noise


def dcasgd(
    weight: Any, grad: Any, *states: Any, lr: Any, wd: Any, momentum: Any, lamda: Any, rescale_grad: Any,
    clip_gradient: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the new weight, the new velocity if there is one, and the previous weight."""
    g = rescaled(grad, rescale_grad, clip_gradient)
    step = (g + weight * wd + g.square() * (weight - states[-1]) * lamda) * lr
    if len(states) == 1:
        return weight - step, weight
    velocity = states[0] * momentum - step
    return weight + velocity, velocity, weight


@Optimizer.register
class DCASGD(Optimizer):
    """Delay-compensated asynchronous SGD: corrects gradients that were computed at older weights (Zheng et al., 2017).

    Args:
        momentum: decay of the velocity.
        lamda: weight of the correction ``g * g * (weight - weight before)``.
    """

    def __init__(self, momentum: float = 0.0, lamda: float = 0.04, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.momentum = number(momentum, "DCASGD: momentum", low=0)
        self.lamda = number(lamda, "DCASGD: lamda")

    def create_state(self, index: Any, weight: NDArray) -> State:
        return (zeros_as(weight) if self.momentum else None), weight.copy()

    @one_step
    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        self._update_count(index)
        lr, wd = self._rates(index)
        settings = {"momentum": self.momentum, "lamda": self.lamda}
        arrays = [array for array in state if array is not None]
        self.apply(dcasgd, weight, grad, *arrays, lr=lr, wd=wd, **settings, **self._common())

    def state_bytes(self, weight_nbytes: int) -> int:
        return weight_nbytes * (2 if self.momentum else 1)


@Optimizer.register
class LARS(Optimizer):
    """Descent with a rate for each layer, by the norms of its weight and gradient (You et al., 2017).

    ``lr * eta * |w| / (|g| + wd * |w| + eps)``; names that end in gamma, beta or bias keep ``lr``, and so does a layer
    with a norm of 0. Weight decay is off for every name that does not end in ``_weight``.

    Args:
        momentum: decay of the velocity.
        eta: share of a weight's norm that a step may be, over the rate.
        eps: added to the norm of the gradient.
        momentum_correction: in the first update of a weight under another rate the momentum is multiplied by the ratio
            of the rates (Goyal et al., 2017). MXNet 1.9.1 does so for the weights alone that it updates first.
        lazy_update: accepted; it matters to sparse gradients alone.
    """

    weight_last = True

    def __init__(
        self,
        momentum: float = 0.0,
        lazy_update: bool = True,
        eta: float = 0.001,
        eps: float = 0,
        momentum_correction: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.momentum = number(momentum, "LARS: momentum", low=0)
        self.eta = number(eta, "LARS: eta", low=0)
        self.eps = number(eps, "LARS: eps", low=0)
        self.momentum_correction = momentum_correction
        self._rate_before: dict[Any, float] = {}
        """Index -> the rate of its last update, before ``lr_mult``."""

    def set_wd_mult(self, args_wd_mult: Mapping[Any, float]) -> None:
        multipliers = {n: 0.0 for n in self.idx2name.values() if n.endswith("_gamma")}
        stated = {n: float(a["__wd_mult__"]) for n, a in self._attrs.items() if "__wd_mult__" in a}
        super().set_wd_mult({**multipliers, **stated, **args_wd_mult})

    def create_state(self, index: Any, weight: NDArray) -> State:
        return zeros_as(weight) if self.momentum else None

    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        self._update_count(index)
        lr, wd = self._rates(index)
        common = {"wd": wd, **self._common()}
        now = self.learning_rate
        previous_rate = self._rate_before.get(index, now)
        self._rate_before[index] = now
        momentum = self.momentum * (now / previous_rate if self.momentum_correction and previous_rate else 1.0)
        if str(self.idx2name.get(index, index)).endswith(("gamma", "beta", "bias")):
            if state is None:
                nd.sgd_update(weight, grad, out=weight, lr=lr, **common)
            else:
                nd.sgd_mom_update(weight, grad, state, out=weight, lr=lr, momentum=momentum, **common)
            return
        rate = self._rate(weight, grad, lr, wd).reshape((1,) * len(weight.shape))
        g = clipped(grad * self.rescale_grad, self.clip_gradient)
        step = nd.broadcast_mul(g + weight * wd, rate.astype(weight.dtype))
        if state is None:
            weight[:] = weight - step
        else:
            state[:] = state * momentum - step
            weight[:] = weight + state

    def _rate(self, weight: NDArray, grad: NDArray, lr: float, wd: float) -> Any:
        """Return the layer's rate as an array of one element, computed asynchronously."""
        of_weight, of_grad = (nd.multi_sum_sq(array, num_arrays=1) for array in (weight, grad))
        rate, decay = (nd.full((1,), value, ctx=weight.context) for value in (lr, wd))
        return nd.multi_lars(
            rate, of_weight, of_grad, decay, eta=self.eta, eps=self.eps, rescale_grad=self.rescale_grad
        )

    def state_bytes(self, weight_nbytes: int) -> int:
        return weight_nbytes if self.momentum else 0


_WARMUPS = {
    "linear": lambda share: share,
    "power2": lambda share: share * share,
    "sqrt": math.sqrt,
}


@Optimizer.register
class LBSGD(Optimizer):
    """Large-batch descent: accumulates ``batch_scale`` batches per update and warms the rate up accordingly.

    Args:
        momentum: decay of the velocity.
        warmup_strategy: how the rate grows to ``batch_scale`` times itself: ``linear``, ``power2``, ``sqrt``; ``lars``:
            by the norms of weight and gradient (You et al., 2017); anything else: in one jump after the warm-up.
        warmup_epochs, updates_per_epoch: length of the warm-up: their product, in batches.
        batch_scale: number of batches per update.
        begin_epoch: epochs already done.
        num_epochs: accepted and ignored, as in MXNet.
    """

    weight_last = True

    def __init__(
        self,
        momentum: float = 0.0,
        multi_precision: bool = False,
        warmup_strategy: str = "linear",
        warmup_epochs: int = 5,
        batch_scale: int = 1,
        updates_per_epoch: int = 32,
        begin_epoch: int = 0,
        num_epochs: int = 60,
        **kwargs: Any,
    ) -> None:
        super().__init__(multi_precision=multi_precision, **kwargs)
        self.momentum = number(momentum, "LBSGD: momentum", low=0)
        if batch_scale < 1:
            raise ParameterError(f"LBSGD: batch_scale is a number of batches >= 1, got {batch_scale!r}")
        self.warmup_strategy = warmup_strategy
        self.warmup_epochs = warmup_epochs
        self.batch_scale = batch_scale
        self.updates_per_epoch = updates_per_epoch
        self.init_updates = begin_epoch * updates_per_epoch
        self.num_epochs = num_epochs
        self._sums: dict[Any, tuple[Any, int]] = {}
        """Index -> (sum of gradients since the last update, batches so far)."""

    def create_state(self, index: Any, weight: NDArray) -> State:
        return zeros_as(weight) if self.momentum else None

    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        lr, wd = self._rates(index)
        self._update_count(index)
        total, batches = self._sums.get(index, (None, self.init_updates))
        total, batches = (grad if total is None else total + grad), batches + 1
        if batches % self.batch_scale:
            self._sums[index] = (total.copy() if total is grad else total, batches)
            return
        self._sums[index] = (None, batches)
        mean = total / self.batch_scale
        lr *= self._by_norms(weight, mean, wd) if self.warmup_strategy == "lars" else self._growth(batches)
        if state is None:
            nd.sgd_update(weight, mean, out=weight, lr=lr, wd=wd, **self._common())
        else:
            nd.sgd_mom_update(weight, mean, state, out=weight, lr=lr, wd=wd, momentum=self.momentum, **self._common())

    def _growth(self, batches: int) -> float:
        """Return the rate's multiplier after ``batches`` batches."""
        end = self.warmup_epochs * self.updates_per_epoch
        if batches >= end:
            return float(self.batch_scale)
        rule = _WARMUPS.get(self.warmup_strategy)
        return 1.0 if end <= 1 or rule is None else 1.0 + (self.batch_scale - 1) * rule(batches / end)

    def _by_norms(self, weight: NDArray, grad: NDArray, wd: float) -> float:
        """Return the ratio of the norms, within [0.01, 100]; waits for both."""
        of_weight, of_grad = (float(np.square(a.asnumpy()).sum()) for a in (weight, grad))
        return min(100.0, max(0.01, math.sqrt(of_weight / (of_grad + wd * of_weight + 1e-18))))

    def state_bytes(self, weight_nbytes: int) -> int:
        return weight_nbytes if self.momentum else 0
