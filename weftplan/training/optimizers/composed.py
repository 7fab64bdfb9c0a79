"""Optimizers composed of array operations: NAG, AdaGrad, GroupAdaGrad, RMSProp, AdaDelta.

A step of one weight takes several operations; the steps of many weights are fused into one.
"""

from __future__ import annotations

from typing import Any, ClassVar

from weftplan import ndarray as nd
from weftplan.errors import ParameterError, ShapeError
from weftplan.ndarray import NDArray
from weftplan.ops.core.schema import DType, Shape
from weftplan.training.keyword_checks import number
from weftplan.training.optimizers.base import Optimizer, State, one_step


def zeros_as(weight: NDArray) -> NDArray:
    """Zeros of a weight's shape, dtype and context."""
    array: NDArray = nd.zeros(weight.shape, ctx=weight.context, dtype=weight.dtype)
    return array


def clipped(array: Any, limit: float | None) -> Any:
    """Within [-limit, limit]; None, 0 and negative numbers are no limit."""
    return array.clip(-limit, limit) if limit is not None and limit > 0 else array


def rescaled(grad: Any, rescale_grad: Any, clip_gradient: float | None) -> Any:
    """``grad * rescale_grad``, clipped."""
    return clipped(grad * rescale_grad, clip_gradient)


def nag(
    weight: Any, grad: Any, momenta: Any, *, lr: Any, wd: Any, momentum: Any, rescale_grad: Any, clip_gradient: Any
) -> tuple[Any, ...]:
    """Return the new weight and velocity of Nesterov's descent."""
    step = (rescaled(grad, rescale_grad, clip_gradient) + weight * wd) * lr
    velocity = momenta * momentum - step
    return weight + velocity * momentum - step, velocity


