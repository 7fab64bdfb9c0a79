"""Adaptive optimizers with a rate per weight element: Ftrl, FTML, AdamW, LAMB, Adamax, Nadam."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from weftplan import ndarray as nd
from weftplan.ndarray import NDArray
from weftplan.training.keyword_checks import number
from weftplan.training.optimizers.base import Optimizer, State, one_step
from weftplan.training.optimizers.composed import clipped, rescaled, zeros_as


@Optimizer.register
class Ftrl(Optimizer):
    """Follow the regularized leader (McMahan et al., 2013).

    Args:
        lamda1: strength of L1 regularization: a weight element becomes 0 if its accumulated gradient (state ``z``) is
            at most ``lamda1`` in magnitude.
        beta: added to the square root of the sum of squared gradients (state ``n``).
    """

    default_rate: ClassVar[float] = 0.1

    def __init__(
        self, lamda1: float = 0.01, learning_rate: float | None = None, beta: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.lamda1 = number(lamda1, "Ftrl: lamda1", low=0)
        self.beta = number(beta, "Ftrl: beta", low=0)

    def create_state(self, index: Any, weight: NDArray) -> State:
        return zeros_as(weight), zeros_as(weight)

    @one_step
    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        self._update_count(index)
        lr, wd = self._rates(index)
        settings = {"lamda1": self.lamda1, "beta": self.beta, **self._common()}
        self.apply("ftrl_update", weight, grad, *state, lr=lr, wd=wd, **settings)

    def state_bytes(self, weight_nbytes: int) -> int:
        return 2 * weight_nbytes


@Optimizer.register
class FTML(Optimizer):
    """Follow the moving leader (Zheng and Kwok, 2017)."""

    def __init__(self, beta1: float = 0.6, beta2: float = 0.999, epsilon: float = 1e-8, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.beta1 = number(beta1, "FTML: beta1", low=0, below=1)
        self.beta2 = number(beta2, "FTML: beta2", low=0, below=1)
        self.epsilon = number(epsilon, "FTML: epsilon", low=0)

    def create_state(self, index: Any, weight: NDArray) -> State:
        return zeros_as(weight), zeros_as(weight), zeros_as(weight)

    @one_step
    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        count = self._update_count(index)
        lr, wd = self._rates(index)
        self.apply(
            "ftml_update",
            weight,
            grad,
            *state,
            lr=lr,
            wd=wd,
            t=count,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            rescale_grad=self.rescale_grad,
            clip_grad=self.clip_gradient or -1.0,
        )

    def state_bytes(self, weight_nbytes: int) -> int:
        return 3 * weight_nbytes


def adamw(
    weight: Any, grad: Any, mean: Any, square: Any, *, lr: Any, wd: Any, beta1: Any, beta2: Any, epsilon: Any,
    correction: Any, rescale_grad: Any, clip_gradient: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the new weight and running means; ``correction`` multiplies the mean gradient (bias correction)."""
    g = rescaled(grad, rescale_grad, clip_gradient)
    mean = mean * beta1 + g * (1.0 - beta1)
    square = square * beta2 + g.square() * (1.0 - beta2)
    return weight - (mean * correction / (square.sqrt() + epsilon) + weight * wd) * lr, mean, square


@Optimizer.register
class AdamW(Optimizer):
    """Adam whose weight decay is no part of the gradient (Loshchilov and Hutter, 2019).

    ``w -= lr * (c * mean / (sqrt(square) + epsilon) + wd * w)``, where ``c`` corrects both running means.

    Args:
        correct_bias: whether the running means are corrected for their beginning at 0.
    """

    default_rate: ClassVar[float] = 0.001

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        correct_bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.beta1 = number(beta1, "AdamW: beta1", low=0, below=1)
        self.beta2 = number(beta2, "AdamW: beta2", low=0, below=1)
        self.epsilon = number(epsilon, "AdamW: epsilon", low=0)
        self.correct_bias = bool(correct_bias)

    def create_state(self, index: Any, weight: NDArray) -> State:
        return zeros_as(weight), zeros_as(weight)

    @one_step
    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        count = self._update_count(index)
        lr, wd = self._rates(index)
        correction = math.sqrt(1.0 - self.beta2**count) / (1.0 - self.beta1**count) if self.correct_bias else 1.0
        settings = {"beta1": self.beta1, "beta2": self.beta2, "epsilon": self.epsilon, "correction": correction}
        self.apply(adamw, weight, grad, *state, lr=lr, wd=wd, **settings, **self._common())

    def state_bytes(self, weight_nbytes: int) -> int:
        return 2 * weight_nbytes


