"""``mx.executor_manager``: the function that scripts for MXNet take from it; modules split batches themselves."""

from typing import NoReturn

from weftplan.data.device_placement import split_by_loads as _split_input_slice

__all__ = ["_split_input_slice"]


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"weftplan has no executor_manager.{name} on purpose: mx.mod.Module splits batches over contexts"
    )