@Optimizer.register
class NAG(Optimizer):
    """Nesterov's accelerated gradient: ``d = lr*(g + wd*w); m = momentum*m - d; w += momentum*m - d``.

    In ``m`` MXNet 1.9.1 decays the weight that it has just written, which differs by ``lr * wd`` of a step.
    """

    weight_last = True

    def __init__(self, momentum: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.momentum = number(momentum, "NAG: momentum", low=0)

    def create_state(self, index: Any, weight: NDArray) -> State:
        return zeros_as(weight) if self.momentum else None

    @one_step
    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        self._update_count(index)
        lr, wd = self._rates(index)
        if state is None:
            self.apply("sgd_update", weight, grad, lr=lr, wd=wd, **self._common())
        else:
            self.apply(nag, weight, grad, state, lr=lr, wd=wd, momentum=self.momentum, **self._common())

    def state_bytes(self, weight_nbytes: int) -> int:
        return weight_nbytes if self.momentum else 0


def adagrad(
    weight: Any, grad: Any, squares: Any, *, lr: Any, wd: Any, eps: Any, rescale_grad: Any, clip_gradient: Any
) -> tuple[Any, ...]:
    """Return the new weight and the new sum of squares."""
    g = rescaled(grad, rescale_grad, clip_gradient)
    total = squares + g.square()
    return weight - (g / (total + eps).sqrt() + weight * wd) * lr, total


@Optimizer.register
class AdaGrad(Optimizer):
    """Each element's rate falls with the squares of its gradients so far (Duchi, Hazan and Singer, 2011).

    ``h += g*g; w -= lr*(g/sqrt(h + eps) + wd*w)``: weight decay is not part of the history.
    """

    def __init__(self, eps: float = 1e-7, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.float_stable_eps = number(eps, "AdaGrad: eps", low=0)

    def create_state(self, index: Any, weight: NDArray) -> State:
        return zeros_as(weight)

    @one_step
    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        self._update_count(index)
        lr, wd = self._rates(index)
        self.apply(adagrad, weight, grad, state, lr=lr, wd=wd, eps=self.float_stable_eps, **self._common())

    def state_bytes(self, weight_nbytes: int) -> int:
        return weight_nbytes


@Optimizer.register
class GroupAdaGrad(Optimizer):
    """:class:`AdaGrad` with one rate for each row of a weight of two dimensions: ``h += mean(g*g) of the row``.

    ``w -= lr*g/sqrt(h + eps)``. Weight decay is refused, as in MXNet 1.9.1.
    """

    def __init__(self, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.float_stable_eps = number(eps, "GroupAdaGrad: eps", low=0)

    def create_state(self, index: Any, weight: NDArray) -> State:
        if len(weight.shape) != 2:
            raise ShapeError(f"GroupAdaGrad: weight {index!r} must have two dimensions, got shape {weight.shape}")
        return nd.zeros((weight.shape[0], 1), ctx=weight.context, dtype=weight.dtype)

    def _shaped_state_bytes(self, shape: Shape, dtype: DType) -> int:
        return shape[0] * dtype.itemsize

    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        self._update_count(index)
        lr, wd = self._rates(index)
        if wd:
            raise ParameterError(f"GroupAdaGrad has no weight decay, got wd={wd:g} for weight {index!r}: pass wd=0")
        g = clipped(grad * self.rescale_grad, self.clip_gradient)
        state[:] = state + nd.mean(nd.square(g), axis=1, keepdims=True)
        weight[:] = weight - g * lr / nd.sqrt(state + self.float_stable_eps)


def rmsprop(
    weight: Any,
    grad: Any,
    square: Any,
    *centered: Any,
    lr: Any,
    wd: Any,
    gamma1: Any,
    gamma2: Any,
    epsilon: Any,
    clip_weights: Any,
    rescale_grad: Any,
    clip_gradient: Any,
) -> tuple[Any, ...]:
    """Return the new weight and mean square; in the centered form also the new mean gradient and step."""
    g = clipped(grad * rescale_grad + weight * wd, clip_gradient)
    square = square * gamma1 + g.square() * (1.0 - gamma1)
    if not centered:
        return clipped(weight - g * lr / (square + epsilon).sqrt(), clip_weights), square
    mean, delta = centered
    mean = mean * gamma1 + g * (1.0 - gamma1)
    delta = delta * gamma2 - g * lr / (square - mean.square() + epsilon).sqrt()
    return clipped(weight + delta, clip_weights), square, mean, delta


@Optimizer.register
class RMSProp(Optimizer):
    """Gradients divided by the root of their running mean square (Tieleman and Hinton, 2012).

    Args:
        gamma1: decay of the mean square (``centered``: and of the mean).
        gamma2: momentum; ``centered`` only.
        epsilon: added under the root.
        centered: divide by the standard deviation instead (Graves, 2013).
        clip_weights: limit of the absolute values of weights; None, 0 and negative numbers are none.
    """

    default_rate: ClassVar[float] = 0.001

    def __init__(
        self,
        learning_rate: float | None = None,
        gamma1: float = 0.9,
        gamma2: float = 0.9,
        epsilon: float = 1e-8,
        centered: bool = False,
        clip_weights: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.gamma1 = number(gamma1, "RMSProp: gamma1", low=0)
        self.gamma2 = number(gamma2, "RMSProp: gamma2", low=0)
        self.epsilon = number(epsilon, "RMSProp: epsilon", low=0)
        self.centered = centered
        self.clip_weights = None if clip_weights is None else number(clip_weights, "RMSProp: clip_weights")

    def create_state(self, index: Any, weight: NDArray) -> State:
        return tuple(zeros_as(weight) for _ in range(3 if self.centered else 1))

    @one_step
    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        self._update_count(index)
        lr, wd = self._rates(index)
        settings = {
            "gamma1": self.gamma1,
            "gamma2": self.gamma2,
            "epsilon": self.epsilon,
            "clip_weights": self.clip_weights,
        }
        self.apply(rmsprop, weight, grad, *state, lr=lr, wd=wd, **settings, **self._common())

    def state_bytes(self, weight_nbytes: int) -> int:
        return weight_nbytes * (3 if self.centered else 1)


def adadelta(
    weight: Any, grad: Any, gradients: Any, steps: Any, *, wd: Any, rho: Any, epsilon: Any, rescale_grad: Any,
    clip_gradient: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the new weight and the new mean squares of gradients and of steps."""
    g = rescaled(grad, rescale_grad, clip_gradient)
    gradients = gradients * rho + g.square() * (1.0 - rho)
    step = g * (steps + epsilon).sqrt() / (gradients + epsilon).sqrt()
    return weight - step - weight * wd, gradients, steps * rho + step.square() * (1.0 - rho)


@Optimizer.register
class AdaDelta(Optimizer):
    """Gradients times the ratio of the RMS of earlier steps to the RMS of gradients (Zeiler, 2012); no learning rate.

    Args:
        rho: decay of both running means.
        epsilon: added under both roots.
    """

    def __init__(self, rho: float = 0.9, epsilon: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rho = number(rho, "AdaDelta: rho", low=0)
        self.epsilon = number(epsilon, "AdaDelta: epsilon", low=0)

    def create_state(self, index: Any, weight: NDArray) -> State:
        return zeros_as(weight), zeros_as(weight)

    @one_step
    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        self._update_count(index)
        _, wd = self._rates(index)
        self.apply(adadelta, weight, grad, *state, wd=wd, rho=self.rho, epsilon=self.epsilon, **self._common())

    def state_bytes(self, weight_nbytes: int) -> int:
        return 2 * weight_nbytes
