"""``mx.mod.SequentialModule``: a chain of modules, each fed with the outputs of its predecessor.

A single symbol of all parts would be planned as a whole. The chain is for parts that are not symbols, such as a loss in
Python.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from weftplan.data.batch import DataBatch, DataDesc
from weftplan.errors import MXNetError, ParameterError
from weftplan.ndarray import NDArray
from weftplan.support.keyword_errors import known_keywords
from weftplan.support.rollback import all_or_nothing, rollback
from weftplan.training.fit.fit_module import Descs, Logs, OptimizerLike, OptimizerSettings, StoreLike
from weftplan.training.fit.monitor import Monitor
from weftplan.training.initializers.initializer import Initializer
from weftplan.training.metrics.metric import EvalMetric
from weftplan.training.module.base_module import BaseModule, as_descs
from weftplan.training.module.module import Module
from weftplan.training.module.module_steps import BindOptions, InitOptions, Params
from weftplan.training.module.python_module import PythonModule


class SequentialModule(BaseModule):
    """Chain of modules, initially empty; :meth:`add` appends."""

    META_TAKE_LABELS = "take_labels"
    META_AUTO_WIRING = "auto_wiring"

    def __init__(self, logger: Logs | None = None) -> None:
        super().__init__(logger)
        self._modules: list[Any] = []
        self._metas: list[dict[str, Any]] = []
        self._label_shapes: list[DataDesc] = []

    @known_keywords()
    def add(self, module: BaseModule, *, take_labels: bool = False, auto_wiring: bool = False) -> SequentialModule:
        """Append a module; returns the chain.

        Args:
            take_labels: whether the module receives the labels of the batch.
            auto_wiring: whether its inputs keep the module's own data names instead of the previous module's output
                names.
        """
        self._modules.append(module)
        self._metas.append({self.META_TAKE_LABELS: take_labels, self.META_AUTO_WIRING: auto_wiring})
        self.binded = self.params_initialized = self.optimizer_initialized = False  # the new one is not
        return self

    def rollback_parts(self) -> list[object]:
        parts = [getattr(module, "rollback_parts", None) for module in self._modules]
        return [self, *(part for of_module in parts if of_module is not None for part in of_module())]

    @contextmanager
    def _old_values(self) -> Iterator[None]:
        """Give the modules back the values of their parameters if the body raises."""
        # A user's get_params is not called for this.
        own = (Module, PythonModule)
        kinds = [next((kind for kind in own if isinstance(m, kind)), type(m)) for m in self._modules]
        pairs = [pair for pair in zip(self._modules, kinds, strict=True) if pair[0].params_initialized]
        old = [(module, kind.get_params(module)) for module, kind in pairs]
        try:
            yield
        except BaseException:
            for module, values in old:
                module.set_params(*values)
            raise

    def _takes_labels(self) -> list[BaseModule]:
        return [
            module for module, meta in zip(self._modules, self._metas, strict=True) if meta.get(self.META_TAKE_LABELS)
        ]

    def _ends(self) -> tuple[Any, Any]:
        """First and last module."""
        if not self._modules:
            raise MXNetError("the SequentialModule is empty; add modules first")
        return self._modules[0], self._modules[-1]

    @property
    def data_names(self) -> list[str]:
        """Names of the first module's data."""
        return list(self._ends()[0].data_names) if self._modules else []

    @property
    def output_names(self) -> list[str]:
        """Names of the last module's outputs."""
        return list(self._ends()[1].output_names) if self._modules else []

    @property
    def data_shapes(self) -> list[DataDesc]:
        self._need("data_shapes", binded=True)
        shapes: list[DataDesc] = self._ends()[0].data_shapes
        return shapes

    @property
    def label_shapes(self) -> list[DataDesc]:
        """Bound labels; empty if no module takes labels."""
        self._need("label_shapes", binded=True)
        return self._label_shapes

    @property
    def output_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Outputs of the last module: [(name, shape), …]."""
        self._need("output_shapes", binded=True)
        shapes: list[tuple[str, tuple[int, ...]]] = self._ends()[1].output_shapes
        return shapes

    def _bind(self, data_shapes: Descs, label_shapes: Descs | None, options: BindOptions) -> None:
        self._ends()
        if options.shared_module is not None:
            raise ParameterError("SequentialModule.bind: a chain shares no memory with another module")
        if options.inputs_need_grad and not options.for_training:
            raise ParameterError("SequentialModule.bind: inputs_need_grad needs for_training=True")
        takers = self._takes_labels()
        shapes: Any = data_shapes
        for k, (module, meta) in enumerate(zip(self._modules, self._metas, strict=True)):
            if meta.get(self.META_AUTO_WIRING):
                if len(shapes) != len(module.data_names):
                    raise ParameterError(
                        f"SequentialModule.bind: module {k} takes {module.data_names}, {len(shapes)} arrays come"
                    )
                shapes = [(name, desc[1]) for name, desc in zip(module.data_names, shapes, strict=True)]
            module.bind(
                data_shapes=shapes,
                label_shapes=label_shapes if module in takers else None,
                **options._replace(
                    inputs_need_grad=options.inputs_need_grad or (options.for_training and k > 0)
                )._asdict(),
            )
            shapes = module.output_shapes
        self._label_shapes = as_descs(label_shapes) if takers else []
        self.for_training, self.inputs_need_grad = options.for_training, options.inputs_need_grad
        self.binded = True

    def get_params(self) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
        self._need("get_params", binded=True, params=True)
        args: dict[str, NDArray] = {}
        aux: dict[str, NDArray] = {}
        for module in self._modules:
            mine, states = module.get_params()
            args.update(mine)
            aux.update(states)
        return args, aux

    def _init_params(
        self,
        initializer: Initializer | None,
        arg_params: Params | None,
        aux_params: Params | None,
        options: InitOptions,
    ) -> None:
        self._need("init_params", binded=True)
        self._check_names(arg_params, aux_params, options.allow_extra)
        with self._old_values():
            for module in self._modules:
                module.init_params(
                    initializer=initializer,
                    arg_params=arg_params,
                    aux_params=aux_params,
                    **options._replace(allow_extra=True)._asdict(),
                )
            self._refuse_twins()
        self.params_initialized = True

    def _set_params(self, arg_params: Params, aux_params: Params | None, options: InitOptions) -> None:
        self._need("set_params", binded=True)
        self._check_names(arg_params, aux_params, options.allow_extra)
        with self._old_values():
            for module in self._modules:
                module.set_params(arg_params, aux_params, **options._replace(allow_extra=True)._asdict())
            self._refuse_twins()
        self.params_initialized = True

    def _names(self) -> list[tuple[int, str]]:
        """Return (number of the module, name) of every parameter and auxiliary state."""
        return [
            (k, name)
            for k, module in enumerate(self._modules)
            for name in (*getattr(module, "param_names", ()), *getattr(module, "aux_names", ()))
        ]

    def _check_names(
        self, arg_params: Mapping[str, NDArray] | None, aux_params: Mapping[str, NDArray] | None, allow_extra: bool
    ) -> None:
        """Refuse given values whose names no module has."""
        open_ended = any(not hasattr(module, "param_names") for module in self._modules)
        all_names = {name for _, name in self._names()}
        unknown = sorted({*(arg_params or {}), *(aux_params or {})} - all_names)
        if unknown and not allow_extra and not open_ended:
            raise ParameterError(f"no module of the chain has {unknown}; pass allow_extra=True to ignore them")

    def _refuse_twins(self) -> None:
        seen: dict[str, int] = {}
        names = [
            (k, name) for k, module in enumerate(self._modules) for part in module.get_params() for name in part or ()
        ]
        for k, name in names:
            if seen.setdefault(name, k) != k:
                raise ParameterError(f"parameter {name!r} is in module {seen[name]} and in module {k} of the chain")

    def _init_optimizer(
        self, kvstore: StoreLike, optimizer: OptimizerLike, settings: OptimizerSettings, *, force_init: bool
    ) -> None:
        self._need("init_optimizer", binded=True, params=True)
        if self.optimizer_initialized and not force_init:
            return
        for module in self._modules:
            module.init_optimizer(
                kvstore=kvstore, optimizer=optimizer, optimizer_params=settings, force_init=force_init
            )
        self.optimizer_initialized = True

    def forward(self, data_batch: DataBatch, is_train: bool | None = None) -> None:
        self._need("forward", binded=True, params=True)
        batch = copy.copy(data_batch)
        last_module = self._ends()[1]
        for module in self._modules:
            module.forward(batch, is_train=is_train)
            if module is not last_module:
                batch.data = module.get_outputs()
                batch.provide_data = [DataDesc(name, shape) for name, shape in module.output_shapes]

    def backward(self, out_grads: Sequence[NDArray] | None = None) -> None:
        self._need("backward", binded=True, params=True)
        for k, module in reversed(list(enumerate(self._modules))):
            module.backward(out_grads=out_grads)
            if k:
                out_grads = module.get_input_grads()

    def update(self) -> None:
        self._need("update", binded=True, params=True, optimizer=True)
        for module in self._modules:
            module.update()

    def synchronize(self) -> None:
        for module in self._modules:
            module.synchronize()

    def get_outputs(self, merge_multi_context: bool = True) -> Any:
        self._need("get_outputs", binded=True, params=True)
        return self._ends()[1].get_outputs(merge_multi_context=merge_multi_context)

    def get_input_grads(self, merge_multi_context: bool = True) -> Any:
        """Gradients of the first module's data (bind with ``inputs_need_grad=True``)."""
        if not self.inputs_need_grad:
            raise MXNetError("get_input_grads: bind with inputs_need_grad=True")
        return self._ends()[0].get_input_grads()

    def update_metric(self, eval_metric: EvalMetric, labels: Sequence[NDArray], pre_sliced: bool = False) -> None:
        self._need("update_metric", binded=True, params=True)
        for module in self._takes_labels():
            module.update_metric(eval_metric, labels, pre_sliced)

    @all_or_nothing
    def install_monitor(self, mon: Monitor) -> None:
        self._need("install_monitor", binded=True)
        with rollback(mon):
            for module in self._modules:
                module.install_monitor(mon)
