"""The bound part of a Module: its executors, and access to their shapes, outputs, gradients and states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weftplan.data.batch import DataBatch, DataDesc
from weftplan.errors import BindError, MXNetError, ParameterError
from weftplan.ndarray import NDArray
from weftplan.support.rollback import all_or_nothing
from weftplan.training.executor_group import ExecutorGroup, GradReq
from weftplan.training.fit.precision import SCALE
from weftplan.training.metrics.metric import EvalMetric
from weftplan.training.module.base_module import PADDING, BaseModule
from weftplan.training.mxnet_names import ModuleNames


class BoundModule(ModuleNames, BaseModule):
    """Base of Module with the results of its executors, which ``bind`` of the subclass makes."""

    output_names: list[str]
    state_names: list[str]
    _group: ExecutorGroup | None
    _bind_options: dict[str, Any]
    _ran: bool
    """Whether a forward has run since the last bind."""
    _precision: str | None
    loss_scale: float | None
    """Loss scale in mixed precision; None otherwise."""

    @property
    def group(self) -> ExecutorGroup:
        """The bound executors; raises MXNetError before bind."""
        if self._group is None:
            raise MXNetError("the module is not bound; call bind(data_shapes, label_shapes) or fit first")
        return self._group

    @property
    def data_shapes(self) -> list[DataDesc]:
        """Bound data inputs."""
        return self.group.data_shapes

    @property
    def label_shapes(self) -> list[DataDesc]:
        """Bound labels."""
        return self.group.label_shapes

    @property
    def output_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Outputs of the whole batch: [(name, shape), …]."""
        return list(zip(self.output_names, self.group.output_shapes(), strict=True))

    def bound_grad_req(self) -> GradReq | None:
        return self._bind_options.get("grad_req")

    def clear_gradients(self, data_batch: DataBatch) -> None:
        self.group.clear_gradients()

    def get_outputs(self, merge_multi_context: bool = True) -> Any:
        """Outputs of the last forward: of the whole batch, or per output a list with one array per context."""
        self._need("get_outputs", binded=True, params=True)
        if not self._ran:
            raise MXNetError("get_outputs: there are none yet; call forward first")
        return self.group.merged_outputs() if merge_multi_context else self.group.outputs()

    def get_input_grads(self, merge_multi_context: bool = True) -> Any:
        """Gradients of the data arrays (bind with ``inputs_need_grad=True``): of the whole batch, or of each a
        list with one per context."""
        if not self._bind_options.get("inputs_need_grad"):
            raise MXNetError("get_input_grads: bind with inputs_need_grad=True")
        return self.group.merged_input_grads() if merge_multi_context else self.group.input_grad_arrays

    def get_states(self, merge_multi_context: bool = True) -> Any:
        """Return the states: of the whole batch, or per state a list with one array per context."""
        self._need("get_states", binded=True, params=True)
        return self.group.merged_states() if merge_multi_context else self.group.state_arrays

    def set_states(self, states: Sequence[Sequence[NDArray]] | None = None, value: float | None = None) -> None:
        """Set all states to ``value``, or each to arrays per context, as ``get_outputs(merge_multi_context=False)``.

        Raises:
            ParameterError: both, or neither; or another number of ``states`` than the module has.
        """
        self._need("set_states", binded=True, params=True)
        if (states is None) == (value is None):
            raise ParameterError("set_states: give either states or value")
        if states is not None and len(states) != len(self.state_names):
            raise ParameterError(f"set_states: {len(states)} states given, there are {self.state_names}")
        self.group.set_states(states, value)

    def update_metric(self, eval_metric: EvalMetric, labels: Sequence[Any], pre_sliced: bool = False) -> None:
        self.group.update_metric(eval_metric, labels, pre_sliced, PADDING.get())

    @property
    def precision(self) -> str | None:
        """The dtype of mixed precision; None if it is off."""
        return self._precision

    @all_or_nothing
    def set_precision(self, dtype: str | None, *, rebind: bool = False) -> None:
        if dtype == self._precision:
            return
        if self.binded and not rebind:
            raise BindError(
                f"fit: mixed_precision={dtype!r} needs another binding than that with {self._precision!r}, which there "
                f"is: pass force_rebind=True"
            )
        self._precision = dtype
        self.loss_scale = None if dtype is None else 1.0

    @all_or_nothing
    def set_loss_scale(self, scale: float) -> None:
        self.loss_scale = scale
        if self._group is not None:
            self._group.set_argument(SCALE, scale)
