"""Modules written in Python: PythonModule, a base with no-op steps, and PythonLossModule.

In a :class:`~weftplan.training.module.sequential_module.SequentialModule` they come after the modules that train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from weftplan import ndarray as nd
from weftplan.data.batch import DataBatch, DataDesc
from weftplan.errors import MXNetError, ParameterError
from weftplan.ndarray import NDArray
from weftplan.training.fit.fit_module import Descs, Logs
from weftplan.training.fit.monitor import Monitor
from weftplan.training.initializers.initializer import Initializer
from weftplan.training.metrics.metric import EvalMetric
from weftplan.training.module.base_module import BaseModule, as_descs
from weftplan.training.module.module_steps import BindOptions, InitOptions, Params


class PythonModule(BaseModule):
    """Base of modules without parameters. A subclass implements ``forward``, ``backward``, ``get_outputs``,
    ``get_input_grads`` and ``_compute_output_shapes``.

    Args:
        data_names, label_names: names of the inputs; None: no labels.
        output_names: names of the outputs.
    """

    def __init__(
        self,
        data_names: Sequence[str],
        label_names: Sequence[str] | None,
        output_names: Sequence[str],
        logger: Logs | None = None,
    ) -> None:
        super().__init__(logger)
        self.data_names = list(data_names)
        self.label_names = [] if label_names is None else list(label_names)
        self.output_names = list(output_names)
        self._data_shapes: list[DataDesc] = []
        self._label_shapes: list[DataDesc] = []
        self._output_shapes: list[tuple[str, tuple[int, ...]]] = []

    @property
    def data_shapes(self) -> list[DataDesc]:
        return self._data_shapes

    @property
    def label_shapes(self) -> list[DataDesc]:
        """Bound labels; empty if the module takes no labels."""
        return self._label_shapes

    @property
    def output_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Outputs: [(name, shape), …]."""
        return self._output_shapes

    def _bind(self, data_shapes: Descs, label_shapes: Descs | None, options: BindOptions) -> None:
        if options.grad_req != "write":
            raise ParameterError(f"{type(self).__name__}.bind: grad_req must be 'write', got {options.grad_req!r}")
        data, labels = as_descs(data_shapes), as_descs(label_shapes)
        for what, descs, names in (("data", data, self.data_names), ("label", labels, self.label_names)):
            if [desc.name for desc in descs] != names and (descs or what == "data"):
                raise ParameterError(
                    f"{type(self).__name__}.bind: the {what} names are {names}, got {[desc.name for desc in descs]}"
                )
        self._data_shapes, self._label_shapes = data, labels
        self.for_training, self.inputs_need_grad = options.for_training, options.inputs_need_grad
        self._output_shapes = self._compute_output_shapes()
        self.binded = True

    def _compute_output_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """[(name, shape)] of the outputs, once the shapes of the inputs are known."""
        raise NotImplementedError(f"{type(self).__name__}._compute_output_shapes")

    def get_params(self) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
        return {}, {}

    def _init_params(
        self,
        initializer: Initializer | None,
        arg_params: Params | None,
        aux_params: Params | None,
        options: InitOptions,
    ) -> None:
        self.params_initialized = True

    def _set_params(self, arg_params: Params, aux_params: Params | None, options: InitOptions) -> None:
        self.params_initialized = True

    def _init_optimizer(self, *settings: object, force_init: bool) -> None:
        self.optimizer_initialized = True

    def update(self) -> None:
        """There is nothing to update."""

    def update_metric(self, eval_metric: EvalMetric, labels: Sequence[NDArray], pre_sliced: bool = False) -> None:
        if self._label_shapes:
            eval_metric.update(list(labels), self.get_outputs())

    def get_input_grads(self, merge_multi_context: bool = True) -> list[NDArray]:
        """Gradients of the data of the last ``backward``."""
        raise NotImplementedError(f"{type(self).__name__}.get_input_grads")

    def install_monitor(self, mon: Monitor) -> None:
        """There is no executor to watch."""


class PythonLossModule(PythonModule):
    """Loss layer: passes its input through; a Python function computes the gradient.

    Args:
        name: prefix of the output name, ``<name>_output``.
        grad_func: function of (scores, labels) that returns the gradient, an NDArray or a NumPy array. Alternatively a
            subclass overrides ``_backward_impl``, which sets ``self._scores_grad``.
    """

    def __init__(
        self,
        name: str = "pyloss",
        data_names: Sequence[str] = ("data",),
        label_names: Sequence[str] = ("softmax_label",),
        logger: Logs | None = None,
        grad_func: Callable[[NDArray, NDArray], object] | None = None,
    ) -> None:
        if len(data_names) != 1 or len(label_names) != 1:
            raise ParameterError(f"PythonLossModule takes one input and one label, got {data_names} and {label_names}")
        if grad_func is not None and not callable(grad_func):
            raise ParameterError(f"grad_func must be a function of scores and labels, got {grad_func!r}")
        super().__init__(data_names, label_names, [f"{name}_output"], logger)
        self._scores: NDArray | None = None
        self._labels: NDArray | None = None
        self._scores_grad: NDArray | None = None
        self._grad_func = grad_func

    def _compute_output_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(self.output_names[0], tuple(self._data_shapes[0].shape))]

    def forward(self, data_batch: DataBatch, is_train: bool | None = None) -> None:
        self._scores = data_batch.data[0]
        if self.for_training if is_train is None else is_train:
            self._labels = data_batch.label[0]

    def get_outputs(self, merge_multi_context: bool = True) -> Any:
        if self._scores is None:
            raise MXNetError("get_outputs: there are none yet; call forward first")
        return [self._scores] if merge_multi_context else [[self._scores]]

    def backward(self, out_grads: Sequence[NDArray] | None = None) -> None:
        if out_grads is not None:
            raise ParameterError("PythonLossModule.backward: a loss takes no gradients of its output")
        if not self.for_training:
            raise MXNetError("backward: the module was bound with for_training=False")
        self._backward_impl()

    def _backward_impl(self) -> None:
        """Write the gradient of the scores."""
        if self._grad_func is None:
            raise NotImplementedError(f"{type(self).__name__}: give grad_func, or replace _backward_impl")
        if self._scores is None or self._labels is None:
            raise MXNetError("backward: call forward(is_train=True) first")
        grad = self._grad_func(self._scores, self._labels)
        self._scores_grad = grad if isinstance(grad, NDArray) else nd.array(grad)

    def get_input_grads(self, merge_multi_context: bool = True) -> list[NDArray]:
        if self._scores_grad is None:
            raise MXNetError("get_input_grads: there are none yet; call backward first")
        return [self._scores_grad]
