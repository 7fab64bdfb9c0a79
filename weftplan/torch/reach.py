"""Copies of everything that a step reaches, with fake tensors in place of tensors.

A step reaches objects through its arguments, closure, defaults, bound object and the globals that its code loads.
Copies share nothing that can change with the originals, so a traced step changes nothing of the caller's. A plain deep
copy would share functions, such as hooks, with their closures, and would lose the hooks of tensors.
"""

from __future__ import annotations

import ast
import dis
import functools
import logging
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weftplan.errors import PlanError
from weftplan.torch.private import OPERATORS, FakeTensor, FakeTensorMode, gradient_hooks, is_compiled

LIBRARY_FOLDERS = ("site-packages", "/lib/python", "dist-packages")
SHARED: tuple[type, ...] = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    type(None),
    type(...),
    type(NotImplemented),
)
SHARED += (bool, int, float, complex, str, bytes, range, torch.dtype, torch.device, torch.layout, torch.memory_format)
SHARED += (logging.Logger, re.Pattern, Path, property, staticmethod, classmethod, ast.AST, np.ufunc)
SHARED += (torch.jit.ScriptFunction,)
"""Types whose instances are shared, because a step does not change them."""
LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}
PARALLEL = ("DistributedDataParallel", "FullyShardedDataParallel")
"""Modules that exchange gradients, or shard parameters, in C++ or by other processes."""


