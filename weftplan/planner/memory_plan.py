"""A memory plan: the address and lifetime of every entry, queries and reports.

The README next to this file defines entry, storage, slab, step and lifetime. An executor must preserve the order of
two kinds of reuse:

* Entries of one storage follow each other in execution order; one engine variable per storage orders them.
* If storages overlap in one slab, :attr:`MemoryPlan.after` lists them: the first writer of storage ``s`` must wait
  until all readers and writers of ``after(s)`` have finished. In the next run of the same plan, the first writer of
  ``after(s)`` must in turn wait for the users of ``s`` in this run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from html import escape
from os import PathLike
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from weftplan.device.amounts import amount, bytes_of
from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.planner.batch import largest_fitting
from weftplan.planner.options import PlanOptions
from weftplan.planner.program import Graph, IntArray
from weftplan.support import slots
from weftplan.support.keyword_errors import known_keywords
from weftplan.support.tensor_types import DType, Shape

CALLER = "(caller)"
"""Name of the last reader of a graph output."""
USES = ("activations", "gradients", "scratch", "recomputed", "spilled")
"""Uses of planned memory: results of the forward part, results of the backward part, scratch of one operator,
recomputed forward results, and copies of offloaded results at the target and back on the device."""
NOBODY = "(nobody)"
"""Name of the last reader of an entry that is never read."""


class Labels:
    """Names, shapes and other facts of a plan's graph, for reports. A plan from a file uses a subclass.

    Names are built lazily: naming 10^6 entries would take longer than planning them.
    """

    steps: Sequence[int]
    """Node of each step."""
    shapes: Sequence[Shape]
    dtypes: Sequence[DType]
    makers: Sequence[int]
    """Node that makes each entry."""
    node_names: Sequence[str]

    def __init__(
        self,
        graph: Graph,
        steps: Sequence[int],
        *,
        shapes: Sequence[Shape],
        dtypes: Sequence[DType],
        inplace: Sequence[int],
        skipped: Collection[int],
    ) -> None:
        """Store the graph, its steps, and the shape, dtype and sharing of its entries.

        ``inplace`` and ``skipped`` are those of its :class:`~weftplan.planner.storage_assignment.Assignment`.
        """
        self._graph, self.steps, self.shapes, self.dtypes = graph, steps, shapes, dtypes
        self.makers, self.node_names = graph.entry_node, graph.names
        self._inplace, self._skipped = inplace, skipped

    def name(self, eid: int) -> str:
        """Return the name of an entry."""
        return self._graph.entry_name(eid)

    def node_op(self, nid: int) -> str:
        """Return the operator of a node; ``variable`` for a variable."""
        return self._graph.works[nid].label

    def source(self, eid: int) -> int:
        """Return the entry whose memory an entry of kind INPLACE or ADDTO takes over; -1 for any other kind."""
        index = self._inplace[eid]
        if index >= 0:
            return self._graph.inputs[self.makers[eid]][index]
        return self._totals.get(eid, -1)

    @cached_property
    def _totals(self) -> dict[int, int]:
        """Map from each added term to the partial sum that it is added to."""
        inputs = self._graph.inputs
        return {inputs[nid][1]: inputs[nid][0] for nid in self._skipped}


class PassReport(NamedTuple):
    """A pass that ran over the network before its memory was planned."""

    name: str
    """Its effect, such as ``equal expressions merged``."""
    changed: str
    """Description of its changes; empty if it changed nothing."""
    switch: str
    """Environment variable that disables the pass if it is 0, or the function that ran it."""

    @property
    def text(self) -> str:
        """One line that describes the pass: name, changes and switch."""
        return f"{self.name}: {self.changed or 'nothing to change'} ({self.switch})"


@dataclass(frozen=True, slots=True)
class Bar:
    """One buffer, an entry with planned memory or a node's scratch, as a rectangle of time and address."""

    name: str
    kind: str
    """Name of its :class:`~weftplan.planner.storage_assignment.Kind` in lower case, or ``workspace``."""
    device: str
    first: int
    """First step at which it is alive."""
    last: int
    """First step at which it is dead."""
    address: int
    """Offset in bytes in the device's planned memory, with its slabs concatenated."""
    nbytes: int
    shape: Shape
    dtype: str
    """Name of its dtype; ``uint8`` for scratch."""
    op: str
    """Operator of its maker."""
    maker: str
    """Name of the node that makes it."""
    last_reader: str
    """Name of its last reader, :data:`weftplan.planner.memory_plan.CALLER` or
    :data:`weftplan.planner.memory_plan.NOBODY`."""
    storage: int
    use: str
    """Its use: one of :data:`weftplan.planner.memory_plan.USES`."""

    def as_dict(self) -> dict[str, object]:
        """Return the fields by name, for JSON."""
        return asdict(self)


