"""``mx.mod.BucketingModule``: a network in several sizes, for sequences of different lengths.

Each bucket is a :class:`~weftplan.training.module.module.Module`. The default bucket owns the parameters, the optimizer
and the kvstore. Other buckets are bound when their first batch arrives. They share the default bucket's arrays and
memory, so the next bucket that runs overwrites the results of the previous run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weftplan import ndarray as nd
from weftplan.data.batch import DataBatch, DataDesc
from weftplan.device.context import Context
from weftplan.errors import BindError, MXNetError, listed
from weftplan.ndarray import NDArray
from weftplan.support.rollback import all_or_nothing, rollback
from weftplan.symbol import Symbol
from weftplan.symbol.name import NameManager
from weftplan.training.executor_group import GradReq
from weftplan.training.fit.fit_module import Descs, Logs, OptimizerLike, OptimizerSettings, StoreLike
from weftplan.training.fit.monitor import Monitor
from weftplan.training.fit.parameter_files import load_params, params_path, write_params
from weftplan.training.initializers.initializer import Initializer
from weftplan.training.metrics.metric import EvalMetric
from weftplan.training.module.base_module import BaseModule
from weftplan.training.module.module import Module
from weftplan.training.module.module_steps import BindOptions, InitOptions, Params

SymbolGenerator = Callable[[Any], tuple[Symbol, Sequence[str] | None, Sequence[str] | None]]


class BucketingModule(BaseModule):
    """Family of networks with shared parameters, selected by bucket key.

    Args:
        sym_gen: bucket key -> (symbol, names of data, names of labels). Automatic node names are the same for every
            bucket.
        default_bucket_key: key of the network that has all parameters. Choose the largest network, because all buckets
            share its memory.
        logger, context, work_load_list, fixed_param_names, state_names, group2ctxs, compression_params, memory_budget:
            settings of :class:`~weftplan.training.module.module.Module` that all buckets have.
    """

    _init_options = ("allow_missing", "force_init")

    def __init__(
        self, sym_gen: SymbolGenerator, default_bucket_key: Hashable | None = None, logger: Logs | None = None,
        context: Context | Sequence[Context] | None = None, work_load_list: Sequence[float] | None = None,
        fixed_param_names: Sequence[str] | None = None, state_names: Sequence[str] | None = None,
        group2ctxs: Mapping[str, Context] | Sequence[Mapping[str, Context]] | None = None,
        compression_params: Mapping[str, object] | None = None, *, memory_budget: int | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(logger)
        if default_bucket_key is None:
            raise BindError("BucketingModule needs default_bucket_key: the bucket that has all parameters")
        self._sym_gen = sym_gen
        self._settings: dict[str, Any] = {
            "logger": logger, "context": context, "work_load_list": work_load_list,
            "fixed_param_names": fixed_param_names, "state_names": state_names, "group2ctxs": group2ctxs,
            "compression_params": compression_params, "memory_budget": memory_budget,
        }  # fmt: skip
        self.default_bucket_key = default_bucket_key
        self._buckets: dict[Any, Module] = {}
        self._symbols: Mapping[Any, Symbol] = {}
        self._default = self._make(default_bucket_key)
        self._use(default_bucket_key, self._default)
        self._bind_options: dict[str, Any] = {}
        self._monitor: Monitor | None = None

    def _make(self, key: Hashable) -> Module:
        with NameManager():
            symbol, data_names, label_names = self._sym_gen(key)
        return Module(self._symbols.get(key, symbol), data_names, label_names, **self._settings)

    # -- files ----------------------------------------------------------------------------------------------------

    def save_checkpoint(self, prefix: str | os.PathLike[str], epoch: int, remove_amp_cast: bool = True) -> Path:
        """Write the parameters, the network of each bucket (``<prefix>-<key>-symbol.json``) and their keys
        (``<prefix>.buckets``); returns the parameter file's path. ``remove_amp_cast``: see
        :meth:`Symbol.tojson <weftplan.symbol.Symbol.tojson>`.

        Args:
            prefix: path and start of the files' names.
            epoch: number in the name of the parameter file.
            remove_amp_cast: see :meth:`Symbol.tojson <weftplan.symbol.Symbol.tojson>`.

        Raises:
            BindError: a key is not a whole number, which the file of keys cannot store.
        """
        self._need("save_checkpoint", binded=True, params=True)
        strange = [key for key in self._buckets if not isinstance(key, (int, np.integer)) or isinstance(key, bool)]
        if strange:
            raise BindError(f"save_checkpoint: the keys of buckets must be whole numbers, got {listed(strange)}")
        name = os.fsdecode(prefix)
        for key, module in self._buckets.items():
            module.symbol.save(f"{name}-{key}-symbol.json", remove_amp_cast)
        path = params_path(prefix, epoch)
        write_params(path, *self.get_params())
        nd.save(f"{name}.buckets", [nd.array(list(self._buckets), dtype="int32")])
        return path

    @staticmethod
    def load(
        prefix: str | os.PathLike[str],
        epoch: int,
        sym_gen: SymbolGenerator | None = None,
        default_bucket_key: Hashable = None,
        **settings: Any,
    ) -> BucketingModule:
        """Load a module whose parameters come from a checkpoint (assigned at bind) and whose networks from ``sym_gen``.

        Args:
            prefix: path and start of the files' names.
            epoch: number in the name of the parameter file.
            sym_gen: as for the constructor.
            default_bucket_key: as for the constructor.
            **settings: as for the constructor.

        Raises:
            BindError: no ``sym_gen``, or no ``default_bucket_key``.
            FormatError: the files are damaged.
        """
        if sym_gen is None or default_bucket_key is None:
            raise BindError("BucketingModule.load needs sym_gen and default_bucket_key, as the constructor does")
        module = BucketingModule(sym_gen, default_bucket_key, **settings)
        module._default._arg_params, module._default._aux_params = load_params(prefix, epoch)
        return module

    @staticmethod
    def load_dict(
        sym_dict: Mapping[Hashable, Symbol] | None = None,
        sym_gen: SymbolGenerator | None = None,
        default_bucket_key: Hashable = None,
        arg_params: Params | None = None,
        aux_params: Params | None = None,
        **settings: Any,
    ) -> BucketingModule:
        """Make a module from networks and parameters in memory; parameters are assigned at bind.

        Args:
            sym_dict: bucket key -> network; ``sym_gen`` supplies other buckets, and the names of data and labels.

        Raises:
            BindError: one of the arguments is missing.
        """
        required = {"sym_dict": sym_dict, "sym_gen": sym_gen, "default_bucket_key": default_bucket_key,
                 "arg_params": arg_params, "aux_params": aux_params}  # fmt: skip
        absent = [name for name, value in required.items() if value is None]
        if sym_dict is None or sym_gen is None or absent:
            raise BindError(f"BucketingModule.load_dict needs {', '.join(required)}; {', '.join(absent)} not given")
        module = BucketingModule(sym_gen, default_bucket_key, **settings)
        module._symbols = dict(sym_dict)
        module._default = module._make(default_bucket_key)
        module._use(default_bucket_key, module._default)
        module._default._arg_params, module._default._aux_params = dict(arg_params or {}), dict(aux_params or {})
        return module

    @property
    def _default_bucket_key(self) -> Hashable:
        """MXNet's private name of :attr:`default_bucket_key`, for scripts."""
        return self.default_bucket_key

    @property
    def _curr_module(self) -> Module:
        """MXNet's private name of the current bucket's module, for scripts."""
        return self._current

    def rollback_parts(self) -> list[object]:
        modules = {id(module): module for module in (self._default, *self._buckets.values())}.values()
        return [self, *(part for module in modules for part in module.rollback_parts())]

    def _use(self, key: Hashable, module: Module) -> None:
        self._buckets[key] = module
        self._current, self.bucket_key, self.symbol = module, key, module.symbol

    def _expect(
        self,
        memory_budget: int | str | None,
        kvstore: StoreLike,
        optimizer: OptimizerLike,
        settings: OptimizerSettings,
        *,
        rebind: bool,
    ) -> None:
        if memory_budget is not None:
            self._settings["memory_budget"] = memory_budget
        for module in {id(m): m for m in (self._default, *self._buckets.values())}.values():
            module._expect(memory_budget, kvstore, optimizer, settings, rebind=rebind)

    # -- binding --------------------------------------------------------------------------------------------------

    @property
    def data_names(self) -> list[str]:
        """Data of the current bucket."""
        return self._current.data_names

    @property
    def label_names(self) -> list[str]:
        """Labels of the current bucket."""
        return self._current.label_names

    @property
    def output_names(self) -> list[str]:
        """Outputs of the current bucket."""
        return self._current.output_names

    @property
    def data_shapes(self) -> list[DataDesc]:
        """Data of the current bucket as bound."""
        return self._current.data_shapes

    @property
    def label_shapes(self) -> list[DataDesc]:
        """Labels of the current bucket as bound."""
        return self._current.label_shapes

    @property
    def output_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Outputs of the current bucket."""
        return self._current.output_shapes

    def _bind(self, data_shapes: Descs, label_shapes: Descs | None, options: BindOptions) -> None:
        if options.shared_module is not None:
            raise BindError("BucketingModule.bind: shared_module is not supported")
        self.for_training, self.inputs_need_grad = options.for_training, options.inputs_need_grad
        self._bind_options = {
            "for_training": options.for_training, "inputs_need_grad": options.inputs_need_grad,
            "grad_req": options.grad_req,
        }  # fmt: skip
        self._buckets = {}
        self._default.bind(data_shapes, label_shapes, force_rebind=True, **self._bind_options)
        self._use(self.default_bucket_key, self._default)
        self.binded = True
        self.params_initialized = self._default.params_initialized

    @all_or_nothing
    def switch_bucket(self, bucket_key: Hashable, data_shapes: Descs | None, label_shapes: Descs | None = None) -> None:
        """Switch to the network of this key, binding it for these shapes on first use.

        Args:
            bucket_key: key of the network.
            data_shapes: (name, shape) or ``DataDesc`` of each input; may be None if the bucket is bound.
            label_shapes: the same of each label; None: no labels.

        Raises:
            BindError: the network has a parameter that the default bucket lacks.
        """
        self._need("switch_bucket", binded=True)
        module = self._buckets.get(bucket_key)
        if module is None:
            module = self._make(bucket_key)
            strange = [name for name in module.param_names if name not in self._default.param_names]
            if strange:
                raise BindError(
                    f"bucket {bucket_key!r} has parameters {strange}, which the default bucket "
                    f"{self.default_bucket_key!r} has not: all buckets share its parameters; give them its names"
                )
            module.set_precision(self._default.precision)
            module.loss_scale = self._default.loss_scale
            module.bind(data_shapes or (), label_shapes, shared_module=self._default, **self._bind_options)
            if self._monitor is not None:
                module.install_monitor(self._monitor)
        if self.optimizer_initialized and module is not self._default:
            module.borrow_optimizer(self._default)
        module.params_initialized = self.params_initialized
        self._use(bucket_key, module)

    @all_or_nothing
    def install_monitor(self, mon: Monitor) -> None:
        """Let ``mon`` watch every bucket."""
        self._need("install_monitor", binded=True)
        with rollback(mon):
            self._monitor = mon
            for module in self._buckets.values():
                module.install_monitor(mon)

    # -- parameters and optimizer: those of the default bucket ----------------------------------------------------

    def _init_params(
        self,
        initializer: Initializer | None,
        arg_params: Params | None,
        aux_params: Params | None,
        options: InitOptions,
    ) -> None:
        self._default.init_params(initializer, arg_params, aux_params, *options)
        self.params_initialized = self._current.params_initialized = True

    def _set_params(self, arg_params: Params, aux_params: Params | None, options: InitOptions) -> None:
        self._default.set_params(arg_params, aux_params, *options)
        self.params_initialized = self._current.params_initialized = True

    def get_params(self) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
        """Return (arg_params, aux_params) as copies on the host."""
        return self._default.get_params()

    def synchronize(self) -> None:
        self._default.synchronize()

    def _init_optimizer(
        self, kvstore: StoreLike, optimizer: OptimizerLike, settings: OptimizerSettings, *, force_init: bool
    ) -> None:
        self._default.init_optimizer(kvstore, optimizer, settings, force_init)
        self.optimizer_initialized = True
        for module in self._buckets.values():
            if module is not self._default:
                module.borrow_optimizer(self._default)

    def __repr__(self) -> str:
        keys = ", ".join(map(str, self._buckets))
        return f"<{type(self).__name__} with the buckets {keys}; the default one: {self._default!r}>"

    def owner(self) -> Module:
        return self._default

    def bound_grad_req(self) -> GradReq | None:
        return self._bind_options.get("grad_req")

    def clear_gradients(self, data_batch: DataBatch) -> None:
        self._switch_to(data_batch)
        self._current.clear_gradients(data_batch)

    def _accumulate(self, micro_batches: int) -> None:
        self._default._accumulate(micro_batches)

    def set_precision(self, dtype: str | None, *, rebind: bool = False) -> None:
        self._default.set_precision(dtype, rebind=rebind)

    @property
    def loss_scale(self) -> float | None:
        """Loss scale of the default bucket."""
        return self._default.loss_scale

    @all_or_nothing
    def set_loss_scale(self, scale: float) -> None:
        self._default.set_loss_scale(scale)
        for module in self._buckets.values():
            module.set_loss_scale(scale)

    # -- running: the current bucket ------------------------------------------------------------------------------

    def forward(self, data_batch: DataBatch, is_train: bool | None = None) -> None:
        """Run the network of the batch's ``bucket_key`` (without one: the default bucket), asynchronously.

        Raises:
            MXNetError: the first batch of a bucket lacks ``provide_data``.
        """
        self._need("forward", binded=True, params=True)
        self._switch_to(data_batch)
        self._current.forward(data_batch, is_train)

    def _switch_to(self, data_batch: DataBatch) -> None:
        key = getattr(data_batch, "bucket_key", None)
        key = self.default_bucket_key if key is None else key
        shapes = getattr(data_batch, "provide_data", None), getattr(data_batch, "provide_label", None)
        if key not in self._buckets and not shapes[0]:
            raise MXNetError(
                f"forward: the first batch of bucket {key!r} must say its shapes: "
                f"mx.io.DataBatch(…, bucket_key={key!r}, provide_data=[(name, shape)], provide_label=[…])"
            )
        self.switch_bucket(key, *shapes)

    def prepare(self, data_batch: DataBatch, sparse_row_id_fn: object = None) -> None:
        """Bind the network of the batch, if it is not, and let its module prepare the batch.

        Args:
            data_batch: the batch of the next forward.
            sparse_row_id_fn: passed on.
        """
        key = self.bucket_key
        if getattr(data_batch, "bucket_key", None) is not None:
            self._switch_to(data_batch)
        self._current.prepare(data_batch, sparse_row_id_fn=sparse_row_id_fn)
        if getattr(data_batch, "bucket_key", None) is not None:
            self.switch_bucket(key, None, None)

    def backward(self, out_grads: Sequence[NDArray] | None = None) -> None:
        """Run backward in the current bucket, asynchronously."""
        self._current.backward(out_grads)

    def update(self) -> None:
        """Update the parameters by the current bucket's gradients."""
        self._need("update", binded=True, params=True, optimizer=True)
        self._current.update()

    def get_outputs(self, merge_multi_context: bool = True) -> Any:
        """Outputs of the current bucket's last forward."""
        return self._current.get_outputs(merge_multi_context)

    def get_input_grads(self, merge_multi_context: bool = True) -> Any:
        """Gradients of the current bucket's data."""
        return self._current.get_input_grads(merge_multi_context)

    def get_states(self, merge_multi_context: bool = True) -> Any:
        """Return the states of the current bucket, as ``Module.get_states`` does."""
        return self._current.get_states(merge_multi_context)

    def set_states(self, states: Sequence[Sequence[NDArray]] | None = None, value: float | None = None) -> None:
        """Give the current bucket's states values."""
        self._current.set_states(states, value)

    def update_metric(self, eval_metric: EvalMetric, labels: Sequence[NDArray], pre_sliced: bool = False) -> None:
        self._current.update_metric(eval_metric, labels, pre_sliced)
