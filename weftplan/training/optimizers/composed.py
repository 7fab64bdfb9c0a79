"""Optimizers composed of array operations: NAG, AdaGrad, GroupAdaGrad, RMSProp, AdaDelta.

A step takes several operations, while SGD and Adam need a single fused operation. All of them are pushed without
waiting.
"""

from __future__ import annotations

from typing import Any, ClassVar

from weftplan import ndarray as nd
from weftplan.errors import ParameterError, ShapeError
from weftplan.ndarray import NDArray
from weftplan.ops.core.schema import DType, Shape
from weftplan.training.keyword_checks import number
from weftplan.training.optimizers.base import Optimizer, State


def zeros_as(weight: NDArray) -> NDArray:
    """Zeros of a weight's shape, dtype and context."""
    array: NDArray = nd.zeros(weight.shape, ctx=weight.context, dtype=weight.dtype)
    return array


def clipped(array: Any, limit: float | None) -> Any:
    """Within [-limit, limit]; None, 0 and negative numbers are no limit."""
    return nd.clip(array, -limit, limit) if limit is not None and limit > 0 else array


@Optimizer.register
class NAG(Optimizer):
    """Nesterov's accelerated gradient: ``d = lr*(g + wd*w); m = momentum*m - d; w += momentum*m - d``.

    In ``m`` MXNet 1.9.1 decays the weight that it has just written, which differs by ``lr * wd`` of a step.
    """

    weight_last = True

    def __init__(self, learning_rate: float | None = None, momentum: float = 0.0, **kwargs: Any) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.momentum = number(momentum, "NAG: momentum", low=0)

    def create_state(self, index: Any, weight: NDArray) -> State:
        return zeros_as(weight) if self.momentum else None

    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        self._update_count(index)
        lr, wd = self._rates(index)
        if state is None:
            nd.sgd_update(weight, grad, out=weight, lr=lr, wd=wd, **self._common())
            return
        step = (clipped(grad * self.rescale_grad, self.clip_gradient) + weight * wd) * lr
        state[:] = state * self.momentum - step
        weight[:] = weight + state * self.momentum - step

    def state_bytes(self, weight_nbytes: int) -> int:
        return weight_nbytes if self.momentum else 0


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

    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        self._update_count(index)
        lr, wd = self._rates(index)
        g = clipped(grad * self.rescale_grad, self.clip_gradient)
        state[:] = state + nd.square(g)
        weight[:] = weight - (g / nd.sqrt(state + self.float_stable_eps) + weight * wd) * lr

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

    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        self._update_count(index)
        lr, wd = self._rates(index)
        g = clipped(grad * self.rescale_grad + weight * wd, self.clip_gradient)
        square = state[0]
        square[:] = square * self.gamma1 + nd.square(g) * (1.0 - self.gamma1)
        if self.centered:
            _, mean, delta = state
            mean[:] = mean * self.gamma1 + g * (1.0 - self.gamma1)
            delta[:] = delta * self.gamma2 - g * lr / nd.sqrt(square - nd.square(mean) + self.epsilon)
            moved = weight + delta
        else:
            moved = weight - g * lr / nd.sqrt(square + self.epsilon)
        weight[:] = clipped(moved, self.clip_weights)

    def state_bytes(self, weight_nbytes: int) -> int:
        return weight_nbytes * (3 if self.centered else 1)


@Optimizer.register
class AdaDelta(Optimizer):
    """Steps in units of the steps so far (Zeiler, 2012); there is no learning rate.

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

    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        self._update_count(index)
        _, wd = self._rates(index)
        g = clipped(grad * self.rescale_grad, self.clip_gradient)
        of_gradients, of_steps = state
        of_gradients[:] = of_gradients * self.rho + nd.square(g) * (1.0 - self.rho)
        step = g * nd.sqrt(of_steps + self.epsilon) / nd.sqrt(of_gradients + self.epsilon)
        of_steps[:] = of_steps * self.rho + nd.square(step) * (1.0 - self.rho)
        weight[:] = weight - step - weight * wd

    def state_bytes(self, weight_nbytes: int) -> int:
        return 2 * weight_nbytes
