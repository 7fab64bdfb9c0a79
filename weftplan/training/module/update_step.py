"""The update of a Module's parameters: exchange of the gradients, then the optimizer, in the store or here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from weftplan.kvstore import KVStoreBase, Updater
from weftplan.ndarray import NDArray
from weftplan.training.executor_group import ExecutorGroup


class UpdateStep:
    """The arrays of one update, which are the same at every step.

    Args:
        group: the executors.
        store: exchanges the gradients of their contexts; None: each context is updated by itself.
        numbers: the number of each parameter, from which optimizer indices follow.
        on_store: the store applies the optimizer.
    """

    def __init__(
        self, group: ExecutorGroup, store: KVStoreBase | None, numbers: Mapping[str, int], *, on_store: bool
    ) -> None:
        self.group, self.store, self._numbers = group, store, numbers
        rows = zip(group.param_names, group.grad_arrays, group.param_arrays, strict=True)
        trained = {name: (grads, weights) for name, grads, weights in rows if grads is not None}
        names = [*trained]
        self._exchange: Callable[[], None] | None = None
        buckets: Sequence[Sequence[str]] = [names]
        if store is not None and names:
            grads, weights = [trained[name][0] for name in names], [trained[name][1] for name in names]
            ready_order = [name for name in group.executors[0].gradient_order() if name in trained]
            if store.is_plug_in():
                outs = [{"out": arrays} if on_store else {} for arrays in weights]
                self._exchange = partial(self._exchange_each, names, grads, outs)
            else:
                self._exchange = store.prepare(names, grads, weights if on_store else grads, ready_order)
                buckets = store.buckets(names, ready_order)
        self._buckets = [
            self._bucket(bucket, context, trained)
            for bucket in buckets
            for context in range(len(group.contexts))
            if bucket and not on_store
        ]

    def _bucket(
        self, names: Sequence[str], context: int, trained: Mapping[str, tuple[list[NDArray], list[NDArray]]]
    ) -> tuple[list[int], list[NDArray], list[NDArray]]:
        """Return the (indices, gradients, weights) of a context's parameters that one updater call updates."""
        count = len(self.group.contexts)
        indices = [self._numbers[name] * count + context for name in names]
        grads, weights = ([trained[name][kind][context] for name in names] for kind in (0, 1))
        return indices, grads, weights

    def _exchange_each(
        self, names: Sequence[str], grads: Sequence[list[NDArray]], outs: Sequence[Mapping[str, list[NDArray]]]
    ) -> None:
        """Exchange the gradients of one parameter after another."""
        assert self.store is not None
        for name, values, out in zip(names, grads, outs, strict=True):
            self.store.pushpull(name, values, **out, priority=-self._numbers[name])

    def run(self, updater: Updater | None) -> None:
        """Exchange all gradients in the order in which backward completes them, and update each bucket here when its
        gradients arrive."""
        if self._exchange is not None:
            self._exchange()
        if updater is not None:
            for indices, grads, weights in self._buckets:
                updater(indices, grads, weights)