@Optimizer.register
class LAMB(Optimizer):
    """Adam whose step is scaled to the norm of the weight, times the learning rate (You et al., 2020).

    Args:
        lower_bound, upper_bound: limits of the weight's norm in that scaling; None: no limit.
        bias_correction: whether the running means are corrected for their beginning at 0.
    """

    default_rate: ClassVar[float] = 0.001

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        lower_bound: float | None = None,
        upper_bound: float | None = None,
        bias_correction: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.beta1 = number(beta1, "LAMB: beta1", low=0, below=1)
        self.beta2 = number(beta2, "LAMB: beta2", low=0, below=1)
        self.epsilon = number(epsilon, "LAMB: epsilon", low=0)
        self.lower_bound = lower_bound
        self.upper_bound = upper_bound
        self.bias_correction = bool(bias_correction)

    def create_state(self, index: Any, weight: NDArray) -> State:
        return zeros_as(weight), zeros_as(weight)

    @one_step
    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        count = self._update_count(index)
        lr, wd = self._rates(index)
        settings = {
            "beta1": self.beta1,
            "beta2": self.beta2,
            "epsilon": self.epsilon,
            "bias_correction": self.bias_correction,
        }
        bounds = {"lower_bound": self.lower_bound or -1.0, "upper_bound": self.upper_bound or -1.0}
        self.apply("lamb_update", weight, grad, *state, lr=lr, wd=wd, t=count, **settings, **bounds, **self._common())

    def state_bytes(self, weight_nbytes: int) -> int:
        return 2 * weight_nbytes


@Optimizer.register
class Adamax(Optimizer):
    """Adam with a decaying maximum of gradient magnitudes in place of the RMS (Kingma and Ba, 2015, section 7).

    Elements whose gradients were always 0 do not change; MXNet 1.9.1 divides 0 by 0 there.
    """

    default_rate: ClassVar[float] = 0.002

    def __init__(
        self, learning_rate: float | None = None, beta1: float = 0.9, beta2: float = 0.999, **kwargs: Any
    ) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.beta1 = number(beta1, "Adamax: beta1", low=0, below=1)
        self.beta2 = number(beta2, "Adamax: beta2", low=0, below=1)

    def create_state(self, index: Any, weight: NDArray) -> State:
        return zeros_as(weight), zeros_as(weight)

    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        count = self._update_count(index)
        lr, wd = self._rates(index)
        g = clipped(grad * self.rescale_grad + weight * wd, self.clip_gradient)
        mean, greatest = state
        mean[:] = mean * self.beta1 + g * (1.0 - self.beta1)
        greatest[:] = nd.maximum(greatest * self.beta2, nd.abs(g))
        weight[:] = weight - mean * (lr / (1.0 - self.beta1**count)) / (greatest + (greatest == 0))

    def state_bytes(self, weight_nbytes: int) -> int:
        return 2 * weight_nbytes


def nadam(
    weight: Any, grad: Any, mean: Any, square: Any, *, lr: Any, wd: Any, beta1: Any, beta2: Any, epsilon: Any,
    of_grad: Any, of_mean: Any, of_root: Any, rescale_grad: Any, clip_gradient: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the new weight and running means.

    ``of_grad``, ``of_mean`` and ``of_root`` multiply the gradient, its mean and the root mean square in the step.
    """
    g = clipped(grad * rescale_grad + weight * wd, clip_gradient)
    mean = mean * beta1 + g * (1.0 - beta1)
    square = square * beta2 + g.square() * (1.0 - beta2)
    ahead = g * of_grad + mean * of_mean
    return weight - ahead * lr / (square.sqrt() * of_root + epsilon), mean, square


@Optimizer.register
class Nadam(Optimizer):
    """Adam with Nesterov's momentum (Dozat, 2016).

    The momentum's schedule goes on with every update of any parameter, as in MXNet 1.9.1.

    Args:
        schedule_decay: how fast the momentum reaches ``beta1``.
    """

    default_rate: ClassVar[float] = 0.001

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        schedule_decay: float = 0.004,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.beta1 = number(beta1, "Nadam: beta1", low=0, below=1)
        self.beta2 = number(beta2, "Nadam: beta2", low=0, below=1)
        self.epsilon = number(epsilon, "Nadam: epsilon", low=0)
        self.schedule_decay = number(schedule_decay, "Nadam: schedule_decay", low=0)
        self.m_schedule = 1.0
        """Product of all momenta so far."""

    def create_state(self, index: Any, weight: NDArray) -> State:
        return zeros_as(weight), zeros_as(weight)

    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:  # in the order of keys
        count = self._update_count(index)
        lr, wd = self._rates(index)
        current, following = (self.beta1 * (1.0 - 0.5 * 0.96 ** (n * self.schedule_decay)) for n in (count, count + 1))
        self.m_schedule *= current
        factors = {
            "of_grad": (1.0 - current) / (1.0 - self.m_schedule),
            "of_mean": following / (1.0 - self.m_schedule * following),
            "of_root": 1.0 / math.sqrt(1.0 - self.beta2**count),
        }
        settings = {"beta1": self.beta1, "beta2": self.beta2, "epsilon": self.epsilon}
        self.apply(nadam, weight, grad, *state, lr=lr, wd=wd, **settings, **factors, **self._common())

    def state_bytes(self, weight_nbytes: int) -> int:
        return 2 * weight_nbytes