@dataclass(frozen=True, eq=False, kw_only=True)
class MemoryPlan:
    """The address and lifetime of every entry.

    All arrays are read-only. The first word of an array's name names its index: entries, storages, slabs, or, for
    ``workspace``, nodes. The rows of ``after`` belong to storages.
    """

    strategy: str
    """Name of the strategy that made the plan, such as ``match_range``, ``arena`` or ``none``; never ``auto``."""
    options: PlanOptions
    """Options of the plan."""
    contexts: tuple[Context, ...]
    """Devices, indexed by :attr:`slab_device`."""

    entry_storage: NDArray[np.int32]
    """Storage of each entry; -1 if it is external or has no memory."""
    entry_nbytes: IntArray
    """Bytes of each entry, from its shape and dtype."""
    entry_kind: NDArray[np.int8]
    """:class:`Kind` of each entry."""
    entry_first: NDArray[np.int32]
    """Step that writes each entry; 0 for variables."""
    entry_last: NDArray[np.int32]
    """First step at which each entry is dead; ``len(order)`` for graph outputs."""
    entry_inplace: NDArray[np.int32]
    """Index of the input whose memory each entry of kind INPLACE takes; -1 for other kinds."""

    storage_slab: NDArray[np.int32]
    """Slab of each storage."""
    storage_offset: IntArray
    """Offset of each storage in its slab, in bytes."""
    storage_nbytes: IntArray
    """Bytes of each storage."""
    slab_device: NDArray[np.int32]
    """Device of each slab, as an index of :attr:`contexts`."""
    slab_nbytes: IntArray
    """Bytes of each slab."""

    workspace_nbytes: IntArray
    """Scratch bytes of each node: those that its operator declares, plus a buffer for each output that is added to its
    destination (see :func:`weftplan.planner.program.scratch_of`)."""
    workspace_storage: NDArray[np.int32]
    """Storage of each node's scratch, at least ``workspace_nbytes`` large; -1 if it needs none."""

    after_ptr: IntArray
    """Start of each storage's row in :attr:`after_storages`."""
    after_storages: NDArray[np.int32]
    """Concatenated rows of :meth:`after`."""

    lower_bound: int
    """Sum of the devices' peaks of live bytes; no placement of these buffers in this order needs less."""
    unshared_bytes: int
    """Bytes without sharing: one buffer per entry and one workspace per device."""
    reported_bytes: int
    """Bytes that MXNet prints as "Total … allocated" for this plan: storages of entries without workspaces, counted as
    the option ``sizes`` says. For the ``arena`` strategy, whose storages overlap, this is :attr:`peak`."""
    labels: Labels
    """Names, shapes and sources of entries, for reports and files."""
    external_bytes: Mapping[str, int]
    """Bytes outside the planned buffers, by purpose: arrays of the caller (arguments, gradients, aux, head_grads and,
    on request, optimizer_states), and on GPUs the workspaces of cuBLAS (cublas_workspaces)."""
    input_bytes: int | None = None
    """Bytes of the arguments that are inputs: those whose shape is given, and labels. The other arguments are weights.
    None if the planner does not know which arguments are inputs, as for an executor."""
    outputs: tuple[int, ...] = ()
    """Entries of the forward outputs."""
    num_forward: int | None = None
    """Number of steps of the forward part; None if unknown."""
    num_added_waits: int | None = None
    """Number of pairs in :meth:`after` that make a node wait although it does not need the other's result: the loss of
    parallelism. For whole blocks by Paddle's rules, the number of order edges that they add. None if it was not
    counted: other whole blocks, and more than 8,192 steps."""
    more_time: float = 0.0
    """Modelled seconds that recomputation and waiting for the host add to a step, as a share of a step without them."""
    elsewhere: int = 0
    """Bytes of :attr:`total` outside the memory of the planned device, if several devices with separate memories were
    named; a budget does not count them."""
    notes: tuple[str, ...] = ()
    """Descriptions of decisions of the planner that a user may want to know."""
    passes: tuple[PassReport, ...] = ()
    """The passes that changed the graph before it was planned, in their order."""
    pass_seconds: Mapping[str, float] = field(default_factory=dict)
    """Processor time of each pass over the graph, by name, including passes that :attr:`passes` does not list. Empty if
    the passes did not run for this plan alone (a plan of an executor, or from a file)."""
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Name of a node -> its kernel and the reason, such as ``native`` or ``numpy (depthwise …)``; only nodes that have
    several kernels."""
    again: Callable[..., MemoryPlan] | None = field(default=None, repr=False)
    """Function that plans the same network with another ``batch`` or ``budget``; None for a plan read from a file."""

    def __post_init__(self) -> None:
        """Make the arrays read-only."""
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    @cached_property
    def peak(self) -> int:
        """Bytes that the plan allocates: the sum of its slabs."""
        return int(self.slab_nbytes.sum())

    @property
    def total(self) -> int:
        """Sum of :attr:`peak` and :attr:`external_bytes`."""
        return self.peak + sum(self.external_bytes.values())

    @cached_property
    def peak_by_device(self) -> dict[Context, int]:
        """Bytes that the plan allocates on each device."""
        totals = np.zeros(len(self.contexts), dtype=np.int64)
        np.add.at(totals, self.slab_device, self.slab_nbytes)
        return {context: int(total) for context, total in zip(self.contexts, totals, strict=True)}

    @property
    def on_host(self) -> int:
        """Bytes of :attr:`offloaded` in page-locked host memory."""
        if not any(context.device_type in ("gpu", "sim") for context in self.contexts):
            return 0
        return sum(n for context, n in self.peak_by_device.items() if context.device_type == "cpu_pinned")

    @property
    def offloaded(self) -> int:
        """Bytes of :attr:`peak` at offload targets: page-locked host memory, files, other devices.

        A budget does not count them. See :mod:`weftplan.planner.spill`.
        """
        peers = self.options.peer_contexts
        targets = (n for ctx, n in self.peak_by_device.items() if ctx.device_type == "file" or ctx in peers)
        return self.on_host + sum(targets)

    @property
    def in_homes(self) -> int:
        """Former name of :attr:`offloaded`.

        :meta private:
        """
        warnings.warn("MemoryPlan.in_homes is MemoryPlan.offloaded since 0.3", DeprecationWarning, stacklevel=2)
        return self.offloaded

    @property
    def counted(self) -> int:
        """Bytes that a budget counts: :attr:`total` without :attr:`offloaded` and :attr:`elsewhere`."""
        return self.total - self.offloaded - self.elsewhere

    @property
    def num_storages(self) -> int:
        """Number of storages, workspaces included."""
        return len(self.storage_nbytes)

    @property
    def num_slabs(self) -> int:
        """Number of allocations."""
        return len(self.slab_nbytes)

    def storage_context(self, storage: int) -> Context:
        """Return the device of a storage."""
        return self.contexts[int(self.slab_device[self.storage_slab[storage]])]

    def after(self, storage: int) -> NDArray[np.int32]:
        """Return the storages that overlap ``storage`` and precede it; its first write waits for their users."""
        return self.after_storages[self.after_ptr[storage] : self.after_ptr[storage + 1]]

    @cached_property
    def num_reuse_edges(self) -> int:
        """Total number of pairs (earlier storage, later storage) in :meth:`after`."""
        return len(self.after_storages)

    def __repr__(self) -> str:
        return (
            f"<MemoryPlan {amount(self.total)} in all, {amount(self.peak)} planned, "
            f"{len(self.labels.steps)} steps, strategy {self.strategy}>"
        )

    def __str__(self) -> str:
        return self.summary()

    @known_keywords()
    def batch_max(self, budget: int | str, *, recompute: bool = False) -> int:
        """Return the largest batch with which the same network fits a budget.

        Args:
            budget: as for :func:`weftplan.planner.plan`.
            recompute: whether the planner may recompute forward results, as under a budget. Each tried batch size then
                takes seconds for deep networks.

        Raises:
            BudgetError: not even one sample fits; its ``smallest`` is the bytes of one sample.
            PlanError: the plan was read from a file or taken from an executor.

        >>> from weftplan import models
        >>> models.get("mlp").plan(data=(32, 784)).batch_max("4 MB")
        649
        """
        if self.again is None:
            raise PlanError("batch_max needs a plan that symbol.plan(...) has just made; this one has no network")
        return largest_fitting(self.again, bytes_of(budget, self.contexts[0]), recompute=recompute)[0]

    @property
    def left_out(self) -> str:
        """Description of the bytes that no figure of the plan includes."""
        return str(slots.PLAN_REPORTS.get()["left_out"](self))

    def timeline(self, device: int | None = None) -> IntArray:
        """Return live bytes at each step, on one device (an index of :attr:`contexts`) or on all."""
        return cast(IntArray, slots.PLAN_REPORTS.get()["timeline"](self, device))

    def alive_at_peak(self, limit: int | None = None) -> list[Bar]:
        """Return the buffers alive at the step with the most live bytes, the largest first, at most ``limit``."""
        return cast(list[Bar], slots.PLAN_REPORTS.get()["alive_at_peak"](self, limit))

    def bars(self, device: int | None = None) -> list[Bar]:
        """Return the buffers on a device (an index of :attr:`contexts`) or on all devices."""
        return cast(list[Bar], slots.PLAN_REPORTS.get()["bars"](self, device))

    def summary(self, limit: int = 10) -> str:
        """Return the plan as text, with the ``limit`` largest buffers at the peak."""
        return str(slots.PLAN_REPORTS.get()["summary"](self, limit))

    def compare(self, other: MemoryPlan) -> str:
        """Return a table of this plan next to another."""
        return str(slots.PLAN_REPORTS.get()["compare"](self, other))

    @known_keywords()
    def to_html(self, *, title: str = "memory plan") -> str:
        """Return a self-contained HTML page: bars over time, the peak, and a sortable table of all buffers."""
        return str(slots.PLAN_REPORTS.get()["html"](self, title=title))

    @known_keywords()
    def plot(self, path: str | PathLike[str] | None = None, *, title: str = "memory plan") -> object:
        """Draw the buffers over time with matplotlib.

        Args:
            path: file to save the picture to; its extension selects the format (svg, png, pdf). None: do not save.
            title: title of the picture.

        Returns:
            The ``matplotlib.figure.Figure``.

        Raises:
            MXNetError: matplotlib is not installed.
        """
        return slots.PLAN_REPORTS.get()["plot"](self, path, title=title)

    def _repr_html_(self) -> str:
        """Return the page of :meth:`to_html` in a frame, for notebooks."""
        page = escape(self.to_html(title=repr(self)[1:-1]), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 860px; border: 0" title="memory plan"></iframe>'

    def to_json(self) -> str:
        """Return the plan as JSON text, which :meth:`from_json` reads."""
        return str(slots.PLAN_REPORTS.get()["to_json"](self))

    @staticmethod
    def from_json(text: str) -> MemoryPlan:
        """Return a plan from JSON text. Only the format is checked; ``planner.validate`` checks the plan itself.

        Raises:
            FormatError: the text is no plan, is truncated, or was written by a newer version.
        """
        return cast(MemoryPlan, slots.PLAN_REPORTS.get()["from_json"](text))
