"""The executor: a planned graph bound to arrays, run by the engine.

The first run prepares the segments of the graph. ``forward`` and ``backward`` only push these segments and return;
reading an output waits for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from weftplan import config, engine
from weftplan.device.context import Context
from weftplan.engine.var import Var
from weftplan.errors import BindError, EngineError, MXNetError, did_you_mean, listed
from weftplan.executor.bind_arguments import by_name
from weftplan.executor.memory import PlannedMemory, RunState
from weftplan.executor.monitor import Monitored, checked, debug_str, warn_of_joined
from weftplan.executor.new_arrays import new_zeros
from weftplan.executor.pool import SlabPool
from weftplan.executor.prepared_calls import PreparedStep
from weftplan.executor.prepared_run import PreparedRun, prepare_run
from weftplan.executor.run_values import (
    ArrayValue,
    as_array,
    check_switch,
    copy_in,
    head_values,
    keeps_forward,
    needs_training,
    parameter_values,
    reads_forward,
    unset,
)
from weftplan.executor.segments import StepSegment, bulk_limits
from weftplan.ndarray import NDArray, random
from weftplan.ndarray.memory.chunk import MovableChunk, nothing
from weftplan.planner import MemoryPlan, PlannedGraph
from weftplan.planner.symbolic.passes.pass_manager import hidden_members, unfused
from weftplan.support.array_types import ShapeLike
from weftplan.symbol import Symbol

Callback = Callable[[str, NDArray], None]


class RunProgress(NamedTuple):
    """What an executor has run so far."""

    is_train: bool | None = None
    """Mode of the last forward; None: no forward has run."""
    backward: bool = False
    """Whether backward has run since that forward."""


# Guarantees of an executor:
# * An address is written only after all operations of earlier runs on it: within a run the engine's vars ensure this,
#   between runs the fence.
# * A method that raises has changed nothing; arrays are written after all checks.
# * Runs of one executor are pushed by one thread at a time. Another thread may move its planned memory between runs:
#   ``Idleness.prepared`` keeps the memory in place during a push, and ``_forget`` drops calls on moved memory.
# Fixed after the bind: symbol, plan, context, arrays, memory, ``_external``, ``_overlaps``, ``_engine``.
# Changing: ``_prepared`` (None after a move), ``_progress`` and ``_run`` (with every run), ``_monitor``, ``_unset``.
class Executor:
    """A symbol bound to arrays. Make one with ``symbol.bind`` or ``symbol.simple_bind``.

    Attributes:
        arg_arrays, grad_arrays, aux_arrays: arrays in the order of the symbol's name lists; None for an unwanted
            gradient.
        outputs: arrays of the outputs in planned memory; the next forward overwrites them.
        allocated_bytes: bytes allocated for the plan of this executor. If it shares memory with earlier executors, only
            the growth of the shared memory counts.
    """

    def __init__(
        self,
        symbol: Symbol,
        planned: PlannedGraph,
        context: Context,
        args: Sequence[NDArray],
        grads: Sequence[NDArray | None],
        aux: Sequence[NDArray],
        grad_req: Mapping[str, str],
        *,
        pool: SlabPool | None = None,
        rebind: Callable[..., Executor] | None = None,
        unfuse: Callable[[Executor], Executor] | None = None,
    ) -> None:
        self.symbol = symbol
        self.context = context
        self.planned = planned
        self.arg_names, self.aux_names = list(planned.arguments), list(planned.aux)
        self.output_names = symbol.list_outputs()
        self.arg_arrays = list(args)
        self.grad_arrays = list(grads)
        self.aux_arrays = list(aux)
        self.grad_req = dict(grad_req)
        self._rebind, self._unfuse = rebind, unfuse
        self._inferred: frozenset[str] = frozenset()
        """Names of zero-filled arrays of simple_bind whose shapes were inferred: parameters, not inputs."""
        self._unset: list[str] = []
        """Names of ``_inferred`` that had no value after the last copy_params_from."""
        graph = planned.graph
        variables = (*planned.arguments.values(), *planned.aux.values())
        arrays = zip(variables, (*args, *aux), strict=True)
        external = {graph.row[nid]: array for nid, array in arrays if nid >= 0}
        grad_of = dict(zip(self.arg_names, self.grad_arrays, strict=True))
        external.update((eid, g) for name, eid in planned.gradients.items() if (g := grad_of.get(name)) is not None)
        self._head_grads: list[NDArray | None] = [None] * len(planned.head_grads)
        for k, nid in enumerate(planned.head_grads):
            if nid >= 0:
                out = planned.outputs[k]
                head = new_zeros(planned.shapes[out], planned.devices[nid], planned.dtypes[out])
                self._head_grads[k] = external[graph.row[nid]] = head
        self._memory = self._make_memory(planned, pool)
        self.allocated_bytes = self._memory.allocated_bytes
        self._external = external
        self._limits = bulk_limits(bool(planned.gradients), len(planned.order))
        self._overlaps = planned.memory.num_reuse_edges > 0
        self._prepared: PreparedRun | None = None
        """Calls of a run; None before the first run, since some executors are only inspected or reshaped."""
        planned_outputs = {eid: self._memory.entry(eid) for eid in planned.outputs if eid not in external}
        self.outputs = [planned_outputs[eid] if eid in planned_outputs else external[eid] for eid in planned.outputs]
        self._watches = False
        self._monitor: Monitored | None = None
        self.monitor_callback: tuple[Callback, bool] | None = None
        """The arguments of :meth:`set_monitor_callback`; None without a callback."""
        if config.get("FLAGS_check_nan_inf"):
            self.set_monitor_callback(None)
        self._progress = RunProgress()
        self._repeatable: bool | None = None
        self._run = RunState(is_train=False)
        self._engine = engine.get()

    def _make_memory(self, planned: PlannedGraph, pool: SlabPool | None) -> PlannedMemory:
        """Return the memory of the plan's storages; subclasses override this."""
        return PlannedMemory(planned, pool)

    def _watch(self) -> None:
        """Register :meth:`_forget` with all movable chunks that prepared calls view, to be called when a chunk moves.

        These are the chunks of planned memory, and those of arguments, gradients and states that are movable.
        """
        if self._watches:
            return
        self._watches = True
        forget = weakref.WeakMethod(self._forget)
        external = {id(array.chunk): array.chunk for array in self._external.values()}
        for chunk in (*self._memory.chunks.values(), *external.values()):
            if isinstance(chunk, MovableChunk):
                chunk.watch(forget)

    def _prepare_once(self) -> PreparedRun:
        """Return the calls of a run, prepared again if planned memory has moved since the last run."""
        if self._prepared is None:
            self._prepared = self._prepare()
        return self._prepared

    def _prepare(self) -> PreparedRun:
        """Prepare the calls of a run at the present addresses of planned memory, and cut them into segments."""
        self._memory.complete()
        self._watch()
        return prepare_run(
            self.planned,
            self._memory,
            self._external,
            self.outputs,
            self.grad_arrays,
            limits=self._limits,
            overlaps=self._overlaps,
        )

    def cuda_graphs(self) -> list[tuple[str, int, str]]:
        """Return (name, number of nodes, state) of the CUDA graph of every prepared segment, in each mode it has run.

        The state is ``captured``, ``to be captured``, ``not run yet``, or the reason why the segment cannot be
        captured. ``MXNET_ENABLE_CUDA_GRAPHS`` is read at bind.
        """
        calls = self._prepared
        return [
            (segment.name, len(segment.steps), state)
            for segment in (() if calls is None else (*calls.forward_segments, *calls.backward_segments))
            for state in segment.graphs.values()
        ]

    def _forget(self) -> None:
        """Drop all views of planned memory, which has moved; the next run prepares its calls again."""
        self._prepared = None

    # -- running --------------------------------------------------------------------------------------------------

    def forward(self, is_train: bool = False, **inputs: object) -> list[NDArray]:
        """Push the forward part and return ``outputs``, which are computed asynchronously.

        If an operation fails, reading a result that depends on it raises the error. Other results are computed, unless
        that would overwrite the memory of a failed result before its error has been raised.

        Args:
            is_train: whether Dropout, BatchNorm and similar operators act as in training. With such operators,
                ``backward`` needs True.
            inputs: values to copy into arguments first, by name.

        Raises:
            BindError: an argument name is unknown, or ``is_train`` is an array.
            ShapeError: the shape of a value differs from its argument's.
            DTypeError: a value is not an array of numbers.
            EngineError: the current engine is not the engine of the bind.
            MXNetError: a parameter that :meth:`copy_params_from` was not given still has no value.
        """
        self._check_engine("forward")
        if is_train is not False and is_train is not True:
            check_switch(is_train)
        if self._unset:
            self._check_values(inputs, is_train)
        with self._memory.pool.idleness.prepared(self._prepare_once, self._external.values()):
            calls = self._forward(is_train, inputs)
        if is_train and any(segment.long for segment in calls.forward_segments):
            self._engine.yield_to_worker()  # let workers begin; backward and an update are pushed before a thread waits
        return self.outputs

    def _forward(self, is_train: bool, inputs: Mapping[str, object]) -> PreparedRun:
        """Do the work of :meth:`forward`, with all planned memory present; return the calls."""
        calls = self._prepare_once()
        for target, value in [self._matched(name, value) for name, value in inputs.items()]:
            copy_in(value, target)
        seed, counter = random.next_key(self.context) if calls.random else (0, 0)
        self._fence(calls, by_segment=calls.fences_itself and self._monitor is None)
        self._run = RunState(bool(is_train), seed, counter)
        self._progress = RunProgress(is_train=bool(is_train))
        self._push(calls.forward_segments, calls.forward_steps)
        return calls

    def backward(self, out_grads: object = None, is_train: bool = True) -> None:
        """Push the backward part, which writes or adds gradients to ``grad_arrays`` asynchronously.

        Do nothing if no gradient is wanted.

        Args:
            out_grads: gradient of each output, an NDArray, a list, or a dictionary by output name; needed for outputs
                that are not losses.
            is_train: ignored, as the mode of the forward run decides; MXNet has this argument.

        Raises:
            MXNetError: a gradient needs results of forward, and no forward has run, or its results are overwritten by
                an earlier backward or by another executor that shares the memory; an operator stores what its gradient
                needs in training only, and the last forward had ``is_train=False``; or a needed output gradient is
                missing.
            BindError, ShapeError, DTypeError: an output gradient has an unknown name, another shape, or is no array.
            EngineError: the current engine is not the engine of the bind.
        """
        if not self.planned.gradients:
            return  # as in MXNet
        if not self._progress.is_train:
            self._check_mode()
        self._check_engine("backward")
        if self._progress.is_train is not None and not self._memory.pool.owned_by(self._memory.placement):
            raise MXNetError(
                "backward: another executor that shares this one's planned memory has run since this one's forward, so "
                "what backward needs is overwritten; run forward(is_train=True) again"
            )
        heads = head_values(out_grads, self.output_names, self._head_grads)
        with self._memory.pool.idleness.prepared(self._prepare_once, self._external.values()):
            self._backward(heads)

    def _backward(self, heads: Sequence[tuple[ArrayValue, NDArray]]) -> None:
        """Do the work of :meth:`backward`, with all planned memory present."""
        calls, (is_train, repeated) = self._prepare_once(), self._progress
        if repeated and is_train is not None:
            self._check_repeatable(calls)
        if repeated or is_train is None:
            self._fence(calls)
        for value, head in heads:
            copy_in(value, head)
        self._progress = RunProgress(is_train, backward=True)
        self._push(calls.backward_segments, calls.backward_steps)

    def _check_mode(self) -> None:
        """Raise MXNetError if backward cannot run, given that no forward has run or the last had ``is_train=False``."""
        with self._memory.pool.idleness.prepared(self._prepare_once, self._external.values()):
            calls = self._prepare_once()
            if self._progress.is_train is None:
                if calls.random or reads_forward(self.planned, calls.backward_steps):
                    raise MXNetError("backward: run forward(is_train=True) first")
                return  # backward reads only arguments and gradients of outputs
            why = needs_training(calls.forward_steps)
        if why:
            raise MXNetError(
                f"backward: run forward(is_train=True) first; the last forward had is_train=False, and {why}"
            )

    def _check_repeatable(self, calls: PreparedRun) -> None:
        """Raise if the last backward has overwritten results of forward that backward needs."""
        if self._repeatable is None:
            self._repeatable = keeps_forward(self.planned, calls.backward_steps)
        if not self._repeatable:
            raise MXNetError(
                "backward: backward has run since the last forward(is_train=True), and its results lie where those of "
                "forward were that it needs; run forward(is_train=True) again"
            )

    def _fence(self, calls: PreparedRun, *, by_segment: bool = False) -> None:
        """Order this run after all earlier operations on its addresses; push at most one engine operation.

        The vars of the run's own storages are not enough in two cases: storages of the plan overlap in address, or
        another executor has used the memory since this executor's last run.

        Args:
            calls: the run to push.
            by_segment: whether the first segment writes the fence's vars. The operation is then pushed only in the
                second case.
        """
        # All operations of the pool's executors read its var, so a write of this var waits for them. Operations that
        # users pushed on an output read only the var of that output, so the fence writes these vars, too.
        pool, placement = self._memory.pool, self._memory.placement
        # The chunks stay alive until the push: the var of a dead storage is deleted.
        earlier = [] if pool.owned_by(placement) else pool.take_over(placement)
        writes: list[Var] = []
        if earlier or (self._overlaps and not by_segment):
            writes += calls.fence_vars
        if self._overlaps and self._monitor is not None:
            # The monitor's callback may have pushed operations on any array, not only on outputs.
            writes += [chunk.var for chunk in self._memory.chunks.values()]
        writes += [chunk.var for chunk in earlier]
        if writes:
            engine.get().push(nothing, (), engine.dedupe([], writes)[1], self.context, name="fence")

    def _check_engine(self, verb: str) -> None:
        """Raise EngineError unless the current engine is the engine of the bind."""
        current = engine.get()
        if current is not self._engine:
            raise EngineError(
                f"{verb}: this executor was bound under {self._engine!r}, the current engine is {current!r}; bind it "
                f"again, or run it under the engine that it was bound under"
            )

    def _push(self, segments: Sequence[StepSegment], steps: Sequence[PreparedStep]) -> None:
        """Push ``segments``, or their ``steps`` one by one if a monitor is set."""
        if self._monitor is not None:
            self._monitor.push(steps, self._run)
            return
        run = self._run
        for segment in segments:
            segment.push(run)

    def _matched(self, name: str, value: object) -> tuple[NDArray, ArrayValue]:
        """Return the bound array of argument ``name``, and ``value`` as an array; raise an error if it does not fit."""
        target = self.arg_dict.get(name)
        if target is None:
            hint = did_you_mean(name, ["is_train", *self.arg_names])
            raise BindError(f"forward: unknown argument {name!r}; {hint}the arguments are {listed(self.arg_names)}")
        return target, as_array(value, target, f"forward: argument {name!r}")

    # -- arrays ---------------------------------------------------------------------------------------------------

    @cached_property
    def arg_dict(self) -> dict[str, NDArray]:
        """Arguments by name; reading this raises BindError for duplicate names."""
        return by_name(self.arg_names, self.arg_arrays)

    @cached_property
    def grad_dict(self) -> dict[str, NDArray | None]:
        """Gradients by argument name; None for an unwanted gradient."""
        return by_name(self.arg_names, self.grad_arrays)

    def gradient_order(self) -> list[str]:
        """Return the names of arguments with gradients, sorted by the backward step that completes the gradient.

        If a step completes several gradients, the gradient of the last argument comes first.
        """
        steps = self._prepare_once().backward_steps
        completed = {id(var): index for index, step in enumerate(steps) for var in step.writes}
        arrays = {name: array for name, array in self.grad_dict.items() if array is not None}
        arrays = dict(reversed(arrays.items()))
        return sorted(arrays, key=lambda name: completed.get(id(arrays[name].var), -1))

    @cached_property
    def aux_dict(self) -> dict[str, NDArray]:
        """Auxiliary states by name; reading this raises BindError for duplicate names."""
        return by_name(self.aux_names, self.aux_arrays)

    @property
    def output_dict(self) -> dict[str, NDArray]:
        """Outputs by name; reading this raises BindError for duplicate names."""
        return by_name(self.output_names, self.outputs)

    def copy_params_from(
        self,
        arg_params: Mapping[str, NDArray],
        aux_params: Mapping[str, NDArray] | None = None,
        allow_extra_params: bool = False,
        allow_missing: bool = False,
    ) -> None:
        """Copy values into arguments and auxiliary states by name, cast to their dtypes.

        If a parameter of ``simple_bind`` still has no value at the next :meth:`forward`, that call raises an error
        unless ``allow_missing``: zeros would give plausible, wrong outputs.

        Args:
            arg_params: NDArrays or NumPy arrays by argument.
            aux_params: NDArrays or NumPy arrays by auxiliary state; None: none.
            allow_extra_params: whether unknown names are ignored.
            allow_missing: whether parameters may stay without a value.

        Raises:
            BindError: an unknown name, unless ``allow_extra_params``.
            ShapeError: the shape of a value differs from its array's.
            DTypeError: a value is not an array of numbers.

        Nothing is copied if an error is raised.
        """
        tables = (arg_params, self.arg_dict, "arg"), (aux_params or {}, self.aux_dict, "aux")
        for value, target in parameter_values(tables, allow_extra=allow_extra_params):
            copy_in(value, target)
        self._unset = [] if allow_missing else unset(self, {*arg_params, *(aux_params or {})})

    def _check_values(self, inputs: Mapping[str, object], is_train: bool) -> None:
        """Raise MXNetError if parameters of ``_unset`` still have no value; in training, auxiliary states need none."""
        lost = [name for name in unset(self, inputs) if name in self._unset]
        self._unset = []
        if is_train:  # moving statistics come from the batches
            lost = [name for name in lost if name not in self.aux_names]
        if lost:
            self._unset = lost
            raise MXNetError(
                f"forward: {listed(lost)} never got a value: copy_params_from was not given one; pass the parameters "
                f"of this network, or allow_missing=True where zeros are meant"
            )

    def reshape(self, partial_shaping: bool = False, allow_up_sizing: bool = False, **shapes: ShapeLike) -> Executor:
        """Return an executor for other input shapes that shares arrays and planned memory with this executor.

        Args:
            partial_shaping: allow other arrays than those of ``shapes`` to change their shapes.
            allow_up_sizing: allow arrays to grow; an array that grows is a new array of zeros.
            shapes: new shapes by argument name.

        Raises:
            BindError: an unknown name.
            ShapeError: an array would change its shape or grow, and the options do not allow it.
        """
        assert self._rebind is not None
        return self._rebind(self, partial_shaping, allow_up_sizing, shapes)

    @property
    def _ctx(self) -> Context:
        """The context; MXNet scripts use this name."""
        return self.context

    @property
    def pool(self) -> SlabPool:
        """The pool of planned memory, which executors may share."""
        return self._memory.pool

    # -- inspection -----------------------------------------------------------------------------------------------

    @property
    def memory_plan(self) -> MemoryPlan:
        """The memory plan of intermediate results, outputs and workspaces."""
        return self.planned.memory

    def set_monitor_callback(self, callback: Callback | None, monitor_all: bool = False) -> None:
        """Call ``callback(name, array)`` for every output of every node, right after the node is pushed.

        Args:
            callback: the function; None removes it.
            monitor_all: call it for every input, too, before the node is pushed.

        An executor that has not run yet is planned again without fusion (MXNET_USE_FUSION), to show every node; arrays
        in :attr:`outputs` are new then. After a run only the last output of fused nodes is shown; a ConfigWarning names
        the others.
        """
        shown = checked(callback)
        if callback is not None and self.hidden_outputs:
            if self._prepared is None and self._progress.is_train is None and self._unfuse is not None:
                vars(self).update(vars(self._unfuse(self)))
            warn_of_joined(self.planned.graph.nodes)
        self.monitor_callback = None if callback is None else (callback, monitor_all)
        self._monitor = None if shown is None else Monitored(shown, monitor_all, self.planned.graph)

    @property
    def hidden_outputs(self) -> list[str]:
        """Names of nodes whose outputs a monitor cannot show, because they are fused with the next node."""
        return hidden_members(self.planned.graph.nodes)

    @property
    def has_run(self) -> bool:
        """Whether the executor has run forward or backward."""
        return self._progress.is_train is not None

    def get_optimized_symbol(self) -> Symbol:
        """Return a copy of the optimized forward graph: equal expressions are merged, cross-device copies inserted.

        Fused nodes, such as a layer and its relu, are separate nodes in the copy.
        """
        return Symbol(unfused(self.planned.graph, self.planned.outputs))

    def debug_str(self) -> str:
        """Return the bound graph and the planned megabytes in MXNet's text format."""
        return debug_str(self.planned)

    def __repr__(self) -> str:
        return (
            f"<Executor {self.output_names} on {self.context}: {self.planned.num_forward_nodes} forward and "
            f"{len(self.planned.order) - self.planned.num_forward_nodes} backward nodes, "
            f"{self.memory_plan.peak:,} planned bytes>"
        )
