"""Choice of kvstore and optimizer for a Module, and of where updates run.

The decision depends on the number of devices and the largest parameter. It is made once, when a module's optimizer is
set up. The functions are stateless.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weftplan import config, kvstore
from weftplan.errors import KVStoreError, ParameterError
from weftplan.kvstore import KVStoreBase
from weftplan.kvstore.keys import Key
from weftplan.ndarray import NDArray
from weftplan.support.package_log import log
from weftplan.symbol import Symbol
from weftplan.training.optimizers import sgd_adam as optimizers

BIG_PARAMETER = 16 * 1024 * 1024
"""With kvstore ``local``, a network with a larger parameter (elements) is updated on the devices, as in MXNet."""


def choose_store(spec: str | KVStoreBase | None, *, contexts: int, largest: int) -> tuple[KVStoreBase | None, bool]:
    """Choose the store: (store or None, whether the store applies the optimizer).

    Args:
        spec: None, a name, or a store. With a single context and a single worker, a name gives no store.
        contexts: number of contexts of the module.
        largest: elements of its largest parameter.

    Raises:
        KVStoreError: an unknown name, or something that is no store.
    """
    if spec is None:
        return None, False
    on_store = True
    if isinstance(spec, str):
        store = kvstore.create(spec)  # an unknown name is an error with one context too
        if contexts == 1 and "dist" not in spec:
            return None, False
        if spec == "local":
            on_store = largest <= BIG_PARAMETER
    elif isinstance(spec, KVStoreBase):
        store = spec
    else:
        raise KVStoreError(f"kvstore must be a name such as 'device', a store or None, got {spec!r}")
    return store, on_store and bool(config.get("MXNET_UPDATE_ON_KVSTORE")) and store.is_capable("optimizer")


def compress(store: KVStoreBase, settings: Mapping[str, object]) -> None:
    """Let ``store`` compress gradients; raises KVStoreError if it cannot."""
    switch = getattr(store, "set_gradient_compression", None)
    if switch is None:
        raise KVStoreError(f"compression_params: {store!r} does not compress gradients")
    switch(settings)


def first_values(
    store: KVStoreBase,
    names: Sequence[str],
    arrays: Sequence[Sequence[NDArray]],
    trained: Sequence[bool],
    *,
    on_store: bool,
) -> None:
    """Give a store the values of the parameters: those that are trained, or all as MXNet does for a plug-in store."""
    plug_in = store.is_plug_in()
    for index, (name, copies) in enumerate(zip(names, arrays, strict=True)):
        if not plug_in and trained[index]:
            store.broadcast(name, copies[0], copies, -index)
        elif plug_in and (on_store or type(store).init is KVStoreBase.init):
            store.broadcast(name, copies[0].copy(), out=copies)
        elif plug_in:
            store.init(name, copies[0].copy())


def choose_optimizer(
    optimizer: str | optimizers.Optimizer,
    settings: Mapping[str, object] | Iterable[tuple[str, object]],
    *,
    symbol: Symbol,
    names: Mapping[Key, str],
    batch_size: int,
) -> optimizers.Optimizer:
    """Return the optimizer of a module: the given optimizer, or a new optimizer by name.

    Args:
        optimizer: a name, or an optimizer.
        settings: keyword arguments of a new optimizer; ``rescale_grad`` defaults to 1 / ``batch_size``.
        symbol: the network, whose attributes hold multipliers.
        names: optimizer index -> parameter name.
        batch_size: samples over which gradients are summed.

    Raises:
        ParameterError: an unknown name or setting, or settings that are no keyword arguments.
    """
    rescale = 1.0 / batch_size
    if not isinstance(optimizer, optimizers.Optimizer):
        try:
            named: dict[str, Any] = dict(settings)
        except (TypeError, ValueError):
            raise ParameterError(
                f"optimizer_params must be a dictionary such as {{'learning_rate': 0.1}}, got {settings!r}"
            ) from None
        named.setdefault("rescale_grad", rescale)
        return optimizers.create(optimizer, sym=symbol, param_idx2name=names, **named)
    if not optimizer.idx2name:  # so that its multipliers are found by name
        by_index: Any = names  # by name if the store updates
        optimizer.idx2name = dict(by_index)
    if optimizer.rescale_grad != rescale:
        log.warning(
            "the optimizer was made with rescale_grad=%g: gradients are summed over a batch of %d samples, so 1 / "
            "batch size = %g would make the learning rate independent of it",
            *(optimizer.rescale_grad, batch_size, rescale),
        )
    return optimizer
