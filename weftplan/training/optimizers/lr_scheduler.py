"""Learning-rate schedules of ``mx.lr_scheduler``: callables from the number of updates to a rate.

A schedule is stateful (it stores its progress). Each optimizer therefore needs its own schedule, used by one thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from weftplan.errors import ParameterError
from weftplan.support.keyword_errors import Constructed, changed_settings
from weftplan.support.package_log import log


class LRScheduler(Constructed):
    """Base: linear or constant warm-up from ``warmup_begin_lr`` to ``base_lr`` over ``warmup_steps`` updates."""

    def __init__(
        self,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0,
        warmup_mode: str = "linear",
    ) -> None:
        if warmup_steps < 0:
            raise ParameterError(f"warmup_steps must be >= 0, got {warmup_steps}")
        if warmup_begin_lr > base_lr:
            raise ParameterError(f"warmup_begin_lr {warmup_begin_lr} must not exceed base_lr {base_lr}")
        if warmup_mode not in ("linear", "constant"):
            raise ParameterError(f"warmup_mode must be 'linear' or 'constant', got {warmup_mode!r}")
        self.base_lr = base_lr
        self.warmup_steps = warmup_steps
        self.warmup_begin_lr = warmup_begin_lr
        self.warmup_final_lr = base_lr
        self.warmup_mode = warmup_mode

    def get_warmup_lr(self, num_update: int) -> float:
        """Return the rate at an update before ``warmup_steps``."""
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        share = num_update / self.warmup_steps
        return self.warmup_begin_lr + (self.warmup_final_lr - self.warmup_begin_lr) * share

    def __call__(self, num_update: int) -> float:
        """Return the rate at update ``num_update`` (counted from 1)."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in changed_settings(self).items())})"
        )

    logged_drops = 0
    """Number of drops of the rate that have been logged."""

    def _log_drop(self, num_update: int, drops: int, rate: float, *, last: bool = False) -> None:
        """Log that the rate has fallen, once for each time."""
        if drops > self.logged_drops:
            if last:
                log.info(
                    "Update[%d]: now learning rate arrived at %0.5e, will not change in the future", num_update, rate
                )
            else:
                log.info("Update[%d]: Change learning rate to %0.5e", num_update, rate)
        self.logged_drops = drops


class FactorScheduler(LRScheduler):
    """Multiply the rate by ``factor`` every ``step`` updates, not below ``stop_factor_lr``.

    >>> schedule = FactorScheduler(step=10, factor=0.5, base_lr=1.0)
    >>> [schedule(n) for n in (1, 11, 21)]
    [1.0, 0.5, 0.25]
    """

    def __init__(
        self, step: int, factor: float = 1.0, stop_factor_lr: float = 1e-8, base_lr: float = 0.01,
        warmup_steps: int = 0, warmup_begin_lr: float = 0.0, warmup_mode: str = "linear",
    ) -> None:  # fmt: skip
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        if step < 1:
            raise ParameterError(f"step must be >= 1, got {step}")
        if factor > 1.0:
            raise ParameterError(f"factor must be <= 1 so that the rate falls, got {factor}")
        self.step = step
        self.factor = factor
        self.stop_factor_lr = stop_factor_lr

    def __call__(self, num_update: int) -> float:
        if num_update < self.warmup_steps:
            return self.get_warmup_lr(num_update)
        drops = max(0, num_update - 1) // self.step
        if not drops:
            return self.base_lr  # also if it starts below the least rate
        rate = self.base_lr * self.factor**drops
        is_last = rate < self.stop_factor_lr
        if not is_last or self.base_lr * self.factor ** (drops - 1) >= self.stop_factor_lr:
            self._log_drop(num_update, drops, max(rate, self.stop_factor_lr), last=is_last)
        return max(rate, self.stop_factor_lr)


class MultiFactorScheduler(LRScheduler):
    """Multiply the rate by ``factor`` after each of the given update numbers."""

    def __init__(
        self, step: Sequence[int], factor: float = 1.0, base_lr: float = 0.01, warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0, warmup_mode: str = "linear",
    ) -> None:  # fmt: skip
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        if not step or any(b <= a for a, b in pairwise(step)) or step[0] < 1:
            raise ParameterError(f"step must be a rising list of numbers >= 1, got {list(step)}")
        if factor > 1.0:
            raise ParameterError(f"factor must be <= 1 so that the rate falls, got {factor}")
        self.step = list(step)
        self.factor = factor

    def __call__(self, num_update: int) -> float:
        if num_update < self.warmup_steps:
            return self.get_warmup_lr(num_update)
        drops = sum(num_update > s for s in self.step)
        rate = self.base_lr * self.factor**drops
        self._log_drop(num_update, drops, rate)
        return rate


class CosineScheduler(LRScheduler):
    """Fall from ``base_lr`` to ``final_lr`` along half a cosine."""

    def __init__(
        self, max_update: int, base_lr: float = 0.01, final_lr: float = 0.0, warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0, warmup_mode: str = "linear",
    ) -> None:  # fmt: skip
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        if max_update < 1:
            raise ParameterError(f"max_update must be >= 1, got {max_update}")
        self.max_update = max_update
        self.final_lr = final_lr

    @property
    def max_steps(self) -> int:
        """Updates after the warm-up; 0 or less if the warm-up takes them all, so that the rate stays ``base_lr``."""
        return self.max_update - self.warmup_steps

    def _share(self, num_update: int) -> float:
        return min(1.0, (num_update - self.warmup_steps) / self.max_steps) if self.max_steps > 0 else 0.0

    def _fall(self, share: float) -> float:
        """Return the part of the way from ``final_lr`` to ``base_lr`` that is left after ``share`` of the updates."""
        return (1 + math.cos(math.pi * share)) / 2

    def __call__(self, num_update: int) -> float:
        if num_update < self.warmup_steps:
            return self.get_warmup_lr(num_update)
        return self.final_lr + (self.base_lr - self.final_lr) * self._fall(self._share(num_update))


class PolyScheduler(CosineScheduler):
    """Fall from ``base_lr`` to ``final_lr`` by a power of the remaining share of ``max_update``."""

    def __init__(
        self, max_update: int, base_lr: float = 0.01, pwr: float = 2, final_lr: float = 0.0, warmup_steps: int = 0,
        warmup_begin_lr: float = 0.0, warmup_mode: str = "linear",
    ) -> None:  # fmt: skip
        super().__init__(max_update, base_lr, final_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.power = pwr

    def _fall(self, share: float) -> float:
        return float((1 - share) ** self.power)
