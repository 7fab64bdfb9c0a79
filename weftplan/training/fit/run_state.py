"""Gathering and restoring training state: module, optimizer, metric and random-number state.

Equal state gives equal bits. The state is: parameters, the auxiliary states of every context, the optimizer with its
states, residuals of gradient compression, metrics, the iterator's position, and random-number generators. Gathering
pushes copies without waiting, so training continues while another thread writes them. Gathering and restoring run on
the training thread.

A learning-rate scheduler is part of the optimizer's attributes.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random as python_random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from weftplan import ndarray as nd
from weftplan.errors import FormatError, MXNetError
from weftplan.ndarray import NDArray, random
from weftplan.support.array_types import RawArray
from weftplan.symbol.symbol import Symbol
from weftplan.training.fit.fit_module import TrainedModule
from weftplan.training.fit.state_values import StatePacker, restore, unpacked
from weftplan.training.metrics.base import EvalMetric
from weftplan.training.optimizers.base import Optimizer

Plain = dict[str, Any]

_NO_PROGRESS = frozenset({"idx2name", "_attrs", "lr_mult", "wd_mult"})
"""Attributes of an optimizer that are derived from the network."""
_NOTHING = "not there"
_NO_SETTING = frozenset({"self", "kwargs", "param_idx2name", "sym", "begin_num_update", "lr_scheduler"})


def settings_of(module: TrainedModule, optimizer: Optimizer, fitting: Mapping[str, object]) -> Plain:
    """Collect the settings that determine the bits of a run, as plain values under user-facing names.

    Args:
        module: bound Module that owns the parameters, with its optimizer.
        optimizer: optimizer of the module.
        fitting: further settings, from ``fit`` itself.
    """
    store = module._kvstore
    settings: Plain = {
        "network": network_digest(module.symbol),
        "data shapes": [[desc.name, *desc.shape, np.dtype(desc.dtype).name] for desc in module.data_shapes],
        "devices": [str(ctx) for ctx in module.contexts],
        "kvstore": None if store is None else store.type,
        "compression": dict(module._compression_params or {}) or None,
        "fixed_param_names": sorted(module.fixed_param_names),
        "optimizer": type(optimizer).__name__,
    }
    names = {
        name
        for klass in type(optimizer).__mro__
        if "__init__" in vars(klass)
        for name in inspect.signature(vars(klass)["__init__"]).parameters
    }
    for name in sorted((names | {"lr"}) - _NO_SETTING):
        value = getattr(optimizer, name, None)
        if value is None or isinstance(value, (bool, int, float, str)):
            settings[f"optimizer.{'learning_rate' if name == 'lr' else name}"] = value
    settings.pop("optimizer.learning_rate", None)
    scheduler = optimizer.lr_scheduler
    if scheduler is None:
        settings["optimizer.learning_rate"] = optimizer.lr
    else:
        settings["optimizer.lr_scheduler"] = type(scheduler).__name__
        for name, value in sorted(vars(scheduler).items()):
            if isinstance(value, (bool, int, float, str, list)) and name != "logged_drops":
                settings[f"lr_scheduler.{name}"] = value
    for table in ("lr_mult", "wd_mult"):
        settings[f"optimizer.{table}"] = {str(key): float(value) for key, value in getattr(optimizer, table).items()}
    plain: Plain = json.loads(json.dumps({**settings, **fitting}, default=str))
    return plain


def network_digest(symbol: Symbol) -> str:
    """Hash a network's nodes: their operators, names, settings and connections."""
    nodes = json.loads(symbol.tojson())
    text = json.dumps([nodes.get("nodes"), nodes.get("heads")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(saved: Mapping[str, object], current: Mapping[str, object]) -> list[str]:
    """Describe each difference between two settings in a line.

    >>> differences({"optimizer.learning_rate": 0.1, "batch": 8}, {"optimizer.learning_rate": 0.2, "batch": 8})
    ['optimizer.learning_rate was 0.1, is now 0.2']
    """
    return [
        f"{name} was {saved.get(name, _NOTHING)!r}, is now {current.get(name, _NOTHING)!r}"
        for name in changed_names(saved, current)
    ]


def changed_names(saved: Mapping[str, object], current: Mapping[str, object]) -> list[str]:
    """Return the names of the settings that differ."""
    return [name for name in sorted({*saved, *current}) if saved.get(name, _NOTHING) != current.get(name, _NOTHING)]


def attributes_behind(names: Iterable[str], optimizer: Optimizer) -> list[str]:
    """Return the optimizer attributes from which these settings were derived.

    >>> attributes_behind(["network", "optimizer.learning_rate", "optimizer.wd"], Optimizer())
    ['lr', 'wd']
    """
    attributes = []
    for name in names:
        owner, _, attribute = name.partition(".")
        if owner == "lr_scheduler":
            attribute = owner
        elif owner != "optimizer":
            continue
        attributes.append("lr" if attribute == "learning_rate" else attribute)
    return [name for name in dict.fromkeys(attributes) if hasattr(optimizer, name)]


def listed_under(head: str, lines: Sequence[str]) -> str:
    """Format a heading and indented lines as a message."""
    return "\n  ".join([f"{head}:", *lines])


def gather_module(module: TrainedModule, packer: StatePacker) -> tuple[Plain, dict[str, NDArray], dict[str, NDArray]]:
    """Gather (state, parameters, auxiliary states) of the Module that owns the parameters; arrays are host copies."""
    args, aux = module.get_params()
    state: Plain = {}
    if module.apart:  # save each context's arrays, here and below, because get_params returns only their average
        state["args"] = packer.value(dict(zip(module.param_names, module.group.param_arrays, strict=True)))
    if len(module.contexts) > 1 and module.aux_names:
        state["aux"] = packer.value(dict(zip(module.aux_names, module.group.aux_arrays, strict=True)))
    if module.state_names:
        state["states"] = packer.value(dict(zip(module.state_names, module.group.state_arrays, strict=True)))
    holder = module._states_holder()
    state["optimizer_states"] = packer.value(holder.states)
    state["optimizer"] = packer.attributes(holder.optimizer, _NO_PROGRESS)
    residuals = getattr(getattr(module._kvstore, "residuals", None), "arrays", None)
    if residuals:
        state["residuals"] = packer.value(residuals)
    return state, args, aux


def restore_module(
    module: TrainedModule,
    state: Plain,
    arrays: Mapping[str, RawArray],
    args: Mapping[str, NDArray],
    aux: Mapping[str, NDArray],
    keep: Mapping[str, object],
) -> None:
    """Restore a module from :func:`gather_module`; ``keep`` overrides attributes of the saved optimizer."""
    module.set_params(dict(args), dict(aux))
    for key, names, targets in (
        ("args", module.param_names, module.group.param_arrays),
        ("aux", module.aux_names, module.group.aux_arrays),
        ("states", module.state_names, module.group.state_arrays),
    ):
        if key in state:
            values = unpacked(state[key], arrays)
            for name, parts in zip(names, targets, strict=True):
                for part, value in zip(parts, values[name], strict=True):
                    value.copyto(part)
    holder = module._states_holder()
    holder.replace_states(unpacked(state["optimizer_states"], arrays))
    restore(holder.optimizer, state["optimizer"], arrays)
    for name, value in keep.items():
        setattr(holder.optimizer, name, value)
    if "residuals" in state:
        set_residuals = getattr(module._kvstore, "set_residuals", None)
        if set_residuals is None:
            raise MXNetError("the checkpoint is of a kvstore that compresses gradients; this one does not")
        set_residuals(unpacked(state["residuals"], arrays))


def random_states() -> dict[str, object]:
    """Return the states of all random generators: the package's, Python's and NumPy's."""
    return {
        "weftplan": random.get_state(),
        "python": python_random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 - a program may use it
    }


def gather_random(states: Mapping[str, object], packer: StatePacker) -> Plain:
    """Serialize the result of :func:`random_states`."""
    return {name: packer.value(state) for name, state in states.items()}


def restore_random(state: Plain, arrays: Mapping[str, RawArray]) -> None:
    """Restore the random generators from :func:`gather_random`."""
    setters: dict[str, Callable[[Any], object]] = {
        "weftplan": random.set_state,
        "python": python_random.setstate,
        "numpy": np.random.set_state,
    }
    for name, value in state.items():
        setters[name](unpacked(value, arrays))


def gather_metric(metric: EvalMetric, packer: StatePacker) -> Plain:
    """Serialize a metric's counts, including those of its component metrics."""
    return packer.attributes(metric)


def restore_metric(metric: EvalMetric, state: Plain, arrays: Mapping[str, RawArray]) -> None:
    """Restore a metric from :func:`gather_metric`."""
    restore(metric, state, arrays)


def wrong_parameters(module: TrainedModule, args: Mapping[str, NDArray], aux: Mapping[str, NDArray]) -> list[str]:
    """Describe each mismatch between saved parameters and a module in a line."""
    group = module.group
    wanted = {n: tuple(a[0].shape) for n, a in zip(module.param_names, group.param_arrays, strict=True)}
    wanted.update({n: tuple(a[0].shape) for n, a in zip(module.aux_names, group.aux_arrays, strict=True)})
    shapes = {name: tuple(value.shape) for name, value in {**args, **aux}.items()}
    lines = [f"the checkpoint has no {name} {wanted[name]}" for name in sorted(wanted.keys() - shapes.keys())]
    lines += [f"the network has no {name} {shapes[name]}" for name in sorted(shapes.keys() - wanted.keys())]
    lines += [
        f"{name} has shape {shapes[name]} in the checkpoint, {wanted[name]} in the network"
        for name in sorted(wanted.keys() & shapes.keys())
        if wanted[name] != shapes[name]
    ]
    return lines


def as_arrays(raw: Mapping[str, RawArray], names: set[str]) -> dict[str, NDArray]:
    """Return these arrays of a file as NDArrays; raises FormatError if any is missing."""
    lost = sorted(names - raw.keys())
    if lost:
        raise FormatError(f"damaged: the arrays {lost} are missing")
    return {name: nd.array(raw[name], dtype=raw[name].dtype) for name in sorted(names)}
