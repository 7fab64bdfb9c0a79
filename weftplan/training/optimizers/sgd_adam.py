"""``mx.optimizer``: SGD and Adam, with MXNet's rules for rates, weight decay and clipping.

An optimizer updates a weight by asynchronous operations and returns immediately. SGD and Adam use a single fused
operation: ``sgd_update``, ``sgd_mom_update`` or ``adam_update``. ``index`` is the caller's number of a parameter;
``idx2name`` maps it to a name, the key of ``lr_mult`` and ``wd_mult``. As in MXNet, weight decay is off for every
parameter whose name ends in neither ``_weight`` nor ``_gamma``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

from weftplan import ndarray as nd
from weftplan.errors import ParameterError, did_you_mean
from weftplan.kvstore.updater import Updater
from weftplan.ndarray import NDArray
from weftplan.training.keyword_checks import construct, number
from weftplan.training.optimizers.adaptive import FTML, LAMB, Adamax, AdamW, Ftrl, Nadam
from weftplan.training.optimizers.base import Optimizer, State, one_step
from weftplan.training.optimizers.composed import NAG, AdaDelta, AdaGrad, GroupAdaGrad, RMSProp
from weftplan.training.optimizers.descent import DCASGD, LARS, LBSGD, SGLD, Signum

contrib = SimpleNamespace(GroupAdaGrad=GroupAdaGrad)
"""``mx.optimizer.contrib``."""
__all__ = [
    "DCASGD",
    "FTML",
    "LAMB",
    "LARS",
    "LBSGD",
    "NAG",
    "SGD",
    "SGLD",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "GroupAdaGrad",
    "Nadam",
    "Optimizer",
    "RMSProp",
    "Signum",
    "State",
    "Test",
    "Updater",
    "ccSGD",
    "contrib",
    "create",
    "get_updater",
    "register",
]


@Optimizer.register
class SGD(Optimizer):
    """Stochastic gradient descent: ``m = momentum*m - lr*(g + wd*w); w += m``.

    Without momentum: ``w -= lr*(g + wd*w)``. ``lazy_update`` is accepted; it has an effect only on sparse gradients.
    """

    weight_last = True

    def __init__(self, momentum: float = 0.0, lazy_update: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.momentum = number(momentum, "SGD: momentum", low=0)

    def create_state(self, index: Any, weight: NDArray) -> State:
        if self.momentum == 0.0:
            return None
        return nd.zeros(weight.shape, ctx=weight.context, dtype=weight.dtype)

    @one_step
    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        self._update_count(index)
        lr, wd = self._rates(index)
        if state is None:
            self.apply("sgd_update", weight, grad, lr=lr, wd=wd, **self._common())
        else:
            self.apply("sgd_mom_update", weight, grad, state, lr=lr, wd=wd, momentum=self.momentum, **self._common())

    def state_bytes(self, weight_nbytes: int) -> int:
        return weight_nbytes if self.momentum else 0


@Optimizer.register
class ccSGD(SGD):
    """:class:`SGD` by an older name."""


@Optimizer.register
class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015), weight decay added to the gradient; the rate carries the bias correction.

    ``lazy_update`` is accepted: it matters to sparse gradients alone.
    """

    default_rate: ClassVar[float] = 0.001

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        lazy_update: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.beta1 = number(beta1, "Adam: beta1", low=0, below=1)
        self.beta2 = number(beta2, "Adam: beta2", low=0, below=1)
        self.epsilon = number(epsilon, "Adam: epsilon", low=0)

    def create_state(self, index: Any, weight: NDArray) -> State:
        return (
            nd.zeros(weight.shape, ctx=weight.context, dtype=weight.dtype),
            nd.zeros(weight.shape, ctx=weight.context, dtype=weight.dtype),
        )

    @one_step
    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        count = self._update_count(index)
        lr, wd = self._rates(index)
        lr *= math.sqrt(1.0 - self.beta2**count) / (1.0 - self.beta1**count)
        mean, var = state
        self.apply(
            "adam_update",
            weight,
            grad,
            mean,
            var,
            lr=lr,
            wd=wd,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            **self._common(),
        )

    def state_bytes(self, weight_nbytes: int) -> int:
        return 2 * weight_nbytes


@Optimizer.register
class Test(Optimizer):
    """MXNet's optimizer for tests: ``weight += grad * rescale_grad``, state = weight."""

    __test__ = False  # pytest: this is no test class

    def create_state(self, index: Any, weight: NDArray) -> State:
        return nd.zeros(weight.shape, ctx=weight.context, dtype=weight.dtype)

    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        weight += grad * self.rescale_grad
        state[:] = weight

    def state_bytes(self, weight_nbytes: int) -> int:
        return weight_nbytes


def create(name: str | Optimizer, **kwargs: object) -> Optimizer:
    """Return the optimizer of that name (any case): ``create("sgd", learning_rate=0.1, momentum=0.9)``.

    Raises:
        ParameterError: unknown name or setting; the message lists the known ones.
    """
    if isinstance(name, Optimizer):
        return name
    if not isinstance(name, str):
        raise ParameterError(f"an optimizer is a name such as 'sgd', or an Optimizer, got {name!r}")
    klass = Optimizer.opt_registry.get(name.lower())
    if klass is None:
        names = sorted({*Optimizer.opt_registry} - {"test"})
        hint = did_you_mean(name.lower(), names)
        raise ParameterError(f"unknown optimizer {name!r}: {hint}known: {', '.join(names)}")
    return construct(klass, (), kwargs, "optimizer")


register = Optimizer.register
Optimizer.create_optimizer = staticmethod(create)


def get_updater(optimizer: Optimizer) -> Callable[[Any, NDArray, NDArray], None]:
    """An updater that applies ``optimizer`` and keeps its states."""
    return Updater(optimizer)
