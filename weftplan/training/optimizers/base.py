"""Base of optimizers: learning rates, multipliers, update counts, and half precision.

An optimizer owns the update counts of every parameter. Its caller, a store or an updater, owns the states. Updates are
pushed to the engine and return immediately. One thread at a time uses an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from math import prod
from typing import Any, ClassVar, TypeVar

import numpy as np

from weftplan.device.context import Context
from weftplan.errors import ParameterError, ScheduledRateError
from weftplan.kvstore.stages import Stage
from weftplan.ndarray import NDArray
from weftplan.ops.core.floats import is_half
from weftplan.ops.core.schema import DType, Shape
from weftplan.ops.optimizer.fused_update import Rule
from weftplan.support.keyword_errors import Constructed, changed_settings, shown
from weftplan.support.package_log import log
from weftplan.support.rollback import rollback
from weftplan.symbol import Symbol
from weftplan.training.keyword_checks import number
from weftplan.training.optimizers.fused_step import OptimizerStep, can_fuse_on, push_together, stages_of
from weftplan.training.optimizers.lr_scheduler import LRScheduler

State = Any
Update = TypeVar("Update", bound=Callable[..., None])


def _undone_if_it_fails(update: Update) -> Update:
    """Return an ``update`` that gives the optimizer back its fields and the count of the weight if it raises."""

    @wraps(update)
    def call(self: Optimizer, index: object, *args: object, **kwargs: object) -> None:
        fields, counts = vars(self).copy(), self._index_update_count
        indices = index if isinstance(index, (list, tuple)) else (index,)
        counts_before = {i: counts[i] for i in indices if i in counts}
        try:
            update(self, index, *args, **kwargs)
        except BaseException:
            for i in indices:
                counts.pop(i, None)
            counts.update(counts_before)
            vars(self).update(fields)
            raise

    return call  # type: ignore[return-value]


def one_step(update: Update) -> Update:
    """Mark an ``update`` that consists of a single :meth:`Optimizer.apply`, so that updates of many weights can be
    fused into a single operation."""
    update.one_step = True  # type: ignore[attr-defined]
    return update


class Optimizer(Constructed):
    """Base of all optimizers.

    Args:
        rescale_grad: gradients are multiplied by this first (a Module sets 1 / batch size).
        param_idx2name: index -> parameter name.
        wd: weight decay (added to the gradient as ``wd * weight``).
        clip_gradient: clip each rescaled gradient element to [-c, c]; None, 0 or a negative value: do not clip.
        learning_rate: the rate (default: the class's ``default_rate``); with a scheduler, its ``base_lr`` (default: the
            one that it has).
        lr_scheduler: callable from the number of updates to a rate.
        sym: a symbol whose ``__lr_mult__`` and ``__wd_mult__`` attributes count.
        begin_num_update: number of updates already done.
        multi_precision: keep a float32 copy of each float16 weight, and update that.
        param_dict: index -> an object whose ``lr_mult`` and ``wd_mult`` come before all other multipliers.
    """

    default_rate: ClassVar[float] = 0.01
    weight_last: ClassVar[bool] = False
    """Order of a multi-precision state: (state, float32 weight) as MXNet's SGD and NAG have it, not (weight, state)."""
    opt_registry: ClassVar[dict[str, type[Optimizer]]] = {}
    create_optimizer: ClassVar[Callable[..., Optimizer]]
    """:func:`weftplan.optimizer.create`, under the name that MXNet gives it here."""
    _gathered: list[OptimizerStep] | None = None
    """Steps queued to be fused into a single operation."""

    def __init__(
        self,
        rescale_grad: float = 1.0,
        param_idx2name: Mapping[int, str] | None = None,
        wd: float = 0.0,
        clip_gradient: float | None = None,
        learning_rate: float | None = None,
        lr_scheduler: LRScheduler | None = None,
        sym: Symbol | None = None,
        begin_num_update: int = 0,
        multi_precision: bool = False,
        param_dict: Mapping[int, Any] | None = None,
    ) -> None:
        me = type(self).__name__
        if learning_rate is not None:
            number(learning_rate, f"{me}: learning_rate", low=0)
        number(wd, f"{me}: wd", low=0)
        number(rescale_grad, f"{me}: rescale_grad")
        if clip_gradient is not None:
            number(clip_gradient, f"{me}: clip_gradient")
        if lr_scheduler is not None and not callable(lr_scheduler):
            raise ParameterError(f"{me}: lr_scheduler must map an update number to a rate, got {lr_scheduler!r}")
        self.rescale_grad = rescale_grad
        self.lr_scheduler = lr_scheduler
        self.lr = self.default_rate if learning_rate is None else learning_rate
        if lr_scheduler is not None and learning_rate is not None:
            if getattr(lr_scheduler, "base_lr", learning_rate) != learning_rate:
                log.warning("learning_rate=%g replaces base_lr=%g of lr_scheduler", learning_rate, lr_scheduler.base_lr)
            lr_scheduler.base_lr = lr_scheduler.warmup_final_lr = learning_rate
        self.wd = wd
        self.clip_gradient = clip_gradient
        self.begin_num_update = begin_num_update
        self.multi_precision = multi_precision
        self.num_update = begin_num_update
        self.idx2name = dict(param_idx2name or {})
        self.param_dict = param_dict or {}
        self._index_update_count: dict[Any, int] = {}
        attrs = {} if sym is None else sym.attr_dict()
        self._attrs = {} if sym is None else {name: attrs[name] for name in sym.list_arguments() if name in attrs}
        self.lr_mult: dict[Any, float] = {}
        self.wd_mult: dict[Any, float] = {}
        self.set_lr_mult({})
        self.set_wd_mult({})

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "update" in vars(cls):
            cls.update = _undone_if_it_fails(cls.update)  # type: ignore[method-assign]

    def __repr__(self) -> str:
        changed = {"learning_rate": self.lr, **changed_settings(self)}
        if self.lr_scheduler is not None:
            del changed["learning_rate"]
        return f"{type(self).__name__}({shown(changed)})"

    @staticmethod
    def register(klass: type[Optimizer]) -> type[Optimizer]:
        """Class decorator: make ``create(klass.__name__)`` (any case) give an instance."""
        Optimizer.opt_registry[klass.__name__.lower()] = klass
        return klass

    # -- rates ----------------------------------------------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The rate of the next update, before ``lr_mult``."""
        return self.lr if self.lr_scheduler is None else self.lr_scheduler(self.num_update)

    def set_learning_rate(self, lr: float) -> None:
        """Set the rate; with a scheduler it is the scheduler that decides, so this is an error."""
        if self.lr_scheduler is not None:
            raise ScheduledRateError("the learning rate follows lr_scheduler; change the scheduler instead")
        self.lr = lr

    def set_lr_mult(self, args_lr_mult: Mapping[Any, float]) -> None:
        """Multipliers of the rate by name or index; the symbol's ``__lr_mult__`` attributes count first."""
        self.lr_mult = {n: float(a["__lr_mult__"]) for n, a in self._attrs.items() if "__lr_mult__" in a}
        self.lr_mult.update(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Mapping[Any, float]) -> None:
        """Multipliers of weight decay by name or index; 0 for names that end in neither _weight nor _gamma."""
        self.wd_mult = {n: 0.0 for n in self.idx2name.values() if not n.endswith(("_weight", "_gamma"))}
        self.wd_mult.update({n: float(a["__wd_mult__"]) for n, a in self._attrs.items() if "__wd_mult__" in a})
        self.wd_mult.update(args_wd_mult)

    def _multiplier(self, table: Mapping[Any, float], index: Any) -> float:
        if index in self.param_dict:
            multiplier: float = getattr(self.param_dict[index], "lr_mult" if table is self.lr_mult else "wd_mult")
            return multiplier
        if index in table:
            return table[index]
        return table.get(self.idx2name.get(index, index), 1.0)

    def _update_count(self, index: Any) -> int:
        count = self._index_update_count.get(index, self.begin_num_update) + 1
        self._index_update_count[index] = count
        self.num_update = max(self.num_update, count)
        return count

    def _rates(self, index: Any) -> tuple[float, float]:
        """Return (learning rate, weight decay) of one parameter, multipliers included."""
        return self._get_lr(index), self._get_wd(index)

    def _get_lr(self, index: Any) -> float:
        """Return the learning rate of a parameter, for optimizers written for MXNet."""
        return self.learning_rate * self._multiplier(self.lr_mult, index)

    def _get_wd(self, index: Any) -> float:
        """Return the weight decay of a parameter, for optimizers written for MXNet."""
        return self.wd * self._multiplier(self.wd_mult, index)

    def _get_lrs(self, indices: Sequence[Any]) -> list[float]:
        """Return the learning rates of several parameters, for optimizers written for MXNet."""
        return [self._get_lr(index) for index in indices]

    def _get_wds(self, indices: Sequence[Any]) -> list[float]:
        """Return the weight decays of several parameters, for optimizers written for MXNet."""
        return [self._get_wd(index) for index in indices]

    @property
    def sym_info(self) -> tuple[dict[str, dict[str, str]], list[str]]:
        """Attributes of the symbol's arguments, and the arguments that have any; MXNet's name."""
        return self._attrs, list(self._attrs)

    def _common(self) -> dict[str, Any]:
        return {"rescale_grad": self.rescale_grad, "clip_gradient": self.clip_gradient or -1.0}

    # -- what a subclass does -------------------------------------------------------------------------------------

    def create_state(self, index: Any, weight: NDArray) -> State:
        """Create the state of a parameter: None, an array, or a tuple of arrays."""
        return None

    def update(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        """Change ``weight`` (and ``state``) by ``grad``, asynchronously.

        Args:
            index: number or name of the weight, which selects its learning rate and its count of updates.
            weight: changed in place.
            grad: gradient of the weight, before ``rescale_grad``.
            state: the value of :meth:`create_state` for this weight; changed in place.
        """
        raise NotImplementedError

    def create_state_multi_precision(self, index: Any, weight: NDArray) -> State:
        """Create the state of a weight as :meth:`create_state` does.

        With ``multi_precision``, return (float32 weight, its state) for a float16 weight, in the order that
        :attr:`weight_last` defines.
        """
        if not self._in_float32(weight):
            return self.create_state(index, weight)
        master = weight.astype(np.float32)
        inner_state = self.create_state(index, master)
        return (inner_state, master) if self.weight_last else (master, inner_state)

    def update_multi_precision(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None:
        """Update ``weight`` as :meth:`update` does.

        With ``multi_precision``, update the float32 copy of a float16 weight and round it into the weight. If the
        arguments are lists, call :meth:`update_together`.

        Args:
            index: number or name of the weight, which selects its learning rate and its count of updates.
            weight: changed in place.
            grad: gradient of the weight, before ``rescale_grad``.
            state: the value of :meth:`create_state` for this weight; changed in place.
        """
        if isinstance(index, (list, tuple)):
            lists: tuple[Any, ...] = index, weight, grad, state
            self.update_together(*lists)
            return
        if not self._in_float32(weight):
            self.update(index, weight, grad, state)
            return
        inner_state, master = state if self.weight_last else reversed(state)
        self.update(index, master, grad.astype(np.float32), inner_state)
        weight[:] = master

    def update_together(
        self, indices: Sequence[Any], weights: Sequence[NDArray], grads: Sequence[NDArray], states: Sequence[State]
    ) -> None:
        """Update several weights like :meth:`update_multi_precision`. The updates are fused into a single operation if
        each is a single :meth:`apply` on separate arrays.

        :meta private:
        """
        if not self.fuses:
            for index, weight, grad, state in zip(indices, weights, grads, states, strict=True):
                self.update_multi_precision(index, weight, grad, state)
            return
        with rollback(self):
            push_together(self._gather(indices, weights, grads, states))

    @property
    def fuses(self) -> bool:
        """Whether an update is a single :meth:`apply`, so that the updates of many weights can be fused."""
        me = type(self)
        simple = me.update_multi_precision is Optimizer.update_multi_precision
        return simple and bool(getattr(me.update, "one_step", False))

    def fuses_on(self, context: Context) -> bool:
        """Return whether :meth:`fused_steps` may be called with weights on a device."""
        return self.fuses and can_fuse_on(context)

    def fused_steps(
        self, indices: Sequence[Any], weights: Sequence[NDArray], grads: Sequence[NDArray], states: Sequence[State]
    ) -> list[Stage]:
        """Count an update of each weight and return the updates as stages, if :meth:`fuses_on` says so.

        :meta private:
        """
        with rollback(self):
            return stages_of(self._gather(indices, weights, grads, states))

    def _gather(
        self, indices: Sequence[Any], weights: Sequence[NDArray], grads: Sequence[NDArray], states: Sequence[State]
    ) -> list[OptimizerStep]:
        """Count an update of each weight and return the steps, without pushing any."""
        steps: list[OptimizerStep] = []
        self._gathered = steps
        try:
            for index, weight, grad, state in zip(indices, weights, grads, states, strict=True):
                if not self._in_float32(weight):
                    self.update(index, weight, grad, state)
                    continue
                inner_state, master = state if self.weight_last else reversed(state)
                self.update(index, master, grad, inner_state)
                steps[-1] = steps[-1]._replace(narrow=weight)
        finally:
            del self._gathered
        return steps

    def apply(self, rule: Rule, weight: NDArray, grad: NDArray, *states: NDArray, **params: Any) -> None:
        """Push the step of a weight now, or queue it for a fused operation.

        Args:
            rule: the name of an operator ``nd.<rule>(weight, grad, *states, out=weight, **params)``; a
                function ``rule(weight, grad, *states, **params)`` that returns the new weight and the new states, of
                ``+``, ``-``, ``*``, ``/``, ``sqrt``, ``square`` and ``clip`` of arrays and numbers.
            weight, grad, states: the arrays.

        :meta private:
        """
        step = OptimizerStep(rule, (weight, grad, *states), params)
        if self._gathered is None:
            push_together([step])
        else:
            self._gathered.append(step)

    def _in_float32(self, weight: NDArray) -> bool:
        return self.multi_precision and is_half(weight.np_dtype)

    def kept_bytes(self, shape: Shape, dtype: DType) -> int:
        """Return the bytes of everything that :meth:`create_state_multi_precision` makes for a weight of that shape and
        dtype.

        :meta private:
        """
        if not (self.multi_precision and is_half(dtype)):
            return self._shaped_state_bytes(shape, dtype)
        wide = np.dtype(np.float32)
        return prod(shape) * wide.itemsize + self._shaped_state_bytes(shape, wide)

    def _shaped_state_bytes(self, shape: Shape, dtype: DType) -> int:
        """Return the bytes of :meth:`create_state`; overridden if they depend on more than the weight's bytes."""
        return self.state_bytes(prod(shape) * dtype.itemsize)

    def state_bytes(self, weight_nbytes: int) -> int:
        """Return the bytes of :meth:`create_state` for a weight of ``weight_nbytes``, if they depend only on that."""
        return 0
