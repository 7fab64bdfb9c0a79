"""Compilation of LLVM IR to functions that Python calls, with a cache of object code on disk.

A module is compiled or loaded once per process: the first thread that needs it compiles, and others wait. Functions are
called through :mod:`ctypes`, which lets other Python threads run meanwhile. They take the address of a block of words
and keep no state, so any number of threads may run them concurrently, also in a child after a fork.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weftplan import config
from weftplan.errors import MXNetError
from weftplan.kernels.compiled import ir
from weftplan.kernels.compiled.target import Target, binding, host
from weftplan.locks import Lock, consistent_in_children
from weftplan.support import user_cache

Entry = Callable[[int], None]
"""A compiled function, whose argument is the address of its argument words."""


@dataclass(slots=True)
class CompileCounts:
    """Cost of compilation in this process so far."""

    compiled: int = 0
    """Number of modules compiled."""
    loaded: int = 0
    """Number of modules loaded from the cache."""
    seconds: float = 0.0
    """Seconds spent compiling and loading."""


statistics = CompileCounts()
_lock = consistent_in_children(Lock())
"""Held while a module is compiled or loaded, so that this happens once; guards ``_libraries`` and ``statistics``."""
_libraries: dict[str, dict[str, Entry]] = {}
_owners: list[Any] = []
"""LLVM's owners of the functions' memory, which must live as long as the functions."""


def cache_folder() -> Path | None:
    """Return the folder of the object cache; None if the cache is off or the user has no cache folder."""
    return user_cache.folder("kernels") if config.get("WEFTPLAN_KERNEL_CACHE") else None


def library(
    name: str,
    functions: Callable[[Target], Sequence[ir.Function]],
    entries: Sequence[str],
    target: Target | None = None,
) -> dict[str, Entry]:
    """Return the compiled functions of a module by name; compile or load the module on first use.

    Args:
        name: identifies the module within the process; the object cache identifies it by its text.
        functions: builds the functions of the module for a target.
        entries: names of the functions to return.
        target: processor to compile for (default: this machine's).

    Raises:
        MXNetError: no code can be compiled for this machine.
    """
    if target is None:
        machine = host()
        if isinstance(machine, str):
            raise MXNetError(f"compiled kernels are not available: {machine}")
        target = machine
    label = f"{name}-{target.bits}"
    ready = _libraries.get(label)
    if ready is not None:
        return ready
    with _lock:
        ready = _libraries.get(label)
        if ready is None:
            start = time.perf_counter()
            text = ir.module(functions(target), target.bits)
            ready = _link(label, _object(text, target), entries)
            statistics.seconds += time.perf_counter() - start
            _libraries[label] = ready
    return ready


def _object(text: str, target: Target) -> bytes:
    """Return the object code of a module's IR ``text``, from the cache or newly compiled."""
    folder = cache_folder()
    name = user_cache.key(target.compiler, target.cpu, target.features, text)
    cached = user_cache.load(folder, name)
    if cached is not None:
        statistics.loaded += 1
        return cached
    built = compiled(text, target)
    statistics.compiled += 1
    user_cache.keep(folder, name, built)
    return built


@functools.cache
def _machine(target: Target) -> Any:
    llvm = binding()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=target.cpu, features=target.features, opt=3, reloc="pic", codemodel="small"
    )


def compiled(text: str, target: Target) -> bytes:
    """Return the object code of a module's IR ``text``. Few passes run: the IR is already unrolled and ordered."""
    llvm = binding()
    machine = _machine(target)
    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = options.loop_interleaving = False
    builder = llvm.create_pass_builder(machine, options)
    passes = llvm.create_new_function_pass_manager()
    passes.add_sroa_pass()
    passes.add_simplify_cfg_pass()
    passes.add_instruction_combine_pass()
    passes.add_loop_rotate_pass()
    passes.add_simplify_cfg_pass()
    for function in module.functions:
        if not function.is_declaration:
            passes.run(function, builder)
    content: bytes = machine.emit_object(module)
    return content


@functools.cache
def _linker() -> Any:
    # JITLink allocates one piece of memory for a module. LLVM's older linker allocates each section separately, and
    # aborts the process if a function ends up more than 2 GiB from its constants. JITLink is young on Windows, so the
    # older linker is used there.
    return binding().create_lljit_compiler(_machine_for_linking(), use_jit_link=os.name != "nt")


def _machine_for_linking() -> Any:
    llvm = binding()
    return llvm.Target.from_default_triple().create_target_machine(opt=3, reloc="pic", codemodel="small")


def _link(label: str, content: bytes, entries: Sequence[str]) -> dict[str, Entry]:
    builder = binding().JITLibraryBuilder().add_object_img(content).add_current_process()
    for entry in entries:
        builder.export_symbol(entry)
    tracker = builder.link(_linker(), label)
    _owners.append(tracker)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    return {entry: kind(tracker[entry]) for entry in entries}
