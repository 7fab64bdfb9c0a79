"""Slots: all calls from a lower layer to code that a higher layer provides.

Imports go down the layers. A lower layer that offers a verb of a higher one (``symbol.bind``, ``plan.to_html``) calls
the value of a slot instead; the higher layer fills the slot when it is imported. This file declares all slots, so the
calls that go up are as visible as the imports that go down: ``docs/draw_layers.py`` draws both, and a test compares
the declarations with the code.

Slots are filled under the import lock; :data:`MAKE_ROOM`, :data:`ARRAY_CHUNK` and :data:`TASK_MEMORY` are replaced when
the settings of spilling change. Any thread may read a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from weftplan.errors import MXNetError
from weftplan.support.lazy_import import late_import

T = TypeVar("T")
Function = Callable[..., Any]


class Slot(Generic[T]):
    """A value that a lower layer uses and a higher layer provides.

    Attributes:
        caller: the modules that use the value.
        provider: the modules that fill the slot. :meth:`get` imports the first of them if the slot is empty.
        when: when the value is called.
        value: the value; None until the slot is filled. Read it directly if an empty slot is a normal state.
    """

    __slots__ = ("caller", "provider", "value", "when")

    def __init__(self, caller: str, provider: str, when: str, value: T | None = None) -> None:
        self.caller = tuple(caller.split())
        self.provider = tuple(provider.split())
        self.when = when
        self.value: T | None = value

    def fill(self, value: T) -> None:
        """Set the value; the last call wins."""
        self.value = value

    def get(self) -> T:
        """Return the value; import the provider first if the slot is empty.

        Raises:
            MXNetError: the provider was imported and did not fill the slot.
        """
        if self.value is None:
            late_import(self.provider[0])
            if self.value is None:
                raise MXNetError(f"{self.provider[0]} was imported and did not provide {self.when!r}")
        return self.value


def declared() -> Mapping[str, Slot[Any]]:
    """Return every slot of this file by its name."""
    return {name: value for name, value in globals().items() if isinstance(value, Slot)}


BIND: Slot[Function] = Slot("weftplan.symbol.verbs", "weftplan.executor", "Symbol.bind")
SIMPLE_BIND: Slot[Function] = Slot("weftplan.symbol.verbs", "weftplan.executor", "Symbol.simple_bind")
PLAN_SYMBOL: Slot[Function] = Slot("weftplan.symbol.verbs", "weftplan.planner.symbolic.estimate", "Symbol.plan")
DRAW_SYMBOL: Slot[Function] = Slot("weftplan.symbol.verbs", "weftplan.report.network_svg", "a symbol in a notebook")
SYMBOL_OPERATOR: Slot[Callable[[str], Function]] = Slot(
    "weftplan.symbol.symbol", "weftplan.symbol.api.functions", "an operator as a method of a symbol"
)
SYMBOL_SPLIT: Slot[Function] = Slot("weftplan.symbol.symbol", "weftplan.symbol.api.creation", "Symbol.split_v2")
SYMBOL_CUSTOM: Slot[Function] = Slot("weftplan.symbol", "weftplan.compat.custom_operators", "mx.sym.Custom")

PLAN_REPORTS: Slot[Mapping[str, Function]] = Slot(
    "weftplan.planner.memory_plan", "weftplan.report", "reports of a plan: text, pictures, HTML, JSON"
)
PLAN_OPTIMIZER: Slot[Callable[[str], Any]] = Slot(
    "weftplan.planner.symbolic.estimate", "weftplan.training.memory", "a plan that counts the states of an optimizer"
)
PLAN_ON_SEVERAL: Slot[Function] = Slot(
    "weftplan.planner.symbolic.estimate", "weftplan.training.memory", "a plan of data-parallel training"
)

ARRAY_OPERATOR: Slot[Function] = Slot(
    "weftplan.ndarray.array", "weftplan.ndarray.calls.call_cache", "an operator as a method of an array"
)
ARRAY_RECORD: Slot[Function] = Slot(
    "weftplan.ndarray.array", "weftplan.ndarray.formats.serialize", "an array from its pickled state"
)
ARRAY_SPLIT: Slot[Function] = Slot("weftplan.ndarray.array", "weftplan.ndarray.creation", "NDArray.split_v2")
ARRAY_AS_ROW_SPARSE: Slot[Function] = Slot(
    "weftplan.ndarray.array", "weftplan.ndarray.row_sparse", 'NDArray.tostype("row_sparse")'
)
ARRAY_CUSTOM: Slot[Function] = Slot("weftplan.ndarray", "weftplan.compat.custom_operators", "mx.nd.Custom")
ARRAY_CHUNK: Slot[Function] = Slot(
    "weftplan.ndarray.memory.chunk", "weftplan.ndarray.spill.spilling", "the memory of a new array"
)
MAKE_ROOM: Slot[Function] = Slot(
    "weftplan.ndarray.pushing", "weftplan.ndarray.spill.spilling", "every push, while arrays may be offloaded"
)
TASK_MEMORY: Slot[Function] = Slot(
    "weftplan.tasks.schedule",
    "weftplan.ndarray.spill.spilling",
    "a task on NDArrays, while they may be offloaded",
)

RANDOM_GENERATOR: Slot[Function] = Slot(
    "weftplan.ops.core.schema", "weftplan.kernels.cuda.philox", "a random operator on a device"
)
WORKER_COUNT: Slot[Callable[[], int]] = Slot(
    "weftplan.support.core_sharing", "weftplan.engine.factory", "an operation that may use idle cores"
)
POLLING: Slot[Function] = Slot(
    "weftplan.support.core_sharing",
    "weftplan.kernels.compiled.exchange.polling",
    "a helper thread that waits for its next part",
)
COMPACTOR: Slot[Function] = Slot(
    "weftplan.storage.registry", "weftplan.ndarray.spill.spilling", "an allocation that needs a contiguous range"
)
MEMORY_PAGE: Slot[Callable[..., str]] = Slot(
    "weftplan.storage.snapshot", "weftplan.report", "the page of a memory snapshot"
)
TRAINING_PAGE: Slot[Callable[..., str]] = Slot(
    "weftplan.training.fit.events", "weftplan.report.training_html", "the page of a training run"
)
PROFILER_PAGE: Slot[Callable[..., str]] = Slot(
    "weftplan.profiler", "weftplan.report.lanes_html", "the page of a profile"
)
EMPTY_CACHE: Slot[Callable[..., int]] = Slot("weftplan.device.context", "weftplan.storage", "Context.empty_cache")
TEMPORARY_SOURCE: Slot[Function] = Slot("weftplan.device.temporaries", "weftplan.storage", "a temporary array of CuPy")

WAIT_HELPERS: Slot[list[Callable[[], None]]] = Slot(
    "weftplan.engine.threaded",
    "weftplan.kvstore.distributed.base",
    "a thread that waits for a var: exchanges that it may run inline",
    [],
)

Work = Callable[[int, int], None]
"""``work(first, last)`` runs a compiled loop on the elements ``first`` to ``last`` (excluded)."""
Loop = Callable[..., Work | None]
"""A function that returns a compiled loop for arrays; None if there is none for them, or none on this machine."""

COMPILER: Slot[Callable[[], object]] = Slot(
    "weftplan.ops.core.implementations", "weftplan.kernels.compiled.target", "a choice that depends on the compiler"
)
COMPILED_PACK: Slot[Loop] = Slot(
    "weftplan.kvstore.compression", "weftplan.kernels.compiled.exchange.codec", "compression of a large gradient"
)
COMPILED_UNPACK: Slot[Loop] = Slot(
    "weftplan.kvstore.compression", "weftplan.kernels.compiled.exchange.codec", "decompression of a large gradient"
)
COMPILED_SUM: Slot[Loop] = Slot(
    "weftplan.kvstore.fixed_order_sums", "weftplan.kernels.compiled.exchange.sums", "a sum of large arrays"
)
COMPILED_SPREAD: Slot[Loop] = Slot(
    "weftplan.kvstore.fixed_order_sums", "weftplan.kernels.compiled.exchange.sums", "copies of a large array"
)
COPY_PAST: Slot[Callable[[Any, Any], bool]] = Slot(
    "weftplan.kvstore.fixed_order_sums", "weftplan.kernels.compiled.exchange.sums", "a copy past the caches"
)
COMPILED_PIECES: Slot[Callable[..., Callable[[], None] | None]] = Slot(
    "weftplan.kvstore.distributed.arrays.piece_copies",
    "weftplan.kernels.compiled.exchange.sums",
    "copies and sums of all pieces of a bucket",
)
COMPILED_FORMULA: Slot[Callable[..., Callable[[Sequence[Any], int, int], None]]] = Slot(
    "weftplan.ops.optimizer.fused_update", "weftplan.kernels.compiled.elementwise", "a fused optimizer step on a CPU"
)
CUDA_BROADCAST_INDEX: Slot[Callable[..., object | None]] = Slot(
    "weftplan.planner.symbolic.passes.elementwise_node", "weftplan.kernels.cuda.pointwise", "a broadcast GPU node"
)
CUDA_OPERATIONS: Slot[Callable[[Any], int]] = Slot(
    "weftplan.planner.symbolic.passes.elementwise_node", "weftplan.kernels.cuda.pointwise", "an elementwise GPU node"
)
