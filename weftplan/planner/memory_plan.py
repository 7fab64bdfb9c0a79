"""A memory plan: the address and lifetime of every entry, look-ups in its arrays, and reports.

The README next to this file defines entry, storage, slab, step and lifetime. There are two ways to
reuse memory, which an executor has to honour:

* entries of one storage follow each other in execution order; one engine variable per storage orders them;
* storages whose byte ranges overlap in one slab are listed in :attr:`MemoryPlan.after`: the first writer of storage
  ``s`` must wait until all readers and writers of ``after(s)`` have finished. The next run of the same plan starts
  over, so its first writer of ``after(s)`` must in turn wait for the users of ``s`` in this run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from html import escape
from os import PathLike
from typing import Any, NamedTuple, cast

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
"""Last reader of an output of the graph."""
USES = ("activations", "gradients", "scratch", "recomputed", "spilled")
"""Uses of planned memory: results of the forward part, of the backward part, scratch of one operator, forward
results computed again, results that wait on the host or came back from it."""
NOBODY = "(nobody)"
"""Last reader of an entry that is made but never read."""


class Labels:
    """Facts of a plan's graph, for readers. A plan from a file has a subclass, which reads them from there.

    Texts are made only when asked: naming 10^6 entries would take longer than planning them.
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
        """``inplace`` and ``skipped`` as in :class:`~weftplan.planner.inplace.Assignment`."""
        self._graph, self.steps, self.shapes, self.dtypes = graph, steps, shapes, dtypes
        self.makers, self.node_names = graph.entry_node, graph.names
        self._inplace, self._skipped = inplace, skipped

    def name(self, eid: int) -> str:
        """Name of an entry."""
        return self._graph.entry_name(eid)

    def node_op(self, nid: int) -> str:
        """Operator of a node; ``variable`` for a variable."""
        return self._graph.works[nid].label

    def source(self, eid: int) -> int:
        """Entry whose memory an in-place or added-to entry takes over; -1 for others."""
        index = self._inplace[eid]
        if index >= 0:
            return self._graph.inputs[self.makers[eid]][index]
        return self._totals.get(eid, -1)

    @cached_property
    def _totals(self) -> dict[int, int]:
        """Added term -> the partial sum that it is added to."""
        inputs = self._graph.inputs
        return {inputs[nid][1]: inputs[nid][0] for nid in self._skipped}


class Pass(NamedTuple):
    """A pass that ran over the network before its memory was planned."""

    name: str
    """Its effect, such as ``equal expressions merged``."""
    changed: str
    """Its changes, in words; empty if it found nothing to change."""
    switch: str
    """The variable that switches it off when it is 0, or the function whose call it was."""

    @property
    def text(self) -> str:
        """One line with its changes and its switch."""
        return f"{self.name}: {self.changed or 'nothing to change'} ({self.switch})"


@dataclass(frozen=True, slots=True)
class Bar:
    """One buffer: an entry with planned memory, or a node's scratch. A rectangle of time and address."""

    name: str
    kind: str
    """Name of its :class:`~weftplan.planner.inplace.Kind` in small letters, or ``workspace``."""
    device: str
    first: int
    """Alive during steps [first, last)."""
    last: int
    address: int
    """Bytes from the start of the device's planned memory, its slabs one after the other."""
    nbytes: int
    shape: Shape
    dtype: str
    """``uint8`` for scratch."""
    op: str
    """Operator that makes it."""
    maker: str
    """Name of the node that makes it."""
    last_reader: str
    """Name of the node that reads it last, :data:`weftplan.planner.memory_plan.CALLER` or
    :data:`weftplan.planner.memory_plan.NOBODY`."""
    storage: int
    use: str
    """Its use: one of :data:`weftplan.planner.memory_plan.USES`."""

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


