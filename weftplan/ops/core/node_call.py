"""Calls of kernels: executors of bound graphs, and operators called on arrays, run kernels only through this module.

A :class:`NodeCall` enforces the kernel contract: inputs are read-only in debug mode, a call without a wanted output is
omitted, and results are accumulated after the kernel. It owns only views of its caller's arrays. One thread at a time
may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from weftplan.ops.core.forms import bind, resolved
from weftplan.ops.core.schema import Kernel, Op, OpContext, Params, Shape, TensorSpec
from weftplan.support.array_types import ArrayModule, RawArray

Call = Callable[[], object]


class NodeCall:
    """A call of one node's kernel on raw arrays.

    Args:
        op: the operator.
        kernel: the implementation that runs.
        params: the node's parameters.
        xp: the array module.
        inputs: arrays; None for ignored inputs.
        outputs: arrays; None for unwanted outputs.
        workspace: a flat array of at least the bytes that the operator declares; None if it declares none.
        added: pairs (array, output); the output is added to the array after the kernel.
        guarded: whether the kernel gets read-only inputs, except states (debug mode).
        recompute: whether the call repeats a forward node in the backward pass.
        output_shapes: shapes of all outputs, needed if some of them are None.
        executor_state: the objects that kernels of this executor keep between calls.
    """

    __slots__ = (
        "_added",
        "_executor_state",
        "_idle",
        "_inputs",
        "_kernel",
        "_output_shapes",
        "_outputs",
        "_params",
        "_recompute",
        "_workspace",
        "_xp",
    )

    def __init__(
        self,
        op: Op,
        kernel: Kernel,
        params: Params,
        xp: ArrayModule,
        inputs: Sequence[object],
        outputs: Sequence[object],
        *,
        workspace: RawArray | None = None,
        added: Sequence[tuple[RawArray, RawArray]] = (),
        guarded: bool = False,
        recompute: bool = False,
        output_shapes: Sequence[Shape] = (),
        executor_state: dict[object, object] | None = None,
    ) -> None:
        if guarded:
            states = op.mutated(params)
            inputs = [a if a is None or i in states else read_only(a) for i, a in enumerate(inputs)]
        self._kernel = kernel
        self._params = params
        self._xp = xp
        self._inputs = inputs
        self._outputs = outputs
        self._workspace = workspace
        self._added = added
        self._recompute = recompute
        self._output_shapes = output_shapes
        self._executor_state = executor_state
        self._idle = not op.has_work(outputs)

    def prepared(self) -> Call | None:
        """Return a call that may be replayed in every run; None if the kernel depends on the run."""
        if self._idle:
            return _nothing
        if not is_replayable(self._kernel, self._params):
            return None
        return self._bind(OpContext(self._xp, workspace=self._workspace))

    def bound(self, *, is_train: bool, random_key: tuple[int, int]) -> Call:
        """Return a call for runs with this training flag and random key; it may be called repeatedly."""
        if self._idle:
            return _nothing
        return self._bind(
            OpContext(
                self._xp,
                is_train=is_train,
                workspace=self._workspace,
                random_key=random_key,
                recompute=self._recompute,
                output_shapes=self._output_shapes,
                executor_state=self._executor_state,
            )
        )

    def _bind(self, context: OpContext) -> Call:
        call = bind(self._kernel, context, self._params, self._inputs, self._outputs)
        return self._adding(call) if self._added else call

    def _adding(self, call: Call) -> Call:
        def call_and_add() -> None:
            call()
            for target, term in self._added:
                self._xp.add(target, term, out=target)

        return call_and_add


def is_replayable(kernel: Kernel, params: Params) -> bool:
    """Return whether calls with these parameters do not depend on the run, so that one call serves every run."""
    return bool(getattr(resolved(kernel, params)[0], "replayable", False))


def bare_call(
    kernel: Kernel, params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], workspace: int
) -> Callable[..., object]:
    """Return a function that runs ``kernel`` on NumPy arrays of these shapes and dtypes.

    Its arguments are the inputs, the outputs, and a flat array of ``workspace`` bytes unless that is 0. Any number of
    threads may call it, any number of times.
    """
    kernel, params = resolved(kernel, params)
    make = getattr(kernel, "bare_form", None)
    function: Callable[..., object] | None = None if make is None else make(params, inputs, outputs)
    if function is not None:
        return function
    count, end = len(inputs), len(inputs) + len(outputs)
    if workspace:
        return lambda *arrays: kernel(
            OpContext(np, workspace=arrays[end]), params, list(arrays[:count]), list(arrays[count:end])
        )
    context = OpContext(np)  # without a workspace, calls do not change it
    return lambda *arrays: kernel(context, params, list(arrays[:count]), list(arrays[count:]))


def read_only(array: object) -> object:
    """Return a read-only view of a NumPy array; return any other array unchanged."""
    if not isinstance(array, np.ndarray):
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def _nothing() -> None:
    """Do nothing, for a node without a wanted output; its operation in the engine only orders uses of its memory."""