class Replica(torch.nn.Module):  # type: ignore[misc]
    """A module in ``DistributedDataParallel``, as one process sees it: with the buckets of its gradients.

    With ``views`` gradients are views into the buckets after they are accumulated, as with ``gradient_as_bucket_view``.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device, *, views: bool) -> None:
        super().__init__()
        self.module = module
        trained = [p for p in module.parameters() if p.requires_grad]
        sizes = [p.numel() * p.element_size() for p in trained]
        self.communication = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        for p, part in zip(trained, self.communication.split(sizes), strict=True) if views else ():
            p.register_post_accumulate_grad_hook(lambda p, part=part: setattr(p, "grad", part.view(p.dtype).view_as(p)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def no_sync(self) -> Any:
        """Return a context that does nothing; buckets are there in any case."""
        return torch.autograd.profiler.record_function("no_sync")


class Copies:
    """Copies of objects, made once for each original. The originals stay alive as long as this object.

    Args:
        mode: makes the fake tensors.
        device: the device of copies of tensors on ``meta``.
    """

    def __init__(self, mode: FakeTensorMode, device: str = "cpu") -> None:
        self.originals: dict[int, Any] = {}
        """Originals by id; an id is reused when its object dies."""
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.tensors: list[weakref.ref[torch.Tensor]] = []
        """All copied tensors in order. The references are weak, because a step may replace a tensor."""
        self.mode, self._device = mode, torch.device(device)
        self._copies: dict[int, Any] = {}
        self._namespaces: dict[int, dict[str, Any]] = {}

    def forget(self) -> None:
        """Drop the references to copies, so that a tensor which the step replaces dies as in a real run."""
        self._copies.clear()
        self._namespaces.clear()

    def check_devices(self) -> None:
        """Raise PlanError if only some tensors are on ``meta``; a module on ``meta`` may get inputs that are not."""
        tensors = [t for t in self.originals.values() if isinstance(t, torch.Tensor) and t.dim()]
        devices = {t.device.type for t in tensors}
        weights = {t.device.type for t in tensors if isinstance(t, torch.nn.Parameter)}
        if "meta" in devices and len(devices) > 1 and weights != {"meta"}:
            raise PlanError(
                f"the step reaches tensors on two devices, {' and '.join(sorted(devices, reverse=True))}: build all "
                f"parameters on 'meta', or move every tensor to the device that trains"
            )

    def copy(self, value: Any) -> Any:
        """Return the copy of an object.

        Raises:
            PlanError: the object, or an object that it reaches, is compiled or cannot be copied.
        """
        if isinstance(value, SHARED) or type(value).__module__.startswith(OPERATORS):
            return value
        key = id(value)
        if key not in self._copies:
            self.originals[key] = value
            copied = self._new(value)
            self._copies.setdefault(key, copied)
        return self._copies[key]

    def _new(self, value: Any) -> Any:
        kind = type(value)
        if is_compiled(value):
            raise PlanError(
                "the step reaches a compiled function or module: pass the function or module itself, because compiled "
                "kernels allocate otherwise"
            )
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self.copy(value.__func__), self.copy(value.__self__))
        if isinstance(value, weakref.ref):
            target = value()
            return value if target is None else kind(self.copy(target))
        if kind is dict or kind is list or kind is set:
            container: Any = kind()
            self._copies[id(value)] = container
            if kind is dict:
                container.update((self.copy(k), self.copy(v)) for k, v in list(value.items()))
            else:
                (container.extend if kind is list else container.update)(map(self.copy, list(value)))
            return container
        if kind is tuple:
            return tuple(map(self.copy, value))
        if kind.__name__ in PARALLEL and isinstance(value, torch.nn.Module):
            return self._replica(value)
        return self._object(value)

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, FakeTensor):
            raise PlanError("the step reaches a fake tensor: build the model outside FakeTensorMode, or on 'meta'")
        if value.layout is not torch.strided or value.is_quantized:
            raise PlanError(
                f"the step reaches a tensor of shape {tuple(value.shape)} that is sparse or quantized, which cannot be "
                f"traced without its values: make it inside the step"
            )
        with torch.no_grad():
            if value.is_meta:
                with self.mode:
                    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self._device)
                fake = torch.nn.Parameter(fake, value.requires_grad) if isinstance(value, torch.nn.Parameter) else fake
            else:
                fake = self.mode.from_tensor(value, static_shapes=True)
        if value.is_meta and value.is_leaf:
            fake.requires_grad_(value.requires_grad)
        # Host scalars keep their value, because optimizers read their step counts.
        if value.dim() == 0 and value.is_cpu and not value.requires_grad:
            fake.constant = value.detach().clone()
        self._copies[id(value)] = fake
        self.tensors.append(weakref.ref(fake))
        if value.is_leaf and value.grad is not None:
            fake.grad = self.copy(value.grad)
        before, after = gradient_hooks(value)
        for hook in before:
            fake.register_hook(self.copy(hook))
        for hook in after:
            fake.register_post_accumulate_grad_hook(self.copy(hook))
        for name, attribute in vars(value).items():
            setattr(fake, name, self.copy(attribute))
        return fake

    def _function(self, value: types.FunctionType) -> Any:
        own = not any(folder in value.__code__.co_filename for folder in LIBRARY_FOLDERS)
        reached = (
            {n: value.__globals__[n] for n in global_names(value.__code__) if n in value.__globals__} if own else {}
        )
        state = (
            (value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__)
            if own
            else (value.__closure__,)
        )
        if not (reached or any(state)):
            return value
        space = value.__globals__
        if own:
            space = self._namespaces.setdefault(id(space), dict(space))
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        copied = types.FunctionType(value.__code__, space, value.__name__, None, cells or None)
        self._copies[id(value)] = copied
        copied.__kwdefaults__, copied.__defaults__ = self.copy(value.__kwdefaults__), self.copy(value.__defaults__)
        copied.__qualname__, copied.__module__ = value.__qualname__, value.__module__
        copied.__dict__.update(self.copy(value.__dict__))
        for name, target in reached.items():
            space[name] = self.copy(target)
        for cell, original in zip(cells, value.__closure__ or (), strict=True):
            try:
                cell.cell_contents = self.copy(original.cell_contents)
            except ValueError:
                continue  # the variable has no value yet
        return copied

    def _replica(self, value: torch.nn.Module) -> torch.nn.Module:
        if type(value).__name__ != "DistributedDataParallel":
            raise PlanError(f"{type(value).__name__} cannot be copied: pass the module that it shards")
        device = next(value.parameters()).device
        with self.mode:
            replica = Replica(self.copy(value.module), device, views=value.gradient_as_bucket_view)
        replica.training = value.training
        self.modules.append(replica)
        return replica

    def _object(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, torch.nn.Module) and any("DTensor" in type(p).__name__ for p in value.parameters()):
            raise PlanError(
                f"{kind.__name__} is sharded over processes (its parameters are DTensors): pass the module before "
                f"fully_shard, and divide its parameters, gradients and states by the number of processes"
            )
        whole = isinstance(value, torch.nn.Module | torch.optim.Optimizer)
        if kind in LOCKS:
            return LOCKS[kind]()
        if isinstance(value, functools.partial):
            return functools.partial(self.copy(value.func), *self.copy(value.args), **self.copy(value.keywords))
        if whole or _is_plain(kind):
            try:
                self._copies[id(value)] = copied = object.__new__(kind)
            except TypeError as error:
                raise _cannot_copy(value, error) from error
            for name, attribute in self._attributes(value):
                _set(copied, name, self.copy(attribute))
            if isinstance(value, torch.nn.Module):
                self.modules.append(copied)
            if isinstance(value, torch.optim.Optimizer):
                self.optimizers.append(copied)
            return copied
        return self._reduced(value)

    def _attributes(self, value: Any) -> Iterator[tuple[str, Any]]:
        yield from list(vars(value).items()) if hasattr(value, "__dict__") else ()
        for slot in (s for cls in type(value).__mro__ for s in _slots(cls)):
            if slot != "__weakref__" and slot != "__dict__" and hasattr(value, slot):
                yield slot, getattr(value, slot)

    def _reduced(self, value: Any) -> Any:
        """Return the copy of an object of an extension type or with its own pickling, by its own description."""
        try:
            if hasattr(value, "__deepcopy__"):
                return value.__deepcopy__({})
            made: Any = value.__reduce_ex__(4)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise _cannot_copy(value, error) from error
        if isinstance(made, str):
            return value  # a singleton, found by its name
        make, args, state, items, pairs = (*made, None, None, None)[:5]
        self._copies[id(value)] = copied = make(*map(self.copy, args))
        if state is not None:
            state = self.copy(state)
            if hasattr(copied, "__setstate__"):
                copied.__setstate__(state)
            else:
                vars(copied).update(state[0] or {} if isinstance(state, tuple) else state)
                for name, attribute in (state[1] or {}).items() if isinstance(state, tuple) else ():
                    _set(copied, name, attribute)
        for item in items or ():
            copied.append(self.copy(item))
        for key, item in pairs or ():
            copied[self.copy(key)] = self.copy(item)
        return copied


def _cannot_copy(value: object, error: Exception) -> PlanError:
    """Return the error for an object that a traced step cannot have a copy of."""
    return PlanError(
        f"the step reaches something that cannot be copied ({type(value).__name__}: {error}): pass the module, the "
        f"optimizer and tensors as arguments, and keep loaders, generators, locks and files out of the step"
    )


def _is_plain(kind: type) -> bool:
    """Return whether instances of a type are their attributes only, made and described as ``object`` does."""
    same = all(
        getattr(kind, name) is getattr(object, name)
        for name in ("__new__", "__reduce_ex__", "__reduce__", "__getstate__")
    )
    return same and not hasattr(kind, "__deepcopy__")


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _set(target: Any, name: str, value: Any) -> None:
    """Set an attribute without the checks of a module or of a frozen class."""
    if hasattr(target, "__dict__") and not isinstance(getattr(type(target), name, None), types.MemberDescriptorType):
        vars(target)[name] = value
    else:
        object.__setattr__(target, name, value)


@functools.lru_cache(maxsize=1024)
def global_names(code: types.CodeType) -> frozenset[str]:
    """Return the global names that a function's code, or a function inside it, loads; attributes are not among them."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(names.union(*map(global_names, inner)))


def reached_tensors(function: Callable[..., Any], args: Any) -> list[torch.Tensor]:
    """Return all tensors that a function and its arguments reach, without the states of optimizers."""
    copies = _Tensors(FakeTensorMode())
    copies.copy((function, args))
    return [t for t in copies.originals.values() if isinstance(t, torch.Tensor)]


class _Tensors(Copies):
    """Copies that only serve to find tensors; optimizers are left out."""

    def _new(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor | torch.optim.Optimizer) or is_compiled(value):
            return value
        try:
            return super()._new(value)
        except PlanError:
            return value  # a loader, lock or file, which owns no tensors
