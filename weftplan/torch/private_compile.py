"""Private names of PyTorch that compiled steps use: dynamo, AOTAutograd and inductor; tests fail if they change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

from torch._dynamo import config as tracing_config
from torch._dynamo import exc as _errors
from torch._dynamo.backends.common import aot_autograd as aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.utils import counters as counters
from torch._functorch import config as _functorch_config
from torch._functorch import partitioners as _partitioners
from torch._inductor import custom_graph_pass as _passes
from torch._prims.rng_prims import run_and_save_rng_state as run_and_save_rng_state
from torch._prims.rng_prims import run_with_rng_state as run_with_rng_state

BackendCompilerFailed, TracingFailed = _errors.BackendCompilerFailed, _errors.TorchDynamoException
RecompileLimit = _errors.FailOnRecompileLimitHit
CustomPartitionerFn = _passes.CustomPartitionerFn
autograd_config, eager = _functorch_config, boxed_nop
classify_nodes, default_partition = _partitioners.classify_nodes, _partitioners.default_partition
extract_modules, is_tangent = _partitioners._extract_fwd_bwd_modules, _partitioners._is_tangent
LOGGING = (logging.Logger.debug, logging.Logger.info, logging.Logger.warning, logging.Logger.error)
"""Functions that a traced step may skip, since they compute nothing."""


def tracing_options(shapes: int) -> Any:
    """Return a context that lets dynamo trace a function for up to ``shapes`` shapes and raises for the next."""
    quiet = {*LOGGING, *(f for n, f in vars(logging.Logger).items() if n.endswith("_once"))}
    return tracing_config.patch(
        recompile_limit=shapes,
        accumulated_recompile_limit=max(256, 4 * shapes),
        fail_on_recompile_limit_hit=True,
        allow_rnn=True,
        ignore_logging_functions=tracing_config.ignore_logging_functions | quiet,
    )


def skipped_frames() -> int:
    """Return the number of frames that dynamo has skipped in this process, because they cannot be traced."""
    return int(counters["frames"]["total"] - counters["frames"]["ok"])


def break_reasons() -> list[str]:
    """Return why dynamo has broken graphs in this process, the first line of each reason."""
    return [str(reason).strip().splitlines()[0] for reason in counters["graph_break"]]


def free_attributes(module: Any) -> None:
    """Let attributes of the context of a custom Function die after their last use in backward, as the plan does.

    AOTAutograd saves them without a check of versions, and then keeps them to the end of the backward pass.
    """
    for node in module.graph.nodes:
        node.meta.pop("saved_tensor_with_no_vc_check", None)


@contextmanager
def fused_peaks(scratch: Callable[[], dict[str, int]]) -> Iterator[list[int]]:
    """Yield a list that gets the bytes alive at each node that inductor schedules, with scratch, without parameters."""
    memory, peaks = import_module("torch._inductor.memory"), list[int]()
    reorder = memory.reorder_for_peak_memory

    def watched(nodes: Any, buffers: Any, fused: Any, inputs: Any, outputs: Any) -> Any:
        order, inside = reorder(nodes, buffers, fused, inputs, outputs), scratch()
        alive = memory.estimate_peak_memory(order, memory.get_freeable_input_buf(order, inputs), outputs)[1]
        for node, nbytes in zip(order, alive, strict=False):
            origins = [origin for part in node.get_nodes() for origin in getattr(part.node, "origins", ())]
            peaks.append(nbytes + max((inside.get(str(origin.target), 0) for origin in origins), default=0))
        return order

    with mock.patch.object(memory, "reorder_for_peak_memory", watched):
        yield peaks


def inductor() -> Any:
    """Import and return the module with inductor's ``compile_fx``, ``compile_fx_inner`` and ``config``; slow."""
    return import_module("torch._inductor.compile_fx")