@dataclass(frozen=True, eq=False, kw_only=True)
class MemoryPlan:
    """Where every entry lies, and when. The arrays are read-only; their index is an entry, storage, slab or node id."""

    strategy: str
    """The strategy that made the plan (``match_range``, ``arena`` or ``none``; never ``auto``)."""
    options: PlanOptions
    contexts: tuple[Context, ...]
    """Devices; ``slab_device`` indexes this."""

    entry_storage: NDArray[np.int32]
    """Storage of each entry; -1: none or external."""
    entry_nbytes: IntArray
    """Bytes of each entry, by its true shape and dtype."""
    entry_kind: NDArray[np.int8]
    """:class:`Kind` of each entry."""
    entry_first: NDArray[np.int32]
    """Step that writes the entry (0 for variables)."""
    entry_last: NDArray[np.int32]
    """First step at which the entry is no longer needed; ``len(order)`` for outputs of the graph."""
    entry_inplace: NDArray[np.int32]
    """For kind INPLACE the index of the input whose memory was taken, else -1."""

    storage_slab: NDArray[np.int32]
    storage_offset: IntArray
    """Byte offset in the slab."""
    storage_nbytes: IntArray
    slab_device: NDArray[np.int32]
    slab_nbytes: IntArray

    workspace_nbytes: IntArray
    """Scratch bytes of each node: those that its operator declares, plus room for each output that is added to (see
    :func:`weftplan.planner.program.scratch_of`)."""
    workspace_storage: NDArray[np.int32]
    """Storage that serves as scratch of each node, at least ``workspace_nbytes`` long; -1 where none is needed."""

    after_ptr: IntArray
    after_storages: NDArray[np.int32]
    """Rows of :meth:`after`."""

    lower_bound: int
    """Most bytes live at once, summed over devices: no placement of these buffers in this order can need less."""
    unshared_bytes: int
    """Bytes if every entry that is made had memory of its own, with one workspace per device."""
    reported_bytes: int
    """The bytes that MXNet prints as "Total … allocated" for this plan: storages of entries, as the option ``sizes``
    counts them, without workspaces. For the ``arena`` strategy, whose storages overlap, the same as :attr:`peak`."""
    labels: Labels
    """Names, shapes and sources of entries, for reports and files."""
    external_bytes: Mapping[str, int]
    """Bytes outside the planned buffers, by purpose: arrays of the caller (arguments, gradients, aux, head_grads and,
    on request, optimizer_states), and on GPUs the workspaces of cuBLAS (cublas_workspaces)."""
    input_bytes: int | None = None
    """Bytes of the arguments that are inputs: those whose shape is given, and labels. The other arguments are weights.
    None if the planner does not know which arguments are inputs, as for an executor."""
    outputs: tuple[int, ...] = ()
    """Entries that the caller gets: the forward outputs."""
    num_forward: int | None = None
    """How many steps are the forward part; None if unknown."""
    num_added_waits: int | None = None
    """How many of the pairs that :meth:`after` lists make a node wait although it does not need the other's result: the
    price of sharing in parallelism. For whole blocks by Paddle's rules the order edges that these add. None
    if it was not counted: other whole blocks, and more than 8,192 steps."""
    more_time: float = 0.0
    """Modelled seconds that recomputation and waiting for the host add to a step, as a share of a step without them."""
    elsewhere: int = 0
    """Bytes of :attr:`total` that are in another memory than that of the device that was planned, where several
    devices with memory of their own were named; a budget does not count them."""
    notes: tuple[str, ...] = ()
    """Decisions of the planner that a user may want to know, in words."""
    passes: tuple[Pass, ...] = ()
    """The passes that changed the graph before it was planned, in their order."""
    pass_seconds: Mapping[str, float] = field(default_factory=dict)
    """Processor time of each pass over the graph, those of every plan included, by name; empty if the graph did not go
    through passes for this plan alone (a plan of an executor, or from a file)."""
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Name of a node -> its kernel, and why no other: ``native``, ``numpy (depthwise …)``. Only nodes with a
    choice."""
    again: Callable[..., MemoryPlan] | None = field(default=None, repr=False)
    """Plans the same question once more with another ``batch`` or ``budget``; None for a plan read from a file."""

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
        """:attr:`peak` and everything that the caller brings."""
        return self.peak + sum(self.external_bytes.values())

    @cached_property
    def peak_by_device(self) -> dict[Context, int]:
        """Bytes that the plan allocates on each device."""
        totals = np.zeros(len(self.contexts), dtype=np.int64)
        np.add.at(totals, self.slab_device, self.slab_nbytes)
        return {context: int(total) for context, total in zip(self.contexts, totals, strict=True)}

    @property
    def on_host(self) -> int:
        """Bytes of :attr:`offloaded` that lie in page-locked host memory."""
        if not any(context.device_type in ("gpu", "sim") for context in self.contexts):
            return 0
        return sum(n for context, n in self.peak_by_device.items() if context.device_type == "cpu_pinned")

    @property
    def offloaded(self) -> int:
        """Bytes of :attr:`peak` at offload targets: page-locked host memory, files, other devices.

        A budget does not count them. See :mod:`weftplan.planner.spill`.
        """
        peers = self.options.peer_contexts
        others = (n for ctx, n in self.peak_by_device.items() if ctx.device_type == "file" or ctx in peers)
        return self.on_host + sum(others)

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
        """Device of a storage."""
        return self.contexts[int(self.slab_device[self.storage_slab[storage]])]

    def after(self, storage: int) -> NDArray[np.int32]:
        """Storages that overlap ``storage`` and were in use before it: its first write waits for all their users."""
        return self.after_storages[self.after_ptr[storage] : self.after_ptr[storage + 1]]

    @cached_property
    def num_reuse_edges(self) -> int:
        """How many (earlier storage, later storage) pairs :meth:`after` lists in all."""
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
        """The largest batch with which the same question fits a budget.

        Args:
            budget: as for :func:`weftplan.planner.plan`.
            recompute: let the planner compute forward results again for it, as a budget does. Each batch size that is
                tried then takes seconds for deep networks.

        Raises:
            BudgetError: not even one sample fits; its ``smallest`` is the need of one sample.
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
        """Bytes that none of the figures contains, in words."""
        return str(slots.PLAN_REPORTS.get()["left_out"](self))

    def timeline(self, device: int | None = None) -> IntArray:
        """Bytes alive at each step, on one device (an index of :attr:`contexts`) or in all."""
        return cast(IntArray, slots.PLAN_REPORTS.get()["timeline"](self, device))

    def alive_at_peak(self, limit: int | None = None) -> list[Bar]:
        """The buffers that are alive when most bytes are, the largest first."""
        return cast(list[Bar], slots.PLAN_REPORTS.get()["alive_at_peak"](self, limit))

    def bars(self, device: int | None = None) -> list[Bar]:
        """The buffers on a device (an index of :attr:`contexts`) or on all, as rectangles of time and address."""
        return cast(list[Bar], slots.PLAN_REPORTS.get()["bars"](self, device))

    def summary(self, limit: int = 10) -> str:
        """The plan as text, with the ``limit`` largest buffers at the peak."""
        return str(slots.PLAN_REPORTS.get()["summary"](self, limit))

    def compare(self, other: MemoryPlan) -> str:
        """Return a table of this plan next to another."""
        return str(slots.PLAN_REPORTS.get()["compare"](self, other))

    @known_keywords()
    def to_html(self, *, title: str = "memory plan") -> str:
        """One self-contained page: bars over time, the peak, and a table of all buffers to sort and filter."""
        return str(slots.PLAN_REPORTS.get()["html"](self, title=title))

    @known_keywords()
    def plot(self, path: str | PathLike[str] | None = None, *, title: str = "memory plan") -> Any:
        """Draw the buffers over time with matplotlib.

        Args:
            path: where to save the picture (its ending says the format: svg, png, pdf); None: nowhere.
            title: above the picture.

        Returns:
            The ``matplotlib.figure.Figure``.

        Raises:
            MXNetError: matplotlib is not installed.
        """
        return slots.PLAN_REPORTS.get()["plot"](self, path, title=title)

    def _repr_html_(self) -> str:
        """The page of :meth:`to_html` in a frame, for notebooks."""
        page = escape(self.to_html(title=repr(self)[1:-1]), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 860px; border: 0" title="memory plan"></iframe>'

    def to_json(self) -> str:
        """The plan as JSON text, which :meth:`from_json` reads back."""
        return str(slots.PLAN_REPORTS.get()["to_json"](self))

    @staticmethod
    def from_json(text: str) -> MemoryPlan:
        """A plan from JSON text. Only its form is checked here; ``planner.validate`` judges what it says.

        Raises:
            FormatError: not a plan, truncated, or written by a newer version.
        """
        return cast(MemoryPlan, slots.PLAN_REPORTS.get()["from_json"](text))
