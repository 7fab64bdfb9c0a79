"""Autotuning: the fastest implementation for a call, measured once and cached on disk.

``MXNET_CUDNN_AUTOTUNE_DEFAULT`` and ``cudnn_tune`` of a convolution switch it on. Implementations run alternately on
arrays of the call's shapes, and the shortest time of each counts. Times are cached by operator, parameters, shapes,
dtypes, processor and versions: in this process, and in a file that later processes read, so that they choose alike. If
no file can be written, each process measures for itself.

Measuring temporarily allocates the arrays of one call, which no memory plan counts. Any thread may call
:func:`tuned`; while one thread measures, the others wait.

The planner chooses an implementation in ``planner/symbolic/node_scratch.py`` and calls this module only if the user
has switched autotuning on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable

import numpy as np

from weftplan import config
from weftplan.locks import Lock, consistent_in_children
from weftplan.ops.core import tiling
from weftplan.ops.core.implementations import Implementation, KernelChoice, Specs, compiler, numpy_of, provided
from weftplan.ops.core.schema import Op, OpContext, Params
from weftplan.support import user_cache

OFF, LIMITED, FASTEST = 0, 1, 2
"""Values of MXNET_CUDNN_AUTOTUNE_DEFAULT: no measurement, the fastest within the workspace limit, the fastest."""
BY_NAME = {"off": OFF, "limited_workspace": LIMITED, "fastest": FASTEST}
"""The same values by their names in the parameter ``cudnn_tune`` of a convolution."""
MAX_SECONDS = 0.3
"""Seconds after which the measurement of a call stops; each implementation is timed at least twice."""

_lock = consistent_in_children(Lock())
"""Held during a measurement, so that measurements do not disturb each other; guards ``_cached``."""
_cached: dict[str, dict[str, float]] = {}


def tuned(op: Op, params: Params, inputs: Specs, outputs: Specs, *, tune: int, heuristic: KernelChoice) -> KernelChoice:
    """Return the fastest implementation for a call on a host.

    Args:
        tune: one of :data:`OFF`, :data:`LIMITED` and :data:`FASTEST`; the node's own ``cudnn_tune`` takes precedence.
        heuristic: the heuristic's choice, returned if tuning is off or only one implementation can run the call.
    """
    tune = BY_NAME.get(params.get("cudnn_tune") or "", tune)
    if tune == OFF:
        return heuristic
    choices = [numpy_of(op)]
    candidate = provided().get(op.name)
    while candidate is not None:
        if not candidate.refusal(params, inputs, outputs):
            choices.append(candidate)
        candidate = candidate.otherwise
    if len(choices) == 1:
        return heuristic
    if tune == LIMITED and "workspace" in params:
        limit = params["workspace"] << 20
        fitting = [choice for choice in choices if choice.workspace(params, inputs, outputs) <= limit]
        choices = fitting or choices
    if len(choices) == 1:
        return KernelChoice(choices[0], "alone within the workspace limit", several=True)
    seconds = times(op, params, inputs, outputs, choices=choices)
    best = min(choices, key=lambda choice: seconds[choice.name])
    return KernelChoice(best, "measured", several=True)


def times(op: Op, params: Params, inputs: Specs, outputs: Specs, *, choices: list[Implementation]) -> dict[str, float]:
    """Return the seconds of one call of each implementation, by name; measure them if they are not cached."""
    name = _key(op, params, inputs, outputs)
    with _lock:
        seconds = _cached.get(name)
        if seconds is None:
            folder = user_cache.folder("kernels") if config.get("WEFTPLAN_KERNEL_CACHE") else None
            seconds = _read(user_cache.load(folder, name), choices)
            if seconds is None:
                seconds = _measured(op, params, inputs, outputs, choices=choices)
                user_cache.keep(folder, name, json.dumps(seconds).encode())
            _cached[name] = seconds
    return seconds


def _key(op: Op, params: Params, inputs: Specs, outputs: Specs) -> str:
    settings = sorted((name, repr(value)) for name, value in params.items() if name not in ("cudnn_tune", "workspace"))
    specs = [(spec.shape, str(spec.dtype)) for spec in (*inputs, *outputs)]
    return user_cache.key("time 2", repr(compiler()), np.__version__, op.name, repr(settings), repr(specs))


def _read(content: bytes | None, choices: list[Implementation]) -> dict[str, float] | None:
    """Return the times in a cache file; None without content or if it is malformed."""
    if content is None:
        return None
    try:
        stored = json.loads(content)
        seconds = {choice.name: float(stored[choice.name]) for choice in choices}
    except (ValueError, TypeError, KeyError):
        return None
    return seconds if all(0 < value < math.inf for value in seconds.values()) else None


def _measured(
    op: Op, params: Params, inputs: Specs, outputs: Specs, *, choices: list[Implementation]
) -> dict[str, float]:
    rng = np.random.default_rng(0)
    ignored = op.ignored(params)
    arrays = [
        None if i in ignored else rng.uniform(0.5, 1.5, spec.shape).astype(spec.dtype) for i, spec in enumerate(inputs)
    ]
    results = [np.empty(spec.shape, spec.dtype) for spec in outputs]

    def prepared(choice: Implementation) -> Callable[[], None]:
        scratch = np.empty(choice.workspace(params, inputs, outputs), np.uint8)

        def call() -> None:
            choice.kernel(OpContext(np, is_train=True, workspace=scratch), params, arrays, results)

        return call

    best = {one.name: math.inf for one in choices}
    with tiling.using(tiling.HOST), np.errstate(all="ignore"):
        calls = {one.name: prepared(one) for one in choices}
        for call in calls.values():
            call()  # compiles, and touches all memory
        begin = time.perf_counter()
        rounds = 0
        while rounds < 2 or (rounds < 20 and time.perf_counter() - begin < MAX_SECONDS):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                best[name] = min(best[name], max(time.perf_counter() - start, 1e-9))
            rounds += 1
    return best
